"""Causal DMFT solver: one forward and one backward pass per training step.

The residual stream, per neuron, is linear in independent Gaussian sources (`fields`): chi (covariance X), the initial
read-out w0, and for every layer sO^l ~ GP(0, U^l) forward and s^l ~ GP(0, B^l) backward. With the dressed backward
variable g^l_a(t) = -gamma0 d dloss/dh^l_a(t), the learned factor kappa = eta gamma0 beta0 L^(alpha_L - 1),
b = beta0 L^-alpha_L and the memory m of `Problem`,

    h^0(t)    = chi + eta gamma0 sum_{t'<t} m(t,t') X g^0(t')                                          (_embed)
    h^l(t)    = h^{l-1}(t) + b [ sO^l(t) + sum_{t'<t} (RO^l + kappa m U^l)(t,t') g^l(t') ]             (_cross_layer)
    w_c(t)    = w0_c + eta gamma0 sum_{t'<t} m(t,t') sum_o c_o Delta_oc(t') (R z^L)_o(t')              (_read_out)
    f_oc(t)   = <(R z^L)_o(t) w_c(t)> / gamma0
    g^L(t)    = J R^T c Delta(t) w(t)
    g^{l-1}(t) = g^l(t) + J b [ s^l(t) + sum_{t'<=t} RB^l z^{l-1}(t') + kappa sum_{t'<t} m B^l z^{l-1}(t') ]
                                                                                                       (_cross_layer)

where z is the stream, normalized if the problem says so, and J the projector of that normalization. The covariances U,
B and responses RO, RB of a layer come from its branches (`branches`). Rows of coefficients on the sources give every
kernel and every response. Without the sources of the layers the same recursion with midpoint steps solves the ordinary
differential equation in depth that depth exponent 1 ends in.

`recursion_step` is these equations at one moment. What does not change in time is the `System`; the `Fields` of all
moments are handed to each step: `_cross_layer` fills in those of its layer, `recursion_step` the others.

References
----------
Bordelon, Chaudhry, Pehlevan, arXiv 2405.15712: the limits. These equations and the order in which they are solved are
derived here.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from manyheads.errors import CertificateError
from manyheads.theory.dmft.branches.branch import BranchInput, BranchProcess
from manyheads.theory.dmft.fields import Fields, Moment, System
from manyheads.theory.dmft.grids.coarse_grid import TimeGrid, mean_errors
from manyheads.theory.dmft.grids.depth import DepthStep
from manyheads.theory.dmft.problem import Problem
from manyheads.theory.dmft.trajectory import Trajectory

DIVERGED = 1e6  # outputs beyond so many times the targets are no training


def solve_recursion(
    problem: Problem,
    layers: Sequence[Sequence[BranchProcess]],
    depth_step: DepthStep,
    *,
    responses: bool = True,
    grid: TimeGrid | None = None,
    two_time: bool = False,
) -> Trajectory:
    """Solve the limit: layers from the bottom up, each of one branch or several that see the same stream.

    On a `grid` of a long training `problem` is its `moments`, with which processes are started, too; None solves every
    step. Without `responses` the solution is wrong: the negative control of tests and studies.
    """
    system = System(grid or TimeGrid.of(problem, every=1), layers, depth_step, 1.0 if responses else 0.0)
    fields = Fields.zeros(system, two_time)
    trajectory = Trajectory.zeros(system.problem, len(layers))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):  # what diverges is refused by name
        for index in range(problem.steps):
            try:
                fields = recursion_step(system, fields, trajectory, system.moment(index))
            except CertificateError as error:
                error.partial = trajectory.until(index) if index else None
                raise
    trajectory.two_time = fields.two_time()
    return trajectory


def recursion_step(system: System, fields: Fields, trajectory: Trajectory, t: Moment) -> Fields:
    """Solve one moment and record it: forward through the layers, read out, backward through the layers."""
    problem, layers = system.problem, range(len(system.layers))
    h, stream, scales = _embed(system, fields, t), [], []
    for layer in layers:
        h, kernel, scale = _cross_layer(system, fields, t, layer, h)
        stream.append(kernel)
        scales.append(scale)
    z, scale = _normalize(system, fields, t, h)
    w = _read_out(system, fields, t)
    correlated = fields.sources.covary(z, t.hi)
    fields.pooled[t.time] = problem.pooling @ z
    output = problem.pooling @ correlated @ w.T / problem.richness  # f_oc(t) = <(R z^L)_o w_c> / gamma0
    _check(system, t, output)
    stream.append((correlated @ z.T) * np.outer(scale, scale))
    pooled = problem.pooling @ correlated @ fields.pooled[t.time].T
    observables = [
        {name: value for branch in layer for name, value in branch.observe().items()} for layer in system.layers
    ]
    errors, interval = mean_errors(system.grid, fields.interval, t.time, output, fields.errors[: t.time])
    fields.errors[t.time] = errors
    g, backward = _project_out(system, fields, t, (problem.pooling.T @ errors) @ w, z, scale), []
    for layer in reversed(layers):
        g, kernel, _ = _cross_layer(system, fields, t, layer, g, scales[layer])
        backward.append(kernel)
    fields.g0[t.time] = g
    backward.append(fields.sources.covary(g, t.hi) @ g.T)
    kernels = stream, backward[::-1], pooled
    trajectory.record(t.time, output, system.loss(t.time, output), kernels, observables)
    return replace(fields, interval=interval)


def _embed(system: System, fields: Fields, t: Moment) -> np.ndarray:
    """h^0(t) = chi + eta gamma0 sum_{t'<t} m X g^0(t')."""
    h = fields.sources.tokens()
    if system.problem.embedding:
        h += system.gain * system.problem.gram @ np.tensordot(t.memory, fields.g0[: t.time], 1)
    return h


def _cross_layer(
    system: System, fields: Fields, t: Moment, layer: int, x: np.ndarray, scale: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a field behind a layer, its kernel before the layer, and the scale of z^{l-1}.

    Upward, h^l(t) = h^{l-1}(t) + b [sO^l + (RO^l + kappa m U^l) g^l]. Downward, with the `scale` from the way up,
    g^{l-1}(t) = g^l(t) + J b [s^l + (RB^l + kappa m B^l) z^{l-1}].
    """
    sources, down, step = fields.sources, scale is not None, system.depth_step
    here, there = (fields.above, fields.below) if down else (fields.below, fields.above)
    known = t.hi if down else t.lo
    source, other = (layer + len(system.layers) * side for side in (down, not down))  # s^l or sO^l, and the other one
    correlations = fields.below.correlation[layer], fields.above.correlation[layer]
    change, kernels = np.zeros(1), []
    for _ in range(step.sweeps):
        seen = x + change / 2  # from the second on in the middle of the step in depth
        rows, size = (seen, np.ones(len(x))) if down else _normalize(system, fields, t, seen)
        here.rows[layer, t.now] = rows
        row = sources.covary(rows, t.hi) @ here.rows[layer, : t.hi].T
        here.correlation[layer, t.now, : t.hi], here.correlation[layer, : t.hi, t.now] = row, row.T
        feedback = system.response_weight * sources.response(rows, other)[:, :known]
        inputs = BranchInput(t.time, *correlations, system.learned(t, row), feedback)
        outputs = [branch.backward(inputs) if down else branch.forward(inputs) for branch in system.layers[layer]]
        covariance, response, learning = (
            np.sum([getattr(output, name) for output in outputs], axis=0)
            for name in ("covariance", "response", "learning")
        )
        response = system.response_weight * response
        memory = response.copy()  # response + kappa m covariance
        memory[:, : t.lo] += system.learned(t, learning)
        change = step.step * (sources.of_layer(source, t.time) + memory @ there.rows[layer, :known])
        sources.fill(source, covariance)
        if here.response is not None:
            here.response[layer, t.now, :known] = response
        if scale is not None:
            change = _project_out(system, fields, t, change, fields.below.rows[layer, t.now], scale)
        kernels.append(row[:, t.now] * np.outer(size, size))
    return x + change, kernels[0], size


def _read_out(system: System, fields: Fields, t: Moment) -> np.ndarray:
    """w_c(t) = w0_c + eta gamma0 sum_{t'<t} m sum_o c_o Delta_oc(t') (R z^L)_o(t')."""
    past = (t.memory, fields.errors[: t.time], fields.pooled[: t.time])
    return fields.sources.readout() + system.gain * np.einsum("t,toc,tok->ck", *past, optimize=True)


def _check(system: System, t: Moment, output: np.ndarray) -> None:
    """Refuse outputs that diverge."""
    grid = system.grid
    largest, bound = float(np.abs(output).max()), DIVERGED * (1 + float(np.abs(system.problem.flat_targets).max()))
    if not largest <= bound:
        longest = max(grid.lengths[: grid.intervals[t.time] + 1], default=1)  # so far
        raise CertificateError(
            f"the limit diverges at step {grid.times[t.time]}: take a smaller learning rate, momentum "
            "or richness" + (f", or intervals shorter than {longest} steps (`every`)" if longest > 1 else ""),
            measured=largest,
            threshold=bound,
        )


def _normalize(system: System, fields: Fields, t: Moment, stream: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Divide every token by its root mean square over neurons, where the problem normalizes; return it too."""
    if not system.problem.norm:
        return stream, np.ones(len(stream))
    scale = np.sqrt((fields.sources.covary(stream, t.hi) * stream).sum(1))
    return stream / scale[:, None], scale


def _project_out(
    system: System, fields: Fields, t: Moment, rows: np.ndarray, z: np.ndarray, scale: np.ndarray
) -> np.ndarray:
    """Send backward rows y through the normalization, J y = (y - z <z y>) / s."""
    if not system.problem.norm:
        return rows
    along = (fields.sources.covary(rows, t.hi) * z).sum(1)
    return (rows - along[:, None] * z) / scale[:, None]
