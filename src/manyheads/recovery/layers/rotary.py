"""Rotary layer: causal attention whose logits depend on the distance of two tokens (RoPE), offset by offset.

With queries and keys turned by their positions, the logit of key j in row r depends on the positions by r - j alone:

    l_i = x_r~^T Theta_i^(r-j) x_j~,   x~ = (x, 1),   Theta_i^(t) = [W_Q; b_Q^T] R_t [W_K; b_K^T]^T,

R_t a rotation of planes by t omega_f. The last row and column of a form hold what the biases of queries and keys do,
and are zero without them. A function of the query alone leaves the softmax unchanged, so forms are compared up to a
last column that is the same at all offsets; at offset 0 key and query are one token and only x~^T Theta^(0) x~ is
visible.

Since R_t = R_1^t, all forms of a head follow from one and its turn G, similar to R_1:
Theta^(t) = L G^(t-1) F with L, F of the rank of the head. The angles of the eigenvalues of G are the frequencies.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from manyheads._arrays import as_native, takes_arrays
from manyheads._extras import Float
from manyheads._overview import ArraysAsShapes
from manyheads.attention import AttentionLayer
from manyheads.errors import ShapeError, UsageError
from manyheads.recovery._types import Array
from manyheads.recovery.layers.evaluation import softmax


@dataclass(frozen=True, eq=False, repr=False)
class Turns(ArraysAsShapes):
    """Forms of every head beyond the offsets that are listed: Theta_i^(t) = L_i G_i^(t-1) F_i - L_i S_i."""

    # L_i (d + 1, r_i), G_i (r_i, r_i) and F_i (r_i, d + 1) of every head, a tuple of arrays each
    left: tuple[Array, ...]
    turn: tuple[Array, ...]
    first: tuple[Array, ...]
    # S_i (r_i,), subtracted from the last column: the function of the query that fixes which logit is zero
    shift: tuple[Array, ...]

    def form(self, offset: int) -> Array:
        """Return the forms (m, d + 1, d + 1) at one offset, which may be 0."""
        forms = []
        for left, turn, first, shift in zip(self.left, self.turn, self.first, self.shift, strict=True):
            moved = np.linalg.matrix_power(turn, offset - 1) @ first
            moved[:, -1] -= shift
            forms.append(left @ moved)
        return np.array(forms)

    def frequencies(self) -> list[Array]:
        """Return, for every head, the angles in [0, pi] by which one step turns its planes, largest first."""
        angles = [np.sort(np.angle(np.linalg.eigvals(turn)))[::-1] for turn in self.turn]
        return [angle[: (len(angle) + 1) // 2] for angle in angles]


@dataclass(frozen=True, eq=False, repr=False)
class RotaryLayer(ArraysAsShapes):
    """Causal multi-head attention with one attention form per offset.

    y_r = sum_i sum_{j <= r} softmax_j(x_r~^T Theta_i^(r-j) x_j~) x_j^T W_i + c

    Parameters
    ----------
    forms
        Theta (T, m, d + 1, d + 1) at offsets 0 .. T-1.
    projection
        W (m, d, d).
    bias
        c (d,), or None.
    turns
        How the forms go on beyond T; None refuses sequences of more than T tokens.

    Raises
    ------
    ShapeError
        Weights that do not fit together.

    Examples
    --------
    A head that looks one token back with weight e / (1 + e):

    >>> import numpy as np
    >>> from manyheads.recovery.layers.rotary import RotaryLayer
    >>> forms = np.zeros((2, 1, 2, 2))
    >>> forms[1, 0, 1, 1] = 1.0
    >>> layer = RotaryLayer(forms, projection=np.ones((1, 1, 1)))
    >>> layer(np.array([[[1.0], [0.0]]])).round(3)
    array([[[1.   ],
            [0.731]]])

    References
    ----------
    J. Su et al., "RoFormer: enhanced transformer with rotary position embedding", arXiv 2104.09864, eq. 14-16: the
    dependence on r - j. The forms with biases and their continuation by turns are written out here.
    """

    forms: "Float[np.ndarray, 'offset m d+1 d+1']"
    projection: "Float[np.ndarray, 'm d d']"
    bias: "Float[np.ndarray, ' d'] | None" = None
    turns: Turns | None = None

    def __post_init__(self) -> None:
        for name in ("forms", "projection", "bias"):
            object.__setattr__(self, name, as_native(getattr(self, name), name))
        if np.ndim(self.projection) != 3 or np.ndim(self.forms) != 4:
            raise ShapeError("forms are (T, m, d + 1, d + 1) and projections (m, d, d)")
        heads, dim, _ = np.shape(self.projection)
        expected = (len(self.forms), heads, dim + 1, dim + 1)
        if self.forms.shape != expected or not len(self.forms):
            raise ShapeError(f"forms of shape {self.forms.shape}: {expected} would fit the projections")
        if self.bias is not None and np.shape(self.bias) != (dim,):
            raise ShapeError(f"bias of shape {np.shape(self.bias)}: ({dim},) would fit the projections")

    @classmethod
    @takes_arrays
    def of_projections(
        cls,
        query: "Float[np.ndarray, 'm rows r']",
        key: "Float[np.ndarray, 'm rows r']",
        projection: "Float[np.ndarray, 'm d d']",
        frequencies: "Float[np.ndarray, ' planes']",
        *,
        bias: "Float[np.ndarray, ' d'] | None" = None,
        offsets: int = 16,
    ) -> "RotaryLayer":
        """Return the layer of given query and key matrices (m, d or d + 1, r), whose last row, if any, is the bias.

        Planes are (f, f + r/2), turned by `frequencies` (at most r/2 of them, the rest stand still) a step; a logit
        scale belongs into the matrices. Forms are listed at offsets 0 .. `offsets` - 1 and go on by turns.
        """
        heads, dim, rank = np.shape(query)[0], np.shape(projection)[1], np.shape(query)[2]
        if rank % 2 or np.size(frequencies) > rank // 2:
            raise UsageError(f"{np.size(frequencies)} frequencies for key dimension {rank}: give at most half of it")
        query, key = (np.pad(w, ((0, 0), (0, dim + 1 - w.shape[1]), (0, 0))) for w in (query, key))
        angle = np.pad(np.asarray(frequencies, np.float64), (0, rank // 2 - np.size(frequencies)))
        cosine, sine = np.diag(np.cos(angle)), np.diag(np.sin(angle))
        turn = np.block([[cosine, sine], [-sine, cosine]])  # row vectors: x R_r (x' R_j)^T = x R_(r-j) x'^T
        first = tuple(turn @ matrix.T for matrix in key)
        turns = Turns(tuple(query), (turn,) * heads, first, (np.zeros(rank),) * heads)
        return cls(np.array([turns.form(t) for t in range(offsets)]), np.asarray(projection), bias, turns)

    def of_scaled_tokens(self, factor: float) -> "RotaryLayer":
        """Return the layer that gives for x what this one gives for factor * x."""
        sizes = np.append(np.full(self.dim, factor), 1.0)
        turns = self.turns
        if turns is not None:
            left = tuple(sizes[:, None] * one for one in turns.left)
            turns = replace(turns, left=left, first=tuple(one * sizes for one in turns.first))
        return replace(
            self, forms=sizes[:, None] * self.forms * sizes, projection=factor * self.projection, turns=turns
        )

    @property
    def causal(self) -> bool:
        """Whether later tokens are not seen."""
        return True

    @property
    def heads(self) -> int:
        """Number of heads m."""
        return len(self.projection)

    @property
    def dim(self) -> int:
        """Token dimension d."""
        return self.projection.shape[1]

    @property
    def offsets(self) -> int:
        """Number T of offsets whose forms are listed."""
        return len(self.forms)

    def attention(self, offset: int) -> "Float[np.ndarray, 'm d d']":
        """Return the attention matrices (m, d, d) at one offset, without what the biases add."""
        return self.form(offset)[:, :-1, :-1]

    def form(self, offset: int) -> Array:
        """Return the forms (m, d + 1, d + 1) at one offset."""
        if 0 <= offset < self.offsets:
            return self.forms[offset]
        if offset < 0 or self.turns is None:
            raise UsageError(f"offset {offset}: forms are known at offsets 0 to {self.offsets - 1}")
        return self.turns.form(offset)

    def at_offset(self, offset: int) -> AttentionLayer:
        """Return the merged form that acts between tokens at one offset."""
        form = self.form(offset)
        return AttentionLayer(form[:, :-1, :-1], self.projection, form[:, -1, :-1], self.bias, causal=True)

    @takes_arrays
    def __call__(self, x: "Float[ArrayLike, 'n k d']") -> "Float[np.ndarray, 'n k d']":
        """Apply the layer to sequences (n, k, d), in float64."""
        x = np.asarray(x, np.float64)
        if x.ndim != 3 or x.shape[2] != self.dim:
            raise ShapeError(f"sequences of shape {x.shape}: this layer takes (n, k, {self.dim})")
        weights = self.weights(x)
        y = sum((weights[head] @ x) @ self.projection[head] for head in range(self.heads))
        return np.asarray(y if self.bias is None else y + self.bias)

    @takes_arrays
    def weights(self, x: "Float[np.ndarray, 'n k d']") -> "Float[np.ndarray, 'm n k k']":
        """Return the attention weights (m, n, k, k) on sequences (n, k, d)."""
        return softmax(self.logits(x))

    @takes_arrays
    def logits(self, x: "Float[np.ndarray, 'n k d']") -> "Float[np.ndarray, 'm n k k']":
        """Return the logits (m, n, k, k) on sequences (n, k, d), -inf for later tokens."""
        count, length, _ = x.shape
        tokens = np.concatenate([x, np.ones((count, length, 1))], axis=2)
        logits = np.full((self.heads, count, length, length), -np.inf)
        for offset in range(length):
            rows = np.arange(offset, length)
            moved = np.einsum("nrd,mde->mnre", tokens[:, rows], self.form(offset), optimize=True)
            logits[:, :, rows, rows - offset] = (moved * tokens[:, rows - offset]).sum(-1)
        return logits
