"""Parts of a forward pass, and their items in a forward, backward and recomputed pass."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from manyheads.costs.cost import Item
from manyheads.costs.tally import Tally


@dataclass(frozen=True)
class Part:
    """One named step of a forward pass.

    A product `Y = X W` of `macs` multiply-adds has a backward pass of twice as many: `dX = dY W^T` and `dW = X^T dY`.

    Parameters
    ----------
    name, macs
        The step and its multiply-adds.
    forward, exp, backward, backward_exp
        Elementwise operations and transcendental functions of each pass.
    scores
        Scores that pass through a softmax.
    scores_macs
        Multiply-adds that recreate the scores alone.
    idle
        Multiply-adds among those of the backward pass whose gradient nobody asks for.
    again
        Whether block recomputation repeats the step: ``"block"``, ``"last"`` for the step that ends a block, ``""``.
    embedding
        Whether the products exist only for one-hot rows.
    """

    name: str
    macs: Tally = field(default_factory=Tally)
    forward: Tally = field(default_factory=Tally)
    exp: Tally = field(default_factory=Tally)
    backward: Tally = field(default_factory=Tally)
    backward_exp: Tally = field(default_factory=Tally)
    scores: Tally = field(default_factory=Tally)
    scores_macs: Tally = field(default_factory=Tally)
    idle: int = 0
    again: Literal["block", "last", ""] = ""
    embedding: bool = False


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
        forward = Item(part.name, "forward", part.macs, part.scores, part.forward, part.exp, embedding=part.embedding)
        items.append(forward)
        if training:
            items += _backward_items(part, forward)
    return tuple(items)


def _backward_items(part: Part, forward: Item) -> list[Item]:
    needed = 2 * part.macs + Tally.of(-part.idle)
    items = [
        Item(
            part.name,
            "backward",
            needed,
            2 * part.scores,
            part.backward,
            part.backward_exp,
            embedding=part.embedding,
        )
    ]
    if part.idle:
        items.append(Item(part.name, "idle", Tally.of(part.idle), embedding=part.embedding))
    if part.again:
        items.append(replace(forward, stage="block-again" if part.again == "block" else "last-again"))
    if part.scores_macs:
        items.append(replace(forward, stage="scores-again", macs=part.scores_macs))
    return items


def traffic(amount: int) -> Item:
    """Return an item that only moves bytes."""
    return Item("inputs and outputs", bytes=amount)


def size_note(itemsize: int) -> str:
    """Return the note on the numbers that bytes are counted for."""
    return f"bytes are those of numbers of {itemsize} bytes"
