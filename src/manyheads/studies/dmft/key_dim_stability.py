"""`limits/key-dim-stability`: growth of the backward signal with the key dimension at logit exponent 1/2."""

import math
from typing import Any

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.studies.dmft.shared.mean_field import problem_of, solve_blocks, train_seeds
from manyheads.theory.dmft import Network, Problem
from manyheads.theory.papers import BORDELON

MOST = 64  # networks at once
FLAT = 1.1  # over all sizes
GROWN = 1.5
NAMES = {1.0: "1", 0.5: "1/2"}


class KeyDimStability(st.Study):
    """Backward signal below attention against the key dimension, before and after training.

    With e the backward signal behind W_O and M_ab = sigma_ab (e_a . v_b - e_a . u_a)/N, a block adds to the backward
    variable N^(1 - alpha_A) sum_b M_ab W_Q^T k_b, and the same with queries and keys exchanged. At the start e and v
    are independent, M is N^(-1/2), and the sum is of order one or less at both exponents. Training aligns e with v: M
    becomes a number of order one, and at alpha_A = 1/2 the sum grows like N^(1/2), at alpha_A = 1 it stays. So a
    coordinate check at the start sees nothing, and `infinite_key_dim` refuses alpha_A = 1/2. (Derived here.)

    Measured is the root mean square of the backward variable below all blocks over that above them, which is free of
    the size of the error; over tokens in the loss only.
    """

    name = "limits/key-dim-stability"
    claim = "At logit exponent 1/2 gradients below attention grow with N during training"
    source = BORDELON.at("table 3, the two logit exponents; that training breaks 1/2 is derived here")
    grid = {"logit_exponent": NAMES, "key_dim": "key_dims", "heads": "heads_counts"}

    task: str = st.setting("digits", "digits or text")
    key_dims: tuple[int, ...] = st.sweep((4, 16, 64), "key dimensions N", small=(4, 8), full=(4, 16, 64, 256))
    heads_counts: tuple[int, ...] = st.setting((4, 16), "numbers of heads H", least=1, small=(4,), full=(1, 4))
    depth: int = st.setting(1, "blocks")
    norm: bool = st.setting(False, "whether streams are normalized")
    steps: int = st.setting(32, "steps of gradient descent", small=3)
    learning_rate: float = st.setting(0.15, "its learning rate")
    richness: float = st.setting(1.5, "richness of the training")
    networks: int = st.setting(4, "networks of the largest size, in one replicate", least=1, small=16, full=8)

    def check(self) -> None:
        self.problem()

    def predict(self, key: st.Key) -> st.Record:
        """Solve the limit of infinite key dimension at exponent 1, the only one that has it; also without responses."""
        return {
            name: self._signal(solve_blocks(self.problem(), responses=responses).backward)
            for name, responses in (("backward", True), ("backward_without", False))
        } | {"logit_exponent": ((), 1.0, "logit exponent"), "step": ("step", np.arange(self.steps), "updates")}

    def train(self, key: st.Key, logit_exponent: float, key_dim: int, heads: int) -> st.Record:
        """Train some networks of one size, and more of the smaller ones, whose noise is larger; keep their mean."""
        network = Network(key_dim, heads, logit_exponent)
        count = min(MOST, self.networks * self.key_dims[-1] * max(self.heads_counts) // network.width)
        trained = train_seeds(self.problem(), network, key, count)
        logits = trained["logits"].values
        return {
            "backward": self._signal(trained["backward"].values),
            "update": ((), np.sqrt(((logits[:, -1] - logits[:, 0]) ** 2).mean()), "change of the attention logits"),
            "loss": ("step", trained["loss"].values.mean(0), "loss"),
            "step": ("step", np.arange(self.steps), "updates"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        first, last = self.key_dims[0], self.key_dims[-1]
        grown = st.log(trained["backward"].sel(key_dim=last) / trained["backward"].sel(key_dim=first))
        quantity = "backward signal, largest over smallest N (ln)"
        for exponent in NAMES:
            for heads in self.heads_counts:
                where = f"logit exponent {NAMES[exponent]}, H={heads}"
                ratio = grown.sel(logit_exponent=exponent, heads=heads)
                for step, when in ((0, "before"), (-1, "after")):
                    yield st.Claim(
                        f"{where}: {when} training the backward signal below attention changes by at most 10% from "
                        f"N={first} to N={last} (log ratio)",
                        ratio.isel(step=step),
                        st.near(0, math.log(FLAT)),
                        f"corrections are of relative size 1/N, at most a tenth at N={first} where M^2 is 1/N",
                        quantity,
                        "refuted" if when == "after" and exponent < 1 else "holds",
                    )
                if exponent < 1:
                    yield st.Claim(
                        f"{where}: after training the backward signal below attention grows by half or more from "
                        f"N={first} to N={last} (log ratio)",
                        ratio.isel(step=-1),
                        st.above(math.log(GROWN)),
                        "its square is a + c N: from N=4 to 64 it grows by 1.5^2 where the part that grows is a tenth "
                        "of the rest at N=4",
                        quantity,
                    )
                    continue
                found = trained["backward"].sel(logit_exponent=exponent, heads=heads, key_dim=last).isel(step=-1)
                for words, name, expected in (
                    ("of the limit", "backward", "holds"),
                    ("of the limit without response functions", "backward_without", "refuted"),
                ):
                    yield st.Claim(
                        f"{where}: after training the backward signal at N={last} is that {words} to 10% (log ratio)",
                        st.log(found / float(theory[name][-1])),
                        st.near(0, math.log(FLAT)),
                        "corrections are of relative size 1/N, and at most a tenth at the smallest",
                        "backward signal, measured over predicted (ln)",
                        expected,
                    )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        limit, label = theory["backward"], "backward variable below attention over that above"
        for exponent, name in NAMES.items():
            found, measured = trained["backward"].sel(logit_exponent=exponent), dict[str, xr.DataArray]()
            flat = dict[str, xr.DataArray]()
            for step, when in ((0, "before training"), (-1, "after")):
                measured |= {
                    f"H={heads}, {when}": found.sel(heads=heads).isel(step=step) for heads in self.heads_counts
                }
                flat[f"infinite N, {when}"] = limit.isel(step=step).expand_dims(key_dim=list(self.key_dims))
            yield st.lines(
                f"Backward signal below attention, logit exponent {name}",
                "key_dim",
                label,
                measured,
                flat if exponent == 1 else {},
                log="xy",
                x_label="key dimension N",
                note="Means over networks and replicates; bands range over replicates.",
                shows=(f"logit exponent {name},",),
            )
        title = f"Backward signal below attention over training, H={self.heads_counts[-1]}"
        signals = {
            f"exponent {name}, N={size}": trained["backward"].isel(heads=-1).sel(logit_exponent=exponent, key_dim=size)
            for exponent, name in NAMES.items()
            for size in self.key_dims
        }
        note = "Means over networks; bands range over replicates."
        yield st.lines(title, "step", label, signals, {"limit at exponent 1": limit}, note=note)

    def problem(self) -> Problem:
        return problem_of(self)

    def _signal(self, backward: np.ndarray) -> tuple[Any, ...]:
        """Return the signal over training; of networks the geometric mean."""
        sizes = amplification(self.problem(), np.einsum("...laa->...la", backward))
        if sizes.ndim > 1:
            sizes = np.exp(np.log(sizes).mean(0))
        return "step", sizes, "backward variable below attention over that above"


def amplification(problem: Problem, sizes: np.ndarray) -> np.ndarray:
    """Return how much larger the backward variable is below all blocks than above: mean squares (..., level, row)."""
    shares = problem.loss_weights.any(0)  # (O,)
    rows = problem.pooling[shares].any(0)  # tokens that are in the loss
    return np.asarray(np.sqrt((sizes[..., 0, rows] / sizes[..., -1, rows]).mean(-1)))
