"""Three front doors to the solver: infinitely many heads, infinite key dimension, infinite depth.

Each composes blocks from branches, plans the march, runs it, and returns a labelled dataset. Where a branch is sampled
the march runs twice with independent samples: the mean of the two is returned, half their difference as the error, and
samples are doubled until an error that was asked for is reached.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr

from manyheads.errors import CertificateError, UsageError
from manyheads.limits.theory.attention_heads import AttentionHeads
from manyheads.limits.theory.attention_limit import AttentionLimit
from manyheads.limits.theory.branches import Branch
from manyheads.limits.theory.depth import cells_in_depth, extrapolate
from manyheads.limits.theory.marching import Depthwise, March, blocks_in_depth, march
from manyheads.limits.theory.perceptron import Perceptron
from manyheads.limits.theory.plans import Plan
from manyheads.limits.theory.problem import Problem
from manyheads.limits.theory.uniform_attention import UniformAttention


@dataclass(frozen=True)
class Sampling:
    """How sampled branches are sampled.

    Attributes
    ----------
    seed
        Of the samples.
    samples
        Heads, or neurons, of each of the two halves; None takes the fewest that match moments, at least 512.
    tolerance
        Root mean square error of the outputs that is asked for; None takes what the samples give.
    most
        Samples are doubled up to so many.
    memory
        Bytes that a march may keep.
    """

    seed: int = 0
    samples: int | None = None
    tolerance: float | None = None
    most: int = 65_536
    memory: float = 4e9


def infinite_key_dim(
    problem: Problem, *, logit_exponent: float = 1.0, activation: str | None = None, sampling: Sampling | None = None
) -> xr.Dataset:
    """Solve the limit of infinite key dimension N, at any number of heads and finite depth.

    Parameters
    ----------
    problem
        What is trained.
    logit_exponent
        alpha_A; 1 only.
    activation
        Of an MLP after every attention; None for none. Without it nothing is sampled.
    sampling
        How neurons are sampled.

    Returns
    -------
    Dataset with `output` (step, output, class), `loss` (step), kernels at equal times `stream` and `backward` (step,
    level, row, row_too) and `pooled` (step, output, output_too), `logits` (step, layer, sample, token, key); with
    sampled branches the error of each beside it, such as `output_error`.

    Raises
    ------
    UsageError
        Logit exponent below 1, or a solution that does not fit into memory.
    CertificateError
        The error that was asked for is not reached with the most samples.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.limits import Problem, infinite_key_dim
    >>> rng = np.random.default_rng(0)
    >>> problem = Problem(rng.standard_normal((2, 2, 8)), np.array([1.0, -1.0]), steps=8, rate=0.3)
    >>> solved = infinite_key_dim(problem)
    >>> bool(solved.loss[-1] < solved.loss[0] / 4)
    True

    References
    ----------
    Bordelon, Chaudhry, Pehlevan, arXiv 2405.15712.
    """
    if logit_exponent != 1:
        raise UsageError(
            f"logit_exponent={logit_exponent}: what is sent back through the initial query and key weights grows like "
            "N^(1 - alpha_A), so that with anything trained below the attention infinite key dimension is no stable "
            "limit; solve infinitely many heads at a fixed key dimension (`infinite_heads`)"
        )
    return _solve(problem, [AttentionLimit()], activation, sampling or Sampling())


def infinite_heads(
    problem: Problem,
    key_dim: int,
    *,
    logit_exponent: float = 1.0,
    activation: str | None = None,
    sampling: Sampling | None = None,
) -> xr.Dataset:
    """Solve the limit of infinitely many heads of key dimension N, at finite depth; heads are sampled.

    Parameters, returned variables and errors are those of `infinite_key_dim`, with any `logit_exponent` from 1/2 to 1;
    besides `logit_variance` (step, layer, sample, token, key), the variance of the logits over heads.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.limits import Problem, infinite_heads
    >>> rng = np.random.default_rng(0)
    >>> problem = Problem(rng.standard_normal((2, 2, 8)), np.array([1.0, -1.0]), steps=4, rate=0.3)
    >>> solved = infinite_heads(problem, key_dim=2, logit_exponent=0.5)
    >>> before = solved.logit_variance.values[0, 0, 0]  # over heads it is X_aa X_bb at the start, at any N
    >>> sizes = np.diag(problem.gram)[:2]
    >>> bool(np.allclose(before, np.outer(sizes, sizes), rtol=0.2)), bool(solved.output_error.max() < 0.05)
    (True, True)
    """
    return _solve(problem, [AttentionHeads(key_dim, 4, logit_exponent)], activation, sampling or Sampling())


def infinite_depth(
    problem: Problem,
    *,
    key_dim: int | None = None,
    activation: str | None = None,
    cells: int = 8,
    sampling: Sampling | None = None,
) -> xr.Dataset:
    """Solve the limit of infinite depth, at infinite key dimension or with infinitely many heads of key dimension N.

    At depth exponent 1 the equation in depth is solved in `cells` midpoint cells. Below it attention at infinite key
    dimension stays uniform: its closed equation is solved in cells between 1/2 and 1; at 1/2 `cells` and 2 `cells`
    blocks are extrapolated.

    Parameters
    ----------
    problem
        What is trained; its depth is not used.
    key_dim
        N of infinitely many heads; None is infinite, too.
    activation
        Of an MLP in every block; None for none.
    cells
        Cells of the depth; the error falls like one over their square.
    sampling
        How heads and neurons are sampled.

    Returns
    -------
    Dataset as from `infinite_key_dim`, over cells instead of layers.

    Raises
    ------
    UsageError
        A key dimension or an MLP at a depth exponent strictly between 1/2 and 1, whose continuum is not closed here.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.limits import Problem, infinite_depth
    >>> rng = np.random.default_rng(0)
    >>> problem = Problem(rng.standard_normal((2, 2, 8)), np.array([1.0, -1.0]), steps=4, rate=0.3)
    >>> few, many = (infinite_depth(problem, cells=cells) for cells in (4, 16))
    >>> bool(abs(few.output - many.output).max() < 0.003)
    True
    """
    sampling = sampling or Sampling()
    plain = key_dim is None and activation is None
    attention: Branch = AttentionLimit() if key_dim is None else AttentionHeads(key_dim, 4)
    if problem.depth_exponent < 1 and plain:
        attention = UniformAttention()
    if problem.depth_exponent == 0.5:
        shallow, deep = (
            _solve(replace(problem, depth=depth), [attention], activation, sampling, raw=True)
            for depth in (cells, 2 * cells)
        )
        halves = [extrapolate(coarse, fine) for coarse, fine in zip(shallow, deep, strict=True)]
        return _label(problem, halves)
    if problem.depth_exponent < 1 and not plain:
        raise UsageError(
            f"depth_exponent={problem.depth_exponent}: with heads or an MLP the continuum is solved at 1/2 and 1 only"
        )
    return _solve(problem, [attention], activation, sampling, cells=cells)


def _solve(
    problem: Problem,
    blocks: list[Branch],
    activation: str | None,
    sampling: Sampling,
    *,
    cells: int | None = None,
    raw: bool = False,
) -> Any:
    """Plan, march, and march again with more samples while their error is too large."""
    depthwise = blocks_in_depth(problem) if cells is None else cells_in_depth(problem, cells)
    branches = blocks if activation is None else [*blocks, Perceptron(activation)]
    factor = 1
    while True:
        sized = [_sized(branch, problem, sampling, factor) for branch in branches]
        layers = [[branch] for branch in sized] * problem.depth if cells is None else [sized] * cells
        Plan.of(problem, layers, depthwise).check(sampling.memory)
        halves = _halves(problem, layers, depthwise, sampling.seed)
        error = _error(halves)
        if sampling.tolerance is None or error <= sampling.tolerance:
            return halves if raw else _label(problem, halves)
        factor *= 2
        if max(branch.samples for branch in sized if branch.sampled) * 2 > sampling.most:  # type: ignore[attr-defined]
            raise CertificateError(
                f"outputs are not known to the error that was asked for with {sampling.most} samples: raise `most`, or "
                "take a smaller richness or fewer steps",
                measured=error,
                threshold=sampling.tolerance,
            )


def _sized(branch: Branch, problem: Problem, sampling: Sampling, factor: int) -> Branch:
    """Return a branch with its samples: what was asked for, or twice the fewest that match moments."""
    rows = problem.steps * problem.rows
    if isinstance(branch, AttentionHeads):
        fewest = max(512, 4 * -(-16 * rows // branch.key_dim))
        return replace(branch, samples=factor * (sampling.samples or fewest))
    if isinstance(branch, Perceptron):
        return replace(branch, samples=factor * (sampling.samples or max(2048, 8 * rows)))
    return branch


def _halves(problem: Problem, layers: list[list[Branch]], depthwise: Depthwise, seed: int) -> list[March]:
    """March once, or twice with independent samples."""
    sampled = any(branch.sampled for layer in layers for branch in layer)
    streams = np.random.default_rng(seed).spawn(2 if sampled else 1)
    return [
        march(problem, [[branch.start(problem, stream) for branch in layer] for layer in layers], depthwise)
        for stream in streams
    ]


def _error(halves: list[March]) -> float:
    """Root mean square error of the mean of two halves, from their difference; zero where nothing is sampled."""
    if len(halves) == 1:
        return 0.0
    return float(np.sqrt(np.mean((halves[0].outputs - halves[1].outputs) ** 2)) / 2)


def _label(problem: Problem, halves: list[March]) -> xr.Dataset:
    """Give names to what the halves left: their mean, and half of their difference as the error."""
    dims = {
        "output": ("step", "output", "class"),
        "loss": ("step",),
        "stream": ("step", "level", "row", "row_too"),
        "backward": ("step", "level", "row", "row_too"),
        "pooled": ("step", "output", "output_too"),
        "logits": ("step", "layer", "sample", "token", "key"),
        "logit_variance": ("step", "layer", "sample", "token", "key"),
    }
    found = [_arrays(half) for half in halves]
    variables: dict[str, Any] = {}
    for name, axes in dims.items():
        if name not in found[0]:
            continue
        values = [arrays[name] for arrays in found]
        about = {"long_name": _NAMES[name], "units": "1"}
        variables[name] = (axes, np.mean(values, axis=0), about)
        if len(values) == 2:
            spread = np.abs(values[0] - values[1]) / 2
            variables[f"{name}_error"] = (axes, spread, {"long_name": f"error of the {_NAMES[name]}", "units": "1"})
    coords = {"step": np.arange(problem.steps)}
    return xr.Dataset(variables, coords=coords, attrs={"rate": problem.rate, "richness": problem.richness})


_NAMES = {
    "output": "output",
    "loss": "training loss",
    "stream": "kernel of the residual stream",
    "backward": "kernel of the backward variable",
    "pooled": "kernel of what is read out",
    "logits": "attention logits, mean over heads",
    "logit_variance": "variance of attention logits over heads",
}


def _arrays(half: March) -> dict[str, np.ndarray]:
    arrays = {
        "output": half.outputs,
        "loss": half.losses,
        "stream": half.stream,
        "backward": half.backward,
        "pooled": half.pooled,
    }
    for name in ("logits", "logit_variance"):
        shown = [[look[name] for look in looks if name in look] for looks in half.looks]
        if shown[0]:
            arrays[name] = np.array(shown)
    return arrays
