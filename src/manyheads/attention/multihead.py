"""Multi-head attention in two forms: query, key, value and output matrices, and merged circuits W_QK and W_OV."""

from dataclasses import KW_ONLY
from typing import TYPE_CHECKING, Any, final

from manyheads._arrays import as_native, follows_arrays
from manyheads._namespaces import Array, cast, in_common_dtype, is_torch, like
from manyheads._trees import map_leaves, static
from manyheads.attention.conversion import factor_weights
from manyheads.attention.layers import (
    Layer,
    as_array,
    check_axes,
    check_weights,
    keep_arrays,
    logit_scale,
    over_heads,
    per_head,
)
from manyheads.errors import ShapeError, check_integer

if TYPE_CHECKING:
    from jax.typing import ArrayLike
    from jaxtyping import Float


@final
class MultiHeadAttention(Layer):
    """Multi-head attention with query, key, value and output matrices, grouped queries included.

    y = sum_h softmax_rows(scale (x W_Q,h + b_Q,h) (x W_K,g + b_K,g)^T + mask) (x W_V,g + b_V,g) W_O,h + 1 b_O^T

    where head h reads the keys and values of group g = h // (H / H_kv): H_kv = H is the plain layer, H_kv = 1 is
    multi-query attention.

    Parameters
    ----------
    query, key, value, output
        W_Q (H, d, N), W_K (H_kv, d, N), W_V (H_kv, d, N_v), W_O (H, N_v, d). Tokens multiply from the left.
    query_bias, key_bias, value_bias, bias
        b_Q (H, N), b_K (H_kv, N), b_V (H_kv, N_v), b_O (d,); None for none.
    scale
        Factor on the logits; None means N**-0.5. Part of the structure, not a trained weight.
    causal
        Whether a token attends to itself and to earlier ones only.

    Raises
    ------
    ShapeError
        Weights that do not fit together, or are not floating-point; H not a multiple of H_kv.
    UsageError
        `scale` is not a positive number.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.attention import MultiHeadAttention
    >>> rng = np.random.default_rng(0)
    >>> query, key, value = (rng.normal(size=(heads, 6, 3)) for heads in (4, 2, 2))
    >>> layer = MultiHeadAttention(query, key, value, output=rng.normal(size=(4, 3, 6)), causal=True)
    >>> x = rng.normal(size=(5, 6))
    >>> bool(np.allclose(layer(x), layer.merged()(x), rtol=0, atol=1e-12))
    True

    References
    ----------
    A. Vaswani et al., "Attention is all you need", section 3.2; J. Ainslie et al., "GQA", arXiv 2305.13245.
    """

    query: Array
    key: Array
    value: Array
    output: Array
    _: KW_ONLY
    query_bias: Array | None = None
    key_bias: Array | None = None
    value_bias: Array | None = None
    bias: Array | None = None
    scale: Any = static(default=None)  # a number, once made
    causal: bool = static(default=False)

    def __post_init__(self) -> None:
        keep_arrays(self)
        object.__setattr__(self, "scale", logit_scale(self.scale, check_axes("query", self.query, "(H, d, N)")[-1]))
        heads, dim, key_dim = self.query.shape
        groups = check_axes("key", self.key, "(H_kv, d, N)")[0]
        value_dim = check_axes("value", self.value, "(H_kv, d, N_v)")[-1]
        if heads % groups:
            raise ShapeError(f"{heads} query heads and {groups} key heads: the first must be a multiple of the second")
        biases = {"query_bias": (heads, key_dim), "key_bias": (groups, key_dim), "value_bias": (groups, value_dim)}
        matrices = {"query": (heads, dim, key_dim), "key": (groups, dim, key_dim), "value": (groups, dim, value_dim)}
        check_weights(self, {**matrices, "output": (heads, value_dim, dim), **biases, "bias": (dim,)})

    @classmethod
    def from_matrices(
        cls,
        matrices: tuple["ArrayLike", "ArrayLike", "ArrayLike", "ArrayLike"],
        heads: int,
        *,
        groups: int | None = None,
        biases: tuple["ArrayLike | None", ...] = (None, None, None, None),
        scale: float | None = None,
        causal: bool = False,
    ) -> "MultiHeadAttention":
        """Cut the four flat matrices of a checkpoint into heads.

        Raises `ShapeError`: a matrix whose size is not a multiple of its number of heads, or which does not fit the
        others.

        Parameters
        ----------
        matrices
            W_Q (d, H N), W_K (d, H_kv N), W_V (d, H_kv N_v), W_O (H N_v, d): tokens multiply from the left, heads lie
            side by side. PyTorch's Linear stores the transpose: give `linear.weight.T`.
        heads, groups
            H and H_kv; `groups=None` means as many as heads.
        biases
            b_Q (H N,), b_K (H_kv N,), b_V (H_kv N_v,), b_O (d,), each may be None.

        Examples
        --------
        >>> import numpy as np
        >>> square = np.eye(6)
        >>> MultiHeadAttention.from_matrices((square, square, square, square), heads=2).query.shape
        (2, 6, 3)
        """
        groups = heads if groups is None else groups
        weights = {"output": _split("output", as_array(matrices[3]).T, heads).swapaxes(-1, -2)}  # (H, N_v, d)
        parts = zip(("query", "key", "value"), (heads, groups, groups), matrices[:3], biases[:3], strict=True)
        for name, count, matrix, bias in parts:
            weights |= {name: _split(name, matrix, count), f"{name}_bias": _split(f"{name}_bias", bias, count)}
        return cls(**weights, bias=biases[3], scale=scale, causal=causal)

    @property
    def heads(self) -> int:
        """Number of query heads H."""
        return self.query.shape[0]

    @property
    def groups(self) -> int:
        """Number of key and value heads H_kv."""
        return self.key.shape[0]

    @property
    def dim(self) -> int:
        """Token dimension d."""
        return self.query.shape[1]

    @follows_arrays
    def merged(self) -> "AttentionLayer":
        """Multiply the factors out: the same function with merged weights.

        Theta_h = scale W_Q,h W_K,g^T,  beta_h = scale W_K,g b_Q,h,  W_h = W_V,g W_O,h,  c = b_O + sum_h W_O,h^T b_V,g

        The key bias disappears: it adds the same number to all logits of a row, which a softmax does not see. Of value
        biases only the sum over a row's weights counts, which is one.
        """
        (same,), dtype = in_common_dtype(self)
        return map_leaves(lambda weight: cast(weight, dtype), same._multiply())

    def _multiply(self) -> "AttentionLayer":
        query, key, value, output = map(self._by_group, (self.query, self.key, self.value, self.output))
        key_bias, bias, size = None, self.bias, (self.heads, self.dim)
        if self.query_bias is not None:
            key_bias = self.scale * (key @ self._by_group(self.query_bias)[..., None]).reshape(size)
        if self.value_bias is not None:
            carried = (self._by_group(self.value_bias)[..., None, :] @ output).reshape(size).sum(0)
            bias = carried if bias is None else bias + carried
        return AttentionLayer(
            theta=self.scale * (query @ key.swapaxes(-1, -2)).reshape(*size, self.dim),
            projection=(value @ output).reshape(*size, self.dim),
            key_bias=key_bias,
            bias=bias,
            causal=self.causal,
        )

    def logits(
        self, x: "Float[Array, '... k d']", keys: "Float[Array, '... m d'] | None" = None
    ) -> "Float[Array, '... heads k m']":
        """Logits scale (x W_Q + b_Q) (x W_K + b_K)^T, (..., H, k, m), the second x being `keys` if given."""
        queries = per_head(x, self.query, self.query_bias)
        keys = per_head(x if keys is None else keys, self.key, self.key_bias)
        grouped = queries.reshape(*queries.shape[:-3], self.groups, -1, *queries.shape[-2:])
        logits = self.scale * (grouped @ keys[..., None, :, :].swapaxes(-1, -2))
        return logits.reshape(*queries.shape[:-1], keys.shape[-2])

    def read(self, pattern: "Float[Array, '... heads k m']", x: "Float[Array, '... m d']") -> "Float[Array, '... k d']":
        """Sum over heads of pattern_h (x W_V + b_V) W_O,h, (..., k, d)."""
        values = per_head(x, self.value, self.value_bias)
        grouped = pattern.reshape(*pattern.shape[:-3], self.groups, -1, *pattern.shape[-2:])
        mixed = grouped @ values[..., None, :, :]
        return over_heads(mixed.reshape(*pattern.shape[:-1], values.shape[-1]), self.output)

    def _by_group(self, weight: Array) -> Array:
        """Split the heads of a weight (H or H_kv, ...) into (H_kv, heads per group or 1, ...)."""
        return weight.reshape(self.groups, -1, *weight.shape[1:])


@final
class AttentionLayer(Layer):
    """Multi-head attention with merged weights: a query-key circuit and an output-value circuit per head.

    y = sum_i softmax_rows(x Theta_i x^T + 1 (x beta_i)^T + mask) x W_i + 1 c^T

    Raises `ShapeError`: weights that do not fit together, or are not floating-point.

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

    Examples
    --------
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

    theta: Array
    projection: Array
    key_bias: Array | None = None
    bias: Array | None = None
    causal: bool = static(default=False)

    def __post_init__(self) -> None:
        keep_arrays(self)
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

        Theta_i = scale W_Q,i W_K,i^T, beta_i = scale W_K,i b_Q,i, W_i = W_V,i W_O,i. Factors come from
        singular value decompositions in NumPy and are equally large on both sides. They are not unique: N x N matrices
        may be moved from one factor to the other.

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
        >>> AttentionLayer(theta=np.ones((1, 2, 2)), projection=np.ones((1, 2, 2))).factored(rank=1).query.shape
        (1, 2, 1)
        """
        scale = logit_scale(scale, check_integer("rank", rank))
        merged: tuple[Array, ...] = (self.theta, self.projection, self.key_bias)
        theta, projection, beta = (as_native(weight.detach()) if is_torch(weight) else weight for weight in merged)
        factors = factor_weights(theta, projection, beta, rank, scale, tolerance)
        weights = map_leaves(lambda factor: like(self.theta, factor), factors)
        return MultiHeadAttention(**weights, bias=self.bias, scale=scale, causal=self.causal)

    def logits(
        self, x: "Float[Array, '... k d']", keys: "Float[Array, '... m d'] | None" = None
    ) -> "Float[Array, '... heads k m']":
        """Logits x Theta_i x^T + 1 (x beta_i)^T, (..., heads, k, m), the second x being `keys` where they are given."""
        return per_head(x, self.theta, self.key_bias) @ (x if keys is None else keys)[..., None, :, :].swapaxes(-1, -2)

    def read(self, pattern: "Float[Array, '... heads k m']", x: "Float[Array, '... m d']") -> "Float[Array, '... k d']":
        """Sum over heads of pattern_i x W_i, (..., k, d)."""
        return over_heads(pattern @ x[..., None, :, :], self.projection)


def _split(name: str, flat: Array, heads: int) -> Array:
    """Cut (d, H N) into (H, d, N), or (H N,) into (H, N)."""
    if flat is None:
        return None
    flat = as_array(flat)
    if heads < 1 or flat.ndim not in (1, 2) or flat.shape[-1] % heads:
        raise ShapeError(f"{name} of shape {flat.shape} does not split into {heads} heads")
    cut = flat.reshape(*flat.shape[:-1], heads, -1)
    return cut if cut.ndim == 2 else cut.swapaxes(0, 1)
