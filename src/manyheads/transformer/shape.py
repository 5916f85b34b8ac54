"""Shape of a transformer: key dimension N, heads H, depth L."""

from collections.abc import Sequence
from dataclasses import dataclass

from manyheads.errors import UsageError, check_integers


@dataclass(frozen=True)
class Shape:
    """Key dimension N, heads H, depth L; the residual stream has width d = N H.

    Raises
    ------
    UsageError
        One of them is not a positive integer.

    Examples
    --------
    >>> Shape(key_dim=8, heads=4, depth=2).width
    32
    """

    key_dim: int
    heads: int
    depth: int

    def __post_init__(self) -> None:
        check_integers(self, "key_dim", "heads", "depth")

    @classmethod
    def of(cls, given: "Shape | Sequence[int]", name: str = "shape") -> "Shape":
        """Return a shape as it is, or that of three integers N, H, L.

        Raises
        ------
        UsageError
            Neither.

        Examples
        --------
        >>> Shape.of((8, 4, 2))
        Shape(key_dim=8, heads=4, depth=2)
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, tuple | list) or len(given) != 3:
            raise UsageError(f"{name}={given!r}: expected Shape(key_dim, heads, depth), or these three integers")
        return cls(*given)

    @property
    def width(self) -> int:
        """Width d = N H of the residual stream."""
        return self.key_dim * self.heads
