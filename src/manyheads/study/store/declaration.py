"""Declaration of a study, checked before any work: class variables, cells, claims, inputs."""

import inspect
import re

from manyheads.errors import UsageError, check_call, check_integer
from manyheads.study.base import Study
from manyheads.study.cells import Cell
from manyheads.study.execution.units import RESERVED
from manyheads.study.sources import Source
from manyheads.study.store.records.schema import MOST_UNITS

DECLARED = {"name": str, "claim": str, "source": Source, "revision": int, "vectorized": bool, "chunk": int}
"""Class variables of a study, and their types."""

METHODS: dict[str, tuple[str, ...]] = {"cells": (), "inputs": (), "predict": ("key",), "flops": ("cell",)}
METHODS |= dict.fromkeys(("claims", "pictures"), ("theory", "trained"))
METHODS |= dict.fromkeys(("compare", "panels"), ("predicted", "trained", "claims"))
"""Methods of a study, and what they are called with; `train` takes the values of a cell by name."""


def check_run(study: Study, replicates: int, seed: int) -> tuple[int, int]:
    """Refuse what cannot be a run, and return the two numbers as Python's own."""
    if not isinstance(study, Study):
        raise UsageError(f"expected an instance of a frozen dataclass that derives from Study, got {study!r}")
    for declared, kind in DECLARED.items():
        if not hasattr(study, declared):
            raise UsageError(f"{type(study).__name__} has no class variable {declared!r}: every study declares it")
        if type(value := getattr(study, declared)) is not kind:
            raise UsageError(f"{type(study).__name__}.{declared} is {value!r}: expected {kind.__name__}")
    if type(study.predictions) not in (int, type(None)):
        raise UsageError(f"{type(study).__name__}.predictions is {study.predictions!r}: expected int or NoneType")
    for method, arguments in METHODS.items():
        check_call(f"{type(study).__name__}.{method}", getattr(study, method), *arguments)
    if not isinstance(cells := study.cells(), tuple) or not all(isinstance(each, Cell) for each in cells):
        raise UsageError(f"{study.name}: cells() returns {cells!r}: expected a tuple of Cell")
    if type(study).claims is Study.claims and type(study).compare is Study.compare:
        raise UsageError(f"{study.name} states nothing to decide: list its claims in claims()")
    if not isinstance(found := study.inputs(), dict) or not all(isinstance(each, str) for each in found.values()):
        raise UsageError(f"{study.name}: inputs() returns {found!r}: expected a table of sha256 by name")
    if not re.fullmatch(r"[a-z0-9-]+(/[a-z0-9-]+)?", study.name):
        raise UsageError(f"the study's name {study.name!r}: expected wing/study in small letters, digits and '-'")
    replicates, seed = check_integer("replicates", replicates), check_integer("seed", seed, 0, 2**32 - 1)
    count = len(cells)
    if not 0 < study.chunk <= MOST_UNITS:
        raise UsageError(f"{study.name}: chunk={study.chunk}: expected 1 to {MOST_UNITS:,}")
    if (units := replicates * count) > MOST_UNITS:
        most = f"a store holds at most {MOST_UNITS:,}: ask for {MOST_UNITS // count:,} or fewer"
        raise UsageError(f"replicates={replicates} in {count} cells are {units:,} units; {most}")
    if study.predictions is not None and not 2 <= study.predictions <= MOST_UNITS:
        raise UsageError(f"{study.name}: predictions={study.predictions}: None, or 2 to {MOST_UNITS:,} draws")
    _check_cells(study)
    return replicates, seed


def _check_cells(study: Study) -> None:
    cells = study.cells()
    slugs = [cell.slug for cell in cells]
    if not slugs or len(set(slugs)) != len(slugs) or len(set(cells)) != len(cells):
        raise UsageError(f"{study.name}: cells must be at least one and distinct, got {slugs}")
    if len(names := {tuple(cell) for cell in cells}) > 1:
        raise UsageError(f"{study.name}: cells name different coordinates: {sorted(names)}")
    for name in cells[0]:
        if name in RESERVED:
            raise UsageError(f"{study.name}: the cell name {name!r} is reserved; choose another one")
        kinds = {float if isinstance(value, float) else type(value) for value in (cell[name] for cell in cells)}
        if len(kinds) > 1 and kinds != {int, float}:
            raise UsageError(f"{study.name}: cell values {name!r} mix {sorted(kind.__name__ for kind in kinds)}")
    try:
        taken = inspect.signature(study.train)
        taken.bind("key", **cells[0], **({"replicate": 0} if "replicate" in taken.parameters else {}))
    except TypeError as error:
        expected = f"expected a function of ({', '.join(('key', *cells[0]))})"
        raise UsageError(f"{type(study).__name__}.train: {error}; {expected}") from error
    for cost in (cost for cost in map(study.flops, cells) if cost is not None):
        check_integer(f"{type(study).__name__}.flops()", cost, 0)
