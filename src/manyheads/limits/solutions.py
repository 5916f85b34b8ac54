"""Three front doors to the solver: infinitely many heads, infinite key dimension, infinite depth.

Each composes blocks from branches, plans the march, runs it, and returns a labelled dataset. Where a branch is sampled
the march runs twice with independent samples: the mean of the two is returned, half their difference as the error, and
samples are doubled until an error that was asked for is reached.
"""

from collections.abc import Sequence
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

    def __post_init__(self) -> None:
        if self.samples is not None and not 1 <= self.samples <= self.most:
            raise UsageError(f"samples={self.samples}: from 1 to most={self.most}")
        if self.tolerance is not None and not self.tolerance > 0:
            raise UsageError(f"tolerance={self.tolerance}: a positive error, or None for what the samples give")
        if not self.memory > 0:
            raise UsageError(f"memory={self.memory}: a positive number of bytes")


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
    Dataset with `output` (step, read_out, class), `loss` (step), kernels at equal times `stream` and `backward` (step,
    level, row, row_too) and `pooled` (step, read_out, read_out_too), `logits` (step, layer, sample, token, key); with
    sampled branches the error of each beside it, such as `output_error`.

    Raises
    ------
    UsageError
        Logit exponent below 1, or a solution that does not fit into memory.
    CertificateError
        The limit diverges at this rate, or the error that was asked for is not reached with the most samples; its
        `partial` is the dataset of the steps before, or of the last samples.

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
    _check_stable(logit_exponent)
    return _solve([problem], AttentionLimit(), activation, sampling or Sampling())


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
    return _solve([problem], AttentionHeads(key_dim, 4, logit_exponent), activation, sampling or Sampling())


def infinite_depth(
    problem: Problem,
    *,
    key_dim: int | None = None,
    logit_exponent: float = 1.0,
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
    logit_exponent
        alpha_A; with infinite key dimension 1 only.
    activation
        Of an MLP in every block; None for none.
    cells
        Cells of the depth; the error falls like one over their square.
    sampling
        How heads and neurons are sampled.

    Returns
    -------
    Dataset as from `infinite_key_dim`, over cells instead of layers; errors beside variables are those of sampling, not
    of the steps in depth. Where depths are extrapolated, outputs, loss and `pooled` are, and the rest is that of the
    deeper one.

    Raises
    ------
    UsageError
        A key dimension or an MLP at a depth exponent strictly between 1/2 and 1, whose continuum is not closed here;
        logit exponent below 1 at infinite key dimension.
    CertificateError
        As from `infinite_key_dim`.

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
    if key_dim is None:
        _check_stable(logit_exponent)
    plain = key_dim is None and activation is None
    attention: Branch = AttentionLimit() if key_dim is None else AttentionHeads(key_dim, 4, logit_exponent)
    if problem.depth_exponent < 1 and plain:
        attention = UniformAttention()
    if problem.depth_exponent == 0.5:
        return _solve(
            [replace(problem, depth=cells), replace(problem, depth=2 * cells)], attention, activation, sampling
        )
    if problem.depth_exponent < 1 and not plain:
        raise UsageError(
            f"depth_exponent={problem.depth_exponent}: with heads or an MLP the continuum is solved at 1/2 and 1 only"
        )
    return _solve([problem], attention, activation, sampling, cells=cells)


def _check_stable(logit_exponent: float) -> None:
    """Refuse infinite key dimension where it is no limit."""
    if logit_exponent != 1:
        raise UsageError(
            f"logit_exponent={logit_exponent}: what is sent back through the initial query and key weights grows like "
            "N^(1 - alpha_A), so that with anything trained below the attention infinite key dimension is no stable "
            "limit; solve infinitely many heads at a fixed key dimension (`infinite_heads`, or `key_dim`)"
        )


def _solve(
    problems: Sequence[Problem],
    attention: Branch,
    activation: str | None,
    sampling: Sampling,
    *,
    cells: int | None = None,
) -> xr.Dataset:
    """Plan, march, and march again with more samples while their error is too large.

    Of two problems, at L and at 2L, the marches are extrapolated to infinite depth.
    """
    branches = [attention] if activation is None else [attention, Perceptron(activation)]
    factor, found, error = 1, None, np.inf
    while True:
        sized = [_sized(branch, problems[0], sampling, factor) for branch in branches]
        plans = [_lay(problem, sized, cells) for problem in problems]
        most = max((getattr(branch, "samples", 0) for branch in sized), default=0)
        if found is not None and (
            most > sampling.most or any(Plan.of(*plan).memory > sampling.memory for plan in plans)
        ):
            raise CertificateError(
                f"outputs are not known to the error that was asked for, and {most} samples are more than `most` or "
                "`memory` allow: raise them, or take a smaller richness or fewer steps; `partial` is what was solved",
                measured=error,
                threshold=sampling.tolerance or 0.0,
                partial=_label(problems[0], found),
            )
        for plan in plans:
            Plan.of(*plan).check(sampling.memory)
        marched = [_halves(*plan, sampling.seed) for plan in plans]
        found = marched[0] if len(marched) == 1 else [extrapolate(*pair) for pair in zip(*marched, strict=True)]
        error = _error(found)
        if sampling.tolerance is None or error <= sampling.tolerance:
            return _label(problems[0], found)
        factor *= 2


def _lay(problem: Problem, branches: list[Branch], cells: int | None) -> tuple[Problem, list[list[Branch]], Depthwise]:
    """Return what a plan takes: in depth one branch after the other, in a cell those of a block side by side."""
    if cells is None:
        return problem, [[branch] for branch in branches] * problem.depth, blocks_in_depth(problem)
    return problem, [branches] * cells, cells_in_depth(problem, cells)


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
    halves: list[March] = []
    for stream in streams:
        started = [[branch.start(problem, stream) for branch in layer] for layer in layers]
        try:
            halves.append(march(problem, started, depthwise))
        except CertificateError as error:
            if isinstance(error.partial, March):
                error.partial = _label(problem, [error.partial])
            raise
    return halves


def _error(halves: list[March]) -> float:
    """Root mean square error of the mean of two halves, from their difference; zero where nothing is sampled."""
    if len(halves) == 1:
        return 0.0
    return float(np.sqrt(np.mean((halves[0].outputs - halves[1].outputs) ** 2)) / 2)


def _label(problem: Problem, halves: list[March]) -> xr.Dataset:
    """Give names to what the halves left: their mean, and half of their difference as the error."""
    dims = {
        "output": ("step", "read_out", "class"),
        "loss": ("step",),
        "stream": ("step", "level", "row", "row_too"),
        "backward": ("step", "level", "row", "row_too"),
        "pooled": ("step", "read_out", "read_out_too"),
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
    coords = {"step": np.arange(len(halves[0].losses))}
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
