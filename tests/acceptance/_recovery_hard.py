"""Hard layers: their Fourier weights, what a student makes of them, and what comes of broken assumptions."""

import itertools
import math
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._studies import study, words_of

from manyheads.recovery.examples.six_stages import learn_in_six_stages
from manyheads.recovery.examples.student import StudentSettings, fit_student
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.layers.matching import function_error
from manyheads.recovery.planted.hard_instances import attention_signal, guarantees, parity_layer, wave_layer
from manyheads.recovery.planted.task import planted_layer, sequences
from manyheads.recovery.planted.violations import DEFORMATIONS, deformed_layer
from manyheads.recovery.refusals import RecoveryRefused

STUDENT = StudentSettings(restarts=1, evaluations=300, refinement=GaussNewtonSettings(steps=20, inner=60))
MOST_STARTS = 12


def fourier_weights(folder: Path, heads: list[int], dims: list[int]) -> Measured:
    """Transform the signal over every setting of the signs; compare layers of all hidden sets."""
    worst, across = 0.0, 0.0
    for count in heads:
        hidden = tuple(range(1, count + 1))
        layer = parity_layer(count + 1, count, hidden)
        z = np.array(list(itertools.product([1.0, -1.0], repeat=2 * count)))
        x = np.ones((len(z), 2, count + 1))
        x[:, 1, 0] = -1
        x[:, 0, 1:], x[:, 1, 1:] = z[:, :count], -z[:, count:]
        values = attention_signal(layer, x)[:, 0, 0].reshape((2,) * 2 * count)
        for axis in range(2 * count):
            plus, minus = np.take(values, 0, axis), np.take(values, 1, axis)
            values = np.stack([(plus + minus) / 2, (plus - minus) / 2], axis)
        by_degree = np.bincount(np.indices(values.shape).sum(0).ravel(), (values**2).ravel(), 2 * count + 1)
        worst = max(worst, by_degree[: 2 * count - 1].sum() / by_degree.sum())
        worst = max(worst, guarantees(layer, hidden).share_up_to(2 * count - 2))
    for dim, count in itertools.product(dims, heads):
        if not 2 <= count < dim - 1:
            continue
        x = np.array(list(itertools.product([1.0, -1.0], repeat=2 * dim))).reshape(-1, 2, dim)
        sets = itertools.combinations(range(1, dim), count)
        signals = np.stack([attention_signal(parity_layer(dim, count, hidden), x).ravel() for hidden in sets])
        gram = signals @ signals.T / len(x) / (2 / count)
        across = max(across, float(np.abs(gram - np.eye(len(gram))).max()))
    extent = f"largest scalar product of two signals {across:.1e}, of all sets at d = {', '.join(map(str, dims))}"
    return Measured(f"{worst:.1e}", extent, "none", worst < 1e-20 and across < 1e-10)


def against_student(folder: Path, sizes: dict[str, list[int]], samples: int, seeds: int) -> Measured:
    """Solve an ordinary layer, then give a hard one of its size as many CPU seconds, and whole starts."""
    left: dict[str, list[float]] = {name: [] for name in sizes}
    shown, solved = [], 0.0
    for (name, (dim, heads, size)), seed in itertools.product(sizes.items(), range(seeds)):
        rng = np.random.default_rng([seed, dim, heads])
        hidden = tuple(int(one) for one in 1 + rng.permutation(dim - 1)[:size])
        hard = (parity_layer if name == "parity" else wave_layer)(dim, heads, hidden)
        ordinary, needed, starts = teach(planted_layer(rng, dim, heads), samples, math.inf, rng)
        unexplained, seconds, _ = teach(hard, samples, needed, rng)
        left[name].append(unexplained)
        solved = max(solved, ordinary)
        shown.append(
            f"{name} {unexplained:.2f} in {seconds:.0f} s (ordinary {ordinary:.0e} in {needed:.0f} s, {starts})"
        )
    least = min(min(values) for values in left.values())
    return Measured(f"{least:.2f} unexplained", "; ".join(shown), f"0-{seeds - 1}", least > 0.5 and solved < 1e-10)


def teach(layer, samples: int, seconds: float, rng: np.random.Generator) -> tuple[float, float, int]:
    """Start a student until it has solved the layer or used the seconds; return what it leaves, seconds, starts.

    What it leaves is a share of the signal: of what the best linear function of both tokens leaves of fresh labels.
    """
    x, fresh = (sequences(rng, samples, 2, layer.dim) for _ in range(2))
    y, labels = evaluate_layer(layer, x), evaluate_layer(layer, fresh)

    def both(tokens: np.ndarray) -> np.ndarray:
        return np.concatenate([tokens, tokens[:, ::-1]], -1).reshape(-1, 2 * layer.dim)

    linear = np.linalg.lstsq(both(x), y.reshape(-1, layer.dim), rcond=None)[0]
    signal = np.sum((labels.reshape(-1, layer.dim) - both(fresh) @ linear) ** 2)
    cut, best, spent, starts = samples * 9 // 10, None, 0.0, 0
    while starts < MOST_STARTS and (best is None or (best.held_out_error > 1e-12 and spent <= seconds)):
        examples, held = Examples(x[:cut], y[:cut]), Examples(x[cut:], y[cut:])
        fit = fit_student(examples, held, layer.heads, rng, wanted=1e-12, settings=STUDENT)
        spent, starts = spent + fit.seconds, starts + 1
        best = fit if best is None or fit.held_out_error < best.held_out_error else best
    assert best is not None
    return float(np.sum((evaluate_layer(best.layer, fresh) - labels) ** 2) / signal), spent, starts


def broken(folder: Path, names: list[str], dim: int, samples: int, seeds: int) -> Measured:
    """Learn layers that break an assumption in six stages: each is refused by name, or tested on fresh sequences."""
    shown, worst, refused = [], 0.0, 0
    for name, seed in itertools.product(names, range(seeds)):
        rng = np.random.default_rng([seed, *name.encode()])
        layer, inputs = deformed_layer(rng, name, dim, 2), DEFORMATIONS[name].inputs
        x, fresh = (sequences(rng, count, 2, dim, distribution=inputs) for count in (samples, 4000))
        try:
            found = learn_in_six_stages((x, evaluate_layer(layer, x)), 2, rng=rng).layer
        except RecoveryRefused as refusal:
            refused += 1
            shown.append(f"{name} {type(refusal).__name__}")
            continue
        error = function_error(lambda z, f=layer: evaluate_layer(f, z), lambda z, f=found: evaluate_layer(f, z), fresh)
        worst = max(worst, error)
        shown.append(f"{name} {error:.0e}")
    figure = f"{refused} of {len(names) * seeds} refused, worst error of the others {worst:.0e}"
    return Measured(figure, "; ".join(shown), f"0-{seeds - 1}", worst < 1e-10)


FIGURES = [
    Figure(
        "hard-fourier-weights",
        "Fourier weight of parity layers below degree 2m - 1, by enumeration",
        "below 1e-20 of all, m = 1 to 6; signals of different hidden sets orthogonal to 1e-10",
        fourier_weights,
        {"heads": [1, 2, 3, 4, 5, 6], "dims": [5, 6]},
    ),
    Figure(
        "hard-student",
        "signal that the restarted student leaves of parity and wave layers",
        "above 0.5 in the CPU seconds in which it solves an ordinary layer of the same size to 1e-10",
        against_student,
        {"sizes": {"parity": [16, 4, 4], "wave": [24, 16, 12]}, "samples": 6000, "seeds": 3},
    ),
    Figure(
        "broken-assumptions",
        "six stages after heads at cosine .995, cancelled sums, heavy diagonals, parity",
        "each run refused by name, or right on fresh sequences to 1e-10: nothing wrong is returned",
        broken,
        {
            "names": ["closer-heads", "cancelled", "heavy-diagonal", "parity"],
            "dim": 16,
            "samples": 100_000,
            "seeds": 3,
        },
    ),
    *(
        Figure(
            f"study-{name}",
            f"verdicts of recovery/{name}",
            "every outcome as expected",
            study,
            {"name": f"recovery/{name}", "replicates": 8},
            command=words_of(f"recovery/{name}", 8),
        )
        for name in ("hard-instances", "violations")
    ),
]
