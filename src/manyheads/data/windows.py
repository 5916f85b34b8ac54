"""Random windows of a tokenized text."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Integer

from manyheads._arrays import as_native, takes_arrays
from manyheads.data.draws import draw_integers
from manyheads.errors import ShapeError


class TextWindows(eqx.Module):
    r"""Batches of windows and, as targets, the same windows one token later, as a function of a key.

    The start of a window is uniform over all that fit, up to a bias below :math:`2^{-32}` a position. A pytree whose
    only leaf is the text, so that two texts of one length share one compilation.

    Raises
    ------
    ShapeError
        The text is not a sequence of integers, or it holds no window of this length and its target.

    Examples
    --------
    >>> inputs, targets = TextWindows(np.arange(50), length=8, size=3)(jax.random.key(0))
    >>> inputs.shape, bool((targets == inputs + 1).all())
    ((3, 8), True)
    """

    tokens: jax.Array  # (n,)
    length: int = eqx.field(static=True)  # tokens of a window, below n
    size: int = eqx.field(static=True)  # windows of a batch

    def __init__(self, tokens: "Integer[np.ndarray, ' n'] | Integer[jax.Array, ' n']", length: int, size: int):
        tokens = as_native(tokens, "tokens")
        if np.ndim(tokens) != 1 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ShapeError(f"a text of shape {np.shape(tokens)} and type {tokens.dtype}: give (n,) integers")
        if length < 1 or size < 1 or len(tokens) <= length:
            raise ShapeError(f"{len(tokens)} tokens hold no {size} windows of {length} and their targets: shorten them")
        self.tokens, self.length, self.size = jnp.asarray(tokens, jnp.int32), length, size

    def __call__(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Draw (inputs, targets), both (size, length), int32."""
        return self.cut(draw_integers(key, (self.size,), len(self.tokens) - self.length))

    @takes_arrays
    def cut(
        self, starts: "Integer[jax.Array, ' size']"
    ) -> "tuple[Integer[jax.Array, 'size length'], Integer[jax.Array, 'size length']]":
        """Cut the windows that begin at `starts` (windows,): (inputs, targets), both (windows, length)."""
        taken = self.tokens[starts[:, None] + jnp.arange(self.length + 1)]  # (windows, length + 1)
        return taken[:, :-1], taken[:, 1:]
