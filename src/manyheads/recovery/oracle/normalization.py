"""LayerNorm or RMSNorm without weights, in front of a layer."""

from dataclasses import dataclass

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads.attention import AttentionLayer
from manyheads.errors import ShapeError
from manyheads.recovery._types import Array
from manyheads.recovery.layers.evaluation import dense_weights


@dataclass(frozen=True)
class Normalization:
    """u = (x - mean x) / sqrt(mean (x - mean x)² + epsilon), or without the means.

    Examples
    --------
    >>> import numpy as np
    >>> Normalization(centred=True, epsilon=0.0)(np.array([1.0, 3.0]))
    array([-1.,  1.])
    """

    centred: bool = True  # whether the mean is taken off: LayerNorm. Else RMSNorm.
    epsilon: float = 1e-5  # what is added under the root

    @takes_arrays
    def __call__(self, x: Array) -> Array:
        """Normalize tokens (..., d)."""
        x = np.asarray(x, np.float64)
        moved = x - x.mean(-1, keepdims=True) if self.centred else x
        return moved / np.sqrt((moved**2).mean(-1, keepdims=True) + self.epsilon)

    @takes_arrays
    def inverse(self, u: Array) -> Array:
        """Return the tokens (..., d) that are normalized to u, of mean square below 1, but for their mean."""
        u = np.asarray(u, np.float64)
        u = u - u.mean(-1, keepdims=True) if self.centred else u
        return u * np.sqrt(self.epsilon / (1 - (u**2).mean(-1, keepdims=True)))

    @property
    def formula(self) -> str:
        """The normalization in signs."""
        off = "(x - mean) / sqrt(variance" if self.centred else "x / sqrt(mean square"
        return f"{off} + {self.epsilon:.1e})"

    @property
    def name(self) -> str:
        """LayerNorm or RMSNorm."""
        return "LayerNorm" if self.centred else "RMSNorm"


@takes_arrays
def projected(
    layer: AttentionLayer, gain: Array, shift: Array | None = None, *, centred: bool = True
) -> AttentionLayer:
    r"""Return the layer on u that is the same function as `layer` on gain * u + shift.

    .. math:: P G \Theta_i G P,\quad P G (\beta_i + \Theta_i^\top \delta),\quad P G W_i,\quad c + \sum_i \delta W_i,
              \qquad G = \operatorname{diag}(\gamma)

    with P the projector off the vector of ones where u has mean zero (`centred`), else the identity. This is all
    that the function of u determines: G Theta_i^T delta on the side of the queries changes whole rows of logits, which
    the softmax ignores, and parts along ones meet zero.

    `gain` gamma and `shift` delta are (d,); no shift is zero.
    """
    theta, projection, beta, constant = dense_weights(layer)
    dim = layer.dim
    gain = np.asarray(gain, np.float64)
    shift = np.zeros(dim) if shift is None else np.asarray(shift, np.float64)
    if gain.shape != (dim,) or shift.shape != (dim,):
        raise ShapeError(f"gain {gain.shape} and shift {shift.shape}: expected ({dim},) both")
    off = np.diag(gain) - (np.ones((dim, 1)) @ gain[None] / dim if centred else 0.0)  # P G
    turned = off @ theta @ off.T, off @ projection, (beta + shift @ theta) @ off.T
    return AttentionLayer(*turned, constant + (shift @ projection).sum(0), layer.causal)
