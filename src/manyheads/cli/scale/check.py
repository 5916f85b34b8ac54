"""`manyheads scale check`: coordinate check and learning-rate transfer of small transformers along one axis."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from manyheads._json import Json, json_ready
from manyheads.cli.flags import check_flags, flag
from manyheads.cli.parsing import OptionalFloat, OptionalInt, OptionalPath, Switch
from manyheads.cli.scale import budget
from manyheads.cli.scale.base_shape import Grid, Numbers, Sizes, Theory, read_shape
from manyheads.cli.scale.budget import LARGEST_NETWORK, count_weights, count_work, listed
from manyheads.errors import CertificateError, UsageError

if TYPE_CHECKING:
    from manyheads.scaling import Parametrization
    from manyheads.scaling.checks.coordinate_check import CoordinateCheck
    from manyheads.scaling.checks.transfer_check import TransferCheck
    from manyheads.scaling.task import Task
    from manyheads.scaling.trained.transformers import Recipe
    from manyheads.transformer import Shape

VERDICT = {"holds": "consistent", "refuted": "BREAKS", "inconclusive": "undecided"}
USUAL: dict[str, dict[str, Any]] = {
    # Gradient descent needs training of order one, away from the edge of stability: larger batches, a moderate rate.
    "adam": {"learning_rate": 3e-3, "steps": (4, 25), "learning_rates": (3e-4, 3e-1, 7), "batch": 16},
    "muon": {"learning_rate": 1e-2, "steps": (4, 25), "learning_rates": (2.5e-3, 0.16, 7), "batch": 16},
    "sgd": {"learning_rate": 0.3, "steps": (60,), "learning_rates": (1e-2, 10.0, 7), "batch": 96},
}
LARGEST_SEED = 2**31  # beyond, JAX would take a seed for another one
MOST_SEEDS = 10_000  # networks of each size; eight are sharp
MOST_STEPS = 2**31 - 1  # counted in 32 bits


@dataclass(frozen=True)
class Check(Theory):
    """Train small transformers at several sizes along one axis and compare the RMS updates of every module.

    With --transfer the best learning rate of each size is found as well.
    """

    base: Sizes = None
    """Shape of the given learning rate, 8,4,2 if absent; the trained networks are multiples of it along --axis."""
    axis: Literal["key_dim", "heads", "depth"] = "heads"  # Axis along which networks grow.
    sizes: Numbers = None
    """Sizes on that axis; if absent half, once and four times the base's, for depth once, twice and eight times."""
    task: Literal["digits", "text"] = "digits"  # Handwritten digits, or the next character of a text.
    text: OptionalPath = None  # UTF-8 file for --task text; Python's documentation if absent.
    learning_rate: OptionalFloat = flag(None, above=0)
    """Learning rate of the base; 0.003 for adam, 0.01 for Muon's groups and 0.3 for sgd if absent."""
    adam_learning_rate: float = 3e-3  # Learning rate of the base of AdamW beside Muon.
    epsilon: float = flag(1e-8, above=0)  # Adam's epsilon at the base.
    steps: Numbers = flag(None, least=1, most=MOST_STEPS, order="rising")
    """Steps after which updates are measured; 4 and 25 for adam and muon and 60 for sgd if absent."""
    batch: OptionalInt = flag(None, least=1)  # Sequences of a step; 16 for adam and muon and 96 for sgd if absent.
    seeds: int = flag(8, least=2, most=MOST_SEEDS)  # Networks of each size.
    seed: int = flag(0, least=0)  # First seed.
    transfer: Switch = False  # Find the best learning rate of each size as well.
    learning_rates: Grid = None
    """Grid for --transfer; 0.0003 0.3 7 for adam, 0.0025 0.16 7 for muon and 0.01 10 7 for sgd if absent."""
    train: int = flag(60, least=1, most=MOST_STEPS)  # Steps of a training for --transfer.
    out: OptionalPath = None  # Folder for the pictures (SVG) and for the figures (check.json).
    json: Switch = False  # Print JSON instead of sentences.
    strict: Switch = False  # Exit with 1 if a check is refuted.

    def run(self) -> int:
        """Train, print the verdicts, and return the exit status."""
        from manyheads.scaling.trained.transformers import Recipe
        from manyheads.study.execution.progress import announce

        start = time.monotonic()
        base, _ = read_shape(self.base or "8,4,2", "--base", is_file=False)
        parametrization = self.parametrization(base)
        shapes = self._shapes(base)
        self._refuse(shapes)
        task = self._task()
        batch, rates = self._usual("batch"), self._usual("learning_rates")[2]
        budget.refuse_memory(task, shapes, batch, (self.train, rates) if self.transfer else None)
        tokens, steps = batch * budget.LENGTH[self.task], self._usual("steps")[-1]
        sweeps = rates * self.seeds * self.transfer
        budget.refuse_work(shapes, tokens, "--steps", steps, self.seeds)
        budget.refuse_work(shapes, tokens, "--train", self.train, sweeps)
        work = count_work(shapes, tokens, steps, self.seeds) + count_work(shapes, tokens, self.train, sweeps)
        announce(f"about {budget.tell_time(work, len(shapes))}", True)
        given = task, parametrization, Recipe(self.train, self.epsilon, self.adam_learning_rate)
        check, found = self._check_coordinates(shapes, *given), None
        if not self.json:  # printed before the longer check, which may be interrupted or find no optimum
            print("\n".join(_coordinates_as_text(self, check)), flush=True)
        try:
            found = self._check_transfer(shapes, *given) if self.transfer else None
        except CertificateError as error:
            if self.json:
                failed = {"outcome": "failed", "sentence": str(error)}
                print(json.dumps(_as_json(check, None) | {"transfer_check": failed}, indent=1))
            raise
        lines = [*_transfer_as_text(found), f"\ntook {time.monotonic() - start:.0f} s"]
        print(json.dumps(_as_json(check, found), indent=1) if self.json else "\n".join(lines))
        self._write(check, found)
        broken = [part for part in (check, found) if part is not None and part.outcome == "refuted"]
        return 1 if self.strict and broken else 0

    # Sizes

    def _usual(self, name: str) -> Any:
        given = getattr(self, name)
        return USUAL[self.optimizer][name] if given is None else given

    def _shapes(self, base: "Shape") -> "tuple[Shape, ...]":
        from manyheads.scaling.axes import shapes_along

        here: int = getattr(base, self.axis)
        usual = (here, 2 * here, 8 * here) if self.axis == "depth" else (max(here // 2, 1), here, 4 * here)
        return shapes_along(self.axis, base, self.sizes or sorted(set(usual)))

    def _refuse(self, shapes: "tuple[Shape, ...]") -> None:
        """Refuse before training what would be refused afterwards."""
        from manyheads.scaling.axes import find_axis

        find_axis(shapes)
        check_flags(self)
        (low, high, count), largest = self._usual("learning_rates"), max(shapes, key=count_weights)
        refused = {
            "--text is for --task text: add it": self.text is not None and self.task != "text",
            f"--seed {self.seed}: give a whole number up to {LARGEST_SEED - self.seeds}": (
                self.seed > LARGEST_SEED - self.seeds
            ),
            f"--sizes: {listed((largest,))} has more than {LARGEST_NETWORK:,} weights; give smaller ones": (
                count_weights(largest) > LARGEST_NETWORK
            ),
            f"--out {self.out} is a file: give a folder": self.out is not None and self.out.is_file(),
            "--learning-rates is for --transfer: add it": self.learning_rates is not None and not self.transfer,
            f"--learning-rates {low:g} {high:g} {count}: give two rates, the lower first, and at least 3 points": (
                not 0 < low < high < math.inf or count < 3
            ),
        }
        for message, wrong in refused.items():
            if wrong:
                raise UsageError(message)

    def _write(self, check: "CoordinateCheck", found: "TransferCheck | None") -> None:
        """Write pictures and figures into the folder that was asked for."""
        if self.out is None:
            return
        from manyheads.study.execution.progress import announce
        from manyheads.study.store.disk import write_text

        self.out.mkdir(parents=True, exist_ok=True)
        for name, part in (("coordinate-check", check), ("transfer-check", found)):
            if part is not None:
                part.plot().savefig(self.out / f"{name}.svg")
        write_text(self.out / "check.json", json.dumps(_as_json(check, found), indent=1) + "\n")
        announce(f"pictures and figures in {self.out}", True)

    def _task(self) -> "Task":
        from manyheads.scaling.task import digits_task, text_task

        batch = self._usual("batch")
        return digits_task(batch) if self.task == "digits" else text_task(self.text, batch)

    def _seeds(self) -> range:
        return range(self.seed, self.seed + self.seeds)

    # Checks

    def _check_coordinates(
        self, shapes: "tuple[Shape, ...]", task: "Task", parametrization: "Parametrization", recipe: "Recipe"
    ) -> "CoordinateCheck":
        from manyheads.scaling import coordinate_check
        from manyheads.scaling.checks.coordinate_check import measure_task

        steps = self._usual("steps")
        measure = measure_task(task, parametrization, recipe, self._usual("learning_rate"), steps)
        with self._progress("coordinate check", shapes, "", 1, steps[-1:]) as advance:

            def watched(shape: "Shape", seed: int) -> Any:
                found = measure(shape, seed)
                advance()
                return found

            return coordinate_check(parametrization, shapes, watched, checkpoints=steps, seeds=self._seeds())

    def _check_transfer(
        self, shapes: "tuple[Shape, ...]", task: "Task", parametrization: "Parametrization", recipe: "Recipe"
    ) -> "TransferCheck":
        import numpy as np

        from manyheads.scaling import transfer_check
        from manyheads.scaling.checks.transfer_check import task_losses

        low, high, count = self._usual("learning_rates")
        train = task_losses(task, parametrization, recipe)
        with self._progress("transfer check", shapes, f" {count} learning rates,", count, (self.train,)) as advance:

            def losses(shape: "Shape", learning_rates: Any, seed: int) -> Any:
                found = train(shape, learning_rates, seed)
                if len(learning_rates) == count:  # and not the few by which a grid is widened
                    advance()
                return found

            return transfer_check(shapes, np.geomspace(low, high, count), losses, seeds=self._seeds())

    @contextlib.contextmanager
    def _progress(
        self, name: str, shapes: "tuple[Shape, ...]", more: str, each: int, steps: Sequence[int]
    ) -> Iterator[Callable[..., None]]:
        """Announce a check, `each` trainings of a network, and show its progress."""
        from manyheads.study.execution.progress import announce, progress_bar

        total = len(shapes) * self.seeds
        trainings = f"{total * each} trainings of {_steps(steps)}"
        announce(f"{name}: {listed(shapes)}, {self.seeds} seeds,{more} {trainings}", True)
        with progress_bar(name, total) as advance:
            yield advance


def _steps(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers))} step{'' if tuple(numbers) == (1,) else 's'}"


def _coordinates_as_text(asked: Check, check: "CoordinateCheck") -> Iterator[str]:
    steps = _steps(asked._usual("steps"))
    yield f"{VERDICT[check.outcome]} along {asked.axis.replace('_', ' ')}, after {steps}:"
    for growth in check.growths:
        yield f"  {VERDICT[growth.outcome]:<12}{growth.sentence()}"


def _transfer_as_text(found: "TransferCheck | None") -> Iterator[str]:
    if found is not None:
        yield f"\nbest learning rate at sizes {', '.join(map(str, found.sizes))}:"
        yield f"  {found.sentence()}"


def _as_json(check: "CoordinateCheck", found: "TransferCheck | None") -> dict[str, Json]:
    growths = []
    for growth, fit in ((each, each.fit) for each in check.growths):
        ends = fit and [fit.interval.low, fit.interval.high]
        kept = {name: value for name, value in asdict(growth).items() if name != "fit"}
        said = {"seeds_needed": growth.seeds_needed, "sentence": growth.sentence()}
        growths.append(kept | {"exponent": fit and fit.exponent, "interval": ends} | said)
    data: dict[str, Json] = {"coordinate_check": {"outcome": check.outcome, "growths": growths}}
    if found is not None:
        fitted, low, high = found.decades
        rates = {"best_rates": found.learning_rates.tolist()}
        decades = {"decades_over_factor_8": {"fitted": fitted, "interval": [low, high]}}
        stated = {"outcome": found.outcome, "sizes": list(found.sizes)}
        data["transfer_check"] = stated | rates | decades | {"sentence": found.sentence()}
    return json_ready(data)  # JSON has no infinity: an end that is not known is null
