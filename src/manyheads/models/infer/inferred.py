"""Roles, shape and multipliers of a user's own PyTorch model, inferred from its builder.

One forward pass at the base tells the parts; builds at (2N, H, L), (N, 2H, L) and (N, H, 2L) check them, and show how
every side and multiplier follows the shape.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from manyheads._overview import Overview, Shown, render_table
from manyheads.errors import UsageError, check_call
from manyheads.models.infer.roles import find_blocks
from manyheads.models.infer.traced_model import KINDS, TracedModel, refuse
from manyheads.models.names import join_layers
from manyheads.models.parts import Architecture
from manyheads.models.torch.lazy_torch import Module, torch
from manyheads.transformer.shape import Shape

AXES = {"N": "key_dim", "H": "heads", "L": "depth"}
SIZES = {"key_heads": "K", "hidden": "F", "query_rank": "rank of queries", "key_value_rank": "rank of keys and values"}


@dataclass(frozen=True, repr=False)
class InferredRoles(Shown):
    """Parts of the parameters of a model, its shape and its multipliers; given as `roles=`.

    Attributes
    ----------
    roles
        Name of a parameter → its part, joined by `+` where it has several.
    shape
        The shape that the products of the forward pass show.
    multipliers
        Constants that the model multiplies, each with the power of N, H and L that it follows: `"0.125 N^-1/2"`.
    sides
        Name of a parameter → its sides as powers of N, H and L.
    """

    roles: Mapping[str, str]
    shape: Shape
    multipliers: Mapping[str, str]
    sides: Mapping[str, tuple[str, ...]]
    notes: tuple[str, ...]
    base: TracedModel = field(compare=False)
    example: Any = field(compare=False)

    def read_architecture(self, model: Module) -> Architecture:
        """Return the architecture of the model at any shape, and what it multiplies relative to the base."""
        here = TracedModel(model, self.example, self.base.inside)
        here.settle(self.base)
        refuse(here.compare(self.base) + here.reasons())
        return here.architecture(self.base)

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        kept = {name: getattr(self, name) for name in ("roles", "multipliers", "sides", "notes")}
        return {"shape": {name: size for name, size in vars(self.shape).items() if size is not None}, **kept}

    def _overview(self) -> Overview:
        rows: dict[tuple[str, str, str], int] = {}
        for name, part in self.roles.items():
            row = join_layers(name), part, " × ".join(self.sides.get(name, ()))
            rows[row] = rows.get(row, 0) + 1
        said = "; ".join(f"{name} × {number}" for name, number in self.multipliers.items())
        title = f"{len(self.roles)} parameters, {self.shape}"
        columns = ("parameter", "part", "sides", "count")
        return Overview(title, columns, [(*row, count) for row, count in rows.items()], (said, *self.notes))

    def __str__(self) -> str:
        """Lay out all parameters, layers joined."""
        made = self._overview()
        table = render_table(made.columns, [tuple(map(str, row)) for row in made.rows])
        return "\n".join([made.title, "", table, "", *made.notes])


def infer_roles(build: Callable[..., Any], base: Shape | Sequence[int], example: Any = None) -> InferredRoles:
    """Infer the part of every parameter of a PyTorch model from one traced forward pass; no name is read.

    Parameters
    ----------
    build
        `build(shape)` returns the model at a shape. The function of `preflight`, `make(shape, seed)`, is taken as well.
    base
        Shape at which hyperparameters were tuned.
    example
        Arguments of a forward pass with two different sequences, a tuple or a mapping, or a function of the model that
        returns them; None tries the token ids 2 to 15.

    Raises
    ------
    UsageError
        Whatever has no derived role, all reasons at once. Nothing is guessed.
    """
    base = Shape.of(base, "base")
    shapes = [base, *(replace(base, **{name: 2 * getattr(base, name)}) for name in AXES.values())]
    ends = [build_model(build, shapes[place]) for place in (0, -1)]
    inside = find_blocks(*([name for name, _ in each.named_parameters()] for each in ends))
    first, last = TracedModel(ends[0], example, inside), TracedModel(ends.pop(), example, inside).released()
    others = [TracedModel(build_model(build, shape), example, inside).released() for shape in shapes[1:-1]]
    traced, sides, reasons = [first, *others, last], {}, []
    for name, tensor in first.tensors.items():
        shown = [tuple(each.tensors[name].shape) if name in each.tensors else () for each in traced]
        sides[name] = tuple(_follow([each[axis : axis + 1] for each in shown]) for axis in range(tensor.dim()))
    first.find_starts(sides)
    first.released()
    for asked, other in zip(shapes, traced, strict=True):
        shape, words = other.shape, f"build({asked.key_dim}, {asked.heads}, {asked.depth})"
        other.settle(first)
        wrong = other.reasons()
        if shape and not wrong and shape.depth != asked.depth:
            wrong.append(f"{words} runs {shape.depth} attention layers: expected {asked.depth}, one a block")
        if shape and not wrong and (shape.key_dim, shape.heads) != (asked.key_dim, asked.heads):
            made = f"makes a model of N, H, L = {shape.key_dim}, {shape.heads}, {shape.depth}"
            wrong.append(f"{words} {made}; build every size from the shape that it is given")
        reasons += [*wrong, *(other.compare(first, words) if shape and not other.alone else ())]
    refuse(reasons)
    assert first.shape is not None
    found = {word: [(getattr(each.shape, name),) for each in traced] for name, word in SIZES.items()}
    follows = {word: _follow(each) for word, each in found.items() if all(size for (size,) in each)}
    for part, words in {"query_up": SIZES["query_rank"], "key_value_up": SIZES["key_value_rank"]}.items():
        if follows.get(words) == "N":
            name = next(name for name, parts in first.parts.items() if part in parts)
            refuse([f"{name}: {words} {found[words][0][0]} follows N alone: a matrix within heads has no role"])
    notes = [f"{word} {found[word][0][0]}: {power}" for word, power in follows.items()]
    numbers = [each.multipliers() for each in traced]
    multipliers = {
        f"{kind} {label}".rstrip(): _describe([each[kind].get(label, []) for each in numbers])
        for kind, by_label in numbers[0].items()
        for label in by_label
        if kind in (*KINDS, "position")
    }
    roles = {name: "+".join(parts) for name, parts in first.parts.items()}
    return InferredRoles(roles, first.shape, multipliers, sides, tuple(notes), first, example)


def build_model(build: Callable[..., Any], shape: Shape) -> Any:
    """Build the model at a shape, from one seed."""
    arguments = inspect.signature(build).parameters.values() if callable(build) else ()
    seeded = sum(each.default is each.empty for each in arguments) == 2
    check_call("build", build, "shape", *(["seed"] if seeded else []), returns=" that returns the model")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = build(shape, 0) if seeded else build(shape)
    made = made[0] if isinstance(made, tuple) else made
    if not isinstance(made, torch.nn.Module):
        raise UsageError(f"build returned {type(made).__name__}: expected a torch.nn.Module, build(shape) -> model")
    return made


def _follow(sizes: Sequence[Sequence[float]]) -> str:
    """Return a size as a product of powers of N, H and L, from its values at the base and at each doubling."""
    (own, *_), found = sizes[0], []
    for axis, size in zip(AXES, sizes[1:], strict=True):
        ratio = size[0] / own if size and own else 1.0
        power = math.log2(ratio) if ratio > 0 else math.inf
        near = Fraction(power).limit_denominator(2) if ratio > 0 else 0
        if abs(power - near) > 1e-5:
            found.append(f"(+{size[0] - own:g} as {axis} doubles)")
        elif near:
            found.append(axis if near == 1 else f"{axis}^{near}")
    return " ".join(found) or f"{own:g}"


def _describe(values: Sequence[Iterable[float]]) -> str:
    """Return a multiplier with the power that it follows, or all numbers where it has several."""
    numbers = [sorted(each) for each in values]
    shown = ", ".join(f"{each:.6g}" for each in numbers[0])
    follows = _follow(numbers) if all(len(each) == 1 for each in numbers) else ""
    return f"{shown} {follows}" if set(follows) & set(AXES) else shown
