r"""Layer with any of the attention scores in use: biases, position terms, norms, caps, windows, sinks.

Of a query x_r and a key x_j at the offset t = r - j, with x~ = (x, 1), head i has the score

.. math:: s_i = \mathrm{cap} \tanh\Big(\frac{1}{\mathrm{cap}}
          \frac{\tilde x_r^\top \Theta_i^{(t)} \tilde x_j}{n_i(x_r)\, n_i'(x_j)}\Big) + b_i(t), \qquad
          n_i(x)^2 = \tilde x^\top Q_i \tilde x,

and no weight where t >= window. Each part may be absent: n = 1 (no norm of queries and keys), cap infinite, b = 0
(no position term), no window. What the function determines: of Theta, Q and Q' their products with constants only,
(Theta, Q, Q') ~ (a b Theta, a^2 Q, b^2 Q') for each head; b up to a constant for each head; the gains of the norms are
part of Theta.

A sink is one more logit z_i of the softmax, whose value is zero: weights are e^s / (e^z + sum e^s) and add up to less
than one, so that a bias of the values v_i is no constant any more:

.. math:: y_r = c + \sum_i \sum_j a_i(r, j)\, (x_j W_i + v_i).

The function determines s_i - z_i whole, what depends on the query alone included, up to (Theta, z) ~
(Theta + k e e^T, z + k) with the last unit vector e.
"""

from dataclasses import dataclass, replace
from typing import final

import numpy as np
from numpy.typing import ArrayLike

from manyheads._arrays import as_native, takes_arrays
from manyheads._extras import Float
from manyheads.errors import ShapeError, UsageError
from manyheads.recovery._types import Array
from manyheads.recovery.layers.evaluation import softmax
from manyheads.recovery.layers.rotary import RotaryLayer


@final
@dataclass(frozen=True, eq=False, repr=False)
class ScoreLayer(RotaryLayer):
    """Causal multi-head attention whose scores are more than bilinear forms of tokens.

    Parameters
    ----------
    forms, projection, bias, turns
        As of a `RotaryLayer`. Without rotary positions all forms of a head are the same.
    query_norm, key_norm
        Q (m, d + 1, d + 1) of the squares of the norms, or None.
    cap
        Bound of the scores before the position term, or None.
    window
        How many tokens a token sees, itself included; None for all.
    position_bias
        b (m, T) at offsets 0 .. T-1, or None.
    slopes
        By how much b grows with every offset beyond T, (m,); None refuses longer sequences.
    later_bias
        b (m, T) at offsets 0, -1 .. 1-T, of later tokens, or None: later tokens are not seen. Forms are the same at all
        offsets then.
    sink
        Logits z (m,) of a value of zero, or None.
    value_bias
        v (m, d), or None; without sinks it would be a constant, which is the bias.

    Raises
    ------
    ShapeError
        Weights that do not fit together.

    Examples
    --------
    A head that prefers near tokens, by a factor e for each step:

    >>> import numpy as np
    >>> from manyheads.recovery.layers.scores import ScoreLayer
    >>> layer = ScoreLayer(
    ...     np.zeros((2, 1, 2, 2)), projection=np.ones((1, 1, 1)), position_bias=np.array([[0.0, -1.0]])
    ... )
    >>> layer(np.array([[[1.0], [0.0]]])).round(3)
    array([[[1.   ],
            [0.269]]])
    """

    query_norm: "Float[np.ndarray, 'm d+1 d+1'] | None" = None
    key_norm: "Float[np.ndarray, 'm d+1 d+1'] | None" = None
    cap: float | None = None
    window: int | None = None
    position_bias: "Float[np.ndarray, 'm offset'] | None" = None
    slopes: "Float[np.ndarray, ' m'] | None" = None
    later_bias: "Float[np.ndarray, 'm offset'] | None" = None
    sink: "Float[np.ndarray, ' m'] | None" = None
    value_bias: "Float[np.ndarray, 'm d'] | None" = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, shape in self.shapes(self.heads, self.dim).items():
            if (array := getattr(self, name)) is None:
                continue
            object.__setattr__(self, name, array := as_native(array, name))
            given = np.shape(array)
            if len(given) != len(shape) or any(m not in (n, None) for n, m in zip(given, shape, strict=True)):
                raise ShapeError(f"{name} of shape {given}: {shape} would fit the projections")

    @property
    def causal(self) -> bool:
        """Whether later tokens are not seen."""
        return self.later_bias is None

    @staticmethod
    def shapes(heads: int, dim: int) -> dict[str, tuple[int | None, ...]]:
        """Return the shapes of what it has beyond a `RotaryLayer`; None for any."""
        norm = (heads, dim + 1, dim + 1)
        of_positions = {"position_bias": (heads, None), "slopes": (heads,), "later_bias": (heads, None)}
        return {"query_norm": norm, "key_norm": norm, **of_positions, "sink": (heads,), "value_bias": (heads, dim)}

    def of_scaled_tokens(self, factor: float) -> "ScoreLayer":
        """Return the layer that gives for x what this one gives for factor * x."""
        scaled = super().of_scaled_tokens(factor)
        sizes = np.append(np.full(self.dim, factor), 1.0)
        given = {name: getattr(self, name) for name in ("query_norm", "key_norm")}
        norms = {name: sizes[:, None] * form * sizes for name, form in given.items() if form is not None}
        return replace(scaled, **norms)  # type: ignore[return-value]

    def parts(self) -> list[str]:
        """Return in words what the scores have beyond forms of tokens.

        Examples
        --------
        >>> ScoreLayer(np.zeros((1, 1, 2, 2)), np.ones((1, 1, 1)), cap=50.0, window=8).parts()
        ['a cap of 50', 'a window of 8 tokens']
        """
        linear = "" if self.slopes is None else ", linear in the offset"
        found = {
            "norms of queries and keys": self.key_norm,
            f"a cap of {self.cap or 0.0:.4g}": self.cap,
            f"a window of {self.window} tokens": self.window,
            f"terms of position{linear}": self.position_bias,
            "terms of later tokens": self.later_bias,
            "a sink for each head": self.sink,
        }
        return [words for words, part in found.items() if part is not None]

    @takes_arrays
    def __call__(self, x: "Float[ArrayLike, 'n k d']") -> "Float[np.ndarray, 'n k d']":
        """Apply the layer to sequences (n, k, d), in float64."""
        y = super().__call__(x)
        if self.value_bias is None:
            return y
        return y + np.einsum("mnr,me->nre", self.weights(np.asarray(x, np.float64)).sum(-1), self.value_bias)

    def weights(self, x: "Float[np.ndarray, 'n k d']") -> "Float[np.ndarray, 'm n k k']":
        """Return the attention weights (m, n, k, k) on sequences (n, k, d), without those of sinks."""
        scores = self.logits(x)
        if self.sink is None:
            return softmax(scores)
        sinks = np.broadcast_to(self.sink[:, None, None, None], (*scores.shape[:-1], 1))
        return softmax(np.concatenate([sinks, scores], axis=-1))[..., 1:]

    def logits(self, x: "Float[np.ndarray, 'n k d']") -> "Float[np.ndarray, 'm n k k']":
        """Return the scores (m, n, k, k) on sequences (n, k, d), -inf for tokens that are not seen."""
        length = x.shape[1]
        tokens = np.concatenate([x, np.ones((*x.shape[:2], 1))], axis=2)
        if self.later_bias is None:
            scores = super().logits(x)
        else:
            scores = np.einsum("nrd,mde,nje->mnrj", tokens, self.form(1), tokens, optimize=True)
        if self.query_norm is not None:
            scores /= token_norms(self.query_norm, tokens)[:, :, :, None]
        if self.key_norm is not None:
            scores /= token_norms(self.key_norm, tokens)[:, :, None, :]
        if self.cap is not None:
            scores = self.cap * np.tanh(scores / self.cap)
        apart = np.arange(length)[:, None] - np.arange(length)
        if self.position_bias is not None:
            scores += self.position_terms(length)[:, np.maximum(apart, 0)][:, None]
        if self.later_bias is not None:
            if length > (known := self.later_bias.shape[1]):
                raise UsageError(f"a sequence of {length} tokens: terms of later tokens are known up to {known - 1}")
            later = self.later_bias[:, np.maximum(-apart, 0)][:, None]
            own = 0.0 if self.position_bias is None else self.position_bias[:, :1, None, None]
            return np.asarray(np.where(apart >= 0, scores, scores - own + later))
        seen = (apart >= 0) & (apart < (self.window or length))
        return np.where(seen, scores, -np.inf)

    def position_terms(self, length: int) -> Array:
        """Return b (m, length)."""
        known = self.position_bias
        assert known is not None
        beyond = min(length, self.window or length) - known.shape[1]
        if beyond <= 0:
            return np.pad(known, ((0, 0), (0, max(length - known.shape[1], 0))))
        if self.slopes is None:
            raise UsageError(f"a sequence of {length} tokens: position terms are known to offset {known.shape[1] - 1}")
        steps = np.arange(1, length - known.shape[1] + 1)
        return np.concatenate([known, known[:, -1:] + self.slopes[:, None] * steps], axis=1)


def token_norms(form: Array, tokens: Array) -> Array:
    """Return the norms (m, n, k) of tokens (n, k, d + 1) from their squares (m, d + 1, d + 1)."""
    squares = np.einsum("nkd,mde,nke->mnk", tokens, form, tokens, optimize=True)
    return np.sqrt(np.maximum(squares, np.finfo(np.float64).tiny))
