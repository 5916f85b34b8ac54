"""Matching of heads between two layers, and errors of weights and of the function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from manyheads._arrays import takes_arrays
from manyheads._overview import Overview, Shown
from manyheads.attention import AttentionLayer
from manyheads.errors import ShapeError, UsageError
from manyheads.recovery._types import Array, Indices
from manyheads.recovery.layers.evaluation import dense_weights
from manyheads.recovery.layers.rotary import RotaryLayer


@dataclass(frozen=True, repr=False)
class LayerErrors(Shown):
    r"""Errors of the weights of a recovered layer, each the largest over matched heads."""

    # :math:`\max_i \|\Theta_i - \hat\Theta_{\pi(i)}\|_F / \|\Theta_i\|_F`, and the same of W
    theta: float
    projection: float
    key_bias: float  # the same of :math:`\beta_i`; 0 where neither layer has one
    bias: float  # :math:`\|c - \hat c\| / \|c\|`; 0 where neither layer has one
    permutation: tuple[int, ...]  # :math:`\pi`: planted head i is recovered head permutation[i]

    @property
    def worst(self) -> float:
        """The largest of the four errors."""
        return max(self.theta, self.projection, self.key_bias, self.bias)

    def _overview(self) -> Overview:
        names = ("theta", "projection", "key_bias", "bias")
        order = f"head i of the first is head {list(self.permutation)}[i] of the second"
        title = f"Relative errors of the weights, at most {self.worst:.2g}"
        return Overview(title, names, [tuple(getattr(self, name) for name in names)], (order,))


def match_heads(truth: AttentionLayer, found: AttentionLayer) -> Indices:
    r"""Find the order of the recovered heads that fits the planted ones best.

    The permutation minimizes :math:`\sum_i \|\Theta_i - \hat\Theta_{\pi(i)}\|_F / \|\Theta_i\|_F` (an assignment
    problem, solved exactly). Heads whose attention matrices agree to rounding are ordered by their projections.

    Returns the permutation (m,): planted head i is recovered head permutation[i].
    """
    if truth.theta.shape != found.theta.shape:
        shapes = f"theta of shapes {truth.theta.shape} and {found.theta.shape}"
        raise ShapeError(f"{shapes}: expected the same heads and dimension; compare the functions with function_error")
    cost = _distances(truth.theta, found.theta) + 1e-9 * np.minimum(_distances(truth.projection, found.projection), 1.0)
    return linear_sum_assignment(cost)[1]


def compare_layers(truth: AttentionLayer | RotaryLayer, found: AttentionLayer | RotaryLayer) -> LayerErrors:
    """Return the relative errors of all weights under the best matching of heads.

    A planted weight that is zero, or a bias that only the recovered layer has, has no relative error; it is measured
    against the largest head (theta, projection), the attention matrix of its head (key bias), or the largest
    projection (bias).

    Parameters
    ----------
    truth, found
        Layers of the same dimension and with the same number of heads. Of layers with rotary positions the attention
        matrices at offsets 1 to 15 are compared, as far as both list them, with heads matched at offset 1.

    Raises
    ------
    ShapeError
        Another dimension or number of heads; one layer with rotary positions and one without.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.recovery.planted.task import planted_layer
    >>> layer = planted_layer(np.random.default_rng(0), dim=4, heads=2, bias=True)
    >>> other = type(layer)(layer.theta[::-1] * 1.01, layer.projection[::-1], bias=layer.bias * 0.5)
    >>> errors = compare_layers(layer, other)
    >>> round(errors.theta, 12), errors.projection, errors.bias, errors.permutation
    (0.01, 0.0, 0.5, (1, 0))
    """
    if isinstance(truth, RotaryLayer) and isinstance(found, RotaryLayer):
        return _compare_rotary(truth, found)
    if isinstance(truth, RotaryLayer) or isinstance(found, RotaryLayer):
        raise ShapeError("a layer with rotary positions and one without: compare the functions with function_error")
    return _compare(truth, found, match_heads(truth, found))


def _compare_rotary(truth: RotaryLayer, found: RotaryLayer) -> LayerErrors:
    """Compare offset by offset."""
    order = match_heads(truth.at_offset(1), found.at_offset(1))
    offsets = range(1, max(2, min(truth.offsets, found.offsets, 16)))
    errors = [_compare(truth.at_offset(t), found.at_offset(t), order) for t in offsets]
    worst = {name: max(getattr(one, name) for one in errors) for name in ("theta", "projection", "key_bias", "bias")}
    return LayerErrors(**worst, permutation=errors[0].permutation)


def _compare(truth: AttentionLayer, found: AttentionLayer, order: Indices) -> LayerErrors:
    """Return the errors under a matching of heads."""
    theta, projection, beta, shift = dense_weights(truth)
    others = dense_weights(found)
    sizes, most = _sizes(theta), _sizes(projection).max()
    matrices = _worst(theta, others[0][order], sizes.max()), _worst(projection, others[1][order], most)
    biases = _worst(beta, others[2][order], sizes), _worst(shift[None], others[3][None], most)
    return LayerErrors(*matrices, *biases, tuple(map(int, order)))


@takes_arrays
def function_error(truth: Callable[[Array], Any], found: Callable[[Array], Any], x: Array) -> float:
    r"""Return the mean squared error of one function of sequences against another, relative to its variance.

    :math:`\sum \|f(x) - g(x)\|^2 / \sum \|f(x) - \bar f\|^2` over all rows of all sequences, with the mean row
    :math:`\bar f`: a constant, such as an output bias, does not make an error look small.

    f and g are layers, or any functions (n, k, d) -> (n, k, d); x holds fresh sequences if either was fitted.
    """
    expected, answered = np.asarray(truth(x), np.float64), np.asarray(found(x), np.float64)
    if expected.shape != answered.shape:
        raise ShapeError(f"answers of shapes {expected.shape} and {answered.shape}: compare functions of the same kind")
    moved = (rows := expected.reshape(-1, expected.shape[-1])) - rows[0]
    size = float(np.sum((moved - moved.mean(0)) ** 2))
    if size == 0:
        raise UsageError("the true function is constant on the sequences: a relative error is not defined")
    return float(np.sum((expected - answered) ** 2)) / size


def _sizes(weights: Any) -> Array:
    """Return the Frobenius norm of each head's weight, (m,)."""
    return np.sqrt(np.sum(np.square(np.asarray(weights, np.float64)), axis=tuple(range(1, np.ndim(weights)))))


def _distances(truth: Any, found: Any) -> Array:
    """Return the relative distance of every planted to every recovered head, (m, m)."""
    sizes = _sizes(truth)
    scale = np.where(sizes > 0, sizes, max(sizes.max(), np.finfo(float).tiny))
    return np.stack([_sizes(found - one) / size for one, size in zip(truth, scale, strict=True)])


def _worst(truth: Array, found: Array, instead: Any) -> float:
    """Return the largest relative error over heads; zero weights are measured against `instead`, and then one."""
    sizes = _sizes(truth)
    scale = np.where(sizes > 0, sizes, instead)
    return float(np.max(_sizes(found - truth) / np.where(scale > 0, scale, 1.0)))
