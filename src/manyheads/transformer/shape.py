"""Shape of a transformer: key dimension N, heads H, depth L, and what differs from the plain one."""

from collections.abc import Sequence
from dataclasses import dataclass

from manyheads.errors import UsageError, check_integers


@dataclass(frozen=True, repr=False)
class Shape:
    """Key dimension N, heads H, depth L; the residual stream has width d = N H unless another one is given.

    Raises `UsageError`: one of them is not a positive integer, or K does not divide H.

    Attributes
    ----------
    stream
        Width D of the residual stream; None for N H.
    key_heads
        Heads K of keys and values, a divisor of H; None for one for each query head.
    hidden
        Hidden width F of the MLP; None for a multiple of the stream's width that is the same at every shape.
    query_rank, key_value_rank
        Ranks of the latents of queries, and of keys and values (MLA); None without one, or for the same at every shape.

    Examples
    --------
    >>> Shape(key_dim=8, heads=4, depth=2).width, Shape(8, 4, 2, stream=64).width
    (32, 64)
    """

    key_dim: int
    heads: int
    depth: int
    stream: int | None = None
    key_heads: int | None = None
    hidden: int | None = None
    query_rank: int | None = None
    key_value_rank: int | None = None

    def __post_init__(self) -> None:
        optional = [name for name, value in vars(self).items() if value is not None]
        check_integers(self, *dict.fromkeys(("key_dim", "heads", "depth", *optional)))
        if self.heads % self.group_heads:
            raise UsageError(f"key_heads={self.key_heads}: expected a divisor of heads={self.heads}")

    def __repr__(self) -> str:
        return f"Shape({', '.join(f'{name}={value!r}' for name, value in vars(self).items() if value is not None)})"

    @classmethod
    def of(cls, given: "Shape | Sequence[int]", name: str = "shape") -> "Shape":
        """Return a shape as it is, or that of three integers N, H, L, or of four, N, H, L and the stream's width.

        Examples
        --------
        >>> Shape.of((8, 4, 2))
        Shape(key_dim=8, heads=4, depth=2)
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, tuple | list) or len(given) not in (3, 4):
            raise UsageError(f"{name}={given!r}: expected Shape(key_dim, heads, depth), or these three integers")
        return cls(*given)

    @property
    def width(self) -> int:
        """Width D of the residual stream."""
        return self.stream or self.key_dim * self.heads

    @property
    def group_heads(self) -> int:
        """Heads of keys and values."""
        return self.key_heads or self.heads
