"""`demo/growth`: training of attention blocks of growing key dimension, beside its infinite limit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr
from scipy.special import softmax

from manyheads.data import load_text
from manyheads.data.characters import UNKNOWN, build_vocabulary
from manyheads.demo.sampling import mark_whitespace
from manyheads.demo.text import TextTraining
from manyheads.errors import UsageError, check_rising
from manyheads.scaling.checks.coordinate_check import finite_size_bias
from manyheads.statistics import fit_exponent
from manyheads.studies.dmft.shared.mean_field import DIMS, solve_blocks
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study, distance, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Multiples, Panel, spread_curve
from manyheads.study.tables import dataset, on_grid
from manyheads.theory.dmft import Network, Problem, infinite_key_dim, train_networks
from manyheads.theory.dmft.finite.problems import text_problem
from manyheads.theory.papers import BORDELON

MEASURED = (("output", ("step", "read_out", "class"), "1"), ("loss", ("step",), "nat"))
TRAJECTORIES = {"": "predicted", "_without": "predicted without response functions"}
RARER = "□"  # stands for every rarer character


@dataclass(frozen=True)
class DemoGrowth(Study):
    """Blocks of causal attention trained on a few pieces of text, and their infinite limit.

    Attributes
    ----------
    text
        A UTF-8 file; by default Python's own documentation.
    key_dims
        Sizes N at which blocks are trained, in rising order.
    heads
        Heads of every block; the prediction does not depend on them.
    pieces, length
        Number of pieces of the text, and characters of each.
    vocabulary
        Number of characters, the most frequent ones; all others are replaced by one.
    steps, learning_rate, richness
        Of the training by gradient descent.
    blocks
        Blocks of one size in a replicate.
    """

    name: ClassVar[str] = "demo/growth"
    revision: ClassVar[int] = 2
    claim: ClassVar[str] = "Trained attention blocks approach the infinite-key-dimension limit as N^(-1/2)"
    source: ClassVar[Source] = BORDELON.at("the limit of infinite key dimension; its solution is derived here")

    text: Path | None = None
    key_dims: tuple[int, ...] = (4, 16, 64)
    heads: int = 4
    pieces: int = 3
    length: int = 8
    vocabulary: int = 16
    steps: int = 28
    learning_rate: float = 0.75
    richness: float = 0.75
    blocks: int = 16

    def __post_init__(self) -> None:
        check_rising("key_dims", self.key_dims)
        if self.heads < 1 or self.blocks < 2:
            raise UsageError(f"heads={self.heads}, blocks={self.blocks}: expected 1 head and 2 blocks or more")

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text; refuse a text or a size that is out of range."""
        digests = TextTraining(text=self.text).inputs()
        self.problem()
        return digests

    def problem(self) -> Problem:
        """Return the training problem of the limit and of the blocks."""
        return _problem(
            self.text, self.pieces, self.length, self.vocabulary, self.steps, self.learning_rate, self.richness
        )

    def cells(self) -> tuple[Cell, ...]:
        """Return the sizes."""
        return grid(key_dim=self.key_dims)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Solve the limit, and the same equations without their response functions; nothing is trained or fitted."""
        problem = self.problem()
        solved, without = infinite_key_dim(problem), solve_blocks(problem, responses=False)
        found = {"": (solved.output.values, solved.loss.values), "_without": (without.outputs, without.losses)}
        before, after = self._signs()
        logits = solved.logits.values[-1][..., problem.attention_mask()]
        numbers = {
            f"{name}{trajectory}": (dims, value, f"{name}, {TRAJECTORIES[trajectory]}", unit)
            for trajectory, values in found.items()
            for (name, dims, unit), value in zip(MEASURED, values, strict=True)
        } | {"moved": ((), np.sqrt(np.mean(logits**2)), "rms of the attention logits")}
        texts = {
            "before": ("read_out", before, "what has been seen of a piece", None),
            "after": ("read_out", after, "what comes next", None),
        }
        return dataset(numbers | texts, coords={"step": (np.arange(self.steps), "updates", "1")})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train some blocks of one size from independent weights."""
        network = Network(int(cell["key_dim"]), self.heads)
        seeds = np.random.default_rng(np.asarray(jax.random.key_data(key))).integers(0, 2**31, self.blocks)
        trained = train_networks(self.problem(), network, seeds.tolist(), chunk=self.blocks)
        variables = {name: (("network", *dims), trained[name].values, name, unit) for name, dims, unit in MEASURED}
        return dataset(variables, coords={"step": (np.arange(self.steps), "updates", "1")})

    def claims(self) -> tuple[Claim, ...]:
        """Test the power of the distance from the limit, and the effect of the response functions."""
        bias = -finite_size_bias(self.key_dims)
        basis = f"a correction 1 + N^(-1/2) changes the power by {bias:.2f} over these sizes"

        def power(which: int) -> Measure:
            def fitted(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
                fit = fit_exponent(self.key_dims, self.gaps(predicted, trained)[which])
                return fit.exponent, fit.interval

            return fitted

        def ratio(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            _, near, far = self.gaps(predicted, trained)
            return np.log(near[:, -1] / far[:, -1])

        return (
            Claim(
                "The rms distance of the outputs of single blocks from the limit scales as N^(-1/2)",
                power(0),
                quantity="exponent of N",
                target=-0.5,
                tolerance=bias,
                basis=basis,
            ),
            Claim(
                f"At N = {self.key_dims[-1]} the mean block is closer to the limit than to that without response "
                "functions",
                ratio,
                quantity="distance over that without responses (ln)",
                target=0.0,
                tolerance=(float("inf"), 0.0),
                basis="the logarithm of a ratio of distances is negative if the first is the smaller one",
            ),
            Claim(
                "The distance of the mean block from the limit without response functions scales as N^(-1/2) or faster",
                power(2),
                quantity="exponent of N",
                target=-0.5,
                tolerance=(float("inf"), bias),
                expected="refuted",
                basis=basis + "; a distance from another limit converges to that of the two limits",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the loss, the distances by size, and the probability of the next character."""
        return (
            self._losses(predicted, trained),
            self._distances(predicted, trained),
            self._table(predicted, trained),
        )

    def gaps(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Compute rms distances over all updates, each (replicates, sizes).

        From the limit, of single blocks and of their mean; and of their mean from the limit without response functions.
        """
        found = on_grid(trained, predicted)["output"]
        wanted, without = (predicted[f"output{trajectory}"] for trajectory in TRAJECTORIES)
        single = distance(found, wanted, ("network", *DIMS["output"]))
        near, far = (distance(found.mean("network"), each, DIMS["output"]) for each in (wanted, without))
        return single.values, near.values, far.values

    def _signs(self) -> tuple[list[str], list[str]]:
        """Return the characters up to every read-out, and the next one."""
        problem = self.problem()
        symbols = build_vocabulary(load_text(self.text).content, self.vocabulary).symbols
        signs = np.array([RARER if symbol == UNKNOWN else mark_whitespace(symbol) for symbol in symbols])
        seen = signs[problem.inputs[..., : problem.classes].argmax(-1)]  # (pieces, length)
        before = ["".join(piece[: place + 1]) for piece in seen for place in range(self.length)]
        return before, signs[problem.flat_targets.argmax(-1)].tolist()

    def _losses(self, predicted: xr.Dataset, trained: xr.Dataset) -> Multiples:
        steps = predicted["step"].values
        every = on_grid(trained, predicted)["loss"].values  # (replicates, sizes, networks, step)
        plain = tuple(map(float, steps))
        loss, without = (tuple(predicted[f"loss{trajectory}"].values.tolist()) for trajectory in TRAJECTORIES)
        trajectories = (
            Curve(plain, loss, TRAJECTORIES[""], "predicted", 1),
            Curve(plain, without, TRAJECTORIES["_without"], "reference", 2),
        )
        return Multiples(
            "Training loss",
            "updates",
            "cross-entropy [nat/character]",
            (
                tuple(
                    (spread_curve(steps, every[:, place].reshape(-1, self.steps), "trained blocks"), *trajectories)
                    for place in range(len(self.key_dims))
                ),
            ),
            row_labels=("",),
            column_labels=tuple(f"key dimension N = {size}" for size in self.key_dims),
            log_y=True,
            note=f"Mean of {every.shape[0] * every.shape[2]} blocks of a size, bands range over all of them. The "
            "prediction is computed without training and without fit, and is independent of N and of the number of "
            "heads. Response functions: how fields react to earlier changes, in mean-field theory.",
        )

    def _distances(self, predicted: xr.Dataset, trained: xr.Dataset) -> Lines:
        sizes, (single, near, far) = np.asarray(self.key_dims, float), self.gaps(predicted, trained)
        guide = single.mean(0)[0] * (sizes / sizes[0]) ** -0.5
        mean = f"mean of {self.blocks} blocks"
        return Lines(
            "Distance of the outputs from the prediction",
            "key dimension N",
            "root mean square distance",
            (
                spread_curve(sizes, single, "one block", group=0),
                spread_curve(sizes, near, mean, group=1),
                spread_curve(sizes, far, f"{mean}, from the prediction without response functions", group=2),
                Curve(tuple(sizes.tolist()), tuple(guide.tolist()), "falls like N^(-1/2)", "reference"),
            ),
            log_x=True,
            log_y=True,
            note=f"Over all updates and characters; bands range over replicates. From N = {self.key_dims[0]} to "
            f"{self.key_dims[-1]} the distance of one block is multiplied by {_ratio(single)}, that of the mean by "
            f"{_ratio(near)}, and that of the mean to the prediction without response functions by {_ratio(far)}.",
            shows=("outputs of single blocks",),
        )

    def _table(self, predicted: xr.Dataset, trained: xr.Dataset) -> Listing:
        """Show the final probability of the next character at every position of the first piece."""
        right = self.problem().flat_targets.argmax(-1)[: self.length]
        places = np.arange(self.length)
        theirs = on_grid(trained, predicted)["output"].values[
            ..., -1, : self.length, :
        ]  # (replicates, sizes, networks, ...)
        drawn = softmax(theirs, axis=-1)[..., places, right]
        expected = softmax(predicted["output"].values[-1, : self.length], axis=-1)[places, right]
        rows = tuple(
            (
                str(predicted["before"].values[place]),
                str(predicted["after"].values[place]),
                f"{expected[place]:.2f}",
                *(
                    f"{drawn[:, size, :, place].mean():.2f} ± {drawn[:, size, :, place].std():.2f}"
                    for size in range(len(self.key_dims))
                ),
            )
            for place in places
        )
        return Listing(
            "Probability of the next character",
            ("context", "next", "predicted", *(f"blocks, N = {size}" for size in self.key_dims)),
            rows,
            note=f"First piece, after {self.steps - 1} updates; ± is the standard deviation over blocks. · is a space, "
            f"¶ a line end, {RARER} a rarer character. The predicted rms of the attention logits grows from zero to "
            f"{float(predicted['moved']):.2f}.",
        )


def _ratio(distances: np.ndarray) -> str:
    """Return the last size's distance over the first's, means over replicates: (replicates, sizes)."""
    first, *_, last = distances.mean(0)
    return f"{last / first:.2f}"


@lru_cache(maxsize=4)
def _problem(
    text: Path | None, pieces: int, length: int, vocabulary: int, steps: int, learning_rate: float, richness: float
) -> Problem:
    return text_problem(
        pieces, length, vocabulary, text, steps=steps, learning_rate=learning_rate, richness=richness, norm=True
    )
