"""`Study`: a claim, what the theory predicts, a system that is really trained, and how the two are compared.

A study is a frozen dataclass. Its fields are its configuration, its command-line flags and, hashed, its identity in the
store; its class variables say what it claims and where the claim comes from.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, dataclass_transform, get_args

from manyheads._constraints import check_fields
from manyheads._extras import jax
from manyheads._extras import xarray as xr
from manyheads._user_modules import load_file
from manyheads.errors import UsageError
from manyheads.study.cells import Cell, Value, grid
from manyheads.study.declarations.fields import documented, values_of
from manyheads.study.sources import Source

if TYPE_CHECKING:
    from manyheads.study.claims import Claim
    from manyheads.study.panels import Panel
    from manyheads.study.tables import Record
    from manyheads.study.verdicts import Verdict

    Evaluated = Iterable[Claim] | None


@dataclass_transform(frozen_default=True)
class Study(abc.ABC):
    """A theory's prediction beside a finite system that is really trained.

    Every subclass becomes a frozen dataclass. Its annotated names are its settings, declared by `setting` and `sweep`:
    numbers, text, booleans, tuples of them, `pathlib.Path` (identified by the file's content, not by its name), or
    nested frozen dataclasses. Everything runs with 64-bit types enabled, so random draws and new arrays name their
    dtype.

    Attributes
    ----------
    name
        ``wing/study``, as typed on the command line.
    claim
        One line: what is claimed.
    source
        The publication and the place in it.
    revision
        Raised by one whenever a change of the code alters the study's numbers: old runs then stay what they are.
    predictions
        None when the theory is deterministic: `predict` is called once. A number of at least two when it samples:
        `predict` is called so many times with independent keys and the results gain a leading dimension `prediction`.
    grid
        Axes of the grid of settings, whose product are the cells: values, or the name of the setting that holds them.
    unread_prediction
        Why the comparison does not use what `predict` returns; empty when it does.
    vectorized, chunk
        True when `train` can be traced by JAX: replicates are then trained `chunk` at a time under `jax.vmap`, and a
        chunk is computed, written and resumed as one.

    See Also
    --------
    manyheads.run : compute what is missing in a store and return the comparison.
    manyheads.study.check_study : the contract that every study keeps.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]

    name: ClassVar[str]
    claim: ClassVar[str]
    source: ClassVar[Source]
    revision: ClassVar[int] = 1
    predictions: ClassVar[int | None] = None
    grid: ClassVar[Mapping[str, Iterable[Value]]] = {}
    unread_prediction: ClassVar[str] = ""
    vectorized: ClassVar[bool] = False
    chunk: ClassVar[int] = 8

    def __init_subclass__(cls, **keywords: object) -> None:
        """Make the class a frozen dataclass and document its settings."""
        super().__init_subclass__(**keywords)
        dataclasses.dataclass(frozen=True)(cls)
        cls.__doc__ = documented(cls)
        settings = [field.name for field in dataclasses.fields(cls)]
        for name in (at for at in cls.grid.values() if isinstance(at, str) and at not in settings):
            known = f"a tuple of values, or a setting: {', '.join(settings)}"
            raise UsageError(f"{cls.__name__}.grid names {name!r}: expected {known}")

    def __post_init__(self) -> None:
        """Check every setting, then what they must be together."""
        check_fields(self)
        self.check()

    def check(self) -> None:  # noqa: B027
        """Refuse settings that do not fit together, by a `UsageError`."""

    @classmethod
    def full(cls) -> Self:
        """Return the study at the publication's own size (``--full``)."""
        return cls(**values_of(cls, "full"))

    @classmethod
    def small(cls) -> Self:
        """Return the smallest configuration in which every claim can change; the contract is checked with it."""
        return cls(**values_of(cls, "small"))

    def cells(self) -> tuple[Cell, ...]:
        """Return the product of the axes of `grid`; without any a single empty cell."""
        axes = {axis: getattr(self, at) if isinstance(at, str) else tuple(at) for axis, at in self.grid.items()}
        return grid(**axes)

    @abc.abstractmethod
    def predict(self, key: jax.Array) -> Record | xr.Dataset:
        """Return a `Record` of what the theory predicts, with its own error where it has one.

        A pure function of the study and, when it samples, of `key`. It sees nothing of the trained systems.
        """

    @abc.abstractmethod
    def train(self, *args: Any, **kwargs: Any) -> Record | xr.Dataset:
        """Train ONE finite system in one cell and return a `Record` of what is measured of it.

        Declared as ``train(self, key, heads: int, rate: float)``, with the values of the cell by name. A pure function
        of the study, `key` and the cell. The key belongs to the replicate and is the same in every cell, which makes
        comparisons between cells paired; `independent` makes one that is not. All cells return the same variables with
        the same dimensions. A failure that the study expects is data: return it as a text variable `outcome`.

        A study of data from outside has a further parameter ``replicate`` and is told its number, from 0: which
        recorded run to read from a file whose path is a field, for instance.
        """

    def independent(self, key: jax.Array, **cell: Value) -> jax.Array:
        """Return a key of one cell alone, where cells shall not share their random numbers."""
        return jax.random.fold_in(key, self.cells().index(Cell(**cell)))

    def claims(self, *data: Any) -> Iterable[Claim]:
        """Yield the claims with what was measured: a generator ``claims(self, theory, trained)``.

        `theory` is the prediction; `trained` is over (replicate, axes of the grid, own dimensions), and NaN where the
        grid has no cell. A prediction over the slugs of all cells is over the axes of the grid too. Text, region and
        basis of a claim do not depend on `trained`.
        """
        return ()

    def pictures(self, theory: xr.Dataset, trained: xr.Dataset) -> Iterable[Panel]:
        """Yield pictures beyond those that follow from claims and variables; data as in `claims`."""
        return ()

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset, claims: Evaluated = None) -> tuple[Verdict, ...]:
        """Return the verdicts on the claims, which are evaluated unless they are given."""
        claims = evaluated_claims(self, predicted, trained) if claims is None else claims
        return tuple(claim.verdict() for claim in claims)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset, claims: Evaluated = None) -> tuple[Panel, ...]:
        """Return the pictures of the report as data: the study's own, then those of claims and of variables."""
        from manyheads.study.panels import Panel
        from manyheads.study.reporting.standard import standard_panels

        with _on_grid(self, predicted, trained) as data:
            own = all_of(self.pictures(*data), Panel, "pictures")
            return (*own, *standard_panels(self.claims(*data) if claims is None else claims, *data, own))

    def inputs(self) -> dict[str, str]:
        """Return the sha256 of everything from outside that the numbers depend on, by name.

        Fields of type `pathlib.Path` are covered already; a study that reads a default text adds it here.
        """
        return {}

    def flops(self, cell: Cell) -> int | None:
        """Return the exact matrix-multiply FLOPs of one replicate, announced before work starts; None if unknown."""
        return None


@contextlib.contextmanager
def _on_grid(study: Study, predicted: xr.Dataset, trained: xr.Dataset) -> Iterator[tuple[xr.Dataset, xr.Dataset]]:
    """Yield prediction and trained systems over the axes of the grid; arithmetic keeps long names and units."""
    from manyheads.study.tables import on_grid, theory_on_grid

    with xr.set_options(keep_attrs=True):
        yield theory_on_grid(predicted, study.cells()), on_grid(trained, predicted)


def evaluated_claims(study: Study, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Claim, ...]:
    """Return the claims of a study with what was measured."""
    from manyheads.study.claims import Claim

    with _on_grid(study, predicted, trained) as data:
        return all_of(study.claims(*data), Claim, "claims")


def all_of(found: object, kind: Any, method: str) -> tuple[Any, ...]:
    """Return what a method of a study yields; UsageError if it is not of the kind, a class or a union of classes."""
    names = " or ".join(each.__name__ for each in get_args(kind) or (kind,))
    if not isinstance(found, Iterable):
        raise UsageError(f"{method}() returns {type(found).__name__}: expected to yield {names}")
    values = tuple(found)
    for each in (each for each in values if not isinstance(each, kind)):
        given = " ".join(repr(each).split())
        raise UsageError(f"{method}() yields {type(each).__name__} {given:.60}: expected {names}")
    return values


def decide(study: Study, predicted: xr.Dataset, trained: xr.Dataset, claims: Evaluated = None) -> tuple[Verdict, ...]:
    """Return the verdicts of a study; outside its default configurations only derived expectations are kept."""
    from manyheads.study.verdicts import Verdict

    verdicts = all_of(study.compare(predicted, trained, claims), Verdict, "compare")
    if is_default(study):
        return verdicts
    return tuple(verdict if verdict.derived else dataclasses.replace(verdict, expected=None) for verdict in verdicts)


def is_default(study: Study) -> bool:
    """Tell whether a study has one of the configurations that its expectations are stated for: default or full."""
    kind = type(study)
    with contextlib.suppress(TypeError):  # a field without a default
        return study in (kind(), kind.full())
    return False


def configuration(study: Study) -> dict[str, object]:
    """Return a study's fields by name, in order."""
    return {field.name: getattr(study, field.name) for field in dataclasses.fields(study)}


def only_study(file: str) -> type[Study]:
    """Return the study that a file defines when it defines one; otherwise say which there are."""
    values = (value for value in vars(load_file(Path(file))).values() if isinstance(value, type))
    found = [each for each in values if issubclass(each, Study) and each.__module__ == Path(file).stem]
    if len(found) == 1:
        return found[0]
    names = " or ".join(f"{file}:{each.__name__}" for each in found)
    which = f"{len(found)} studies; name one, as {names}" if found else "no study: derive a class from manyheads.Study"
    raise UsageError(f"{file} defines {which}")
