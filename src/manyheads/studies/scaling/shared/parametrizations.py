"""Parametrizations by name, and plans of networks along N, H and L in which equal networks are trained once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.scaling import Muon, Parametrization
from manyheads.scaling.axes import AXES, LETTERS, Axis, shapes_along, size_along
from manyheads.scaling.parametrization.scaling_exponents import Optimizer
from manyheads.scaling.task import Task, digits_task, text_task
from manyheads.study import Cell, Curve
from manyheads.study.panels import Multiples
from manyheads.transformer.shape import Shape

LABELS: dict[str, str] = {
    "limits": "limits (1, 1)",
    "half-logit": "limits (1/2, 1)",
    "half-depth": "limits (1, 1/2)",
    "mup": "width only",
    "mup-half-logit": "width only (1/2)",
    "standard": "standard",
}
"""Name of a parametrization in cells and flags → label in plots, with the exponents of logits and of depth."""

MUON_LABELS: dict[str, str] = {
    "muon": "Muon (1, 1)",
    "muon-half-logit": "Muon (1/2, 1)",
    "muon-half-depth": "Muon (1, 1/2)",
    "muon-heads": "Muon per head (1, 1)",
    "none": "no shape factor",
    "keller": "Keller Jordan",
    "moonlight": "Moonlight",
    "heads-none": "per head, no factor",
    "heads-keller": "per head, Keller Jordan",
    "heads-spectral": "per head, spectral",
}
"""Labels of scalings under Muon: its table, and recipes that keep the rate of a group and rely on a shape factor."""

NAMES = LABELS | MUON_LABELS

PLOT_GROUPS: dict[str, int] = {name: place for place, name in enumerate(LABELS)} | {
    "muon": 0,
    "muon-half-logit": 1,
    "muon-half-depth": 8,
    "muon-heads": 2,
    "none": 12,
    "keller": 5,
    "moonlight": 4,
    "heads-none": 6,
    "heads-keller": 15,
    "heads-spectral": 3,
}
"""Groups of curves in plots: those that share a colour, being equal modulo 7, are not compared along the same axis."""

RECIPES: dict[str, Muon] = {
    "none": Muon("whole", "none"),
    "keller": Muon("whole", "original"),
    "moonlight": Muon("whole", "match_rms_adamw"),
    "heads-none": Muon("heads", "none"),
    "heads-keller": Muon("heads", "original"),
    "heads-spectral": Muon("heads", "sqrt(r/c)"),
}

ADAMW_BESIDE_MUON = ("mup", "standard")
"""Parametrizations of AdamW for all weights, with which Muon is compared."""

MUON_EPSILON = 1e-12  # Adam's and Muon's: too small to matter, so that the rates alone are compared
CONSISTENT = ("limits", "half-logit", "half-depth")
TASKS = ("digits", "text")


def parametrization_of(name: str, base: Shape, optimizer: Optimizer) -> Parametrization:
    """Return a parametrization by its name in `LABELS`, or under Muon in `MUON_LABELS` or `ADAMW_BESIDE_MUON`.

    Recipes of Muon have usual logits, over the root of N, no branch multiplier, and width-only rates of AdamW beside
    them, so that the matrices alone differ from the table's.
    """
    if optimizer == "muon" and name in ADAMW_BESIDE_MUON:
        optimizer = "adam"
    if optimizer == "muon":
        if name not in MUON_LABELS:
            names = ", ".join((*MUON_LABELS, *ADAMW_BESIDE_MUON))
            raise UsageError(f"parametrization {name!r} of Muon: choose from {names}")
        if name in RECIPES:
            return Parametrization(0.5, optimizer="muon", base=base, scheme="mup", muon=RECIPES[name])
        logit, depth = (0.5 if name == f"muon-half-{part}" else 1.0 for part in ("logit", "depth"))
        muon = Muon("heads" if name == "muon-heads" else "whole", "none")
        return Parametrization(logit, depth, optimizer="muon", base=base, muon=muon)
    if name == "standard":
        return Parametrization.standard(base, optimizer)
    if name.startswith("mup"):
        return Parametrization.mup(base, optimizer, 0.5 if name == "mup-half-logit" else 1.0)
    exponents = {"limits": (1.0, 1.0), "half-logit": (0.5, 1.0), "half-depth": (1.0, 0.5)}
    if name not in exponents:
        raise UsageError(f"parametrization {name!r}: choose from {', '.join(LABELS)}")
    return Parametrization(*exponents[name], optimizer=optimizer, base=base)


def axes_of(recipes: Iterable[tuple[str, Axis]]) -> dict[str, tuple[Axis, ...]]:
    """Return the axes of scalings under Muon that differ along some alone: of the table, and of recipes as given."""
    own: dict[str, tuple[Axis, ...]] = {"muon-half-logit": ("key_dim",), "muon-half-depth": ("depth",)}
    given = {name: tuple(axis for other, axis in recipes if other == name) for name in RECIPES}
    return own | {"muon-heads": ("heads",)} | given


@lru_cache(maxsize=8)
def task_of(task: str, batch: int) -> Task:
    """Return the digits or the text, read once."""
    if task not in TASKS:
        raise UsageError(f"task={task!r}: choose one of {', '.join(TASKS)}")
    return digits_task(batch) if task == "digits" else text_task(batch=batch)


@dataclass(frozen=True)
class Plan:
    """The networks that a study compares: parametrizations, a base, and sizes along axes.

    Two parametrizations that give a network the same numbers at a shape train the same network, so it is trained once:
    at the base all of them are one, and parametrizations that differ in one axis are one along the others.
    """

    base: Shape
    sizes: tuple[tuple[Axis, tuple[int, ...]], ...]
    parametrizations: tuple[str, ...]
    optimizer: Optimizer
    epsilon: bool = True  # whether Adam's epsilon is large enough to make a difference
    axes_of: Mapping[str, tuple[Axis, ...]] = field(default_factory=dict)  # parametrization → its axes, where not all

    def __post_init__(self) -> None:
        if not self.parametrizations or not self.sizes:
            raise UsageError("choose at least one parametrization and one axis")
        for name, given in (("parametrizations", self.parametrizations), ("axes", [axis for axis, _ in self.sizes])):
            if len(set(given)) < len(given):
                raise UsageError(f"{name}={tuple(given)}: give each of them once")
        for axis, values in self.sizes:
            if axis not in AXES:
                raise UsageError(f"axis={axis!r}: choose one of {', '.join(AXES)}")
            check_rising(axis, values)
        for name in self.parametrizations:
            parametrization_of(name, self.base, self.optimizer)

    def shapes(self, axis: Axis) -> tuple[Shape, ...]:
        return shapes_along(axis, self.base, dict(self.sizes)[axis])

    def networks(self) -> dict[tuple[str, Shape], Cell]:
        """Return the cell in which the network of every parametrization and shape is trained."""
        first: dict[Any, Cell] = {}
        found, streams = {}, self.base.stream is not None or any(axis == "stream" for axis, _ in self.sizes)
        for name, axis in self._asked():
            for shape in self.shapes(axis):
                sizes = {"key_dim": shape.key_dim, "heads": shape.heads, "depth": shape.depth}
                own = Cell(parametrization=name, **sizes | ({"stream": shape.width} if streams else {}))
                marks = _numbers(parametrization_of(name, self.base, self.optimizer), shape, self.epsilon)
                found[name, shape] = first.setdefault((*sizes.values(), shape.width, marks), own)
        return found

    def _asked(self) -> list[tuple[str, Axis]]:
        """Return every parametrization with every axis along which it is to be trained."""
        pairs = [(name, axis) for axis, _ in self.sizes for name in self.parametrizations]
        return [(name, axis) for name, axis in pairs if axis in self.axes_of.get(name, (axis,))]

    def cells(self) -> tuple[Cell, ...]:
        """Return every network once, small ones first."""
        cells = {tuple(cell.values()): cell for cell in self.networks().values()}  # the parametrization, then sizes
        return tuple(cells[values] for values in sorted(cells, key=lambda values: (*values[1:], values[0])))

    def train_with(self, parametrization: str, **sizes: int) -> tuple[Parametrization, Shape]:
        return parametrization_of(parametrization, self.base, self.optimizer), Shape(**sizes)

    def along(self, trained: xr.Dataset, name: str, parametrization: str, axis: Axis) -> xr.DataArray:
        """Return a variable along one axis: over (replicate, that axis, its own dimensions)."""
        networks = self.networks()
        picked = [trained[name].sel(networks[parametrization, shape], drop=True) for shape in self.shapes(axis)]
        found = xr.concat(picked, xr.Variable(axis, list(dict(self.sizes)[axis])))
        return found.transpose("replicate", axis, ...)

    def pairs(self) -> Iterable[tuple[str, Axis]]:
        """Return every parametrization with every axis along which it is something of its own."""
        for name, axis in self._asked():
            if any(cell["parametrization"] == name for cell in self.own(name, axis)):
                yield name, axis

    def own(self, parametrization: str, axis: Axis) -> Sequence[Cell]:
        """Return the cells of a parametrization away from the base."""
        networks = self.networks()
        shapes = [shape for shape in self.shapes(axis) if size_along(axis, shape) != size_along(axis, self.base)]
        return [networks[parametrization, shape] for shape in shapes]

    def multiples(
        self,
        title: str,
        x_label: str,
        y_label: str,
        plot: Callable[[str, Axis], Iterable[Curve]],
        note: str,
        *,
        log_y: bool = False,
    ) -> Multiples:
        """Return a plot for every parametrization and axis, empty where its networks are those of another one."""
        pairs = set(self.pairs())
        shown = [name for name in self.parametrizations if any(name == other for other, _ in pairs)]
        sizes = "; ".join(f"{LETTERS[axis]} = {', '.join(map(str, values))}" for axis, values in self.sizes)
        return Multiples(
            title,
            x_label,
            y_label,
            tuple(tuple(tuple(plot(s, a)) if (s, a) in pairs else () for a, _ in self.sizes) for s in shown),
            row_labels=tuple(NAMES[name] for name in shown),
            column_labels=tuple(f"along {LETTERS[axis]}" for axis, _ in self.sizes),
            log_y=log_y,
            note=f"Sizes: {sizes}. {note} A parametrization stands only along axes where its networks are its own.",
        )


def plan_of(study: Any, optimizer: Optimizer, **options: Any) -> Plan:
    """Return the plan of a study: its base and parametrizations, and the sizes along its `axes`."""
    fields = {"key_dim": "key_dims", "heads": "heads_counts", "depth": "depths", "stream": "streams"}
    sizes = {axis: getattr(study, name) for axis, name in fields.items() if hasattr(study, name)}
    if unknown := set(study.axes) - set(sizes):
        raise UsageError(f"axis={unknown.pop()!r}: choose from {', '.join(sizes)}")
    along: Any = tuple((axis, sizes[axis]) for axis in study.axes)
    return Plan(Shape.of(study.base, "base"), along, study.parametrizations, optimizer, **options)


@lru_cache(maxsize=4096)
def _numbers(parametrization: Parametrization, shape: Shape, epsilon: bool) -> tuple[Any, ...]:
    """Return all that a network consumes of a parametrization, to ten digits, so that rounding distinguishes none."""
    table = parametrization.table(shape)
    names = ("initial", "multiplier", "learning_rate", "epsilon")[: None if epsilon else -1]
    columns: list[Iterable[float]] = [table.column(name).values() for name in names]
    logit = table.logit_prefactor * shape.key_dim**-table.logit_exponent
    split = (parametrization.muon.split,) if parametrization.optimizer == "muon" else ()
    if split:  # of rate and shape factor only the product counts
        columns[2] = [row.learning_rate * row.rate_factor for row in table.rows]
    return split + tuple(
        float(f"{value:.10g}") for value in (*(v for column in columns for v in column), logit, table.branch)
    )
