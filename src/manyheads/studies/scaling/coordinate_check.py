"""`limits/coordinate-check`: RMS update of every module against N, H and L, under six parametrizations."""

import jax
import numpy as np

import manyheads.study as st
from manyheads.scaling.axes import LETTERS, Axis
from manyheads.scaling.checks.coordinate_check import TOLERANCE, Growth, decide_growths, finite_size_bias
from manyheads.scaling.checks.growth_powers import QUANTITIES, least_growth, required_growth
from manyheads.scaling.parametrization.scaling_exponents import Optimizer
from manyheads.scaling.trained.transformers import USUAL, Recipe, measure_updates
from manyheads.studies.scaling.shared import parametrizations as scalings
from manyheads.studies.scaling.shared.updates import beyond, exponents_table, fitted, updates_picture, worst_of
from manyheads.theory.papers import BORDELON
from manyheads.transformer.shape import Shape

# Learning rate, batch and checkpoints. Gradient descent: after training of order one, and away from the edge of
# stability. After 20 steps the largest N has hardly started: queries seem to move as N^-0.5.
OWN: dict[str, tuple[float, int, tuple[int, ...]]] = {"adam": (0.003, 16, (4, 25)), "sgd": (0.3, 96, (4, 60))}
STARTS = {
    "head_variance_start": "variance of the attention logits over heads, before training",
    "kernel_std": "std of the residual kernel between networks, before training",
}
MOVED = {name: f"update of {text}" for name, text in QUANTITIES.items()}
MOVED |= {"head_variance": "variance of the attention logits over heads"}
ROWS = dict(
    zip(QUANTITIES, ("outputs", "stream", "logits", "queries, own weights", "values, own weights"), strict=True)
)
HALF = "half of the distance between two exponents of the theory"


class CoordinateCheckStudy(st.Study):
    """Updates of outputs, stream, logits, queries and values against size, for every parametrization and axis.

    Notes
    -----
    Random parts make the square of an update 1 + n0/n of what it is at infinite size. For what Adam's weights move n is
    the width N H and n0 is pi/2 times the number of directions in which the tokens of a batch lie, 11 for the digits
    and about 50 for the text: at the default sizes the update of queries by a right parametrization scales on text as
    N^-0.2 where N^0 is prescribed, and larger sizes have to decide (NOTEBOOK, 2026-11-22; derived here).
    """

    name = "limits/coordinate-check"
    revision = 3
    claim = "Coordinate check: the RMS update of every module is independent of N, H and L"
    source = BORDELON.at("table 1 and figure 5; the exponents of single modules are derived here")
    unread_prediction = "targets follow from parametrization and axis of each claim; the prediction tabulates them"

    task: str = st.setting("digits", "digits or text", choices=scalings.TASKS)
    optimizer: Optimizer = st.setting("adam", "adam or sgd", choices=OWN)
    axes: tuple[str, ...] = st.setting(("key_dim", "heads", "depth"), "which axes", small=("key_dim",))
    parametrizations: tuple[str, ...] = st.setting(
        tuple(scalings.LABELS), "which parametrizations", small=("limits", "half-logit", "standard")
    )
    base: tuple[int, int, int] = st.setting((8, 4, 2), "N, H, L at which all are one", small=(4, 2, 2))
    key_dims: tuple[int, ...] = st.setting((4, 8, 32), "key dimensions N", small=(4, 8), full=(4, 8, 32, 128))
    heads_counts: tuple[int, ...] = st.setting((2, 4, 16), "numbers of heads H", full=(2, 4, 16, 64))
    depths: tuple[int, ...] = st.setting((2, 8, 16), "numbers of blocks L", full=(2, 8, 16, 64))
    checkpoints: tuple[int, ...] = st.sweep((), "updates; none for the optimizer's own", count=0, small=(1, 2))
    learning_rate: float = st.setting(0.0, "learning rate at the base; 0 for the optimizer's own", least=0)
    batch: int = st.setting(0, "sequences of a step; 0 for the optimizer's own", least=0, small=16)
    networks: int = st.setting(2, "networks of a replicate, whose geometric mean is taken", least=1, small=1)

    def check(self) -> None:
        self.plan()

    def cells(self) -> tuple[st.Cell, ...]:
        return self.plan().cells()

    def predict(self, key: st.Key) -> st.Record:
        schemes = [scalings.parametrization_of(name, *self._base) for name in self.parametrizations]
        dims = ("parametrization", "axis", "quantity")
        required, least = (
            [[[getattr(growth(scheme)[q], axis) for q in QUANTITIES] for axis in self.axes] for scheme in schemes]
            for growth in (required_growth, least_growth)
        )
        return {
            "required": (dims, required, "prescribed exponent"),
            "least": (dims, least, "lowest exponent of a consistent scaling"),
            "parametrization": ("parametrization", list(self.parametrizations), "parametrization", None),
            "axis": ("axis", list(self.axes), "axis", None),
            "quantity": ("quantity", list(QUANTITIES), "quantity", None),
        }

    def train(self, key: st.Key, parametrization: str, **sizes: int) -> st.Record:
        learning_rate, batch, steps = self._training
        network = (scalings.task_of(self.task, batch), *self.plan().train_with(parametrization, **sizes))
        keys = [jax.random.fold_in(key, number) for number in range(self.networks)]
        runs = [measure_updates(*network, Recipe(), learning_rate, steps, one) for one in keys]
        with np.errstate(invalid="ignore", divide="ignore"):  # a diverged run is data
            found = {name: np.exp(np.mean([np.log(getattr(run, name)) for run in runs], 0)) for name in USUAL}
        return (
            {name: ("step", found[name], text) for name, text in MOVED.items()}
            | {name: ((), found[name], text) for name, text in STARTS.items()}
            | {
                "loss": ("step", found["loss"], "loss on the probe batch", "nat"),
                "step": ("step", np.asarray(steps), "updates"),
            }
        )

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        for name, axis in self.plan().pairs():
            growths, letter = self.growths(trained, name, axis), LETTERS[axis]
            who = f"{scalings.LABELS[name]} parametrization"
            if name in scalings.CONSISTENT or (name == "mup" and axis != "depth"):
                found = worst_of(growths)
                text = f"{who}: the updates of all modules scale with {letter} as prescribed"
                basis = f"{HALF}, beyond where finite size lets one lie"
                quantity = "deviation of an exponent, worst module"
                yield st.Claim(text, (*beyond(found), found.seeds_needed), st.near(0, TOLERANCE[axis]), basis, quantity)
            else:
                yield st.Claim(
                    f"{who}: the update of a module grows with {letter} faster than prescribed",
                    beyond(max(growths, key=lambda growth: beyond(growth)[1].low)),
                    st.above(TOLERANCE[axis]),
                    f"{HALF}; the clearest growth of all modules counts",
                    "excess of an exponent, clearest module",
                )
            yield from self._queries(name, axis, who, growths)
            yield from self._early(name, axis, who, growths)
            yield from self._at_init(name, axis, who, trained)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        note = (
            "A horizontal line is consistent, except that at logit (depth) exponent 1/2 N^-0.5 (L^-0.5) is prescribed "
            "for queries by their own weights. A parametrization is shown where its networks differ from those of "
            "others."
        )
        yield updates_picture(self.plan(), trained, ROWS, note, ("updates of all modules", "update of a module"))
        yield exponents_table(self.plan(), trained, ROWS)

    def plan(self) -> scalings.Plan:
        return scalings.plan_of(self, self.optimizer)

    def growths(self, trained: st.Data, name: str, axis: Axis) -> tuple[Growth, ...]:
        """Return the judged growths of one parametrization along one axis."""
        plan = self.plan()
        updates = {quantity: plan.along(trained, quantity, name, axis).values for quantity in QUANTITIES}
        parametrization = scalings.parametrization_of(name, *self._base)
        sizes = dict(plan.sizes)[axis]
        return decide_growths(parametrization, axis, sizes, updates, self._training[2], TOLERANCE[axis])

    def _queries(self, name: str, axis: Axis, who: str, growths: tuple[Growth, ...]) -> st.Claims:
        """Claim the exponent of what queries move by their own weights."""
        required = getattr(required_growth(scalings.parametrization_of(name, *self._base))["query_by_weights"], axis)
        unscaled = name == "mup-half-logit" and axis == "key_dim"
        if not (name == "limits" or (name in scalings.CONSISTENT and required) or unscaled):
            return
        exponent, bias = 0.0 if unscaled else required, -finite_size_bias(dict(self.plan().sizes)[axis])
        yield st.Claim(
            f"{who}: the update of queries by their own weights scales as {LETTERS[axis]}^{exponent:g}"
            + (", which a consistent scaling does not prescribe" if unscaled else ""),
            fitted(next(growth for growth in reversed(growths) if growth.quantity == "query_by_weights")),
            st.near(exponent, 0.15),
            f"a correction 1 + n^(-1/2), random parts being one at n = 1, moves the exponent by {bias:.2f} over these "
            "sizes",
            "exponent of the size",
        )

    def _early(self, name: str, axis: Axis, who: str, growths: tuple[Growth, ...]) -> st.Claims:
        """Claim how fast updates grow after few steps of Adam on the digits, where that is known."""
        if self.task != "digits" or self.optimizer != "adam":
            return
        step = self._training[2][0]
        if name == "standard" and axis != "depth":
            # Not the outputs: after few steps they differ most between seeds.
            chosen: tuple[str, ...] = ("residual", "logits")
            text, least = f"the updates of stream and attention logits grow at least as {LETTERS[axis]}^0.5", 0.5
            basis = "an update of d^(1/2) or more: each of d entries moves by one step of Adam, whatever d"
        elif name == "mup" and axis == "depth":
            chosen, text, least = ("residual",), "the update of the stream grows at least as L^0.8", 0.8
            basis = "each block adds as much whatever L: L^1, less what blocks that disagree take away"
        else:
            return
        found = [fitted(growth) for growth in growths if growth.step == step and growth.quantity in chosen]
        yield st.Claim(
            f"{who}: after {step} steps {text}",
            min(found, key=lambda fit: fit[1].low),
            st.above(least),
            basis,
            "exponent of the size",
        )

    def _at_init(self, name: str, axis: Axis, who: str, trained: st.Data) -> st.Claims:
        """Claim the exponents of variances before training."""
        if axis == "key_dim" and name in ("limits", "half-logit"):
            power = -1.0 if name == "limits" else 0.0
            variable, text = "head_variance_start", f"the variance of attention logits over heads scales as N^{power:g}"
            basis = "exact in the first layer, N^(1 - 2 alpha_A); deeper ones feel 1/(N H) through their kernels"
        elif axis == "heads" and name == "limits":
            variable, power = "kernel_std", -0.5
            text = "the residual kernel fluctuates between networks as H^-0.5"
            basis = "root mean squares of sums over N H entries: corrections of relative size 1/H"
        else:
            return
        values = self.plan().along(trained, variable, name, axis)
        yield st.Claim(
            f"{who}: before training {text}",
            st.exponent(values.assign_coords(parametrization=scalings.LABELS[name]), axis),
            st.near(power, 0.1),
            basis,
            "exponent of the size",
        )

    @property
    def _base(self) -> tuple[Shape, Optimizer]:
        return Shape(*self.base), self.optimizer

    @property
    def _training(self) -> tuple[float, int, tuple[int, ...]]:
        learning_rate, batch, steps = OWN[self.optimizer]
        return self.learning_rate or learning_rate, self.batch or batch, self.checkpoints or steps
