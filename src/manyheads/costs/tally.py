"""Exact amounts of work under each way of counting a causal mask."""

from dataclasses import dataclass

from manyheads.costs.conventions import Causal, ConventionError
from manyheads.errors import UsageError


@dataclass(frozen=True)
class Tally:
    """One amount of work under each way of counting a causal mask."""

    dense: int = 0  # the mask ignored
    exact: int = 0  # masked pairs left out
    doubled_halved: int = 0  # twice, the causal square halved: `n m - n^2 / 2` pairs need not be an integer

    @classmethod
    def of(cls, amount: int) -> "Tally":
        """Return an amount that no mask changes."""
        return cls(amount, amount, 2 * amount)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(self.dense + other.dense, self.exact + other.exact, self.doubled_halved + other.doubled_halved)

    def __mul__(self, factor: int) -> "Tally":
        return Tally(self.dense * factor, self.exact * factor, self.doubled_halved * factor)

    __rmul__ = __mul__

    def __bool__(self) -> bool:
        return bool(self.dense or self.exact or self.doubled_halved)

    def products(self, causal: Causal) -> int:
        """Read the amount as a number of products."""
        if causal in ("exact", "executed"):
            return self.exact
        if causal == "halved":
            if self.doubled_halved % 2:
                remedy = "ask for causal='exact', or for multiply_add=2"
                raise ConventionError(f"halved count: {self.doubled_halved}/2 is no integer; {remedy}")
            return self.doubled_halved // 2
        return self.dense

    def elementwise(self, causal: Causal) -> int:
        """Read the amount as elementwise work: there are no half scores, so "halved" reads "exact"."""
        return self.dense if causal == "dense" else self.exact


NOTHING = Tally()


def pair(queries: int, keys: int, causal: bool, window: int = 0) -> Tally:
    """Count the (query, key) pairs of one attention pattern: `n m - n (n - 1) / 2` with a causal mask and no window.

    With a causal mask the `n` queries are the last of the `m` keys, and query `i` of `0..n-1` sees `m - n + i + 1`
    keys, or the last `window` of these. Without one a position sees those that are at most `window // 2` away. Only the
    exact count knows the window; 0 means all keys. UsageError for more queries than keys under a causal mask, or
    another number of them under a window of both sides.

    Examples
    --------
    >>> pair(4, 4, causal=True)
    Tally(dense=16, exact=10, doubled_halved=16)
    """
    if queries < 0 or keys < 0 or window < 0:
        raise UsageError(f"pairs: queries={queries}, keys={keys}, window={window} must not be negative")
    if not causal:
        if not window:
            return Tally.of(queries * keys)
        if queries != keys:
            raise UsageError(f"pairs: a window of both sides needs as many queries as keys, got {queries} and {keys}")
        half = min(window // 2, max(keys - 1, 0))
        return Tally(queries * keys, queries * (2 * half + 1) - half * (half + 1), 2 * queries * keys)
    if queries > keys:
        raise UsageError(f"pairs: {queries} causal queries cannot be the last of {keys} keys; need queries <= keys")
    exact = queries * keys - queries * (queries - 1) // 2
    if window:
        # Query i loses what lies before its window: max(0, m - n + i + 1 - w), an arithmetic series.
        most = keys - window
        least = max(0, keys - queries + 1 - window)
        if most > 0:
            exact -= (least + most) * (most - least + 1) // 2
    return Tally(queries * keys, exact, 2 * queries * keys - queries * queries)
