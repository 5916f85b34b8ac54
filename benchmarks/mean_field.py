"""The mean-field solver beside what it replaces: ensembles of networks, a loop of PyTorch trainings, plain sampling.

    python benchmarks/mean_field.py [ensembles] [growth] [torch] [figures]

One thread, float64, medians of repeats with their range; CPU time, compilation excluded where it is not given. Threes
against fives of the digits, four tokens an image, by gradient descent at richness 0.75. About six minutes in all.

* ``ensembles``: how many networks of which size have a mean as near to the limit as the solver. Spread and bias of
  networks are measured; a mean of M networks of size H is then taken to be sqrt(bias^2 / H^2 + spread^2 / (H M)) away,
  which is put to the test at an error that can be reached, and continued to the solver's own.
* ``growth``: CPU time against samples, tokens, steps, depth and heads, beside the stated powers.
* ``torch``: `train_networks` against a loop of PyTorch trainings that start from the same weights and end with the same
  outputs.
* ``figures``: the solver at 512 token-times, and the error of plain heads, whose normals are used as they are drawn.
"""

import os
import resource
import statistics
import sys
import time
from dataclasses import dataclass

from _shared import ONE_THREAD, ratio_of, versions_of

os.environ.update(ONE_THREAD)

import jax
import numpy as np

from manyheads.statistics import fit_exponent
from manyheads.theory.dmft import Network, Problem, Sampling, infinite_heads, infinite_key_dim, train_networks
from manyheads.theory.dmft.finite.problems import digits_problem

REPEATS = 3
TRAINING = {"learning_rate": 0.25, "richness": 0.75}
NEAR = 0.01  # an error that an ensemble reaches in seconds
CHUNK = 16  # networks that are trained at once; numbers of networks are multiples of it
ENSEMBLES = 8  # on which the predicted error is put to the test


def timed(task):
    """Return CPU seconds, wall seconds and what the task returns."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = task()
    return time.process_time() - cpu, time.perf_counter() - wall, found


def repeated(task, repeats=REPEATS):
    """Return CPU seconds and wall seconds of every repeat, and what the last one returned."""
    runs = [timed(task) for _ in range(repeats)]
    return [run[0] for run in runs], [run[1] for run in runs], runs[-1][2]


def shown(values):
    """Return the median with the range."""
    return f"{statistics.median(values):.3g} ({min(values):.3g} to {max(values):.3g})"


def rms(values):
    """Return the root mean square."""
    return float(np.sqrt(np.mean(np.asarray(values) ** 2)))


# ensembles: the solver against the mean of networks


LIMITS = {
    "N = 4, infinitely many heads": (
        lambda lesson, seed: infinite_heads(lesson, 4, sampling=Sampling(seed=seed)),
        lambda size: Network(4, size),
        "H",
    ),
    "four heads, infinite key dimension": (
        lambda lesson, seed: infinite_key_dim(lesson),
        lambda size: Network(size, 4),
        "N",
    ),
}
MEASURED = {4: 512, 16: 512, 64: 128, 128: 32}  # networks of each size


def train(lesson, network, count, first=0):
    """Return outputs (networks, step, read_out, class) of networks with seeds from `first` on."""
    return train_networks(lesson, network, range(first, first + count), chunk=CHUNK).output.values


@dataclass(frozen=True)
class Law:
    """Measurements of networks of some sizes, and the laws that continue them."""

    spreads: dict  # rms distance of single networks from their mean
    biases: dict  # rms distance of the mean from the limit, without what a mean of so many scatters; zero: unresolved
    seconds: dict  # CPU time of one network

    @staticmethod
    def measure(lesson, network, limit):
        """Train networks of every size."""
        law = Law({}, {}, {})
        for size, count in MEASURED.items():
            train(lesson, network(size), CHUNK)  # compiles
            cpu, _, outputs = timed(lambda size=size, count=count: train(lesson, network(size), count))
            variance = outputs.var(0, ddof=1).mean()
            square = np.mean((outputs.mean(0) - limit) ** 2) - variance / count
            law.spreads[size], law.biases[size] = float(variance**0.5), float(max(square, 0.0) ** 0.5)
            law.seconds[size] = cpu / count
        return law

    @property
    def power(self):
        """Power of the size that the time of one network follows at the end."""
        (small, first), (large, last) = list(self.seconds.items())[-2:]
        return float(np.log(last / first) / np.log(large / small))

    def cheapest(self, error):
        """Return CPU seconds, size and number of networks whose mean has an error; sizes are powers of two."""
        sizes = list(MEASURED)
        bias = np.mean([size * self.biases[size] for size in sizes[:2]])  # where it is resolved
        spread = rms([size**0.5 * self.spreads[size] for size in sizes])
        plans = []
        for size in 2 ** np.arange(2, 15):
            rest = error**2 - (bias / size) ** 2
            if rest > 0:
                count = CHUNK * int(np.ceil(spread**2 / (size * rest) / CHUNK))
                one = np.interp(np.log(size), np.log(sizes), np.log([self.seconds[known] for known in sizes]))
                plans.append((count * np.exp(one) * max(1.0, size / sizes[-1]) ** self.power, int(size), count))
        return min(plans)

    def said(self, letter):
        """Return all that was measured."""
        parts = []
        for size, count in MEASURED.items():
            bias = f"{self.biases[size]:.4f}" if self.biases[size] else "not resolved"
            one = f"{self.spreads[size]:.3f}, {bias}, {1e3 * self.seconds[size]:.3g} ms"
            parts.append(f"{letter} = {size} ({count} networks): {one}")
        return f"spread, bias, CPU time of one: {'; '.join(parts)}; time continued like {letter}^{self.power:.2f}"


def try_ensembles(lesson, network, count, limit):
    """Return the median CPU time of ensembles, and the rms distance of their means from the limit."""
    train(lesson, network, CHUNK)
    starts = range(10_000, 10_000 + ENSEMBLES * count, count)
    runs = [timed(lambda start=start: train(lesson, network, count, start)) for start in starts]
    return statistics.median(run[0] for run in runs), rms([rms(run[2].mean(0) - limit) for run in runs])


def compare_ensembles():
    """Print what a mean of networks costs that is as near as the solver."""
    lesson, notes = digits_problem(steps=12, **TRAINING), []
    print(
        "| limit | error of the mean output | solver, CPU s | networks that have it | their CPU | times the solver's |"
    )
    print("|---|---|---|---|---|---|")
    for name, (solve, network, letter) in LIMITS.items():
        spent, _, solved = repeated(lambda solve=solve: solve(lesson, 0))
        limit = solved.output.values
        law = Law.measure(lesson, network, limit)
        sampled = "output_error" in solved
        claimed = rms(solved.output_error) if sampled else 1e-3
        for error in (NEAR, claimed):
            cost, size, count = law.cheapest(error)
            how = "continued"
            if error == NEAR:
                cost, reached = try_ensembles(lesson, network(size), count, limit)
                how = f"trained {ENSEMBLES} times: {reached:.1e}"
            wanted = f"{error:.1e}" + (", as the solver reports" if sampled and error == claimed else "")
            time_of = f"{cost:.3g} s" if cost < 3600 else f"{cost / 3600:.3g} h"
            cells = f"{count:,} of {letter} = {size} ({how}) | {time_of} | {cost / statistics.median(spent):.3g}"
            print(f"| {name} | {wanted} | {shown(spent)} | {cells} |", flush=True)
        notes.append(f"{name}: {law.said(letter)}.")
    print("", *notes, sep="\n")


# growth: exponents beside the stated ones


def lesson_of(samples=4, tokens=4, steps=16, depth=1):
    """Return random tokens and targets of a size."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((samples, tokens, 16))
    return Problem(inputs, rng.standard_normal(samples), steps=steps, depth=depth, **TRAINING)


AXES = {
    "samples P": ("samples", (8, 16, 32), {"steps": 8}, "3 (n^3)"),
    "tokens T": ("tokens", (8, 16, 32), {"steps": 8}, "3 (n^3)"),
    "steps S": ("steps", (16, 32, 64), {}, "3 (n^3)"),
    "depth L": ("depth", (2, 4, 8), {}, "1 to 2 (L n^3 branches + L^2 n^3 stream)"),
}


def measure_growth():
    """Print CPU times along each axis, and the power that they follow."""
    print("| solver | axis | sizes | n = S P T | CPU s | power, first to last | power, last step | stated |")
    print("|---|---|---|---|---|---|---|---|")
    infinite_key_dim(lesson_of())  # imports and first touches of memory
    rows = []
    for axis, (name, sizes, others, stated) in AXES.items():
        lessons = [lesson_of(**others | {name: size}) for size in sizes]
        runs = [repeated(lambda lesson=lesson: infinite_key_dim(lesson))[0] for lesson in lessons]
        rows.append(("infinite key dimension", axis, sizes, lessons, runs, stated))
    lesson, heads = lesson_of(steps=8), (2048, 4096, 8192)
    runs = [
        repeated(lambda count=count: infinite_heads(lesson, 4, sampling=Sampling(samples=count, most=count)))[0]
        for count in heads
    ]
    rows.append(("infinitely many heads, N = 4", "sampled heads", heads, [lesson] * len(heads), runs, "1"))
    for solver, axis, sizes, lessons, runs, stated in rows:
        powers = fit_exponent(sizes, np.transpose(runs)), fit_exponent(sizes[-2:], np.transpose(runs)[:, -2:])
        rows_of = [lesson.steps * lesson.rows for lesson in lessons]
        cells = [solver, axis, ", ".join(map(str, sizes)), ", ".join(map(str, rows_of))]
        cells += [", ".join(f"{statistics.median(run):.2g}" for run in runs)]
        cells += [f"{power.exponent:.2f}" for power in powers] + [stated]
        print("| " + " | ".join(cells) + " |", flush=True)


# torch: batched networks against a loop


def draw_weights(lesson, network, seed):
    """Return the weights from which `train_networks` starts."""
    from manyheads.theory.dmft.finite.ensembles import _draw, _Frame

    with jax.enable_x64(True):
        drawn = _draw(jax.random.key(seed), lesson.inputs.shape[-1], lesson.classes, _Frame.of(lesson), network)
        return {name: np.asarray(value) for name, value in drawn.items()}


def torch_loop(lesson, network, starts):
    """Train one network after the other, as one would write it; outputs (networks, step, read_out, class)."""
    import torch

    torch.set_num_threads(1)
    width, n = network.width, network.key_dim
    inputs, wanted, shares = (
        torch.tensor(part) for part in (lesson.inputs, lesson.flat_targets, lesson.loss_weights[0])
    )
    branch = lesson.branch * lesson.depth**-lesson.depth_exponent
    rate = lesson.learning_rate * lesson.richness**2 * width
    inside = rate * lesson.depth ** (2 * lesson.depth_exponent - 1)

    def forward(weights):
        stream = inputs @ weights["embedding"].T / inputs.shape[-1] ** 0.5
        for layer in range(lesson.depth):
            seen = stream[:, None] / width**0.5
            query, key, value = (seen @ weights[name][layer].mT for name in ("query", "key", "value"))  # (P, H, T, N)
            mixed = torch.softmax(query @ key.mT / n, -1) @ value
            out = weights["output"][layer].permute(1, 2, 0)  # (H, N, d)
            stream = stream + branch / width**0.5 * (mixed @ out).sum(1)
        return stream.mean(1) @ weights["readout"].T / (lesson.richness * width)

    every = []
    for start in starts:
        weights = {name: torch.tensor(value, requires_grad=True) for name, value in start.items()}
        groups = [
            {"params": [weight], "lr": rate if name in ("embedding", "readout") else inside}
            for name, weight in weights.items()
        ]
        optimizer, outputs = torch.optim.SGD(groups), []
        with torch.no_grad():
            before = forward(weights)
        for _ in range(lesson.steps):
            optimizer.zero_grad()
            output = forward(weights) - before
            loss = (shares * ((wanted - output) ** 2).sum(-1)).sum() / 2
            loss.backward()
            optimizer.step()
            outputs.append(output.detach().numpy())
        every.append(outputs)
    return np.array(every)


def compare_torch():
    """Print times of both, and how far apart outputs are."""
    print(
        "| N, H, L | networks | ours, CPU s | compilation | torch loop | torch over ours (range) | largest difference |"
    )
    print("|---|---|---|---|---|---|---|")
    for key_dim, heads, depth, count in ((4, 4, 1, 64), (4, 4, 4, 64), (16, 4, 2, 64), (64, 4, 2, 16)):
        lesson, network = digits_problem(steps=12, depth=depth, **TRAINING), Network(key_dim, heads)
        starts = [draw_weights(lesson, network, seed) for seed in range(count)]
        once, _, _ = timed(lambda: train(lesson, network, count))  # noqa: B023
        fast, _, ours = repeated(lambda: train(lesson, network, count))  # noqa: B023
        torch_loop(lesson, network, starts[:1])
        slow, _, theirs = repeated(lambda: torch_loop(lesson, network, starts))  # noqa: B023
        times = f"{shown(fast)} | {once - statistics.median(fast):.1f} s | {shown(slow)}"
        cells = f"{times} | {ratio_of(slow, fast)} | {np.abs(ours - theirs).max():.0e}"
        print(f"| {key_dim}, {heads}, {depth} | {count} | {cells} |", flush=True)


# figures: the solver at 512 token-times


def solve_with(lesson, heads, seed):
    """Solve with so many heads in each of two halves."""
    return infinite_heads(lesson, 4, sampling=Sampling(seed=seed, samples=heads, most=heads))


def solve_plainly(lesson, heads, seed):
    """Solve with normals as they are drawn, neither matched nor in groups of signs."""
    from manyheads.theory.dmft.branches import attention_infinite_heads as attention_heads

    kept = attention_heads.signed_normals
    attention_heads.signed_normals = lambda rng, rows, count, width: rng.standard_normal((4, rows, count * width))
    try:
        return solve_with(lesson, heads, seed)
    finally:
        attention_heads.signed_normals = kept


def print_figures():
    """Print time of the three solutions, and errors of sampled ones against the mean of independent solutions."""
    lesson = digits_problem(samples=8, tests=0, steps=16, **TRAINING)
    deep = digits_problem(samples=8, tests=0, steps=16, depth=4, **TRAINING)
    print(f"n = S P T = {lesson.steps * lesson.rows}\n")
    print("| solution | CPU s | wall s | rms error of the outputs |")
    print("|---|---|---|---|")
    infinite_key_dim(digits_problem(steps=2, **TRAINING))
    for name, problem in (("infinite key dimension, L = 1", lesson), ("infinite key dimension, L = 4", deep)):
        cpu, wall, _ = repeated(lambda problem=problem: infinite_key_dim(problem))
        print(f"| {name} | {shown(cpu)} | {shown(wall)} | exact to rounding |", flush=True)
    runs = [timed(lambda seed=seed: infinite_heads(lesson, 4, sampling=Sampling(seed=seed))) for seed in range(REPEATS)]
    solved = [run[2].output.values for run in runs]
    # Each against the mean of the others, whose own error is taken off as if all were equally good.
    apart = [rms(one - np.mean([x for x in solved if x is not one], axis=0)) for one in solved]
    default = [value / (1 + 1 / (REPEATS - 1)) ** 0.5 for value in apart]
    say("as by default", runs, default)
    truth = np.mean(solved, axis=0)
    fewest = 32 * lesson.steps * lesson.rows // 4  # heads of a half whose moments can be matched, N = 4
    for name, first, solve in (
        (f"two halves of {fewest}", 100, lambda seed: solve_with(lesson, fewest, seed)),
        ("two halves of 2048, plain", 200, lambda seed: solve_plainly(lesson, 2048, seed)),
    ):
        runs = [timed(lambda seed=seed, solve=solve: solve(seed)) for seed in range(first, first + REPEATS)]
        say(name, runs, [rms(run[2].output.values - truth) for run in runs])


def say(name, runs, errors):
    """Print one way of sampling heads."""
    cells = f"{shown([run[0] for run in runs])} | {shown([run[1] for run in runs])} | {shown(errors)}"
    print(f"| infinitely many heads, N = 4, {name} | {cells} |", flush=True)


PARTS = {
    "ensembles": compare_ensembles,
    "growth": measure_growth,
    "torch": compare_torch,
    "figures": print_figures,
}


def main():
    """Run the parts that were asked for, or all."""
    wanted = sys.argv[1:] or list(PARTS)
    if unknown := set(wanted) - set(PARTS):
        sys.exit(f"unknown part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    for part in wanted:
        print(f"\n{part}\n")
        PARTS[part]()
    packages = ["manyheads", "jax", "numpy", "scipy"] + ["torch"] * ("torch" in wanted)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"\n{versions_of(*packages)}, peak {peak:.1f} GB")


if __name__ == "__main__":
    main()
