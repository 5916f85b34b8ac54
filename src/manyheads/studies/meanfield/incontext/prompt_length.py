"""`meanfield/prompt-length`: loss of the linear-attention transformer against the number of pairs in a prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.theory.meanfield.incontext.prompt_length import length_coefficient, prompt_loss, solve_attention
from manyheads.theory.meanfield.incontext.prompts import draw_prompt_losses
from manyheads.theory.meanfield.incontext.task import FeatureTask, circle_task, harmonics
from manyheads.theory.papers import KIM

SIGNAL, FOREIGN, THIRD = np.diag([0.3, 0.03]), 0.6, 0.3  # amplitudes of the representation's harmonics 2, 1 and 3
FEWEST = 1 << 13  # prompts of a cell


@dataclass(frozen=True)
class PromptLength(Study):
    """Loss of drawn prompts of n pairs, beside the exact L + c/n and the bound of the paper.

    The representation is fixed: two target harmonics, one of them weak, and four foreign ones; the attention is the
    best one at infinite prompts.

    Attributes
    ----------
    lengths
        Pairs n of a prompt, rising.
    pairs
        Pairs drawn in a cell of a replicate; at least 8192 prompts are drawn.
    """

    name: ClassVar[str] = "meanfield/prompt-length"
    claim: ClassVar[str] = "With n pairs in a prompt the loss exceeds its limit by exactly c/n"
    source: ClassVar[Source] = replace(
        KIM, locus="|L_n - L| <~ sqrt(log k / n); the exact c/n and its bound are derived here"
    )
    revision: ClassVar[int] = 2

    lengths: tuple[int, ...] = (4, 16, 64, 256, 1024)
    pairs: int = 1 << 21

    def __post_init__(self) -> None:
        check_rising("lengths", self.lengths)
        if self.pairs < 1:
            raise UsageError(f"pairs={self.pairs}: expected a positive number")

    @classmethod
    def full(cls) -> PromptLength:
        """Return the study with eight times as many pairs."""
        return cls(pairs=1 << 24)

    @classmethod
    def small(cls) -> PromptLength:
        """Return the smallest configuration in which every claim can change."""
        return cls(lengths=(2, 4), pairs=1)

    def cells(self) -> tuple[Cell, ...]:
        """Return every length."""
        return grid(length=self.lengths)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the exact loss at every length, at this attention and at the best one, and the paper's bound."""
        task, h = representation()
        attention = solve_attention(task, h)
        lengths = np.asarray(self.lengths)
        exact = [prompt_loss(task, h, attention.weights, length) for length in self.lengths]
        best = [solve_attention(task, h, length).loss for length in self.lengths]
        most = 0.5 * task.features * float((task.targets**2).sum(1).max())
        return dataset(
            {
                "loss": ("length", exact, "loss at the attention of infinite prompts"),
                "best": ("length", best, "loss at the best attention for n pairs"),
                "limit": ((), attention.loss, "loss of infinite prompts"),
                "coefficient": ((), length_coefficient(task, h, attention.weights), "c of L + c/n"),
                "largest": ((), most, "largest c of any representation"),
                "paper": ("length", np.sqrt(np.log(task.features) / lengths), "bound of the paper, up to a factor"),
            },
            {"length": (list(self.lengths), "pairs of a prompt")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Draw prompts, and average the loss on one query, and over tasks and queries."""
        length = int(cell["length"])
        task, h = representation()
        attention = solve_attention(task, h).weights
        key = jax.random.fold_in(key, length)
        drawn = draw_prompt_losses(task, h, attention, length, max(FEWEST, self.pairs // length), key)
        return dataset(
            {
                "raw": ((), drawn.raw.mean(), "mean loss of drawn tasks, pairs and queries"),
                "averaged": ((), drawn.averaged.mean(), "mean loss of drawn pairs"),
                "prompts": ((), len(drawn.raw), "prompts"),
            }
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare level and exponent of the excess with c/n, and the exponent with the paper's bound."""
        lengths = np.asarray(self.lengths)

        def excess(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            return trained["averaged"].transpose("replicate", "cell").values - float(predicted["limit"])

        def raw(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return (trained["raw"].transpose("replicate", "cell").values / predicted["loss"].values).mean(1)

        def level(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return (excess(predicted, trained) * lengths / float(predicted["coefficient"])).mean(1)

        def exponent(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return fit_exponent(lengths, excess(predicted, trained))

        def share(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return (excess(predicted, trained) * lengths).max(1) / float(predicted["largest"])

        spread = 2.0 / np.sqrt(FEWEST)  # of a chi-squared variable's mean, with one degree of freedom
        return (
            Claim(
                "The loss on drawn tasks, prompts and queries is the exact L + c/n (ratio, averaged over n)",
                raw,
                quantity="loss, measured over predicted",
                target=1.0,
                tolerance=3 * spread,
                basis=f"three standard errors of {FEWEST} squared errors, twice those of a normal error's square",
            ),
            Claim(
                "The excess over infinite prompts is c/n with c in closed form (ratio, averaged over n)",
                level,
                quantity="excess, measured over predicted",
                target=1.0,
                tolerance=3 * spread,
                basis=f"three standard errors of {FEWEST} quadratic forms",
            ),
            Claim(
                "The excess of the loss at n pairs decreases as 1/n",
                exponent,
                quantity="exponent of n",
                target=-1.0,
                tolerance=3 * spread / np.log(lengths[-1] / lengths[0]) * np.sqrt(2),
                basis="the same error of the logarithms at both ends, over the logarithm of their ratio",
            ),
            Claim(
                "|L_n - L| decreases at least as fast in n as the paper's bound sqrt(log k / n) (exponent at most "
                "-1/2)",
                exponent,
                quantity="exponent of n",
                target=-0.5,
                tolerance=(np.inf, 0.0),
                basis="the bound's dependence on n, which is not tight; its dependence on k is not tested",
            ),
            Claim(
                "At the attention of infinite prompts the excess is at most k max|f|^2 / 2n (share of it)",
                share,
                quantity="excess over the bound",
                target=1.0,
                tolerance=(np.inf, 0.0),
                basis="the variance of a mean of n pairs is at most its second moment; without a logarithm of k",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the excess over the limit against n, measured and exact, and the paper's rate through the first."""
        limit, lengths = float(predicted["limit"]), np.asarray(self.lengths, float)
        x = tuple(lengths.tolist())
        measured = trained["averaged"].transpose("replicate", "cell").values - limit
        paper = predicted["paper"].values * float(measured[:, 0].mean()) / float(predicted["paper"][0])
        exact, best = (predicted[name].values - limit for name in ("loss", "best"))
        ends = measured[:, 0].mean() / measured[:, -1].mean()
        return (
            Lines(
                f"Excess loss of prompts of n pairs: n^({fit_exponent(lengths, measured).exponent:.3f})",
                "pairs n of a prompt",
                "loss minus that of infinite prompts",
                (
                    spread_curve(lengths, measured, "drawn prompts"),
                    Curve(x, tuple(exact.tolist()), "exact c/n", "predicted"),
                    Curve(x, tuple(best.tolist()), "exact, attention optimized for n", "predicted", 1),
                    Curve(x, tuple(paper.tolist()), "rate of the paper's bound, through the first point", "reference"),
                ),
                log_x=True,
                log_y=True,
                note=f"From n = {lengths[0]:g} to {lengths[-1]:g} the excess falls {ends:.3g}-fold; 1/n would be "
                f"{lengths[-1] / lengths[0]:g}-fold, that of the bound {(lengths[-1] / lengths[0]) ** 0.5:.3g}-fold. "
                "Band: replicates.",
            ),
        )


def representation() -> tuple[FeatureTask, np.ndarray]:
    """Return the task on the circle and the representation at its nodes."""
    task = circle_task((2, 2))
    angles = np.arctan2(task.inputs[:, 1], task.inputs[:, 0])
    return task, task.targets @ SIGNAL + FOREIGN * harmonics(1, angles) + THIRD * harmonics(3, angles)
