"""`limits/logit-exponent`: both logit exponents on a real text as N grows, at fixed steps and at fixed compute."""

import math

import numpy as np

import manyheads.study as st
from manyheads.costs import ModelShape, transformer_cost
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.trained.trajectories import follow_networks
from manyheads.scaling.trained.transformers import Recipe
from manyheads.studies.scaling.shared.parametrizations import task_of
from manyheads.theory.papers import BORDELON
from manyheads.transformer.shape import Shape

EXPONENTS = {1.0: "1", 0.5: "1/2"}
WINDOW = 4  # losses are averaged over the last quarter of the steps
SAME = 1e-3  # in log loss, of two runs of one network
SIGN = "the sign; mean over the last quarter of the steps, on the same batches"


class LogitExponent(st.Study):
    """Loss of causal transformers on a text, trained by Adam at both logit exponents, from one base.

    At one N a step costs as much at both exponents, so that fixed compute differs from fixed steps only by how far
    larger networks are trained: to the steps that the smallest one's compute buys. Exponent 1/2 is the better one at
    fixed steps and the worse one at fixed compute where it begins behind and overtakes; curves are compared on the same
    batches, from weights that differ by the init's scale of queries and keys. (Derived here.)
    """

    name = "limits/logit-exponent"
    claim = "Larger N favours logit exponent 1/2 at fixed steps, exponent 1 at fixed compute"
    source = BORDELON.at("figures 7 and 12: language models, base (8, 8, 4), beta_0 = 4, gamma_0 = 0.25")
    grid = {"logit_exponent": EXPONENTS, "key_dim": "key_dims"}

    key_dims: tuple[int, ...] = st.sweep(
        (8, 32),
        "key dimensions N; the smallest is the base, at which both exponents are one network",
        small=(2, 4),
        full=(8, 16, 32, 64),
    )
    heads: int = st.setting(8, "number of heads H", small=2)
    depth: int = st.setting(4, "blocks L; the branch multiplier beta_0/L is one at the base", small=1)
    richness: float = st.setting(0.25, "gamma_0 at the base", above=0)
    steps: int = st.setting(200, "updates of Adam", small=12, full=1000)
    batch: int = st.setting(4, "sequences of a batch", small=2, full=16)
    learning_rate: float = st.setting(0.01, "learning rate at the base", above=0)

    def check(self) -> None:
        if self.bought(self.key_dims[-1]) < 2:
            buys = f"the compute of N={self.key_dims[0]} buys less than two at N={self.key_dims[-1]}"
            raise st.UsageError(f"steps={self.steps}: {buys}; give more steps or smaller key_dims")

    def predict(self, key: st.Key) -> st.Record:
        return {"bought": ("key_dim", [self.bought(size) for size in self.key_dims], "steps at fixed compute")}

    def train(self, key: st.Key, logit_exponent: float, key_dim: int) -> st.Record:
        """Train one transformer; its batches are those of every cell."""
        base = Shape(self.key_dims[0], self.heads, self.depth)
        # Outputs of the base are divided by gamma_0 d in the paper, by the root of d in a standard init.
        richness = self.richness * math.sqrt(base.width)
        parametrization = Parametrization(logit_exponent, 1.0, richness, base=base)
        shape = Shape(key_dim, self.heads, self.depth)
        task, recipe = task_of("text", self.batch), Recipe(self.steps)
        found = follow_networks(task, parametrization, shape, recipe, self.learning_rate, (self.steps,), 1, key)
        return {
            "loss": ("step", np.asarray(found.losses[0], np.float64), "loss of the batch before the update", "nat"),
            "step": ("step", np.arange(self.steps), "updates"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        first, largest = self.key_dims[0], self.key_dims[-1]
        losses = st.log(trained["loss"])
        apart = losses.sel(logit_exponent=0.5) - losses.sel(logit_exponent=1.0)
        quantity = "loss at 1/2 over loss at 1 (ln)"
        text = f"At N={first} both logit exponents train one network (largest log ratio)"
        basis = "the base, at which all factors are one; rounding"
        yield st.Claim(text, abs(apart.sel(key_dim=first)).max(), st.near(0, SAME), basis, quantity)
        for what, last, word, region in (
            ("steps", self.steps, "below", st.below(0)),
            ("compute", int(theory["bought"][-1]), "above", st.above(0)),
        ):
            yield st.Claim(
                f"At N={largest} and fixed {what} the loss of logit exponent 1/2 is {word} that of 1 (log ratio)",
                apart.sel(key_dim=largest).isel(step=_window(last)).mean("step"),
                region,
                SIGN,
                quantity,
            )
        ends = losses.isel(step=_window(self.steps)).mean("step")
        for exponent, name in EXPONENTS.items():
            here = ends.sel(logit_exponent=exponent)
            yield st.Claim(
                f"Logit exponent {name}: at fixed steps the loss at N={largest} is below that at N={first} (log ratio)",
                here.sel(key_dim=largest) - here.sel(key_dim=first),
                st.below(0),
                SIGN,
                "loss at the largest over that at the smallest N (ln)",
            )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        loss, tenth, updates = trained["loss"], max(1, self.steps // 10), np.arange(self.steps) + 1
        smooth = loss.rolling(step=tenth, min_periods=1).mean()
        by_size = {size: smooth.sel(key_dim=size) for size in self.key_dims}
        costs = {size: values.assign_coords(step=self._step(size) * updates) for size, values in by_size.items()}
        curves = {
            f"exponent {name}, N={size}": costs[size].sel(logit_exponent=exponent)
            for exponent, name in EXPONENTS.items()
            for size in self.key_dims
        }
        note = "Means over a tenth of the steps; bands range over replicates."
        yield st.lines("Loss against compute", "step", "loss (nat)", curves, log="x", x_label="FLOPs", note=note)
        apart = st.log(loss.sel(logit_exponent=0.5) / loss.sel(logit_exponent=1.0)).assign_coords(step=updates)
        apart = apart.rolling(step=tenth, min_periods=1).mean()
        yield st.lines(
            "Loss of logit exponent 1/2 over that of 1",
            "step",
            "log ratio of losses",
            {f"N={size}": apart.sel(key_dim=size) for size in self.key_dims},
            x_label="updates",
            note="On the same batches, means over a tenth of the steps; bands range over replicates. The compute of "
            f"N={self.key_dims[0]} buys {int(theory['bought'][-1])} updates at N={self.key_dims[-1]}.",
            shows=(f"At N={self.key_dims[-1]}",),
        )

    def flops(self, cell: st.Cell) -> int:
        return self.steps * self._step(int(cell["key_dim"]))

    def bought(self, key_dim: int) -> int:
        """Return the steps at one N that cost as much as all steps at the smallest."""
        return self.steps * self._step(self.key_dims[0]) // self._step(key_dim)

    def _step(self, key_dim: int) -> int:
        """Matrix-multiply FLOPs of one step."""
        config = task_of("text", self.batch).config(Shape(key_dim, self.heads, self.depth))
        width = config.shape.width
        hidden = round(config.mlp_ratio * width)
        model = ModelShape(self.depth, width, self.heads, mlp_hidden=hidden, vocabulary=config.outputs, causal=True)
        return transformer_cost(model, config.length, self.batch, training=True, convention="dense").flops


def _window(last: int) -> slice:
    return slice(last - max(1, last // WINDOW), last)
