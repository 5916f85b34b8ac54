"""Powers of key dimension, heads, depth and richness: the arithmetic of every table of exponents."""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction

from manyheads.transformer.shape import Shape

SYMBOLS = {"key_dim": "N", "heads": "H", "depth": "L", "richness": "γ"}


@dataclass(frozen=True)
class Power:
    r"""The product :math:`N^a H^b L^c \gamma_0^e`, kept as its exponents.

    Attributes
    ----------
    key_dim, heads, depth, richness
        The exponents a, b, c, e of key dimension N, heads H, depth L and richness gamma0.

    Examples
    --------
    >>> width = Power(key_dim=1, heads=1)
    >>> print(width**-1 * Power(depth=0.5))
    N^-1 H^-1 L^1/2
    >>> (width**-1).ratio(Shape(16, 8, 2), Shape(8, 4, 2))
    0.25
    """

    key_dim: float = 0.0
    heads: float = 0.0
    depth: float = 0.0
    richness: float = 0.0

    def __mul__(self, other: Power) -> Power:
        return Power(*(getattr(self, axis) + getattr(other, axis) for axis in SYMBOLS))

    def __pow__(self, exponent: float) -> Power:
        return Power(*(getattr(self, axis) * exponent for axis in SYMBOLS))

    def __truediv__(self, other: Power) -> Power:
        return self * other**-1

    def __str__(self) -> str:
        exponents = {SYMBOLS[field.name]: getattr(self, field.name) for field in fields(self)}
        return " ".join(_show(symbol, value) for symbol, value in exponents.items() if value) or "1"

    def ratio(self, shape: Shape, base: Shape, richness: float = 1.0) -> float:
        """Return the product at a shape over the product at a base shape of richness one.

        A ratio of sizes that is one contributes exactly one, whatever its exponent.
        """
        return (
            (shape.key_dim / base.key_dim) ** self.key_dim
            * (shape.heads / base.heads) ** self.heads
            * (shape.depth / base.depth) ** self.depth
            * richness**self.richness
        )

    def without_depth(self) -> Power:
        """Return the product without its powers of depth and richness: what a theory of width alone says."""
        return Power(self.key_dim, self.heads)


ONE = Power()
WIDTH = Power(key_dim=1, heads=1)


def _show(symbol: str, exponent: float) -> str:
    if exponent == 1:
        return symbol
    simple = Fraction(exponent).limit_denominator(64)
    return f"{symbol}^{simple if abs(float(simple) - exponent) < 1e-12 else f'{exponent:g}'}"
