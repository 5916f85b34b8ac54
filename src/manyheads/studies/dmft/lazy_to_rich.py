"""`limits/lazy-to-rich`: feature learning against the richness, from the lazy limit (NTK) to rich training."""

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.studies.dmft.shared import mean_field
from manyheads.studies.dmft.shared.mean_field import DIMS, solve_blocks
from manyheads.theory.dmft import Network, Problem
from manyheads.theory.dmft.ntk import ntk_outputs
from manyheads.theory.papers import BORDELON

UPDATES = {
    "output": "distance of the outputs from NTK descent",
    "pooled": "update of the kernel of the read-outs",
    "logits": "update of the attention logits, mean over heads",
}
SHORT = {"output": "outputs", "pooled": "kernel", "logits": "logits"}
SMALL = 0.1  # richness up to which powers are fitted


class LazyToRich(st.Study):
    """Updates of outputs, kernels and logits against the richness gamma0, in the theory and in networks.

    The equations of the limit are unchanged under gamma0 -> -gamma0 with w -> -w: outputs, kernels and logits are even
    in it. So outputs depart from NTK descent by gamma0^2, kernels move by gamma0^2, and so do logits: what queries
    and keys learn has a factor gamma0, and so has M, which is <e v> once value and output weights have learned. One
    finite network has no such symmetry: its M is N^(-1/2) before anything is learned, and its logits move by gamma0 (N
    H)^(-1/2) first. (Derived here.)
    """

    name = "limits/lazy-to-rich"
    claim = "Features move as richness squared up to 0.1, and saturate in rich training"
    source = BORDELON.at("the richness gamma0; the powers are derived here")
    grid = {"key_dim": "key_dims", "richness": "richness"}

    task: str = st.setting("digits", "digits, or text, which trains well with --norm --learning-rate 0.5")
    richness: tuple[float, ...] = st.sweep(
        (0.01, 0.03, 0.1, 0.3, 1.0, 2.0),
        "gamma0: two or more up to 0.1, and two or more above, where updates saturate between the last two",
        above=0,
        count=4,
        small=(0.03, 0.1, 1.0, 2.0),
        full=(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 1.4, 2.0),
    )
    key_dims: tuple[int, ...] = st.sweep((4, 16, 64), "key dimensions N", small=(2, 4), full=(4, 16, 64, 256))
    heads: int = st.setting(4, "number of heads H", least=1, small=2)
    depth: int = st.setting(2, "blocks", small=1)
    norm: bool = st.setting(False, "whether streams are normalized")
    steps: int = st.setting(16, "steps of gradient descent", small=3)
    learning_rate: float = st.setting(0.15, "its learning rate")
    networks: int = st.setting(16, "networks of one replicate", least=2, small=2, full=32)

    def check(self) -> None:
        small = sum(level <= SMALL for level in self.richness)
        if not 2 <= small <= len(self.richness) - 2:
            raise st.UsageError(f"richness={self.richness}: expected two or more up to {SMALL}, and two or more above")
        self.problem(self.richness[0])

    def predict(self, key: st.Key) -> st.Record:
        """Solve the limit at every richness, with and without response functions, and the lazy limit (NTK)."""
        solved, without = (
            np.stack([solve_blocks(self.problem(level), responses=responses).outputs for level in self.richness])
            for responses in (True, False)
        )
        found = mean_field.record({"output": solved, "output_without": without}, "richness")
        return found | {"lazy": (DIMS["output"], ntk_outputs(self.problem(self.richness[0])), "outputs of NTK descent")}

    def train(self, key: st.Key, key_dim: int, richness: float) -> st.Record:
        """Train some networks of one size at one richness, from the same weights at every richness.

        The root mean square updates of the limit at this richness are recorded with them.
        """
        problem = self.problem(richness)
        trained = mean_field.train_seeds(problem, Network(key_dim, self.heads), key, self.networks)
        moved = {name: trained[name].values[:, -1] - trained[name].values[:, 0] for name in ("pooled", "logits")}
        solved = solve_blocks(problem)
        logits = [np.stack([look["logits"] for look in solved.observables[moment]]) for moment in (0, -1)]
        updates = {
            "output": solved.outputs - ntk_outputs(self.problem(self.richness[0])),
            "pooled": solved.pooled[-1] - solved.pooled[0],
            "logits": logits[1] - logits[0],
        }
        return (
            mean_field.record({"output": trained["output"].values}, "network")
            | {name: (("network", *DIMS[name]), value, UPDATES[name]) for name, value in moved.items()}
            | {
                f"limit_{name}": ((), np.sqrt((value**2).mean()), f"{UPDATES[name]}, at infinite key dimension")
                for name, value in updates.items()
            }
        )

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        levels, largest, smallest = self.richness, self.key_dims[-1], self.key_dims[0]
        updates = {name: st.log(values) for name, values in self._updates(trained).items()}
        small = [level for level in levels if level <= SMALL]
        for name, words in UPDATES.items():
            yield st.Claim(
                f"Theory: the {words} scales as gamma0^2 up to gamma0={SMALL}",
                st.slope(updates[name].sel(richness=small), "richness", np.log(small)),
                st.near(2, 0.1),
                f"the next term is gamma0^4: with a coefficient of 10 it is a tenth at {SMALL}, and moves an exponent "
                "fitted over a decade by less than 0.1",
                "exponent of gamma0",
            )
        for name, most, why in (
            ("output", 1.0, "targets bound it: at most half the power of small gamma0"),
            ("pooled", 1.5, "a product of two equal factors that is gamma0 moves like gamma0: half way there from 2"),
        ):
            yield st.Claim(
                f"Theory: from gamma0={levels[-2]:g} on the {UPDATES[name]} grows at most as gamma0^{most:g}",
                (updates[name][-1] - updates[name][-2].values) / np.log(levels[-1] / levels[-2]),
                st.below(most),
                why,
                "exponent of gamma0",
            )
        mean = trained["output"].sel(key_dim=largest).mean("network")
        yield st.Claim(
            f"Networks: at gamma0={levels[0]:g} their mean at N={largest} follows NTK descent (projection)",
            mean_field.projection(mean.sel(richness=levels[0]), theory["lazy"], DIMS["output"]),
            st.near(1, (largest * self.heads) ** -0.5),
            "a mean of many lies nearer than one network's fluctuation, one over the root of the width",
            "projection on NTK descent",
        )
        mild = [level for level in levels if level <= 1]  # beyond, the smallest networks have not settled
        single = st.log(self._single_distances(theory, trained).sel(richness=mild))
        yield st.Claim(
            "Networks: up to gamma0=1 the distance of single ones from the theory scales as N^(-1/2) (mean exponent)",
            st.slope(single, "key_dim", np.log(self.key_dims)).mean("richness"),
            *mean_field.root_law("N", self.key_dims),
            "exponent of N",
        )
        near, far = self._mean_distances(theory, trained)
        yield st.Claim(
            f"Networks: at the worst richness their mean at N={largest} is nearer to the theory than to that without "
            "response functions (log ratio)",
            st.log(near / far).max("richness"),
            *mean_field.NEARER,
        )
        moved = (trained["logits"].sel(key_dim=smallest) ** 2).mean(("network", *DIMS["logits"])) ** 0.5
        yield st.Claim(
            f"In a single network of N={smallest} the update of attention logits scales as gamma0 where gamma0 is "
            "smallest",
            st.exponent(moved.isel(richness=slice(2)), "richness", "gamma0"),
            st.near(1, 0.5),
            "half way to the square of the limit, which takes over at gamma0 of about (N H)^(-1/2)",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        largest = self.key_dims[-1]
        updates, found, label = self._updates(trained), trained.sel(key_dim=largest), "richness gamma0"
        moved = {
            f"{SHORT[name]}, N={largest}": (found[name] ** 2).mean(("network", *DIMS[name])) ** 0.5
            for name in ("pooled", "logits")
        }
        law = {f"{SHORT[name]}, theory": updates[name] for name in ("pooled", "logits", "output")}
        guide = {"gamma0^2": updates["pooled"][0] * (theory["richness"] / self.richness[0]) ** 2}
        labels = "Updates against richness", "richness", "root mean square"
        note, shows = "Single networks: bands range over replicates.", ("Theory:",)
        yield st.lines(*labels, moved, law, guide, log="xy", x_label=label, note=note, shows=shows)
        single, (near, far) = self._single_distances(theory, trained), self._mean_distances(theory, trained)
        away = {f"single, N={size}": single.sel(key_dim=size) for size in self.key_dims}
        away |= {f"mean, N={largest}": near, f"mean, N={largest}, no responses": far}
        labels = "Distance of networks from the theory", "richness", "root mean square distance of outputs"
        note = "Means and ranges over replicates. No responses: from the theory without response functions."
        yield st.lines(*labels, away, log="xy", x_label=label, note=note, shows=("distance of single ones",))
        first = {"read_out": 0, "class": 0}
        output, theirs = found["output"].isel(first).mean("network"), theory["output"].isel(first)
        shown = {f"gamma0={level:g}": {"richness": level} for level in (self.richness[0], self.richness[-2])}
        yield st.lines(
            "Output of the first read-out over training",
            "step",
            "output",
            {f"{label}, mean of networks": output.sel(at) for label, at in shown.items()},
            {f"{label}, theory": theirs.sel(at) for label, at in shown.items()},
            {"NTK descent": theory["lazy"].isel(first)},
            note=f"Networks of N={largest}; bands range over the means of replicates.",
        )

    def problem(self, richness: float) -> Problem:
        return mean_field.problem_of(self, richness=richness)

    def _updates(self, trained: st.Data) -> dict[str, xr.DataArray]:
        return {name: trained[f"limit_{name}"].isel(key_dim=0).mean("replicate") for name in UPDATES}

    def _single_distances(self, theory: st.Data, trained: st.Data) -> xr.DataArray:
        return st.distance(trained["output"], theory["output"], over=("network", *DIMS["output"]))

    def _mean_distances(self, theory: st.Data, trained: st.Data) -> tuple[xr.DataArray, xr.DataArray]:
        """Return how far the mean of the largest networks is from the theory, and from that without responses."""
        mean = trained["output"].isel(key_dim=-1).mean("network")
        near, far = (st.distance(mean, theory[name], over=DIMS["output"]) for name in ("output", "output_without"))
        return near, far
