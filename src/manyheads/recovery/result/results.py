r"""Result of a recovery: the layer, its certificate, and the figures of every stage.

Accuracy of every head of a recovered layer, from the error of the whole.

A layer whose answers err by at most E* Var(y) may have any error of its weights that changes the answers by no more.
With h_i(x) the contribution of head i and t_i = dh_i / ds its derivative in a common factor 1 + s of its logits, both
without their means over sequences, the changes sum_i (a_i h_i + b_i t_i) have the squared norm (a, b)^T G (a, b), G the
Gram matrix of the 2m functions, so that

.. math:: |a_i| \le \sqrt{E^* \mathrm{Var}(y)\, (G^{-1})_{ii}}

and likewise for b_i. a_i is a relative error of W_i along itself, b_i one of its logits. Heads whose contributions
resemble each other make G nearly singular and their errors large, as they should be. A head with |a_i| >= 1 might not
exist. Errors of other directions are not in the family: where heads attend nearly alike, a part of W_i that is moved
to W_j changes the answers little, and may be larger than |a_i|.

Derived here.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads._extras import Figure
from manyheads._overview import Overview, Shown
from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Array, ArrayFunction, Figures
from manyheads.recovery.layers.evaluation import apply_layer, attention_logits, softmax
from manyheads.recovery.layers.panels import at_offset_one, describe_heads, rank_tolerance
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.oracle.noise_estimate import OracleNoise
from manyheads.recovery.oracle.oracle import Counts, Oracle

NUMBERS = 1 << 23  # numbers of the contributions that are held at once


@dataclass(frozen=True)
class HeadAccuracy:
    """Accuracy of one head."""

    # Root mean square of its contribution to the answers, relative to the standard deviation of the answers
    share: float
    # Largest errors of a common factor of W_i, and of the logits, that the certificate leaves open; infinite where
    # nothing depends on them
    projection: float
    theta: float

    @property
    def resolved(self) -> bool:
        """Whether the head is above the error of the layer; one that is not might not exist."""
        return self.projection < 1


def head_accuracies(layer: Any, stacks: list[Array], error: float, variance: float) -> tuple[HeadAccuracy, ...]:
    """Return the accuracy of every head of a layer."""
    heads = layer.heads
    gram, mean, weight = np.zeros((2 * heads, 2 * heads)), np.zeros((2 * heads, layer.dim)), 0
    for x in stacks:
        count = max(1, NUMBERS // max(1, 2 * heads * x[0].size))
        for start in range(0, len(x), count):
            part = _responses(layer, x[start : start + count])  # (2m, n, k, d)
            rows = part.shape[2]
            gram += np.einsum("anrd,bnrd->ab", part, part, optimize=True) / rows
            mean += part.mean(2).sum(1)
            weight += part.shape[1]
    gram = (gram / weight - (mean / weight) @ (mean / weight).T) / layer.dim
    sizes = np.sqrt(np.maximum(np.diag(gram), 0.0))
    alive = sizes > 0
    open_ = np.full(2 * heads, np.inf)
    if alive.any():
        scaled = gram[np.ix_(alive, alive)] / np.outer(sizes[alive], sizes[alive])
        values, vectors = np.linalg.eigh(scaled)
        inverse = (vectors**2 / np.maximum(values, len(values) * np.finfo(float).eps)).sum(1)
        open_[alive] = np.sqrt(error * variance * inverse) / sizes[alive]
    deviation = np.sqrt(variance) if variance > 0 else 1.0
    return tuple(
        HeadAccuracy(float(sizes[i] / deviation), float(open_[i]), float(open_[heads + i])) for i in range(heads)
    )


def note_unresolved(accuracies: tuple[HeadAccuracy, ...], told_apart: bool = False) -> tuple[str, ...]:
    """Name the heads that are below the error of their layer; `told_apart` if held-out sequences ask for all heads."""
    unresolved = [str(head) for head, accuracy in enumerate(accuracies) if not accuracy.resolved]
    if not unresolved:
        return ()
    which = f"head {unresolved[0]} is" if len(unresolved) == 1 else f"heads {', '.join(unresolved)} are"
    why = "and might not exist"
    if told_apart:
        why = "though held-out sequences need every head: its matrices are not determined"
    return (f"{which} below the error of the layer, {why}",)


def _responses(layer: Any, x: Array) -> Array:
    """Return h and t of all heads, (2m, n, k, d)."""
    logits = layer.logits(x) if isinstance(layer, RotaryLayer) else attention_logits(layer, x)  # (m, n, k, k)
    weights = softmax(logits)
    finite = np.where(np.isfinite(logits), logits, 0.0)
    turned = weights * (finite - (weights * finite).sum(-1, keepdims=True))
    projection = np.asarray(layer.projection, np.float64)[:, None]
    return np.concatenate([(weights @ x) @ projection, (turned @ x) @ projection])


@dataclass(frozen=True)
class Stage:
    """One stage: its name, its figures (errors, gaps, ranks, calls: plain numbers) and the CPU seconds it took."""

    name: str
    figures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


class StageLog:
    """Times stages and keeps their figures; queries of an oracle are counted under the stage's name."""

    def __init__(self, oracle: Oracle | None = None):
        self.oracle, self.stages = oracle, list[Stage]()

    @contextmanager
    def stage(self, name: str) -> Iterator[Figures]:
        """Run one stage, which writes its figures into the dictionary it is given."""
        started, figures = time.process_time(), Figures()
        with nullcontext() if self.oracle is None else self.oracle.stage(name):
            yield figures
        plain = {name: float(value) for name, value in figures.items()}
        self.stages.append(Stage(name, plain, time.process_time() - started))


@dataclass(frozen=True)
class Extracted:
    """Result of a method of extraction, before it is verified."""

    layer: AttentionLayer  # with merged weights, float64
    stages: tuple[Stage, ...] = ()  # in the order in which they ran
    acts_on: str = "the tokens"  # what the layer acts on, in words: the tokens, or what a norm makes of them
    prepare: ArrayFunction | None = None  # maps tokens (n, k, d) to what the layer acts on; None: the tokens
    longest: int | None = None  # most tokens of a sequence for which the layer is known; None for all
    whole: ArrayFunction | None = None  # the function that was asked, if with a residual connection or an MLP

    @takes_arrays
    def __call__(self, x: Array) -> Array:
        """Return the answers of the function that was asked, residual and MLP included, to tokens (n, k, d)."""
        return self.attention(x) if self.whole is None else self.whole(x)

    @takes_arrays
    def attention(self, x: Array) -> Array:
        """Return the answers of the attention alone to tokens (n, k, d), behind its norm if it has one, in float64."""
        return apply_layer(self.layer, x if self.prepare is None else self.prepare(x))


@dataclass(frozen=True, repr=False)
class Recovery(Shown):
    """A recovered layer beside its evidence.

    Attributes
    ----------
    layer
        The layer with merged weights, float64.
    certificate
        The statement that was checked on fresh sequences, and its figures.
    stages
        The stages in the order in which they ran.
    method
        Name of the method that produced it.
    reason
        Why this method was chosen.
    counts
        What every stage asked of the oracle, the verification included.
    noise
        What was measured of the oracle before anything else.
    tried
        What was tried, in order, and what came of it.
    extracted
        The function that was asked, as it was found; its `attention` is the attention alone.
    notes
        What is left open about the heads, in words.
    head_accuracy
        Share and accuracy of every head, in the order of the layer.
    """

    layer: AttentionLayer
    certificate: Any
    stages: tuple[Stage, ...]
    method: str
    reason: str = ""
    counts: Mapping[str, Counts] = field(default_factory=dict)
    noise: OracleNoise | None = None
    tried: tuple[str, ...] = ()
    extracted: Extracted | None = None
    notes: tuple[str, ...] = ()
    head_accuracy: tuple[HeadAccuracy, ...] = ()

    @property
    def heads(self) -> int:
        """Number of heads that were found."""
        return self.layer.heads

    @property
    def total(self) -> Counts:
        """All queries to the oracle."""
        return sum(self.counts.values(), Counts())

    def save(self, path: Path | str, notes: Mapping[str, str] | None = None) -> Path:
        """Write the layer as `save_layer` does, with what it acts on and its certificate in the metadata."""
        from manyheads.recovery.layers.files import save_layer

        acts_on = "the tokens" if self.extracted is None else self.extracted.acts_on
        return save_layer(path, self.layer, {**(notes or {}), "acts on": acts_on, "certificate": str(self.certificate)})

    def plot(self) -> "Figure":
        """Draw what every head compares (W_QK) and what it passes on (W_OV), entry by entry."""
        from manyheads.recovery.layers.panels import heads_picture
        from manyheads.study.reporting.charts import draw_titled

        return draw_titled(heads_picture(at_offset_one(self.layer)))

    def _overview(self) -> Overview:
        layer, asked = at_offset_one(self.layer), self.total
        heads = describe_heads(layer, rank_tolerance(float(self.certificate.largest_error)))
        accuracy = self.head_accuracy or (None,) * len(heads)
        rows = []
        for place, (head, one) in enumerate(zip(heads, accuracy, strict=True)):
            matrices = (head.theta_rank, head.theta_norm, head.projection_rank, head.projection_norm)
            rows.append((place, *matrices, *([None] * 3 if one is None else (one.share, one.theta, one.projection))))
        columns = ("head", "qk_rank", "qk_norm", "ov_rank", "ov_norm", "share", "qk_error", "ov_error")
        title = f"Recovery: {self.heads} heads in {layer.dim} dimensions, method {self.method!r}, {asked.calls:,} calls"
        return Overview(title, columns, rows, (str(self.certificate), *self.notes))
