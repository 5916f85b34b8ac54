"""Parts of a forward pass, and their items in a forward, backward and recomputed pass."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from manyheads.costs.conventions import Convention
from manyheads.costs.cost import Cost, Item, merge
from manyheads.costs.tally import NOTHING, Tally


@dataclass(frozen=True)
class Part:
    """One named step of a forward pass.

    A product `Y = X W` of `macs` multiply-adds has a backward pass of twice as many: `dX = dY W^T` and `dW = X^T dY`.
    """

    name: str
    macs: Tally = NOTHING
    forward: Tally = NOTHING  # elementwise operations and transcendental functions of each pass
    exp: Tally = NOTHING
    backward: Tally = NOTHING
    backward_exp: Tally = NOTHING
    scores: Tally = NOTHING  # that pass through a softmax
    scores_macs: Tally = NOTHING  # multiply-adds that recreate the scores alone
    idle: int = 0  # multiply-adds among those of the backward pass whose gradient nobody asks for
    again: Literal["block", "last", ""] = ""  # whether block recomputation repeats the step; "last" ends a block
    embedding: bool = False  # whether the products exist only for one-hot rows
    unvisited: bool = False  # whether they are of experts that a token does not visit


def dense_part(
    name: str, rows: int, macs: int, *, bias: int = 0, idle: int = 0, again: Literal["block", "last", ""] = ""
) -> Part:
    """Return the part of a dense layer on `rows` rows: `macs` multiply-adds and `bias` additions a row."""
    adds = Tally.of(rows * bias)
    return Part(name, Tally.of(rows * macs), forward=adds, backward=adds, idle=idle, again=again)


def pass_items(parts: Iterable[Part], training: bool) -> tuple[Item, ...]:
    """Spread parts over the stages of a forward pass, or of a forward and backward pass with all its recomputations."""
    items: list[Item] = []
    for part in parts:
        forward = Item(part.name, "forward", part.macs, part.scores, part.forward, part.exp)
        forward = replace(forward, embedding=part.embedding, unvisited=part.unvisited)
        items.append(forward)
        if not training:
            continue
        needed, elementwise = 2 * part.macs + Tally.of(-part.idle), (part.backward, part.backward_exp)
        backward = replace(forward, stage="backward", macs=needed, scores=2 * part.scores)
        items.append(replace(backward, elementwise=elementwise[0], transcendental=elementwise[1]))
        if part.idle:
            items.append(Item(part.name, "idle", Tally.of(part.idle), embedding=part.embedding))
        if part.again:
            items.append(replace(forward, stage="block-again" if part.again == "block" else "last-again"))
        if part.scores_macs:
            items.append(replace(forward, stage="scores-again", macs=part.scores_macs))
    return tuple(items)


def size_note(itemsize: int) -> str:
    """Return the note on the numbers that bytes are counted for."""
    return f"bytes are those of numbers of {itemsize} bytes"


def cost_of(
    items: Iterable[Item], moved: int, itemsize: int, convention: str | Convention, notes: tuple[str, ...] = ()
) -> Cost:
    """Return the cost of items that move so many bytes between them and memory."""
    traffic = Item("inputs and outputs", bytes=moved)
    return Cost(merge((*items, traffic)), notes=(*notes, size_note(itemsize))).to(convention)
