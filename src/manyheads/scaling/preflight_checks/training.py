"""A user's training as `make(shape, seed)` returns it, in PyTorch or JAX, and what a run of it measures."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from manyheads.errors import UsageError, check_call
from manyheads.transformer.shape import Shape

STREAM, OUTPUTS = "stream", "outputs"
"""Beginnings of the names of what is judged as the residual stream and as the outputs."""
RETURNED = "(model, optimizer, batches), with a loss(model, batch) and roles after them where needed"


@dataclass(frozen=True)
class Training:
    """One training, built at one shape from one seed.

    Attributes
    ----------
    model
        A `torch.nn.Module`, or a tree of JAX arrays; functions and integers in it, as equinox has them, are left alone.
    optimizer
        A torch optimizer, a schedule over it, or a list of them; for JAX an optax transformation.
    batches
        Batches in the order of training, at least one; they are repeated where they are fewer than the steps.
    loss
        `loss(model, batch)`; None for a PyTorch model that returns its loss: called with the entries of a mapping by
        name or of a tuple in order, it has `.loss` or returns a number among its results. For JAX the loss may come
        with arrays whose changes are then measured, `(loss, {name: array})`: `stream...` and `outputs...` are judged.
    roles
        Patterns of parameter names to parts, or a file of them, as `torch_groups` takes them; for JAX a tree of roles,
        as `Parametrization.optax` does. None for a model of transformers or one whose parameters have known names; any
        other is then measured, and not judged.
    """

    model: Any
    optimizer: Any
    batches: Iterable[Any]
    loss: Callable[[Any, Any], Any] | None = None
    roles: Any = None
    _kept: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)
    _source: list[Iterator[Any]] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, made: Any, name: str) -> Training:
        """Return a training from what a function returned: a training, or a tuple of its fields."""
        if isinstance(made, cls):
            return made
        most = sum(each.init for each in fields(cls))
        if not isinstance(made, tuple) or not 3 <= len(made) <= most:
            shown = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
            raise UsageError(f"{name} returned {shown}: expected {RETURNED}")
        training = cls(*made)
        if training.loss is not None:
            check_call("loss", training.loss, "model", "batch")
        return training

    def batch(self, step: int) -> Any:
        """Return the batch of a step; only as many are drawn as were asked for."""
        if not self._source:
            if not isinstance(self.batches, Iterable):
                raise UsageError(f"batches is {type(self.batches).__name__}: give an iterable of batches")
            self._source.append(iter(self.batches))
        self._kept.extend(itertools.islice(self._source[0], max(0, step + 1 - len(self._kept))))
        if not self._kept:
            raise UsageError("batches is empty: give at least one batch")
        return self._kept[step % len(self._kept)]

    def repeats(self, steps: int) -> bool:
        """Tell whether training for this many steps, which has ended, used a batch twice."""
        return len(self._kept) < steps


@dataclass(frozen=True)
class Update:
    """How far one quantity has moved, RMS over the entries of the fixed batch.

    `random` is n0 / n: the random part of a sum over n inputs over its aligned part, squared, from the directions in
    which the inputs lie; 0 where nothing is summed.
    """

    size: float
    random: float = 0.0


@dataclass(frozen=True)
class Measured:
    """What one run measured: updates by module, layers joined, and the losses of its steps."""

    updates: dict[str, Update]
    losses: list[float]

    @classmethod
    def of(cls, rows: dict[str, list[Update]], losses: list[float]) -> Measured:
        """Take the RMS over the members of every group; where training diverged, all updates are infinite."""
        lost = not all(map(math.isfinite, losses))
        updates = {
            name: Update(
                math.inf if lost else (sum(each.size**2 for each in members) / len(members)) ** 0.5,
                0.0 if lost else sum(each.random for each in members) / len(members),
            )
            for name, members in rows.items()
        }
        return cls(updates, losses)


@dataclass(frozen=True)
class Membership:
    """Parameters that the optimizers step never or twice."""

    missing: tuple[str, ...] = ()
    doubled: tuple[str, ...] = ()

    def sentences(self) -> list[str]:
        """Say it for people."""
        said = [f"{name} is in no optimizer: it is never trained" for name in self.missing]
        return said + [f"{name} is in two groups: every step is made twice" for name in self.doubled]


Make = Callable[[Shape, int], Any]
