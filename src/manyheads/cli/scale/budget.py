"""Memory and work of the trainings of `scale check`, estimated and limited before the first step."""

from typing import TYPE_CHECKING

from manyheads.errors import UsageError

if TYPE_CHECKING:
    from manyheads.scaling.task import Task
    from manyheads.transformer import Shape

LENGTH = {"digits": 16, "text": 32}  # tokens of a sequence
LARGEST_NETWORK = 10**9  # weights; with gradient and Adam's two means 16 GB
LARGEST_WORK = 1e16  # FLOPs of all trainings together: a day or two of an ordinary CPU
LEAST_WORK = 1e7  # FLOPs in the time of a step of the smallest network, which is that of starting its kernels
# Peak memory of a compiled training over what its weights, optimizer and residuals are traced to take: 1.0 where
# weights dominate, 1.3 to 1.6 where the batch does.
OVERHEAD = 1.5
COMPILING = 10  # seconds to compile the training of one size: 25 s of CPU time were measured for two, start included


def count_weights(shape: "Shape") -> int:
    """Count four projections, and two matrices of an MLP of four times the width, in every block."""
    return 12 * shape.depth * shape.width**2


def listed(shapes: "tuple[Shape, ...]") -> str:
    """Format shapes for messages."""
    return "(N, H, L) = " + ", ".join(f"({shape.key_dim}, {shape.heads}, {shape.depth})" for shape in shapes)


def refuse_memory(task: "Task", shapes: "tuple[Shape, ...]", batch: int, losses: tuple[int, int] | None) -> None:
    """Refuse what this machine cannot hold: a process beyond its memory is killed without a message.

    `losses` are steps and rates of the trainings whose losses are kept, if any.
    """
    import jax

    from manyheads._machine import machine_memory
    from manyheads.scaling.trained.transformers import training_bytes

    memory = machine_memory()
    if memory is None or jax.default_backend() != "cpu":  # an accelerator raises an error of its own
        return
    bytes_of = {shape: OVERHEAD * training_bytes(task.config(shape), "adam", task.batches) for shape in shapes}
    shape, here = max(bytes_of, key=bytes_of.__getitem__), f"this machine has {memory / 1e9:,.0f} GB"
    if bytes_of[shape] > memory:
        takes = f"to train {listed((shape,))} takes about {bytes_of[shape] / 1e9:,.0f} GB"
        raise UsageError(f"--batch {batch}: {takes}, and {here}; give a smaller --batch, or smaller --sizes")
    steps, rates = losses or (0, 0)
    kept = 12 * steps * rates  # in single and then in double precision
    if kept > memory:
        take = f"their losses take {kept / 1e9:,.0f} GB"
        raise UsageError(f"--train {steps} and --learning-rates with {rates} points: {take}, and {here}; give fewer")


def count_work(shapes: "tuple[Shape, ...]", tokens: int, steps: int, trainings: int) -> float:
    """Return the FLOPs of so many trainings of every shape, of batches of so many tokens."""
    return sum(max(LEAST_WORK, 6 * tokens * count_weights(shape)) for shape in shapes) * float(steps) * trainings


def tell_time(work: float, sizes: int) -> str:
    """Return how long trainings take, in words: compiling, and FLOPs at the rate of a matrix product measured here."""
    import timeit

    import numpy as np

    matrix = np.ones((512, 512), np.float32)
    seconds = min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=3))
    rate, compiling = 2 * 512**3 / seconds, COMPILING * sizes
    first = f"{compiling + work / rate:.0f} s: {compiling} s to compile {sizes} sizes, the first time"
    return f"{first}, and {work:.1e} FLOPs at {rate / 1e9:.0f} GFLOP/s"


def refuse_work(shapes: "tuple[Shape, ...]", tokens: int, flag: str, steps: int, trainings: int) -> None:
    """Refuse what would take days."""
    work, count = count_work(shapes, tokens, steps, trainings), trainings * len(shapes)
    if work > LARGEST_WORK:
        raise UsageError(f"{flag} {steps}: {count} trainings take about {work:.1g} FLOPs; give fewer steps or seeds")
