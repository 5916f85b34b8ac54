"""`joma/nearly-orthogonal`: theorem 1 for embeddings with the cosines of trained models.

One layer is trained by gradient flow on orthonormal embeddings, on random directions in several dimensions, on
embeddings with a common direction, and on more tokens than dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.spectra.levels import random_coherence
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Lines, Listing, Source, Study
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, select_cell
from manyheads.theory.joma.systems.couplings import integrate_couplings, random_gram, with_gram
from manyheads.theory.joma.systems.gradient_flow import FixedSteps, gradient_flow
from manyheads.theory.joma.systems.layer import draw_parameters, draw_upper
from manyheads.theory.joma.task import Sizes, UpdateRule, draw_joma_task
from manyheads.theory.joma.theorems.nearly_orthogonal import drift_bound, drift_from_couplings, random_drift, token_sum
from manyheads.theory.papers import TIAN

ATTENTIONS = ("linear", "exp")
EXACT, SIMPSON = 1e-10, 1e-6
CLOSE = 0.1  # of the change of the logits


@dataclass(frozen=True)
class NearlyOrthogonal(Study):
    """Drift of the quantity of theorem 1 when token embeddings are not orthogonal.

    Attributes
    ----------
    dimensions
        In which the embeddings are random directions, in falling order: mean abs(cos) is sqrt(2/(pi d)). The
        third one also gives the cosine of embeddings with a common direction.
    crowded
        A dimension below the number of tokens.
    tokens, contexts, neurons
        Size of the task and of the layer.
    horizon, step, records
        End time, step length, and number of states kept.
    """

    name: ClassVar[str] = "joma/nearly-orthogonal"
    claim: ClassVar[str] = "Theorem 1 drifts as the cosines of the embeddings, as their couplings predict"
    source: ClassVar[Source] = replace(
        TIAN,
        locus="theorem 1, and the measured cosines in the reply to reviewers; drift and bound are derived here",
    )
    # Not vectorized: one program per attention serves all cells and replicates.
    dimensions: tuple[int, ...] = (1600, 256, 64, 24)
    crowded: int = 8
    tokens: int = 12
    contexts: int = 40
    neurons: int = 24
    horizon: float = 40.0
    step: float = 0.05
    records: int = 200

    def __post_init__(self) -> None:
        falling = list(self.dimensions) == sorted(set(self.dimensions), reverse=True)
        if not falling or len(self.dimensions) < 3 or self.dimensions[-1] < 2:
            raise UsageError(f"dimensions={self.dimensions}: expected three or more, in falling order, 2 or more each")
        if not 0 < self.crowded < self.tokens:
            raise UsageError(f"crowded={self.crowded}: expected a dimension below the {self.tokens} tokens")

    @classmethod
    def full(cls) -> NearlyOrthogonal:
        """Return the study with more tokens and dimensions."""
        return cls(dimensions=(6400, 1600, 256, 64, 24), tokens=32, crowded=16, contexts=120)

    @classmethod
    def small(cls) -> NearlyOrthogonal:
        """Return the smallest configuration in which every claim can change."""
        return cls((64, 16, 8), 2, tokens=3, contexts=4, neurons=2, horizon=2.0, step=0.25, records=8)

    def cells(self) -> tuple[Cell, ...]:
        """Return every kind of embeddings, with its dimension, for linear and for exp attention."""
        frames = [("orthonormal", 0), *(("random", d) for d in (*self.dimensions, self.crowded))]
        frames.append(("common", self.dimensions[2]))
        return tuple(Cell(attention=a, frame=frame, dimension=d) for a in ATTENTIONS for frame, d in frames)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the exponent of the drift in the dimension, and the mean absolute cosine of random directions."""
        levels = [random_coherence(d) for d in self.dimensions]
        return dataset(
            {
                "exponent": ((), -0.5, "exponent of the drift in the dimension"),
                "level": ("dimension", levels, "mean absolute cosine of random directions"),
            },
            coords={"dimension": (list(self.dimensions), "dimension of the embeddings")},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one layer by gradient flow and record its drift and its couplings."""
        rule = UpdateRule(str(cell["attention"]), "gelu")  # type: ignore[arg-type]
        sizes = Sizes(self.tokens, 1, self.contexts, neurons=self.neurons, width=self.tokens + 1)
        streams = np.random.default_rng(np.asarray(jax.random.key_data(key))).spawn(3 + len(self.cells()))
        gram = self._gram(cell, streams[3 + self.cells().index(cell)])
        task, loss = with_gram(draw_joma_task(sizes, streams[0]), gram), draw_upper(sizes, streams[2])
        init = draw_parameters(sizes, rule, streams[1])
        path = gradient_flow(init, task, loss, rule, FixedSteps.until(self.horizon, self.step, self.records))
        couplings, lengths = integrate_couplings(path, task, loss, rule)
        logits, weights = np.asarray(path.network.logits), np.asarray(path.network.weights)
        powers = logits[:, 0] ** 2 if rule.attention == "linear" else logits[:, 0]  # (S, M)
        squares = ((task.token_embeddings.T @ weights) ** 2).sum(-1)
        relation = powers - squares / (1 if rule.attention == "linear" else 2)
        total = token_sum(rule, logits, weights, task.query_embeddings[:, 0])
        pair = ("token", "other")
        return dataset(
            {
                "gram": (pair, gram, "cosines of the embeddings"),
                "couplings": (pair, couplings[-1], "couplings of tokens at the end"),
                "drift": ("token", relation[-1] - relation[0], "drift of the quantity of theorem 1"),
                "change": ("token", powers[-1] - powers[0], "change of the logits' side of theorem 1"),
                "bound": ("token", drift_bound(rule, gram, lengths), "bound on the absolute drift"),
                "sum_drift": ((), np.abs(total - total[0]).max(), "largest drift of the sum over tokens"),
            },
            coords={"token": (np.arange(self.tokens), "token"), "other": (np.arange(self.tokens), "other token")},
        )

    def _gram(self, cell: Cell, rng: np.random.Generator) -> np.ndarray:
        dimension, eye = int(cell["dimension"]), np.eye(self.tokens)
        if cell["frame"] == "random":
            return random_gram(self.tokens, dimension, rng)
        cosine = random_coherence(dimension) if cell["frame"] == "common" else 0.0
        return (1 - cosine) * eye + cosine

    def claims(self) -> tuple[Claim, ...]:
        """Test equalities to rounding, the bound, the first order, and theorem 1 at measured cosines."""
        few, middle, many = self.dimensions[0], self.dimensions[1], self.dimensions[2]
        cosines = {d: f"{random_coherence(d):.2f}" for d in self.dimensions}

        def close(dimension: int, expected: Any) -> Claim:
            return Claim(
                f"With embeddings of mean absolute cosine {cosines[dimension]} theorem 1 gives the changes of the "
                "logits to a tenth",
                _relative(dimension),
                quantity="root mean square error over that of the changes",
                target=0.0,
                tolerance=CLOSE,
                expected=expected,
                resolution=SIMPSON,
                bounds=(0.0, np.inf),
                basis=f"a tenth of the changes, mean over both kinds of attention, in {dimension} dimensions",
            )

        return (
            Claim(
                "Summed over the tokens, theorem 1 is exact for any embeddings, more tokens than dimensions included",
                lambda predicted, trained: float(trained["sum_drift"].max()),
                quantity="drift",
                target=0.0,
                tolerance=EXACT,
                basis="an equality: rounding, and the fourth power of the step, leave less",
            ),
            Claim(
                "The drift is that of the couplings of tokens times the cosines of their embeddings",
                lambda predicted, trained: float(_identity_error(trained)),
                quantity="largest error (relative)",
                target=0.0,
                tolerance=SIMPSON,
                basis="an equality along each trajectory, up to Simpson's rule between the states kept",
            ),
            Claim(
                "The drift stays below the coherence times the lengths of the couplings",
                lambda predicted, trained: float(_of_bound(trained)),
                quantity="largest drift over its bound",
                target=0.0,
                tolerance=(0.0, 1.0),
                bounds=(0.0, np.inf),
                basis="a bound: the largest cosine for each, and no cancellation",
            ),
            Claim(
                "The drift falls as the root of the dimension of random embeddings",
                _exponent(self.dimensions),
                quantity="exponent of the dimension",
                target=lambda predicted: float(predicted["exponent"]),
                tolerance=0.15,
                basis="the second order adds sqrt(M/d) relative to the first at the smallest dimension, in quadrature, "
                "over a range of dimensions of more than sixty",
            ),
            Claim(
                "The couplings of orthonormal embeddings predict the root mean square of the drift of random ones",
                _against_law((few, middle)),
                quantity="drift over its prediction",
                target=1.0,
                tolerance=0.3,
                bounds=(0.0, np.inf),
                basis=f"the second order, sqrt(M/d), of {(self.tokens / middle) ** 0.5:.1g} at {middle} dimensions, "
                "either way, rounded up",
            ),
            close(few, "holds"),
            close(many, "refuted"),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the relative drift against the mean absolute cosine, and the table of all embeddings."""
        levels, curves = predicted["level"].values, []
        for group, attention in enumerate(ATTENTIONS):
            drifts = np.stack([_size(trained, attention, d, relative=True) for d in self.dimensions], axis=1)
            laws = np.stack([_law(trained, attention, d, relative=True) for d in self.dimensions], axis=1)
            curves.append(spread_curve(levels, drifts, f"{attention} attention", group=group))
            curves.append(spread_curve(levels, laws.mean(0), "" if group else "first order", "predicted", group))
        lines = Lines(
            "Error of theorem 1 for embeddings in random directions",
            "mean absolute cosine",
            "error over the change of the logits",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="Root mean squares over tokens; bands range over replicates. Dashed: from the couplings of "
            "orthonormal embeddings.",
            shows=("falls as the root", "predict the root mean square"),
        )
        return lines, self._table(trained)

    def _table(self, trained: xr.Dataset) -> Panel:
        rows = []
        for cell in self.cells():
            here = select_cell(trained, **dict(cell))
            gram = here["gram"].values
            off = np.abs(gram[:, ~np.eye(self.tokens, dtype=bool)])
            relative = _rms(here["drift"]) / _rms(here["change"])
            rows.append(
                (
                    *(str(cell[name]) for name in ("attention", "frame")),
                    str(cell["dimension"] or ""),
                    f"{off.mean():.3f}",
                    f"{off.max():.2f}",
                    f"{relative.mean():.3f} ({relative.min():.3f} to {relative.max():.3f})",
                    f"{float(here['sum_drift'].max()):.0e}",
                )
            )
        return Listing(
            "Error of theorem 1 by embeddings",
            ("attention", "embeddings", "dimension", "mean cosine", "largest", "relative error", "of the sum"),
            tuple(rows),
            note="Absolute cosines. Relative error: root mean square over tokens, over that of the changes of the "
            "logits; mean and range over replicates. Of the sum: largest drift of the sum over tokens.",
        )


def _rms(values: xr.DataArray) -> np.ndarray:
    return np.sqrt((values.values**2).mean(-1))


def _random(trained: xr.Dataset, attention: str, dimension: int) -> xr.Dataset:
    return select_cell(trained, attention=attention, frame="random", dimension=dimension)


def _size(trained: xr.Dataset, attention: str, dimension: int, relative: bool = False) -> np.ndarray:
    """Return the drift, root mean square over tokens, (R,)."""
    cell = _random(trained, attention, dimension)
    return _rms(cell["drift"]) / (_rms(cell["change"]) if relative else 1.0)


def _law(trained: xr.Dataset, attention: str, dimension: int, relative: bool = False) -> np.ndarray:
    """Return the predicted root mean square of the drift, over tokens and directions, (R,)."""
    cell = select_cell(trained, attention=attention, frame="orthonormal")
    law = random_drift(UpdateRule(attention, "gelu"), dimension, cell["couplings"].values)  # type: ignore[arg-type]
    return np.sqrt((law**2).mean(-1)) / (_rms(cell["change"]) if relative else 1.0)


def _relative(dimension: int) -> Measure:
    return lambda predicted, trained: np.mean(
        [_size(trained, attention, dimension, relative=True) for attention in ATTENTIONS], axis=0
    )


def _exponent(dimensions: tuple[int, ...]) -> Measure:
    def fitted(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
        ratios = [  # over the scale of each replicate and attention, so that both have one line
            np.mean([_size(trained, a, d) / _law(trained, a, dimensions[0]) for a in ATTENTIONS], axis=0)
            for d in dimensions
        ]
        fit = fit_exponent(np.asarray(dimensions, float), np.stack(ratios, axis=1))
        return fit.exponent, fit.interval

    return fitted


def _against_law(dimensions: tuple[int, ...]) -> Measure:
    def ratio(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
        pairs = [(a, d) for a in ATTENTIONS for d in dimensions]
        squares = [(_size(trained, *pair) / _law(trained, *pair)) ** 2 for pair in pairs]
        return np.sqrt(np.mean(squares, axis=0))

    return ratio


def _identity_error(trained: xr.Dataset) -> float:
    """Return the largest distance of a drift from that of its own couplings, over the change of the logits."""
    worst = 0.0
    for number in range(trained.sizes["cell"]):
        cell = trained.isel(cell=number).transpose("replicate", ...)
        rule = UpdateRule(str(cell["attention"].item()), "gelu")  # type: ignore[arg-type]
        for run in range(cell.sizes["replicate"]):
            one = cell.isel(replicate=run)
            gap = one["drift"].values - drift_from_couplings(rule, one["gram"].values, one["couplings"].values)
            worst = max(worst, float(np.abs(gap).max() / np.abs(one["change"].values).max()))
    return worst


def _of_bound(trained: xr.Dataset) -> float:
    """Return the largest drift over its bound, without the orthonormal embeddings, whose bound is zero."""
    apart = trained.isel(cell=np.flatnonzero(trained["frame"].values != "orthonormal"))
    return float((np.abs(apart["drift"]) / apart["bound"]).max())
