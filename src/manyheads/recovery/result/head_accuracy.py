r"""Accuracy of every head of a recovered layer, from the error of the whole.

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

from dataclasses import dataclass
from typing import Any

import numpy as np

from manyheads.recovery._types import Array
from manyheads.recovery.layers.evaluation import attention_logits, softmax
from manyheads.recovery.layers.rotary import RotaryLayer

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
