"""The grid of a study: a cell is one setting (a size, a learning rate, a depth) in which every replicate is trained."""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from manyheads.errors import UsageError

Value = str | int | float | bool
LONGEST_SLUG = 240  # file systems hold 255 bytes


class Cell(Mapping[str, Value]):
    """One setting of a study's grid: an immutable mapping from a coordinate's name to its value.

    Its `slug` names its folder in the store, so names and text values are short and plain.

    Raises
    ------
    UsageError
        A name or value that cannot be part of a folder's name, or a number that is not finite.

    Examples
    --------
    >>> cell = Cell(heads=4, rate=0.1)
    >>> cell["heads"], cell.slug
    (4, 'heads=4,rate=0.1')
    >>> Cell().slug
    'only'
    """

    __slots__ = ("_values",)

    def __init__(self, **values: Value):
        for name, value in values.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
                raise UsageError(f"cell name {name!r}: use letters, digits and _")
            if isinstance(value, str) and not re.fullmatch(r"[A-Za-z0-9._+-]+", value):
                raise UsageError(f"cell value {name}={value!r}: use letters, digits and '._+-' only")
            if not isinstance(value, Value):
                kind = type(value).__name__
                raise UsageError(f"cell value {name}={value!r} is a {kind}: use str, int, float or bool")
            if isinstance(value, float) and not math.isfinite(value):
                raise UsageError(f"cell value {name}={value!r}: use a finite number, or a text for what is none")
        # NumPy's float64 is a float, but it does not print like one, and the slug is what it prints.
        self._values = {name: float(value) if isinstance(value, float) else value for name, value in values.items()}
        if len(self.slug) > LONGEST_SLUG:
            length = len(self.slug)
            raise UsageError(f"cell {self.slug[:40]}…: {length} characters, a folder's name holds {LONGEST_SLUG}")

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"Cell({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(Cell, **self._values), ()

    @property
    def slug(self) -> str:
        """Name of the cell's folder: ``name=value`` joined by commas, ``only`` for the empty cell."""
        return ",".join(f"{name}={value!r}".replace("'", "") for name, value in self._values.items()) or "only"


def grid(**axes: Sequence[Value]) -> tuple[Cell, ...]:
    """Return the Cartesian product of named axes, the last one fastest.

    Examples
    --------
    >>> [cell.slug for cell in grid(heads=(1, 2), depth=(1, 3))]
    ['heads=1,depth=1', 'heads=1,depth=3', 'heads=2,depth=1', 'heads=2,depth=3']
    """
    return tuple(Cell(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values()))
