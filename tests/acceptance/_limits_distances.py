"""How far networks are from the mean-field theory of their training: powers of the size, and the mean network."""

from collections.abc import Sequence

import numpy as np
import xarray as xr
from tests.acceptance._limits_meanfield import looked, rms, solve

from manyheads.statistics import Interval, fit_exponent, mean_interval
from manyheads.statistics.exponents import ExponentFit
from manyheads.theory.dmft import Network, Problem, train_networks
from manyheads.theory.dmft.branches.branch import Branch
from manyheads.theory.dmft.dataset import Trajectory

GROUPS = 16  # networks are averaged in so many groups, which are the replicates of intervals


def apart(found: xr.Dataset, limit: Trajectory) -> dict[str, np.ndarray]:
    """Mean square distances of single networks from the limit, (networks,): outputs, and what is there at the end."""
    branches = (limit.stream.shape[1] - 1) // (found.sizes["level"] - 1)  # of a block
    pairs = {
        "outputs": (found.output, limit.outputs),
        "logits": (found.logits[:, -1], looked(limit, "logits")),
        "pooled": (found.pooled[:, -1], limit.pooled[-1]),
        "stream": (found.stream[:, -1], limit.stream[-1, ::branches]),
    }
    squares = {name: (values.values - wanted) ** 2 for name, (values, wanted) in pairs.items()}
    return {name: square.reshape(len(square), -1).mean(1) for name, square in squares.items()}


def power(sizes: Sequence[int], squares: Sequence[np.ndarray], root: bool = True) -> ExponentFit:
    """Power of the size in the (root) mean over networks, with Student's interval over groups of them."""
    means = np.stack([square.reshape(GROUPS, -1).mean(1) for square in squares], axis=1)
    return fit_exponent(sizes, np.sqrt(means) if root else means)


def powers(sizes: Sequence[int], every: Sequence[dict[str, np.ndarray]], letter: str, off: float) -> tuple[str, bool]:
    """Words for the powers of all distances, and whether their intervals lie within -1/2 +- off."""
    fits = {name: power(sizes, [squares[name] for squares in every]) for name in every[0]}
    passed = all(fit.interval.within(Interval(-0.5 - off, -0.5 + off)) for fit in fits.values())
    return ", ".join(f"{name} {letter}^{shown(fit.exponent, fit.interval)}" for name, fit in fits.items()), passed


def bias(found: xr.Dataset, solution: np.ndarray, other: np.ndarray | None = None) -> tuple[float, Interval]:
    """Root mean square distance of the mean network's outputs from a solution, the noise of the mean taken away.

    With `other`, an independent solution of the same, half their difference is the solution's own error and is taken
    away alike.
    """
    wrong = 0.0 if other is None else rms(solution - other) ** 2 / 4
    squares = bare(found.output.values, solution if other is None else (solution + other) / 2) - wrong
    return signed_root(squares.mean()), mean_interval(squares).mapped(signed_root)


def bare(outputs: np.ndarray, solution: np.ndarray) -> np.ndarray:
    """Pseudo-values (groups,) of the mean square distance of the mean network from a solution, free of its noise.

    The products of the distances of two different groups are averaged, whose mean is the square of the bias; the
    jackknife over groups gives pseudo-values of which Student's interval is taken. It is too wide by a half rather than
    too narrow where there is no bias at all.
    """
    apart = outputs.reshape(GROUPS, -1, solution.size).mean(1) - solution.ravel()  # (groups, entries)
    total, own = apart.sum(0), (apart**2).sum(0)
    whole = np.mean(total**2 - own) / (GROUPS * (GROUPS - 1))
    left = np.mean((total - apart) ** 2 - (own - apart**2), axis=1) / ((GROUPS - 1) * (GROUPS - 2))
    return GROUPS * whole - (GROUPS - 1) * left


def signed_root(square: float) -> float:
    return float(np.sign(square) * np.sqrt(abs(square)))


def shown(value: float, interval: Interval, digits: int = 2) -> str:
    return f"{value:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def about(limit: Trajectory) -> str:
    """What the limit itself does: a reader sees whether training settles and whether attention moves."""
    return f"limit: loss {limit.losses[0]:.2f} -> {limit.losses[-1]:.3f}, rms logits {rms(looked(limit, 'logits')):.3f}"


def train(problem: Problem, network: Network, seeds: int) -> xr.Dataset:
    return train_networks(problem, network, range(seeds), chunk=max(16, 4096 // network.width))


def approach(
    problem: Problem, networks: Sequence[Network], letter: str, branches: Sequence[Branch], seeds: int, off: float
) -> tuple[list[xr.Dataset], Trajectory, str, bool]:
    """Train networks of growing size; return them, the limit, words, and whether single ones approach."""
    limit = solve(problem, *branches)
    found = [train(problem, network, seeds) for network in networks]
    sizes = [network.key_dim if letter == "N" else network.heads for network in networks]
    words, passed = powers(sizes, [apart(each, limit) for each in found], letter, off)
    return found, limit, words, passed


def means(
    found: xr.Dataset, problem: Problem, branches: Sequence[Branch], most: float, least: float
) -> tuple[str, bool]:
    """Words for the bias of the largest networks, with and without responses, and whether it is small and large."""
    near, within = bias(found, *solutions(problem, branches))
    far, without = bias(found, solve(problem, *branches, responses=False).outputs)
    words = f"bias {shown(near, within, 4)}, without responses {shown(far, without, 3)}"
    return words, bool(within.high <= most and without.low >= least)


def solutions(problem: Problem, branches: Sequence[Branch]) -> list[np.ndarray]:
    """Outputs of the limit, and once more with independent samples where it is sampled."""
    return [solve(problem, *branches, seed=seed).outputs for seed in range(1 + any(each.sampled for each in branches))]
