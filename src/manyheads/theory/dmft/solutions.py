"""Infinite limits of training: infinite key dimension, infinitely many heads, infinite depth.

Each composes blocks from branches; `solver` runs the recursion with error control and returns a labelled dataset.
"""

from dataclasses import replace

import xarray as xr

from manyheads.errors import UsageError, check_integer
from manyheads.theory.dmft import dataset, ntk, solver
from manyheads.theory.dmft.branches.attention_infinite_heads import InfiniteHeadsAttention
from manyheads.theory.dmft.branches.attention_infinite_key_dim import InfiniteKeyDimAttention, UniformAttention
from manyheads.theory.dmft.branches.branch import Branch
from manyheads.theory.dmft.options import Keep, Request, Sampling
from manyheads.theory.dmft.problem import MOST, Problem


def infinite_key_dim(
    problem: Problem,
    *,
    logit_exponent: float = 1.0,
    activation: str | None = None,
    sampling: Sampling | None = None,
    every: int = 1,
    keep: Keep = "equal-time",
) -> xr.Dataset:
    """Solve the limit of infinite key dimension N, at any number of heads and finite depth.

    Parameters
    ----------
    logit_exponent
        alpha_A; 1 only.
    activation
        Of an MLP after every attention; None for none. Without it nothing is sampled.
    sampling
        How neurons are sampled, and what the solution may cost.
    every
        1 solves every step. An odd number, best a power of three, solves a long training on intervals that grow from
        single steps to so many (`coarse_grid`): outputs take every step, features are kept over an interval. They
        grow later until the error is reached that `sampling` asks for.
    keep
        ``"two-time"`` returns the two-time correlation functions `correlation` and `backward_correlation`, the response
        functions `response` and `backward_response` (layer, step, row, step_too, row_too; over `branch`, attention and
        MLP in turn, with an activation), and the neural tangent kernel of the start `ntk` (read_out, read_out_too)
        where the activation has a closed one.

    Returns
    -------
    Dataset with `output` (step, read_out, class), `loss` (step), kernels at equal times `stream` and `backward` (step,
    level, row, row_too) and `pooled` (step, read_out, read_out_too), `logits` and the `attention` that they give (step,
    layer, sample, token, key). Level 0 is below the first branch, the others each above one: attention and, with an
    activation, an MLP in every block.

    With sampled branches or on a coarse grid in time the error of each variable is beside it, such as `output_error`.
    The steps are those at which intervals start; `backward` is there dressed with the mean errors of the half interval
    ahead. Errors are estimates in the root mean square, no bounds; those of a grid are as a rule several times too
    large, and now and then too small by two, for the loss or where weights change with every step.

    Raises
    ------
    UsageError
        Logit exponent below 1, a solution that does not fit into memory, or momentum on a coarse grid.
    CertificateError
        The limit diverges at this rate, or the error that was asked for is not reached with the most samples or on
        this grid; its `partial` is the dataset of the steps before, or of the last samples.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.theory.dmft import Problem, infinite_key_dim
    >>> rng = np.random.default_rng(0)
    >>> problem = Problem(rng.standard_normal((2, 2, 8)), np.array([1.0, -1.0]), steps=8, learning_rate=0.3)
    >>> solved = infinite_key_dim(problem)
    >>> bool(solved.loss[-1] < solved.loss[0] / 4)
    True

    Two hundred steps of a small rate, solved at 55 moments, of which 32 are starts of intervals:

    >>> from dataclasses import replace
    >>> long = infinite_key_dim(replace(problem, steps=200, learning_rate=0.02), every=27)
    >>> long.sizes["step"], bool(np.sqrt((long.output_error**2).mean()) < 0.005)
    (32, True)

    References
    ----------
    Bordelon, Chaudhry, Pehlevan, arXiv 2405.15712.
    """
    _check_stable(logit_exponent)
    request = Request((problem,), InfiniteKeyDimAttention(), activation, sampling or Sampling(), every, keep)
    solved = _solution(request)
    if request.two_time and (activation is None or activation in ntk.PAIRS):
        about = {"long_name": "neural tangent kernel at the start", "units": "1"}
        solved["ntk"] = (("read_out", "read_out_too"), ntk.neural_tangent_kernel(problem, activation), about)
    return solved


def infinite_heads(
    problem: Problem,
    key_dim: int,
    *,
    logit_exponent: float = 1.0,
    activation: str | None = None,
    sampling: Sampling | None = None,
    every: int = 1,
    keep: Keep = "equal-time",
) -> xr.Dataset:
    """Solve the limit of infinitely many heads of key dimension N, at finite depth; heads are sampled.

    Parameters, returned variables and errors are those of `infinite_key_dim`, with any `logit_exponent` from 1/2 to 1;
    besides, over heads, the variance of the logits, `logit_variance` (step, layer, sample, token, key), and their
    distribution, `logit_quantiles` (step, layer, sample, token, key, quantile).

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.theory.dmft import Problem, infinite_heads
    >>> rng = np.random.default_rng(0)
    >>> problem = Problem(rng.standard_normal((2, 2, 8)), np.array([1.0, -1.0]), steps=4, learning_rate=0.3)
    >>> solved = infinite_heads(problem, key_dim=2, logit_exponent=0.5)
    >>> before = solved.logit_variance.values[0, 0, 0]  # over heads it is X_aa X_bb at the start, at any N
    >>> sizes = np.diag(problem.gram)[:2]
    >>> bool(np.allclose(before, np.outer(sizes, sizes), rtol=0.2)), bool(solved.output_error.max() < 0.05)
    (True, True)
    """
    heads = InfiniteHeadsAttention(key_dim, 4, logit_exponent)
    return _solution(Request((problem,), heads, activation, sampling or Sampling(), every, keep))


def infinite_depth(
    problem: Problem,
    *,
    key_dim: int | None = None,
    logit_exponent: float = 1.0,
    activation: str | None = None,
    cells: int = 8,
    sampling: Sampling | None = None,
    every: int = 1,
    keep: Keep = "equal-time",
) -> xr.Dataset:
    """Solve the limit of infinite depth, at infinite key dimension or with infinitely many heads of key dimension N.

    At depth exponent 1 the equation in depth is solved in `cells` midpoint cells. Below it attention at infinite key
    dimension stays uniform: its closed equation is solved in cells between 1/2 and 1; at 1/2 `cells` and 2 `cells`
    blocks are extrapolated. The depth of the problem is not used; other parameters are those of `infinite_key_dim`.

    Parameters
    ----------
    key_dim
        N of infinitely many heads; None is infinite, too, at `logit_exponent` 1 only.
    cells
        Cells of the depth; the error falls like one over their square.
    keep
        ``"two-time"`` keeps correlation and response functions, of the cells or (exponent 1/2) the deeper network.

    Returns
    -------
    Dataset as from `infinite_key_dim`, over cells instead of layers; errors beside variables are those of sampling and
    of the grid in time, not of the steps in depth. Where depths are extrapolated, outputs and `pooled` are, the
    loss is that of the outputs, and the rest is that of the deeper one.

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
    >>> from manyheads.theory.dmft import Problem, infinite_depth
    >>> rng = np.random.default_rng(0)
    >>> problem = Problem(rng.standard_normal((2, 2, 8)), np.array([1.0, -1.0]), steps=4, learning_rate=0.3)
    >>> few, many = (infinite_depth(problem, cells=cells) for cells in (4, 16))
    >>> bool(abs(few.output - many.output).max() < 0.003)
    True
    """
    check_integer("cells", cells, most=MOST)
    if key_dim is None:
        _check_stable(logit_exponent)
    plain = key_dim is None and activation is None
    attention: Branch = (
        InfiniteKeyDimAttention() if key_dim is None else InfiniteHeadsAttention(key_dim, 4, logit_exponent)
    )
    if problem.depth_exponent < 1 and plain:
        attention = UniformAttention()
    if problem.depth_exponent == 0.5:
        deep = (replace(problem, depth=cells), replace(problem, depth=2 * cells))
        return _solution(Request(deep, attention, activation, sampling or Sampling(), every, keep))
    if problem.depth_exponent < 1 and not plain:
        raise UsageError(
            f"depth_exponent={problem.depth_exponent}: with heads or an MLP the continuum is solved at 1/2 and 1 only"
        )
    return _solution(Request((problem,), attention, activation, sampling or Sampling(), every, keep, cells))


def _solution(request: Request) -> dataset.Solution:
    found = solver.solve(request)
    return dataset.Solution(found.data_vars, coords=found.coords, attrs=found.attrs)


def _check_stable(logit_exponent: float) -> None:
    """Refuse infinite key dimension where it is no limit."""
    if logit_exponent != 1:
        raise UsageError(
            f"logit_exponent={logit_exponent}: what is sent back through the initial query and key weights grows like "
            "N^(1 - alpha_A), so that with anything trained below the attention infinite key dimension is no stable "
            "limit; solve infinitely many heads at a fixed key dimension (`infinite_heads`, or `key_dim`)"
        )
