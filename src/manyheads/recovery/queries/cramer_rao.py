r"""Cramér-Rao bound of an extraction from given queries: Jacobian of the answers in the weights, Fisher information.

Let M be the information of a number in the answers of some design and K that of Gaussian sequences, both in the free
parameters of the layer, and k the tokens of a call. From N calls, whose answers have independent noise s relative to
their standard deviation on Gaussian sequences, an unbiased estimate has there a relative squared error of at least

.. math:: e = \varphi\, \frac{s^2}{N}, \qquad \varphi = \frac{\operatorname{tr}(K M^{-1})}{k d},

and phi = p / (k d), p the free parameters, where the design is the Gaussian sequences themselves. Weights are factors
[W_Q; b_Q], W_K, W_V, W_O, those that heads share counted once; directions that change no answer have no information
and are left out. Derived here.
"""

from dataclasses import dataclass

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery._types import Array
from manyheads.recovery.fit.rotary_tangent import SEEN, RotaryTangent, RotaryWeights
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.recovery.layers.evaluation import dense_weights, softmax
from manyheads.recovery.layers.panels import RANK_TOLERANCE

ENTRIES = 1 << 23  # of a part of a Jacobian
UNSEEN = 1e-12  # eigenvalue of the information of a direction that changes no answer, relative to the largest


@dataclass(frozen=True)
class Factors:
    """Factors of a layer without positions: lists of [W_Q; b_Q] (d + 1, r) and W_O (r, d), one for each head."""

    query: list[Array]
    key: list[Array]
    value: list[Array]
    output: list[Array]
    key_group: list[int]
    value_group: list[int]
    causal: bool

    @classmethod
    def of(cls, layer: AttentionLayer, tolerance: float = RANK_TOLERANCE) -> "Factors":
        """Factor merged weights; a singular value counts above the share `tolerance` of a head's largest one."""
        theta, projection, beta, _ = dense_weights(layer)
        logits = np.concatenate([theta, beta[:, None]], axis=1)
        keys, key_group = _distinct_spaces([one.T for one in logits], tolerance)
        values, value_group = _distinct_spaces(list(projection), tolerance)
        query = [one @ keys[group] for one, group in zip(logits, key_group, strict=True)]
        output = [values[group].T @ one for one, group in zip(projection, value_group, strict=True)]
        return cls(query, keys, values, output, key_group, value_group, bool(layer.causal))

    @property
    def dim(self) -> int:
        """Token dimension d."""
        return len(self.value[0])

    @property
    def size(self) -> int:
        """Number of weights, the free ones and those that undo each other."""
        return self.dim + sum(part.size for part in (*self.query, *self.key, *self.value, *self.output))

    @property
    def free(self) -> int:
        """Free parameters p: those of heads, r (d - r) of each space that heads read, and d of the output bias."""
        spaces = sum(part.shape[1] * (self.dim - part.shape[1]) for part in (*self.key, *self.value))
        return self.dim + spaces + sum(part.size for part in (*self.query, *self.output))

    def jacobian(self, x: Array) -> Array:
        """Return the derivatives (numbers in the answers, weights) of the answers to sequences (n, k, d)."""
        count, length, dim = x.shape
        seen = np.tril(np.ones((length, length), bool)) if self.causal else np.ones((length, length), bool)
        ones = np.concatenate([x, np.ones((count, length, 1))], axis=2)
        blocks: dict[tuple[str, int], Array] = {("bias", 0): np.tile(np.eye(dim), (count * length, 1))}
        for head, (query, output) in enumerate(zip(self.query, self.output, strict=True)):
            key, value = self.key[self.key_group[head]], self.value[self.value_group[head]]
            asked = ones @ query
            weights = softmax(np.where(seen, asked @ (x @ key).swapaxes(1, 2), -np.inf))
            mean = weights @ x
            # d mean / d logits = sum_j p_j (x_j - mean) x_j^T: the covariance of the tokens under the weights
            spread = np.einsum("nrj,nja,njb->nrab", weights, x, x, optimize=True) - mean[..., None] * mean[..., None, :]
            moved = spread @ (value @ output)  # (n, r, key coordinate, output)
            for name, part in (
                (("query", head), np.einsum("nra,cf,nrco->nroaf", ones, key, moved, optimize=True)),
                (("key", self.key_group[head]), np.einsum("nrf,nrco->nrocf", asked, moved)),
                (("value", self.value_group[head]), np.einsum("nra,fo->nroaf", mean, output)),
                (("output", head), np.einsum("nrf,op->nrofp", mean @ value, np.eye(dim))),
            ):
                flat = part.reshape(count * length * dim, -1)
                blocks[name] = blocks[name] + flat if name in blocks else flat
        return np.concatenate(list(blocks.values()), axis=1)


def query_cost(own: Factors | RotaryWeights, asked: Array, wide: Array) -> float:
    """Return phi, the bound of the calls in units of s^2 / e, of sequences (n, k, d)."""
    seen = information(own, asked)
    size = np.sqrt(np.diag(seen)) + np.finfo(np.float64).tiny
    spectrum, basis = np.linalg.eigh(seen / size / size[:, None])
    kept = spectrum > (UNSEEN if isinstance(own, Factors) else SEEN) * spectrum[-1]
    basis = basis[:, kept] / size[:, None] / np.sqrt(spectrum[kept])
    return float(np.vdot(basis, wide @ basis)) / asked[0].size


def information(own: Factors | RotaryWeights, x: Array) -> Array:
    """Return the Fisher information J^T J of a number of the answers, the mean over sequences (n, k, d)."""
    size = own.size if isinstance(own, Factors) else own.flat().size
    step = max(1, ENTRIES // (x[0].size * size))
    total: Array = np.zeros((size, size))
    for start in range(0, len(x), step):
        part = x[start : start + step]
        one = own.jacobian(part) if isinstance(own, Factors) else RotaryTangent.at(Examples(part, part), own).jacobian()
        total += one.T @ one
    return total / x.size


def _distinct_spaces(matrices: list[Array], tolerance: float) -> tuple[list[Array], list[int]]:
    """Return orthonormal bases (d, r) of the column spaces that differ, and which of them is each matrix's."""
    found: list[Array] = []
    groups = []
    for matrix in matrices:
        u, sizes, _ = np.linalg.svd(matrix)
        own = u[:, : int((sizes > tolerance * sizes[0]).sum())]
        same = []
        for group, one in enumerate(found):
            if one.shape == own.shape and 0 < own.shape[1] < len(own):  # neither nothing nor all of space
                sine = np.linalg.norm(own - one @ (one.T @ own), 2)  # of the largest angle
                same += [group] if sine < 10 * tolerance else []
        groups.append(same[0] if same else len(found))
        found += [] if same else [own]
    return found, groups
