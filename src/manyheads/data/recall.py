r"""Recall task: the symbol after the marker, with the exact accuracy of a model that is blind to order.

A sequence holds :math:`n` tokens: :math:`n-1` symbols, independent and uniform over :math:`V`, and one marker, put
before the last place uniformly at random. The answer is the symbol right after the marker. Whoever sees the order
answers without error.

**Ceiling of the order-blind.** A predictor that does not change when the tokens are permuted sees only the counts
:math:`c_1,\dots,c_V` of the symbols. Whatever the place of the marker, the answer sits at one fixed place among
:math:`n-1` exchangeable symbols, so given the counts it is :math:`s` with probability :math:`c_s/(n-1)`. The best guess
is a most frequent symbol, and no order-blind predictor beats

.. math:: \frac{\mathbb E \max_s c_s}{n-1}, \qquad (c_1,\dots,c_V) \sim \text{Multinomial}(n-1;\, 1/V).

The derivation is this module's own. `order_blind_ceiling` computes it exactly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb
from typing import NamedTuple

from manyheads._constraints import Constraint, check_fields, constrained
from manyheads._extras import Array, jax, jnp
from manyheads.data.draws import draw_integers
from manyheads.errors import check_integer


class RecallBatch(NamedTuple):
    """Sequences (size, n), their answers (size,) and the distance from the answer to the end (size,); all int32."""

    tokens: "Array"
    answers: "Array"
    lags: "Array"


@dataclass(frozen=True)
class Recall:
    """The task at one length; `UsageError` if length or number of symbols are below 2."""

    length: int = constrained(rule=Constraint(least=2))  # number of tokens n, the marker included
    symbols: int = constrained(16, Constraint(least=2))  # V; token `symbols` is the marker

    def __post_init__(self) -> None:
        check_fields(self, "Recall: ")

    @property
    def vocabulary(self) -> int:
        """Number of tokens: the symbols and the marker."""
        return self.symbols + 1

    @property
    def ceiling(self) -> Fraction:
        """The best accuracy of any predictor that is blind to order, exactly."""
        return order_blind_ceiling(self.length - 1, self.symbols)

    def draw(self, key: "Array", size: int) -> RecallBatch:
        """Draw a batch: uniform up to a bias of :math:`2^{-32}` for the place, :math:`2^{-16}` for symbols.

        Examples
        --------
        >>> import jax
        >>> tokens, answers, lags = Recall(length=8, symbols=4).draw(jax.random.key(0), 5)
        >>> tokens.shape, bool((answers < 4).all()), bool(((tokens == 4).sum(1) == 1).all())
        ((5, 8), True, True)
        """
        return _compiled_draw()(self, key, size)


@lru_cache(maxsize=1)
def _compiled_draw() -> "Callable[[Recall, Array, int], RecallBatch]":
    return jax.jit(_draw, inline=True, static_argnums=(0, 2))


def _draw(task: Recall, key: "Array", size: int) -> RecallBatch:
    for_symbols, for_places = jax.random.split(key)
    drawn = draw_integers(for_symbols, (size, task.length), task.symbols, bits=16 if task.symbols <= 256 else 32)
    places = draw_integers(for_places, (size,), task.length - 1)
    rows = jnp.arange(size)
    tokens = drawn.at[rows, places].set(task.symbols)
    return RecallBatch(tokens, drawn[rows, places + 1], task.length - 2 - places)


@dataclass(frozen=True)
class RecallSource:
    """Batches of one size of one task, as a function of a key; equal sources share one compilation."""

    task: Recall
    size: int

    def __call__(self, key: "Array") -> RecallBatch:
        """Draw a batch of the source's size."""
        return self.task.draw(key, self.size)


@lru_cache(maxsize=256)
def order_blind_ceiling(candidates: int, symbols: int) -> Fraction:
    r"""Expect the share of the most frequent symbol among `candidates` uniform ones: :math:`\mathbb E\max_s c_s/k`.

    With :math:`a_V(k)` the number of words of length :math:`k` over :math:`V` symbols in which none occurs more than
    :math:`m` times, :math:`\mathbb E\max_s c_s = \sum_{m\ge 0} (1 - a_V(k)/V^k)`. Appending a letter to an admissible
    word fails only if that letter already occurs :math:`m` times, so

    .. math:: a_V(k+1) = V\,\Big(a_V(k) - \binom{k}{m}\, a_{V-1}(k-m)\Big), \qquad a_V(0) = 1,

    which is the differential equation of the generating function :math:`(\sum_{j\le m} z^j/j!)^V`, term by term.
    Integers throughout; :math:`O(k^2 V)` of them. :math:`k = n-1` in a sequence of n tokens.

    Examples
    --------
    >>> order_blind_ceiling(2, 2)
    Fraction(3, 4)
    """
    candidates, symbols = check_integer("candidates", candidates), check_integer("symbols", symbols)
    words = symbols**candidates
    total = sum(words - _words_with_at_most(most, candidates, symbols) for most in range(candidates))
    return Fraction(total, words * candidates)


def _words_with_at_most(most: int, length: int, symbols: int) -> int:
    """Count the words of a length over an alphabet in which no symbol occurs more than `most` times."""
    previous = [1] + [0] * length  # over the empty alphabet there is the empty word only
    for alphabet in range(1, symbols + 1):
        counts = [1]
        for k in range(length):
            spoilt = comb(k, most) * previous[k - most] if k >= most else 0
            counts.append(alphabet * (counts[k] - spoilt))
        previous = counts
    return previous[length]
