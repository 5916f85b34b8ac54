"""Powers of key dimension, heads, depth, richness and widths: the arithmetic of every table of exponents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from manyheads.transformer.shape import Shape

SYMBOLS = {
    "key_dim": "N",
    "heads": "H",
    "stream": "D",
    "key_heads": "K",
    "hidden": "F",
    "query_rank": "Rq",
    "key_value_rank": "Rkv",
    "depth": "L",
    "richness": "γ",
}


@dataclass(frozen=True)
class Power:
    r"""The product :math:`N^a H^b D^c K^e F^f L^g \gamma_0^h`, kept as its exponents; `SYMBOLS` are the sizes.

    Examples
    --------
    >>> print(Power(stream=-1) * Power(depth=0.5), "|", (Power(stream=-1) * Power(depth=0.5)).plain())
    D^-1 L^1/2 | N^-1 H^-1 L^1/2
    >>> Power(stream=-1).ratio(Shape(16, 8, 2), Shape(8, 4, 2))
    0.25
    """

    key_dim: float = 0.0
    heads: float = 0.0
    depth: float = 0.0
    richness: float = 0.0
    stream: float = 0.0
    key_heads: float = 0.0
    hidden: float = 0.0
    query_rank: float = 0.0
    key_value_rank: float = 0.0

    def __mul__(self, other: Power) -> Power:
        return Power(**{axis: getattr(self, axis) + getattr(other, axis) for axis in SYMBOLS})

    def __pow__(self, exponent: float) -> Power:
        return Power(**{axis: getattr(self, axis) * exponent for axis in SYMBOLS})

    def __truediv__(self, other: Power) -> Power:
        return self * other**-1

    def __str__(self) -> str:
        exponents = {symbol: getattr(self, axis) for axis, symbol in SYMBOLS.items()}
        return " ".join(_show(symbol, value) for symbol, value in exponents.items() if value) or "1"

    def ratio(self, shape: Shape, base: Shape, richness: float = 1.0) -> float:
        """Return the product at a shape over the product at a base shape of richness one.

        A ratio of sizes that is one contributes exactly one, whatever its exponent. Heads of a group, the MLP's width
        over the stream's and the ranks of latents are the same at both where one of the shapes leaves them out.
        """
        power = self.at(shape, base)
        return (
            (shape.key_dim / base.key_dim) ** power.key_dim
            * (shape.heads / base.heads) ** power.heads
            * (shape.depth / base.depth) ** power.depth
            * richness**power.richness
            * (shape.width / base.width) ** power.stream
            * (shape.group_heads / base.group_heads) ** power.key_heads
            * ((shape.hidden or 1) / (base.hidden or 1)) ** power.hidden
            * ((shape.query_rank or 1) / (base.query_rank or 1)) ** power.query_rank
            * ((shape.key_value_rank or 1) / (base.key_value_rank or 1)) ** power.key_value_rank
        )

    def plain(self, stream: bool = True, key_heads: bool = True, hidden: bool = True) -> Power:
        """Return the product in N and H, for a stream of width N H, K like H, and F like the stream's width."""
        found = self
        if hidden:
            found = replace(found, hidden=0.0, stream=found.stream + found.hidden)
        if key_heads:
            found = replace(found, key_heads=0.0, heads=found.heads + found.key_heads)
        if stream:
            both = {"key_dim": found.key_dim + found.stream, "heads": found.heads + found.stream}
            found = replace(found, stream=0.0, **both)
        return found

    def at(self, shape: Shape, base: Shape) -> Power:
        """Return the product in as few sizes as two shapes need: D only where one of them has D other than N H."""
        lost = [rank for rank in ("query_rank", "key_value_rank") if not _both(rank, shape, base)]
        found = replace(self, **dict.fromkeys(lost, 0.0))
        return found.plain(
            stream=all(each.width == each.key_dim * each.heads for each in (shape, base)),
            key_heads=not _both("key_heads", shape, base) or same_ratio("key_heads", "heads", shape, base),
            hidden=not _both("hidden", shape, base) or same_ratio("hidden", "width", shape, base),
        )

    def without_depth(self) -> Power:
        """Return the product without its powers of depth and richness: what a theory of width alone says."""
        return replace(self, depth=0.0, richness=0.0)


ONE = Power()
WIDTH = Power(stream=1)  # the stream's width D
QUERIES = Power(key_dim=1, heads=1)  # rows N H of the query projection
KEYS = Power(key_dim=1, key_heads=1)  # rows N K of the key and value projections
HIDDEN_WIDTH = Power(hidden=1)
QUERY_RANK = Power(query_rank=1)
KEY_VALUE_RANK = Power(key_value_rank=1)


def same_ratio(first: str, second: str, shape: Shape, base: Shape) -> bool:
    """Return whether one size over another is what it is at the base."""

    def size(name: str, shape: Shape) -> int:
        return shape.group_heads if name == "key_heads" else int(getattr(shape, name) or 1)

    return size(first, shape) * size(second, base) == size(first, base) * size(second, shape)


def _both(name: str, shape: Shape, base: Shape) -> bool:
    return getattr(shape, name) is not None and getattr(base, name) is not None


def _show(symbol: str, exponent: float) -> str:
    if exponent == 1:
        return symbol
    simple = Fraction(exponent).limit_denominator(64)
    return f"{symbol}^{simple if abs(float(simple) - exponent) < 1e-12 else f'{exponent:g}'}"
