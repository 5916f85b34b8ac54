"""The axes along which a transformer grows, and lists of shapes along them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, get_args

from manyheads.errors import UsageError
from manyheads.transformer.shape import Shape

Axis = Literal["key_dim", "heads", "depth", "stream"]
AXES: tuple[Axis, ...] = get_args(Axis)
TrainingAxis = Literal["batch", "steps"]
TRAINING_AXES: tuple[TrainingAxis, ...] = get_args(TrainingAxis)
LETTERS: dict[str, str] = {"key_dim": "N", "heads": "H", "depth": "L", "stream": "D"}
LETTERS |= {axis: axis for axis in TRAINING_AXES}
WORDS: dict[str, str] = {
    "key_dim": "key dimension N",
    "heads": "heads H",
    "depth": "depth L",
    "stream": "stream width D",
    "batch": "batch size over your own",
    "steps": "number of steps",
}


def size_along(axis: Axis, shape: Shape) -> int:
    """Return the size of a shape on an axis; the stream's width where the shape leaves it to N H as well."""
    return shape.width if axis == "stream" else int(getattr(shape, axis))


def shapes_along(axis: Axis, base: Shape | Sequence[int], sizes: Iterable[int]) -> tuple[Shape, ...]:
    """Return the base with one of its sizes exchanged."""
    if axis not in AXES:
        raise UsageError(f"axis={axis!r}: choose one of {', '.join(AXES)}")
    return tuple(replace(Shape.of(base, "base"), **{axis: size}) for size in sizes)


def find_axis(shapes: Sequence[Shape | Sequence[int]]) -> tuple[Axis, list[int]]:
    """Return the axis along which shapes differ, and their sizes on it."""
    grown = [Shape.of(shape) for shape in shapes]
    if len(grown) < 2:
        raise UsageError(f"{len(grown)} sizes: a power of the size needs at least two, and three to be sharp")
    moving = [axis for axis in AXES if len({getattr(shape, axis) for shape in grown}) > 1]
    if len(moving) != 1:
        found = " and ".join(LETTERS[axis] for axis in moving) or "no axis"
        raise UsageError(f"{len(grown)} shapes differ along {found}: change one of N, H, L and D at a time")
    sizes = [size_along(moving[0], shape) for shape in grown]
    if len(set(sizes)) < len(sizes):
        raise UsageError(f"sizes {sizes} along {LETTERS[moving[0]]}: give each of them once")
    return moving[0], sizes


def check_seeds(seeds: Sequence[int]) -> None:
    """Refuse seeds that make no sample: a seed that is there twice is one network, and would pass for certainty."""
    if not hasattr(seeds, "__len__"):
        raise UsageError(f"seeds={seeds!r}: give the seeds themselves, such as range(8)")
    if len(seeds) < 2:
        raise UsageError(f"{len(seeds)} seeds: a check needs at least two, and eight to be sharp")
    if len(set(seeds)) < len(seeds):
        raise UsageError(f"seeds {list(seeds)}: give each of them once, or one network counts as several")
