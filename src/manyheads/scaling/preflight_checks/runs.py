"""All trainings of a preflight: built from a seed, timed before they are run, counted."""

from __future__ import annotations

import inspect
import math
import random
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from manyheads._extras import require
from manyheads.errors import CertificateError, UsageError, check_call
from manyheads.scaling.axes import LETTERS, Axis, TrainingAxis, find_axis
from manyheads.scaling.checks.transfer_check import LAST, TransferCheck, transfer_check
from manyheads.scaling.preflight_checks.rate_exponents import RateExponent, search_exponent
from manyheads.scaling.preflight_checks.result import Cost
from manyheads.scaling.preflight_checks.torch_trainer import TorchTrainer
from manyheads.scaling.preflight_checks.training import RETURNED, Make, Measured, Membership, Training
from manyheads.transformer.shape import Shape

if TYPE_CHECKING:
    from manyheads.scaling.preflight_checks.jax_trainer import JaxTrainer


@dataclass
class Runs:
    """All trainings of a preflight, counted and timed."""

    make: Make
    seeds: list[int]
    steps: int
    trainings: int = 0
    done: int = 0
    notes: list[str] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    sizes: dict[Shape, int] = field(default_factory=dict)
    start: tuple[float, float] = field(default_factory=lambda: (time.process_time(), time.monotonic()))
    membership: Membership = field(default_factory=Membership)
    unknown_roles: str = ""

    def build(self, shape: Shape, seed: int, steps: int | None = None) -> TorchTrainer | JaxTrainer:
        """Build a training that was not there before, for a number of steps where they are varied."""
        name = getattr(self.make, "__name__", "make")
        check_call(name, self.make, "shape", "seed", returns=f" that returns {RETURNED}")
        takes_steps = steps and "steps" in inspect.signature(self.make).parameters
        make: Callable[..., Any] = self.make
        training = Training.of(make(shape, seed, **({"steps": steps} if takes_steps else {})), name)
        model = training.model
        if any(each() is model for each in self.seen):
            raise UsageError(f"{name} returned the same model twice: build a new one from (shape, seed) each time")
        if hasattr(model, "__weakref__"):
            self.seen = [each for each in self.seen if each() is not None] + [weakref.ref(model)]
        trainer = find_trainer(training)
        if steps and not takes_steps:
            if getattr(trainer, "schedules", ()):
                raise UsageError(
                    f"{name} schedules the learning rate, and its number of steps is varied: take it as a third "
                    "argument, (shape, seed, steps=None), and build the schedule for it"
                )
            self.notes.append(f"{name} does not take steps: a schedule within the optimizer is not adapted to them")
        return trainer

    def estimate(
        self,
        shapes: list[Shape],
        along: Mapping[Axis, Sequence[Shape]],
        rates: tuple[int, int],  # of a search along the axes of the model, and of one beside them
        train: int,
        limit: float,
        announce: Callable[[str], None],
        beside: Mapping[TrainingAxis, Sequence[int]],
    ) -> None:
        """Time one step at every shape, smallest first, and refuse what takes longer than the limit."""
        total = 0.0
        searches = sum(map(len, beside.values()))
        batches = sum(sum(n) if axis == "steps" else train * max(n) * len(n) for axis, n in beside.items())
        with seeded(self.seeds[0]):
            self.build(shapes[0], self.seeds[0])  # imports what building needs
        on_axes = [shape for each in along.values() for shape in each]
        for shape in sorted(shapes, key=lambda each: each.width**2 * each.depth):
            with seeded(self.seeds[0]):
                start = time.process_time()
                trainer = self.build(shape, self.seeds[0])
                built = time.process_time() - start
                trainer.losses(1, 1.0)  # compiles, and allocates the state of optimizers
                times = [time.process_time()]
                for steps in (1, 3):
                    trainer.losses(steps, 1.0)
                    times.append(time.process_time())
                step = max(0.0, times[2] - 2 * times[1] + times[0]) / 2
                built += max(0.0, times[1] - times[0] - step)
            self.sizes[shape] = trainer.weights()
            self.membership, self.unknown_roles = trainer.membership(), trainer.unknown_roles()
            self._count(5)
            runs = len(self.seeds)
            total += runs * (built + (self.steps + 2) * step)
            total += runs * rates[0] * on_axes.count(shape) * (built + train * step)
            if shape == shapes[0]:
                total += runs * rates[1] * (built * searches + batches * step)
            if total > limit:
                raise UsageError(
                    f"a preflight up to (N, H, L) = ({shape.key_dim}, {shape.heads}, {shape.depth}) takes about "
                    f"{total:.0f} CPU s, and limit={limit:g}: fewer steps, seeds or rates, "
                    "smaller sizes or batches, or a higher limit"
                )
        runs = len(self.seeds) * (len(shapes) + rates[0] * len(on_axes) + rates[1] * searches)
        announce(f"about {total:.0f} CPU s for {runs} trainings at {len(shapes)} shapes")
        for axis, each in along.items():
            if len(counts := {self.sizes[shape] for shape in each}) < 2:
                (count,) = counts
                raise UsageError(
                    f"make builds {count:,} trained weights at every size along {LETTERS[axis]}: use the shape"
                )

    def measure(self, shape: Shape, seed: int) -> Measured:
        """Measure one training."""
        with seeded(seed):
            self._count(self.steps)
            return self.build(shape, seed).measure(self.steps)

    def transfer(self, shapes: Sequence[Shape], factors: Sequence[float], train: int) -> list[TransferCheck]:
        """Search the best factor of the learning rates at every size."""

        def losses(shape: Shape, grid: NDArray[np.float64], seed: int) -> list[float]:
            found = []
            for factor in grid:
                with seeded(seed):
                    last = self.build(shape, seed).losses(train, float(factor))[-(train // LAST) :]
                    found.append(float(np.mean(last)))
                self._count(train)
            return found

        check = partial(transfer_check, shapes, factors, losses, seeds=self.seeds, widenings=1)
        return self._inside(LETTERS[find_axis(shapes)[0]], check)

    def exponent(
        self, base: Shape, axis: TrainingAxis, sizes: Sequence[int], factors: Sequence[float], train: int
    ) -> list[RateExponent]:
        """Search the best factor of the learning rates at every batch size or number of steps."""

        def losses(seed: int, steps: int, parts: int, factor: float) -> list[float]:
            with seeded(seed):
                trainer = self.build(base, seed, steps)
                found = trainer.losses(steps, factor, parts)
            self._count(steps * parts)
            if math.isfinite(found[-1]) and trainer.training.repeats(steps * parts):
                self.notes.append(f"{axis}: batches are repeated, as there are fewer than a training takes; give more")
            return found

        grid = np.asarray(factors, np.float64)
        return self._inside(axis, partial(search_exponent, axis, sizes, grid, losses, self.seeds, train))

    def _inside(self, axis: str, check: Callable[[], Any]) -> list[Any]:
        """Return what a search found, or note that an optimum lies at an end of the grid."""
        try:
            return [check()]
        except CertificateError as error:
            self.notes.append(
                f"learning rate along {axis}: not decided, {error.message}; these are factors of your own "
                "learning rates, rate_factors (--rate-factors LOW HIGH COUNT on the command line)"
            )
            return []

    def _count(self, steps: int) -> None:
        self.trainings, self.done = self.trainings + 1, self.done + steps

    def cost(self) -> Cost:
        """Return what it took so far."""
        cpu, wall = self.start
        return Cost(self.trainings, self.done, time.process_time() - cpu, time.monotonic() - wall)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from a seed in Python, NumPy and PyTorch, and put their states back."""
    kept, numbers = random.getstate(), np.random.get_state()  # noqa: NPY002  # the user's code may draw from it
    with ExitStack() as stack:
        stack.callback(np.random.set_state, numbers)
        stack.callback(random.setstate, kept)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        if find_spec("torch"):
            torch = require("torch")
            stack.enter_context(torch.random.fork_rng())
            torch.manual_seed(seed)
        yield


def find_trainer(training: Training) -> TorchTrainer | JaxTrainer:
    """Return the trainer of PyTorch or of JAX."""
    if find_spec("torch") and isinstance(training.model, require("torch").nn.Module):
        return TorchTrainer(training)
    from manyheads.scaling.preflight_checks.jax_trainer import JaxTrainer

    return JaxTrainer(training)
