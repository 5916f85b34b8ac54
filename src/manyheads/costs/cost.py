"""Costs: integers by named item, readable under any convention that their parts allow, as values and as text."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from manyheads._overview import Overview, Shown, render_table
from manyheads.costs.conventions import Convention, ConventionError, find_convention
from manyheads.costs.tally import NOTHING, Tally
from manyheads.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Stage = Literal["forward", "backward", "idle", "scores-again", "block-again", "last-again"]

# The stages that each answer about recomputation counts. "last" is the product that ends a block: its result is an
# output that was stored anyway, so an implementation that recomputes only what it needs leaves it out.
BLOCK, SCORES = ("block-again", "last-again"), ("scores-again",)
RECOMPUTED: dict[str, tuple[str, ...]] = {"none": (), "scores": SCORES, "block": BLOCK, "executed": BLOCK}
RECOMPUTED |= {"block-needed": BLOCK[:1], "block+scores": BLOCK + SCORES}
LOOP = "a while loop"  # with which the reasons begin that a trip count removes
TRACED = ("exact", "halved", "dense", "mac", "executed", "executed-mac")  # conventions that a traced module answers
FIGURES = ("flops", "elementwise", "transcendental", "bytes")
BYTES = {
    True: "compulsory traffic: every needed input, constant and result of one call once",
    False: "compulsory traffic: every input, matrix and result of one call once; biases and norm gains left out",
}


class UnknownCost(UsageError):
    """Part of a program has a cost that its text does not determine, such as a loop whose end depends on data."""


@dataclass(frozen=True)
class Item:
    """One named amount of work in one stage; nothing in it depends on a convention."""

    name: str
    stage: Stage = "forward"  # of the backward pass, "idle" is for gradients that nobody asks for
    macs: Tally = NOTHING  # multiply-adds of matrix products
    scores: Tally = NOTHING  # that pass through a softmax, twice in the backward stage
    elementwise: Tally = NOTHING
    transcendental: Tally = NOTHING  # not contained in `elementwise`
    bytes: int = 0  # compulsory traffic
    embedding: bool = False  # whether the work exists only if a token embedding is a product with one-hot rows
    unvisited: bool = False  # whether it is of experts that a token does not visit
    module: str = ""  # path of the PyTorch module that does the work; of the outermost its class

    def counted(self, convention: Convention) -> bool:
        """Tell whether `convention` counts this item's work (its bytes are always counted)."""
        if (self.embedding and convention.embedding == "gather") or (
            self.unvisited and convention.experts == "visited"
        ):
            return False
        if self.stage == "idle":
            return convention.backward == "twice"
        return self.stage in ("forward", "backward") or self.stage in RECOMPUTED[convention.recompute]

    def flops(self, convention: Convention) -> int:
        """Operations that `convention` charges to `Cost.flops`."""
        if not self.counted(convention):
            return 0
        charged = convention.multiply_add * self.macs + convention.softmax * self.scores
        return charged.products(convention.causal)

    def times(self, factor: int) -> "Item":
        """Repeat the work."""
        return replace(self, **{name: factor * getattr(self, name) for name in _AMOUNTS})

    def plus(self, other: "Item") -> "Item":
        """Add the amounts of an item of the same name and stage."""
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in _AMOUNTS})


_AMOUNTS = ("macs", "scores", "elementwise", "transcendental", "bytes")


def merge(items: Iterable[Item]) -> tuple[Item, ...]:
    """Add up items of the same name and stage, in the order of their first appearance."""
    merged: dict[tuple[object, ...], Item] = {}
    for item in items:
        key = (item.name, item.stage, item.embedding, item.unvisited, item.module)
        merged[key] = merged[key].plus(item) if key in merged else item
    return tuple(merged.values())


@dataclass(frozen=True, repr=False)
class Cost(Shown):
    """Exact cost of a computation under a named convention.

    Costs of the same convention add, and an integer multiplies: `3 * cost` is three calls.

    Parameters
    ----------
    items
        The parts, apart enough to be read under another convention.
    convention
        How the parts are read.
    notes
        What a reader must know beside the figures.
    unknown
        Parts whose cost is not determined. If there are any, every figure is refused; `lower_bound` gives what is sure.
    traced
        Whether a PyTorch program was traced: it has `flops` alone, and knows its masks and what it recomputes.

    Examples
    --------
    >>> cost = Cost((Item("product", macs=Tally.of(21)),))
    >>> cost.flops, cost.to("mac").flops, (2 * cost + cost).flops
    (42, 21, 126)
    """

    items: tuple[Item, ...] = ()
    convention: Convention = field(default_factory=Convention)
    notes: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    traced: bool = False

    @property
    def flops(self) -> int:
        """Matrix-product operations under the convention (FLOPs if a multiply-add is 2), with its softmax charge."""
        self._require("flops")
        return sum(item.flops(self.convention) for item in self.items)

    @property
    def elementwise(self) -> int:
        """Elementwise arithmetic operations: a reduction counts one for each element that it reads."""
        return self._column("elementwise")

    @property
    def transcendental(self) -> int:
        """Evaluations of transcendental functions (exp, tanh, rsqrt, ...), not contained in `elementwise`."""
        return self._column("transcendental")

    @property
    def bytes(self) -> int:
        """Compulsory traffic in bytes, a lower bound: every input and every output of a call moves once."""
        self._require("bytes")
        return sum(item.bytes for item in self.items)

    def _column(self, name: str) -> int:
        self._require(name)
        counted = (getattr(item, name) for item in self.items if item.counted(self.convention))
        return sum(amount.elementwise(self.convention.causal) for amount in counted)

    @property
    def _counted(self) -> tuple[str, ...]:
        return FIGURES[:1] if self.traced else FIGURES

    def _require(self, figure: str) -> None:
        if figure not in self._counted:
            raise UnknownCost(f"{figure}: not counted for a PyTorch program, only matrix products are; take flops")
        if self.unknown:
            trips = ", or state the trip count" if any(part.startswith(LOOP) for part in self.unknown) else ""
            other = ", or give formulas={op: function}" if self.traced else trips
            raise UnknownCost(f"the cost is not determined: {'; '.join(self.unknown)}. Take lower_bound(){other}")

    def lower_bound(self) -> "Cost":
        """Return the cost with every undetermined part left out, which then stands in the notes."""
        return replace(self, unknown=(), notes=(*self.notes, *(f"left out: {part}" for part in self.unknown)))

    def to(self, convention: str | Convention) -> "Cost":
        """Read the same work under another convention, or preset: exact, nothing is derived from a total.

        Raises `ConventionError`: a count of a program as it runs does not know which products a mask hides or which
        work is recomputed, and a formula does not know how a program would run. Neither is guessed.

        Examples
        --------
        >>> Cost((Item("scores", macs=Tally(16, 10, 16)),)).to("halved").flops
        16
        """
        target = find_convention(convention)
        if not self.reads(convention):
            name = convention if isinstance(convention, str) else target.name
            if self.traced:
                raise ConventionError(f"a traced module cannot be read as {name!r}: choose from {', '.join(TRACED)}")
            have = "a program as it runs" if self.convention.executed else "a formula"
            raise ConventionError(
                f"a count of {have} cannot be read as {name!r} ({target.describe()}): it does not say which "
                "products are masked, recomputed or idle. Use the closed forms for that, and 'executed' or "
                "'executed-mac' for programs"
            )
        return replace(self, convention=target)

    def reads(self, convention: str | Convention) -> bool:
        """Tell whether the parts answer the questions of a convention."""
        target = find_convention(convention)
        return target in map(find_convention, TRACED) if self.traced else target.executed == self.convention.executed

    def by_module(self, depth: int | None = None) -> "Cost":
        """Name the items by the PyTorch module that does their work, `depth` names deep (None: the whole path).

        UsageError if the parts have no modules: of a closed form or a function.
        """
        if not any(item.module for item in self.items):
            raise UsageError("by_module: no part of this cost belongs to a module; count a torch.nn.Module")
        named = [(".".join(item.module.split(".")[:depth]) or item.name, item) for item in self.items]
        return replace(self, items=merge(replace(item, name=name, module="") for name, item in named))

    def __add__(self, other: "Cost") -> "Cost":
        if not isinstance(other, Cost):
            return NotImplemented
        if other.convention != self.convention:
            names = f"{self.convention.name} and {other.convention.name}"
            raise ConventionError(f"costs of different conventions do not add: {names}; convert one with .to")
        if self.items and other.items and self.traced != other.traced:
            raise ConventionError("a traced module and a formula do not add: neither knows what the other recomputes")
        notes, unknown = (*self.notes, *other.notes), (*self.unknown, *other.unknown)
        texts = tuple(dict.fromkeys(notes)), tuple(dict.fromkeys(unknown))
        return Cost(merge((*self.items, *other.items)), self.convention, *texts, self.traced or other.traced)

    def __mul__(self, times: int) -> "Cost":
        if isinstance(times, bool) or not isinstance(times, int):
            return NotImplemented
        if times < 0:
            raise UsageError(f"a cost cannot be repeated {times} times")
        return replace(self, items=tuple(item.times(times) for item in self.items))

    __rmul__ = __mul__

    def breakdown(self) -> dict[str, dict[str, int]]:
        """Split the figures by item name, in the order of the computation; of a PyTorch program only `flops`."""
        names = dict.fromkeys(item.name for item in self.items)
        parts = {name: replace(self, items=tuple(i for i in self.items if i.name == name)) for name in names}
        return {name: _figures(part) for name, part in parts.items() if any(_figures(part).values())}

    def as_dict(self) -> dict[str, object]:
        """Return figures, convention, breakdown and notes as plain data."""
        convention = {"name": self.convention.name, "describes": self.convention.describe(), **asdict(self.convention)}
        known = self.lower_bound()
        figures: dict[str, Any] = _figures(known) if not self.unknown else {"lower_bound": _figures(known)}
        texts = {"unknown": list(self.unknown), "notes": list(self.notes)}
        moved = {"bytes_convention": BYTES[self.convention.executed]} if "bytes" in self._counted else {}
        return {**figures, "convention": convention, "items": known.breakdown(), **texts, **moved}

    def table(self, shares: bool = True) -> str:
        """Render the breakdown as plain text, one item a line, with the total, the convention and the notes.

        With `shares`, the last column is the share of each item in the operations.
        """
        known = self.lower_bound()
        total = _figures(known)
        unit = self._unit
        every = known.breakdown() | {"at least" if self.unknown else "total": total}
        rows = [
            (name, *(f"{figure:,}" for figure in figures.values()), _share(figures["flops"], total["flops"]))
            for name, figures in every.items()
        ]
        columns = ("item", unit, *self._counted[1:], f"% of {unit}")
        last = len(columns) if shares else -1
        lines = [
            render_table(columns[:last], [row[:last] for row in rows]),
            f"convention {self.convention.name}: {self.convention.describe()}",
            *([f"bytes: {BYTES[self.convention.executed]}"] if "bytes" in total else ()),
        ]
        lines += [f"unknown: {part}" for part in self.unknown] + [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def to_dataframe(self) -> "pd.DataFrame":
        """Return the breakdown as a pandas data frame, one row an item, in the order of the computation."""
        return Overview("", ("item", *self._counted), self._rows()).frame()

    def plot(self) -> "Figure":
        """Draw the operations of every item as bars, the most first."""
        from manyheads.study.reporting.charts import draw_bars

        items = sorted(self._rows(), key=lambda row: -row[1])
        return draw_bars(self._overview().title, self._unit, [(name, count) for name, count, *_ in items if count])

    @property
    def _unit(self) -> str:
        return "FLOPs" if self.convention.multiply_add == 2 else "MACs"

    def _rows(self) -> list[tuple[Any, ...]]:
        return [(name, *figures.values()) for name, figures in self.lower_bound().breakdown().items()]

    def _overview(self) -> Overview:
        total = _figures(self.lower_bound())
        least = "at least " if self.unknown else ""
        rows = sorted(self._rows(), key=lambda row: -row[1])
        traffic = f", {total['bytes']:,} bytes" if "bytes" in total else ""
        title = f"Cost: {least}{total['flops']:,} {self._unit}{traffic} ({self.convention.name})"
        columns, convention = ("item", self._unit, f"% of {self._unit}", *self._counted[3:]), self.convention
        shown = [(name, count, _share(count, total["flops"]), *more[2:]) for name, count, *more in rows]
        return Overview(title, columns, shown, (f"convention {convention.name}: {convention.describe()}", *self.notes))


def _figures(cost: Cost) -> dict[str, int]:
    return {name: getattr(cost, name) for name in cost._counted}


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"
