"""Gradient flow with a fixed step, gradient flow with an adaptive one and events, and plain gradient descent."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optimistix

from manyheads._arrays import follows_caller
from manyheads.errors import CertificateError, UsageError
from manyheads.joma.systems.layer import Loss, Network, field, forward, objective, token_weights
from manyheads.joma.task import Rule, Setting


class Path(eqx.Module):
    """Where a network went, at S = records + 1 times, the start included.

    Attributes
    ----------
    times
        (S,): of a path that ended early, the last ones are the time at which it ended.
    network
        Logits (S, Q, M) and weights (S, d, K) or (S, Q, d, K).
    losses
        (S,), in the loss's unit.
    stopped
        Whether it ended at the limit.
    crossings
        How often an event at a kink was met.
    finished
        Whether it came to its end, be it the horizon or the limit; where it did not, the rest is NaN.
    """

    times: Any
    network: Network
    losses: Any
    stopped: Any
    crossings: Any
    finished: Any


@dataclass(frozen=True)
class Steps:
    """A fixed step: `records` states are kept, `stride` steps of length `step` apart."""

    step: float = 0.02
    stride: int = 40
    records: int = 50

    def __post_init__(self) -> None:
        if not self.step > 0 or self.stride < 1 or self.records < 1:
            raise UsageError(f"{self}: the step must be positive, stride and records 1 or more")

    @classmethod
    def until(cls, horizon: float, step: float = 0.02, records: int = 50) -> Steps:
        """Return steps no longer than `step` that end at `horizon`."""
        stride = max(1, math.ceil(horizon / (step * records) - 1e-9))
        return cls(horizon / (stride * records), stride, records)


@dataclass(frozen=True)
class Adaptive:
    """An adaptive step, and the events that end it.

    Attributes
    ----------
    horizon, records
        The flow is followed until this time; so many states are kept, equally far apart.
    rtol, atol
        Error that a step may make.
    limit
        The path ends where the largest |v| = |U_C^T W| gets here: exp attention blows up in finite time, and a clock
        would run into that.
    margin
        A ReLU's gate is held until its input has passed zero by this much. The path is accurate to about this; the
        conserved relations, which hold whatever the gates do, to the tolerance of a step. Gradient flow often slides
        along a kink, the gate open on one side and shut on the other driving it back each time: it then passes to and
        fro as often as the margin allows, so a margin ten times smaller costs ten times as much.
    crossings
        So many gates may open or shut in all.
    """

    horizon: float
    records: int = 50
    rtol: float = 1e-10
    atol: float = 1e-12
    limit: float = math.inf
    margin: float = 1e-3
    crossings: int = 20_000

    def __post_init__(self) -> None:
        positive = (self.horizon, self.rtol, self.atol, self.limit, self.margin)
        if not all(value > 0 for value in positive) or not math.isfinite(self.horizon) or self.records < 1:
            raise UsageError(f"{self}: all must be positive, the horizon finite and records 1 or more")


@follows_caller
def flow(network: Network, setting: Setting, loss: Loss, rule: Rule, steps: Steps = Steps()) -> Path:
    """Follow gradient flow with the classical Runge-Kutta method of order four.

    A step that crosses a ReLU's kink is of order one; `flow_adaptively` stops there. NumPy arrays are worked on in
    double precision; JAX arrays as the caller has set JAX up, and then it can be traced and vmapped over networks and
    settings.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.joma.systems.layer import draw_network, draw_upper
    >>> from manyheads.joma.task import Sizes, draw_setting
    >>> rng, sizes = np.random.default_rng(0), Sizes(tokens=4, contexts=6, neurons=3, width=8)
    >>> rule = Rule("exp", "gelu")
    >>> start, upper = draw_network(sizes, rule, rng), draw_upper(sizes, rng)
    >>> path = flow(start, draw_setting(sizes, rng), upper, rule, Steps(0.1, stride=5, records=4))
    >>> path.network.logits.shape, bool(path.losses[-1] < path.losses[0])
    ((5, 1, 4), True)
    """
    clock = jnp.asarray(steps.step, float), jnp.asarray(steps.stride)
    return _flow(network, setting, loss, rule.traced(), *clock, steps.records)


@eqx.filter_jit
def _flow(
    network: Network, setting: Setting, loss: Loss, rule: Rule, step: jax.Array, stride: jax.Array, records: int
) -> Path:
    def derivative(state: Network) -> Network:
        return field(state, setting, loss, rule)

    return _record(network, setting, loss, rule, lambda _, state: _rk4(derivative, state, step), step, stride, records)


RK4 = ((0.0, 0.5, 0.5, 1.0), (1 / 6, 1 / 3, 1 / 3, 1 / 6))  # where each stage starts on the last one, its weight


def _rk4(derivative: Any, state: Network, step: jax.Array) -> Network:
    def stage(carry: tuple[Network, Network], shares: tuple[jax.Array, jax.Array]) -> Any:
        slope, end = carry
        slope = derivative(_moved(state, slope, step * shares[0]))
        return (slope, _moved(end, slope, step * shares[1])), None

    # A scan, and not four calls: the field is compiled once, which takes half the time, and runs as fast.
    shares = jax.tree.map(lambda column: jnp.asarray(column, step.dtype), (np.asarray(RK4[0]), np.asarray(RK4[1])))
    still = jax.tree.map(jnp.zeros_like, state)
    return jax.lax.scan(stage, (still, state), shares)[0][1]


def _moved(state: Network, direction: Network, by: Any) -> Network:
    return jax.tree.map(lambda y, dy: y + by * dy, state, direction)


def _record(
    network: Network,
    setting: Setting,
    loss: Loss,
    rule: Rule,
    advance: Any,
    step: jax.Array,
    stride: jax.Array,
    records: int,
) -> Path:
    """Advance `records` times `stride` steps; the stride is traced, so that one program serves every rate."""
    start = jax.tree.map(jnp.asarray, network)

    def piece(state: Network, number: jax.Array) -> tuple[Network, Network]:
        state = jax.lax.fori_loop(0, stride, lambda i, s: advance(number * stride + i, s), state)
        return state, state

    _, later = jax.lax.scan(piece, start, jnp.arange(records))
    states = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), start, later)
    losses = jax.vmap(lambda state: objective(state, setting, loss, rule))(states)
    times = jnp.arange(records + 1) * (step * stride)
    finished = jnp.isfinite(losses[-1])
    return Path(times, states, losses, jnp.asarray(False), jnp.asarray(0), finished)


def descend(
    network: Network, setting: Setting, loss: Loss, rule: Rule, steps: Steps = Steps(), batch: Any = None
) -> Path:
    """Follow plain gradient descent with learning rate `steps.step`; times are learning rate times steps.

    Precision and tracing are those of `flow`.

    Parameters
    ----------
    batch
        None for all samples in each step; or a key and a number of samples, drawn with replacement in each step.

    Examples
    --------
    Two seeds as one program, each with its own task and its own batches:

    >>> import numpy as np
    >>> from manyheads.joma.systems.layer import draw_network, draw_upper
    >>> from manyheads.joma.task import Sizes, draw_setting
    >>> rule, sizes = Rule("exp", "gelu"), Sizes(tokens=4, contexts=6, neurons=3, width=8)
    >>> def draw(seed):
    ...     rng = np.random.default_rng(seed)
    ...     return draw_network(sizes, rule, rng), draw_setting(sizes, rng), draw_upper(sizes, rng)
    >>> tasks = jax.tree.map(lambda *leaves: jnp.stack(leaves), draw(0), draw(1))
    >>> def follow(key, *task):
    ...     return descend(*task, rule, Steps(0.1, stride=5, records=4), (key, 3))
    >>> jax.vmap(follow)(jax.random.split(jax.random.key(0), 2), *tasks).network.logits.shape
    (2, 5, 1, 4)
    """
    key: Any
    key, size = (None, None) if batch is None else batch
    if size is not None:
        with contextlib.suppress(jax.errors.TracerArrayConversionError):  # a traced key stays one
            # As NumPy, so that a key, which has no precision, does not decide the path's.
            key = _Seed(np.asarray(jax.random.key_data(key)), jax.random.key_impl(key))
    return _descend_on(network, setting, loss, rule, steps, key, size)


class _Seed(eqx.Module):
    """A key on the host."""

    data: Any
    generator: Any = eqx.field(static=True)


@follows_caller
def _descend_on(
    network: Network, setting: Setting, loss: Loss, rule: Rule, steps: Steps, key: Any, size: int | None
) -> Path:
    rate, stride = jnp.asarray(steps.step, float), jnp.asarray(steps.stride)
    return _descend(network, setting, loss, rule.traced(), (rate, stride, key), (steps.records, size))


@eqx.filter_jit
def _descend(network: Network, setting: Setting, loss: Loss, rule: Rule, clock: Any, counts: Any) -> Path:
    (rate, stride, key), (records, size) = clock, counts
    setting = jax.tree.map(jnp.asarray, setting)
    if isinstance(key, _Seed):
        key = jax.random.wrap_key_data(key.data, impl=key.generator)

    def advance(number: jax.Array, state: Network) -> Network:
        seen = setting
        if size is not None:
            rows = jax.random.randint(jax.random.fold_in(key, number), (size,), 0, len(setting.contexts))
            seen = setting.take(rows)
        return _moved(state, field(state, seen, loss, rule), rate)

    return _record(network, setting, loss, rule, advance, rate, stride, records)


def flow_adaptively(network: Network, setting: Setting, loss: Loss, rule: Rule, until: Adaptive) -> Path:
    """Follow gradient flow with an adaptive method of order eight, stopping at every kink and at the limit.

    Between two events a ReLU's gates are held, so the field is smooth there and the method keeps its order. Precision
    and tracing are those of `flow`; within a traced function nothing can be raised, look at `finished` there.

    Raises
    ------
    CertificateError
        The path did not come to its end: too many steps, or gates that open and shut without end because the flow
        slides along a kink. `measured` is the time that was reached.
    """
    path: Path = _flow_adaptively(network, setting, loss, rule, until)
    try:
        finished = bool(path.finished)
    except jax.errors.TracerBoolConversionError:
        return path
    if not finished:
        crossed = int(path.crossings)
        raise CertificateError(
            f"gradient flow did not come to its end, {crossed} kinks crossed: allow more crossings, a wider margin, or "
            "take a fixed step (`flow`)",
            measured=float(jnp.nanmax(path.times)),
            threshold=until.horizon,
        )
    return path


@follows_caller
def _flow_adaptively(network: Network, setting: Setting, loss: Loss, rule: Rule, until: Adaptive) -> Path:
    numbers = ("horizon", "rtol", "atol", "limit", "margin", "crossings")
    clock = {name: jnp.asarray(getattr(until, name), float) for name in numbers}
    bounded = math.isfinite(until.limit)
    return _adaptive(network, setting, loss, rule.traced(), clock, (until.records, bounded))


class _Front(eqx.Module):
    """The foremost point of an adaptive path."""

    time: jax.Array
    network: Network
    gates: jax.Array | None
    stopped: jax.Array
    failed: jax.Array
    crossings: jax.Array


@eqx.filter_jit
def _adaptive(
    network: Network, setting: Setting, loss: Loss, rule: Rule, clock: dict[str, jax.Array], counts: tuple[int, bool]
) -> Path:
    records = counts[0]
    start = jax.tree.map(jnp.asarray, network)
    gates = forward(start, setting, rule)[1] > 0 if rule.activation == "relu" else None
    no, ticks = jnp.asarray(False), jnp.arange(1, records + 1)
    front = _Front(jnp.zeros(()), start, gates, no, no, jnp.asarray(0))

    def piece(front: _Front, tick: jax.Array) -> tuple[_Front, tuple[jax.Array, Network]]:
        target = clock["horizon"] * tick / records
        front = jax.lax.while_loop(
            lambda front: (front.time < target) & ~front.stopped & ~front.failed,
            lambda front: _segment(front, target, (setting, loss, rule), clock, counts),
            front,
        )
        kept = jax.tree.map(lambda y: jnp.where(front.failed, jnp.nan, y), (front.time, front.network))
        return front, kept

    last, (times, later) = jax.lax.scan(piece, front, ticks)
    times = jnp.concatenate([jnp.zeros(1), times])
    states = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), start, later)
    losses = jax.vmap(lambda state: objective(state, setting, loss, rule))(states)
    return Path(times, states, losses, last.stopped, last.crossings, ~last.failed)


class _Halving(optimistix.Bisection):
    """Bisection in time alone: close to a blow-up no time makes the condition small."""

    def terminate(self, fn: Any, y: Any, args: Any, options: Any, state: Any, tags: Any) -> Any:
        width = jnp.abs(state.upper - state.lower)
        return width <= 4 * jnp.finfo(width.dtype).eps * jnp.abs(y), optimistix.RESULTS.successful


def _segment(
    front: _Front,
    target: jax.Array,
    problem: tuple[Setting, Loss, Rule],
    clock: dict[str, jax.Array],
    counts: tuple[int, bool],
) -> _Front:
    """Go on to the next event or to `target`."""
    (setting, loss, rule), (_, bounded) = problem, counts
    held = front.gates

    def inside(state: Network) -> jax.Array:
        """Return how far the nearest gate is from its kink; it is passed below zero."""
        if held is None:
            return jnp.asarray(jnp.inf)
        before = forward(state, setting, rule)[1]
        return jnp.where(held, before, -before).min() + clock["margin"]

    def below(state: Network) -> jax.Array:
        """Return how far the largest |v| is from the limit."""
        return clock["limit"] - jnp.abs(token_weights(setting, state.weights)).max()

    def condition(t: jax.Array, y: Network, args: Any, **unused: Any) -> jax.Array:
        return jnp.minimum(inside(y), below(y))  # one condition: of several, diffrax takes the first, not the earliest

    root = _Halving(rtol=0.0, atol=0.0, flip=True)  # type: ignore[call-arg]  # its norm has a default
    events = held is not None or bounded
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda time, state, args: field(state, setting, loss, rule, held)),
        diffrax.Dopri8(),
        front.time,
        target,
        None,
        front.network,
        stepsize_controller=diffrax.PIDController(rtol=clock["rtol"], atol=clock["atol"]),
        event=diffrax.Event(condition, root) if events else None,
        adjoint=diffrax.ForwardMode(),  # nothing is differentiated backwards, and this one is compiled sooner
        throw=False,
        max_steps=100_000,
    )
    time, state = solution.ts[-1], jax.tree.map(lambda y: y[-1], solution.ys)
    met = diffrax.is_event(solution.result)
    gates, crossings = held, front.crossings
    if held is not None:
        before = forward(state, setting, rule)[1]
        crossed = jnp.where(held, before, -before) < -clock["margin"] / 2
        gates, crossings = held ^ crossed, crossings + crossed.sum()
    finite = jnp.isfinite(time) & jnp.isfinite(state.logits).all() & jnp.isfinite(state.weights).all()
    good = (diffrax.is_successful(solution.result) | met) & finite & (crossings <= clock["crossings"])
    return _Front(time, state, gates, met & (below(state) < inside(state)), ~good, crossings)
