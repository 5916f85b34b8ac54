"""Gradient flow by Runge-Kutta steps, gradient flow by an adaptive integrator with events, and gradient descent."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix
from jaxtyping import Bool, Float, Int

from manyheads._arrays import follows_caller
from manyheads._constraints import Constrained, Constraint, constrained
from manyheads._trees import PyTree
from manyheads.errors import CertificateError, UsageError
from manyheads.theory.joma.systems.layer import LayerParameters, Loss, forward, objective, token_weights, vector_field
from manyheads.theory.joma.systems.recording import record_states
from manyheads.theory.joma.task import JomaTask, UpdateRule
from manyheads.theory.runge_kutta import move, runge_kutta_step

Problem: TypeAlias = tuple[LayerParameters, JomaTask, Loss, UpdateRule]


class FlowTrajectory(eqx.Module):
    """Parameters and losses at S = records + 1 times, initialization included."""

    times: Float[Any, " states"]  # a trajectory that ended early repeats the time at which it ended
    network: LayerParameters
    losses: Float[Any, " states"]
    stopped: Bool[Any, ""]  # whether it ended at the limit of the weights
    crossings: Int[Any, ""]  # number of ReLU gates that opened or closed
    finished: Bool[Any, ""]  # whether it reached the horizon or the limit; else the remaining states are NaN


@dataclass(frozen=True)
class FixedSteps(Constrained):
    """Fixed step length; `records` states are kept, `stride` steps of length `step` apart."""

    step: float = constrained(0.02, Constraint(above=0))
    stride: int = constrained(40, Constraint(least=1))
    records: int = constrained(50, Constraint(least=1))

    @classmethod
    def until(cls, horizon: float, step: float = 0.02, records: int = 50) -> "FixedSteps":
        """Choose steps no longer than `step` that end at `horizon`."""
        stride = max(1, math.ceil(horizon / (step * records) - 1e-9))
        return cls(horizon / (stride * records), stride, records)


@dataclass(frozen=True)
class AdaptiveSteps:
    """Tolerances of the adaptive integrator, and its events.

    A ReLU gate is held until its pre-activation has passed zero by the margin. The trajectory is accurate to about the
    margin, the conserved relations, which do not depend on the gates, to the tolerance of a step. Gradient flow often
    slides along a kink and crosses it repeatedly: a margin ten times smaller then costs ten times as much.
    """

    horizon: float  # end time
    records: int = 50  # states kept at equal distances
    rtol: float = 1e-10  # of local errors
    atol: float = 1e-12
    limit: float = math.inf  # of |v| = |U_C^T W|, where the trajectory ends: exp attention blows up in finite time
    margin: float = 1e-3
    crossings: int = 20_000  # largest number of gate changes

    def __post_init__(self) -> None:
        positive = (self.horizon, self.rtol, self.atol, self.limit, self.margin)
        if not all(value > 0 for value in positive) or not math.isfinite(self.horizon) or self.records < 1:
            raise UsageError(f"{self}: all must be positive, the horizon finite, and records 1 or more")


@follows_caller
def gradient_flow(
    network: LayerParameters, task: JomaTask, loss: Loss, rule: UpdateRule, steps: FixedSteps = FixedSteps()
) -> FlowTrajectory:
    """Integrate gradient flow with the classical Runge-Kutta method of order four.

    A step that crosses a ReLU's kink is of order one; `adaptive_gradient_flow` stops there. NumPy arrays are
    integrated in double precision, JAX arrays in the precision of the caller, and these can be traced and vmapped over
    networks and tasks.
    """
    clock = jnp.asarray(steps.step, float), jnp.asarray(steps.stride)
    return _flow((network, task, loss, rule.traced()), clock, steps.records)


@eqx.filter_jit
def _flow(problem: Problem, clock: tuple[jax.Array, jax.Array], records: int) -> FlowTrajectory:
    def derivative(state: LayerParameters) -> LayerParameters:
        return vector_field(state, *problem[1:])

    return _record(problem, lambda _, state: runge_kutta_step(derivative, state, clock[0]), clock, records)


def _record(problem: Problem, advance: Any, clock: tuple[jax.Array, jax.Array], records: int) -> FlowTrajectory:
    """Advance `records` times `stride` steps; the stride is traced, so that one program serves every rate."""
    (step, stride), start = clock, jax.tree.map(jnp.asarray, problem[0])

    def piece(state: LayerParameters, number: jax.Array) -> LayerParameters:
        return jax.lax.fori_loop(0, stride, lambda i, s: advance(number * stride + i, s), state)

    states = record_states(piece, start, jnp.arange(records))
    losses = jax.vmap(lambda state: objective(state, *problem[1:]))(states)
    times = jnp.arange(records + 1) * (step * stride)
    finished = jnp.isfinite(losses[-1])
    return FlowTrajectory(times, states, losses, jnp.asarray(False), jnp.asarray(0), finished)


def gradient_descent(
    network: LayerParameters,
    task: JomaTask,
    loss: Loss,
    rule: UpdateRule,
    steps: FixedSteps = FixedSteps(),
    batch: PyTree = None,
) -> FlowTrajectory:
    """Run gradient descent with learning rate `steps.step`; times are learning rate times steps.

    Batches are full, or drawn with replacement in each step: `batch` is a key and their size. Precision and tracing are
    those of `gradient_flow`.
    """
    key: Any
    key, size = (None, None) if batch is None else batch
    if size is not None:
        with contextlib.suppress(jax.errors.TracerArrayConversionError):  # a traced key stays one
            # As NumPy, so that the key does not decide the precision of the trajectory.
            key = _Seed(np.asarray(jax.random.key_data(key)), jax.random.key_impl(key))
    return _descend_on((network, task, loss, rule), steps, key, size)


class _Seed(eqx.Module):
    """A key on the host."""

    data: PyTree
    generator: Any = eqx.field(static=True)


@follows_caller
def _descend_on(problem: Problem, steps: FixedSteps, key: Any, size: int | None) -> FlowTrajectory:
    clock = jnp.asarray(steps.step, float), jnp.asarray(steps.stride)
    return _descend((*problem[:3], problem[3].traced()), clock, key, (steps.records, size))


@eqx.filter_jit
def _descend(
    problem: Problem, clock: tuple[jax.Array, jax.Array], key: Any, counts: tuple[int, int | None]
) -> FlowTrajectory:
    (network, task, loss, rule), (records, size) = problem, counts
    task = jax.tree.map(jnp.asarray, task)
    if isinstance(key, _Seed):
        key = jax.random.wrap_key_data(key.data, impl=key.generator)

    def advance(number: jax.Array, state: LayerParameters) -> LayerParameters:
        batch = task
        if size is not None:
            rows = jax.random.randint(jax.random.fold_in(key, number), (size,), 0, len(task.contexts))
            batch = task.take(rows)
        return move(state, vector_field(state, batch, loss, rule), clock[0])

    return _record((network, task, loss, rule), advance, clock, records)


def adaptive_gradient_flow(
    network: LayerParameters, task: JomaTask, loss: Loss, rule: UpdateRule, until: AdaptiveSteps
) -> FlowTrajectory:
    """Integrate gradient flow with an adaptive method of order eight, with events at every kink and at the limit.

    Between two events the ReLU gates are held, so the vector field is smooth and the method keeps its order. Precision
    and tracing are those of `gradient_flow`; a traced function cannot raise, so check `finished` there.
    """
    path: FlowTrajectory = _flow_adaptively((network, task, loss, rule), until)
    try:
        finished = bool(path.finished)
    except jax.errors.TracerBoolConversionError:
        return path
    if not finished:
        crossed = int(path.crossings)
        raise CertificateError(
            f"gradient flow did not reach its horizon after {crossed} kink crossings: allow more crossings, a wider "
            "margin, or take fixed steps (`gradient_flow`)",
            measured=float(jnp.nanmax(path.times)),
            threshold=until.horizon,
        )
    return path


@follows_caller
def _flow_adaptively(problem: Problem, until: AdaptiveSteps) -> FlowTrajectory:
    numbers = ("horizon", "rtol", "atol", "limit", "margin", "crossings")
    clock = {name: jnp.asarray(getattr(until, name), float) for name in numbers}
    counts = until.records, math.isfinite(until.limit)
    return _adaptive((*problem[:3], problem[3].traced()), clock, counts)


class _Front(eqx.Module):
    """Current state of the adaptive integrator."""

    time: jax.Array
    network: LayerParameters
    gates: jax.Array | None
    stopped: jax.Array
    failed: jax.Array
    crossings: jax.Array


@eqx.filter_jit
def _adaptive(problem: Problem, clock: dict[str, jax.Array], counts: tuple[int, bool]) -> FlowTrajectory:
    (network, task, loss, rule), records = problem, counts[0]
    start = jax.tree.map(jnp.asarray, network)
    gates = forward(start, task, rule)[1] > 0 if rule.activation == "relu" else None
    no, ticks = jnp.asarray(False), jnp.arange(1, records + 1)
    front = _Front(jnp.zeros(()), start, gates, no, no, jnp.asarray(0))

    def piece(front: _Front, tick: jax.Array) -> _Front:
        target = clock["horizon"] * tick / records
        return jax.lax.while_loop(
            lambda front: (front.time < target) & ~front.stopped & ~front.failed,
            lambda front: _segment(front, target, problem, clock, counts[1]),
            front,
        )

    fronts = record_states(piece, front, ticks)

    def kept(y: jax.Array) -> jax.Array:
        return jnp.where(fronts.failed.reshape(-1, *(1,) * (y.ndim - 1)), jnp.nan, y)

    times, states = jax.tree.map(kept, (fronts.time, fronts.network))
    losses = jax.vmap(lambda state: objective(state, task, loss, rule))(states)
    return FlowTrajectory(times, states, losses, fronts.stopped[-1], fronts.crossings[-1], ~fronts.failed[-1])


class _Halving(optimistix.Bisection):
    """Bisection that stops by time alone: close to a blow-up the condition never becomes small."""

    def terminate(self, fn: object, y: PyTree, args: PyTree, options: object, state: PyTree, tags: object) -> Any:
        width = jnp.abs(state.upper - state.lower)
        return width <= 4 * jnp.finfo(width.dtype).eps * jnp.abs(y), optimistix.RESULTS.successful


def _segment(front: _Front, target: jax.Array, problem: Problem, clock: dict[str, jax.Array], bounded: bool) -> _Front:
    """Integrate to the next event or to `target`."""
    (_, task, loss, rule), held = problem, front.gates

    def inside(state: LayerParameters) -> jax.Array:
        """Distance of the nearest gate from its kink; negative beyond the margin."""
        if held is None:
            return jnp.asarray(jnp.inf)
        a = forward(state, task, rule)[1]
        return jnp.where(held, a, -a).min() + clock["margin"]

    def below(state: LayerParameters) -> jax.Array:
        """Distance of the largest |v| from the limit."""
        return clock["limit"] - jnp.abs(token_weights(task, state.weights)).max()

    def condition(t: jax.Array, y: LayerParameters, args: PyTree, **unused: object) -> jax.Array:
        return jnp.minimum(inside(y), below(y))  # one condition: of several, diffrax takes the first, not the earliest

    root = _Halving(rtol=0.0, atol=0.0, flip=True)  # type: ignore[call-arg]  # its norm has a default
    events = held is not None or bounded
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda time, state, args: vector_field(state, task, loss, rule, held)),
        diffrax.Dopri8(),
        front.time,
        target,
        None,
        front.network,
        stepsize_controller=diffrax.PIDController(rtol=clock["rtol"], atol=clock["atol"]),
        event=diffrax.Event(condition, root) if events else None,
        adjoint=diffrax.ForwardMode(),  # no reverse mode is needed, and this one compiles faster
        throw=False,
        max_steps=100_000,
    )
    time, state = solution.ts[-1], jax.tree.map(lambda y: y[-1], solution.ys)
    met = diffrax.is_event(solution.result)
    gates, crossings = held, front.crossings
    if held is not None:
        a = forward(state, task, rule)[1]
        crossed = jnp.where(held, a, -a) < -clock["margin"] / 2
        gates, crossings = held ^ crossed, crossings + crossed.sum()
    finite = jnp.isfinite(time) & jnp.isfinite(state.logits).all() & jnp.isfinite(state.weights).all()
    good = (diffrax.is_successful(solution.result) | met) & finite & (crossings <= clock["crossings"])
    return _Front(time, state, gates, met & (below(state) < inside(state)), ~good, crossings)
