"""Merged attention layer: query-key circuits W_QK and output-value circuits W_OV."""

from typing import TYPE_CHECKING, Any, final

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from manyheads.attention.conversion import factor_stacks
from manyheads.attention.layers import Layer, as_array, check_axes, check_weights, logit_scale

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from jaxtyping import Array, Float

    from manyheads.attention.multihead import MultiHeadAttention


@final
class AttentionLayer(Layer):
    """Multi-head attention with merged weights: a query-key circuit and an output-value circuit per head.

    y = sum_i softmax_rows(x Theta_i x^T + 1 (x beta_i)^T + mask) x W_i + 1 c^T

    Parameters
    ----------
    theta
        Query-key circuits W_QK (m, d, d), one per head. The papers write Theta, and so do the formulas here.
    projection
        Output-value circuits W_OV (m, d, d); the papers write W.
    key_bias
        beta (m, d): what the bias of the queries becomes. None for none.
    bias
        c (d,), added to every row that may attend to something. None for none.
    causal
        Whether a token attends to itself and to earlier ones only.

    Arrays are kept as given; precision, compilation and memory are those of every `Layer`: NumPy float64 in, NumPy
    float64 out, whatever JAX's configuration.

    Raises
    ------
    ShapeError
        Weights that do not fit together, or are not floating-point.

    Examples
    --------
    A head that ignores the tokens averages them:

    >>> import numpy as np
    >>> from manyheads.attention import AttentionLayer
    >>> average = AttentionLayer(theta=np.zeros((1, 2, 2)), projection=np.eye(2)[None], causal=True)
    >>> average(np.array([[0.0, 0.0], [2.0, 4.0]]))
    array([[0., 0.],
           [1., 2.]])

    References
    ----------
    S. Chen, Y. Li, "Provably learning a multi-head attention layer", arXiv 2402.04084: the form with Theta and W; the
    two biases are added here, to hold every layer in use.
    """

    theta: Any
    projection: Any
    key_bias: Any
    bias: Any
    causal: bool = eqx.field(static=True)

    def __init__(
        self,
        theta: "Float[ArrayLike, 'heads d d']",
        projection: "Float[ArrayLike, 'heads d d']",
        key_bias: "Float[ArrayLike, 'heads d'] | None" = None,
        bias: "Float[ArrayLike, ' d'] | None" = None,
        causal: bool = False,
    ):
        self.theta, self.projection, self.key_bias, self.bias = map(as_array, (theta, projection, key_bias, bias))
        self.causal = causal

    def __check_init__(self) -> None:
        heads, dim, _ = check_axes("theta", self.theta, "(m, d, d)")
        square = (heads, dim, dim)
        check_weights(self, {"theta": square, "projection": square, "key_bias": (heads, dim), "bias": (dim,)})

    @property
    def heads(self) -> int:
        """Number of heads m."""
        return self.theta.shape[0]

    @property
    def dim(self) -> int:
        """Token dimension d."""
        return self.theta.shape[1]

    def factored(
        self, rank: int, *, scale: float | None = None, tolerance: float | None = None
    ) -> "MultiHeadAttention":
        """Write the layer with query, key, value and output matrices of `rank` columns: exact, or refused.

        Theta_i and beta_i are factored together, [Theta_i; beta_i^T] = scale [W_Q,i; b_Q,i^T] W_K,i^T, so that a query
        bias comes out; W_i = W_V,i W_O,i. Factors come from singular value decompositions in NumPy and are equally
        large on both sides. They are not unique: N x N matrices may be moved from one factor to the other.

        Parameters
        ----------
        rank
            Key and value dimension N of the result.
        scale
            Logit scale of the result; None means N**-0.5.
        tolerance
            Largest singular value that may be discarded, relative to the largest one of the same matrix. None means
            rounding error: 16 (d + 1) eps.

        Raises
        ------
        RankTooSmall
            `rank` does not hold the matrices; the error names the discarded singular value and the smallest rank that
            works. It is a `CertificateError`.
        UsageError
            `rank` is below 1, `scale` is not positive, or the layer holds NaN or infinite weights.

        Examples
        --------
        >>> import numpy as np
        >>> from manyheads.attention import AttentionLayer
        >>> layer = AttentionLayer(theta=np.ones((1, 2, 2)), projection=np.ones((1, 2, 2)))
        >>> layer.factored(rank=1).query.shape
        (1, 2, 1)
        >>> AttentionLayer(theta=np.eye(2)[None], projection=np.ones((1, 2, 2))).factored(rank=1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        manyheads.attention.conversion.RankTooSmall: rank 1 does not hold the layer's matrices: ...
        """
        from manyheads.attention.multihead import MultiHeadAttention

        augmented = np.asarray(self.theta)  # (m, d, d), or (m, d + 1, d) with the bias
        if self.key_bias is not None:
            augmented = np.concatenate([augmented, np.asarray(self.key_bias)[:, None, :]], axis=1)
        (query, key), (value, output) = factor_stacks((augmented, np.asarray(self.projection)), rank, tolerance)
        scale = logit_scale(scale, rank)
        query, key = query * scale**-0.5, key * scale**-0.5
        weights = {"query": query[:, : self.dim], "key": key, "value": value, "output": np.swapaxes(output, -1, -2)}
        if self.key_bias is not None:
            weights["query_bias"] = query[:, self.dim]
        if isinstance(self.theta, jax.Array):
            weights = jax.tree.map(jnp.asarray, weights)
        return MultiHeadAttention(**weights, bias=self.bias, scale=scale, causal=self.causal)

    def logits(self, x: "Float[Array, '... k d']") -> "Float[Array, '... heads k k']":
        """Logits x Theta_i x^T + 1 (x beta_i)^T, (..., m, k, k)."""
        reads = jnp.einsum("...kd,mde->...mke", x, self.theta)
        if self.key_bias is not None:
            reads = reads + self.key_bias[:, None, :]
        return jnp.einsum("...mke,...le->...mkl", reads, x)

    def read(self, pattern: "Float[Array, '... heads k k']", x: "Float[Array, '... k d']") -> "Float[Array, '... k d']":
        """Sum over heads of pattern_i x W_i, (..., k, d)."""
        values = jnp.einsum("...ld,mde->...mle", x, self.projection)
        return jnp.einsum("...mkl,...mle->...ke", pattern, values)
