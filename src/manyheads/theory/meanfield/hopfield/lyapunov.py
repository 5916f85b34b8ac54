"""Lyapunov spectrum and bifurcation scan of the mean-field map of 1-bit self-attention, by QR of its Jacobian.

The tangent space holds attended values, keys and values of the window. The positional bits are a drive of period L, not
a direction of that space, so no exponent of -infinity arises from them. Of the M (2 L - 1) directions at most L M are
free, since key and value of a token are both functions of what was attended before it.

Each step maps the tangent vectors by the exact Jacobian and orthonormalizes them (Gram-Schmidt); the exponents are the
mean logarithms of the lengths, in nats per step.

In a scan by continuation each temperature starts from the end of the orbit at the one before it, so the scan follows
one attractor as long as it exists. Where scans up and down differ, several attractors coexist.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from manyheads._arrays import as_floats, takes_arrays
from manyheads._extras import ArrayLike, Float, jax, jnp
from manyheads._namespaces import Array
from manyheads._settings import double_precision
from manyheads._trees import PyTree
from manyheads.errors import ShapeError, UsageError, check_integer
from manyheads.theory.meanfield.hopfield.dynamics import (
    State,
    Sweep,
    Weights,
    compiled,
    fill_window,
    first_state,
    read_initial,
    read_sweep,
    read_weights,
    step,
)
from manyheads.theory.meanfield.hopfield.mean_field import run_period
from manyheads.theory.meanfield.hopfield.network import OneBitNetwork

BLOCKS = 10  # of the measured steps; their scatter is the standard error
CHUNK = 500  # systems at a time: their states fit into the cache
TINY = 1e-300  # length of a direction that is contracted to nothing


@dataclass(frozen=True, eq=False)
class LyapunovSpectrum:
    """Lyapunov exponents of systems, and the end of their orbits.

    An exponent of -690.8, the logarithm of the smallest length that is counted, stands for minus infinity (a map that
    contracts to a point, as at beta = 0).
    """

    exponents: Float[np.ndarray, "*systems exponent"]  # the largest ones in falling order, nats per step
    errors: Float[np.ndarray, "*systems"]  # standard error of the largest one over blocks of the orbit
    overlaps: Float[np.ndarray, "*systems recorded feature"]  # overlaps <W^o_c s> of the last tokens
    steps: int  # behind each exponent
    drive: int  # period of the positional drive: L, or 1 at eps = 0, where nothing drives the map


class Lengths(NamedTuple):
    """Periods of the drive that an orbit spends on its transient, in each block, and that are recorded."""

    transient: int
    block: int
    recorded: int

    @classmethod
    def of(cls, network: OneBitNetwork, transient: int, steps: int, record: int) -> Lengths:
        """Convert numbers of steps to whole periods of the drive."""
        drive = network.context
        transient, steps = check_integer("transient", transient, 0), check_integer("steps", steps)
        recorded = -(-check_integer("record", record) // drive)
        return cls(-(-transient // drive), -(-steps // (BLOCKS * drive)), max(recorded, 2))


@takes_arrays
def lyapunov_spectrum(
    network: OneBitNetwork,
    beta: Float[ArrayLike, "*systems"],
    exponents: int = 2,
    transient: int = 40_000,
    steps: int = 20_000,
    record: int = 800,
    gain: Float[ArrayLike, "*systems"] | None = None,
    initial: Float[ArrayLike, "*#systems type"] | None = None,
) -> LyapunovSpectrum:
    """Return the largest Lyapunov exponents of the mean-field map.

    Parameters
    ----------
    beta, gain
        Inverse temperatures of the output and of attention, of shapes that broadcast; with ``beta`` of shape (b,) and
        ``gain`` of shape (g, 1) the result is a phase diagram.
    exponents
        How many, at most L M.
    transient, steps, record
        Steps before the exponents are measured, steps for them, and last steps whose overlaps are kept; each is
        rounded up to whole periods of the drive. A tenth of `steps` more aligns the tangent vectors.
    initial
        Mean spins of the first token by type, for all systems or for each; those of the first feature, W^o_1, if None.

    Raises
    ------
    UsageError
        More exponents than free directions, or numbers of steps that are no positive integers.

    Examples
    --------
    >>> found = lyapunov_spectrum(OneBitNetwork.published(), [0.8, 1.0], transient=2000, steps=2000)
    >>> found.exponents[:, 0].round(3)
    array([-0.164, -0.083])
    """
    lengths = Lengths.of(network, transient, steps, record)
    sweep, weights = read_sweep(network, beta, gain), read_weights(network)
    tangents = draw_tangents(network, exponents)
    spins = np.broadcast_to(read_initial(network, initial, sweep.shape), (network.types, sweep.beta.size))
    size, found = min(CHUNK, sweep.beta.size), []
    for begin in range(0, sweep.beta.size, size):
        places = np.minimum(np.arange(begin, begin + size), sweep.beta.size - 1)  # the last chunk is filled up
        part = Sweep(sweep.beta[places], sweep.gain[places], (size,))
        state, _ = fill_window(weights, first_state(weights, spins[:, places], part), part)
        with double_precision():
            _, logs, overlaps = compiled(run_orbits)(
                lengths.recorded, weights, state, tangents, part.beta, part.gain, *lengths[:2]
            )
            found.append((np.asarray(logs), np.asarray(overlaps)))
    logs, overlaps = (np.concatenate(parts, axis=-1)[..., : sweep.beta.size] for parts in zip(*found, strict=True))
    return summarize(network, lengths, sweep.shape, logs, overlaps)


@takes_arrays
def bifurcation_scan(
    network: OneBitNetwork,
    betas: Float[ArrayLike, " betas"],
    direction: Literal["up", "down"] = "up",
    exponents: int = 2,
    transient: int = 2000,
    steps: int = 4000,
    record: int = 400,
    initial: Float[ArrayLike, " type"] | None = None,
) -> LyapunovSpectrum:
    """Follow attractors along increasing ("up") or decreasing ("down") output inverse temperature.

    Parameters
    ----------
    betas
        Output inverse temperatures, increasing.
    direction
        Order in which they are visited. The result has the order of `betas` either way.
    exponents, transient, steps, record, initial
        As in `lyapunov_spectrum`; the transient is that of each temperature, and `initial` starts the first one.

    Raises
    ------
    UsageError
        Temperatures that do not increase, or a direction of another name.
    """
    values = as_floats(betas, "betas")
    if values.ndim != 1 or not values.size:
        raise ShapeError(f"betas {values.shape}: expected one axis of temperatures")
    if (np.diff(values) <= 0).any() or direction not in ("up", "down"):
        raise UsageError(f'direction={direction!r}: expected "up" or "down", along betas that increase')
    order = slice(None) if direction == "up" else slice(None, None, -1)
    visited = read_sweep(network, values[order], None)
    lengths, weights = Lengths.of(network, transient, steps, record), read_weights(network)
    first = Sweep(visited.beta[:1], visited.gain[:1], (1,))
    state, _ = fill_window(weights, first_state(weights, read_initial(network, initial), first), first)
    tangents = draw_tangents(network, exponents)
    with double_precision():
        given = (lengths.recorded, weights, state, tangents, visited.beta, first.gain, lengths[:2])
        logs, overlaps = (np.asarray(part) for part in compiled(_scan)(*given))
    logs, overlaps = (np.moveaxis(part[order, ..., 0], 0, -1) for part in (logs, overlaps))  # betas last
    return summarize(network, lengths, values.shape, logs, overlaps)


def _scan(recorded: int, weights: Weights, state: State, tangents: Any, betas: Any, gain: Any, lengths: Any) -> Any:
    """Visit temperatures one after the other; return logarithms and overlaps at each. Traced by JAX."""

    def visit(state: State, beta: Array) -> tuple[State, tuple[Array, Array]]:
        state, logs, overlaps = run_orbits(recorded, weights, state, tangents, beta[None], gain, *lengths)
        return state, (logs, overlaps)

    return jax.lax.scan(visit, state, betas)[1]


def summarize(
    network: OneBitNetwork, lengths: Lengths, shape: tuple[int, ...], logs: np.ndarray, overlaps: np.ndarray
) -> LyapunovSpectrum:
    """Make a spectrum of mean logarithms (blocks, exponents, B) and of overlaps (recorded, M, B)."""
    exponents = -np.sort(-logs.mean(0), axis=0)
    return LyapunovSpectrum(
        np.moveaxis(exponents, 1, 0).reshape(*shape, -1),
        (logs[:, 0].std(0, ddof=1) / BLOCKS**0.5).reshape(shape),
        np.moveaxis(overlaps, 2, 0).reshape(*shape, len(overlaps), -1),
        BLOCKS * lengths.block * network.context,
        network.context if network.positional_weight else 1,
    )


def draw_tangents(network: OneBitNetwork, exponents: int) -> np.ndarray:
    """Return generic tangent vectors, shape (exponents, M (2 L - 1)): any ones align in the same way."""
    features, context = network.features, network.context
    if (exponents := check_integer("exponents", exponents)) > features * context:
        raise UsageError(f"exponents={exponents}: the map has {features} x {context} free directions at most")
    return np.random.default_rng(0).standard_normal((exponents, features * (2 * context - 1)))


def run_orbits(
    recorded: int, weights: Weights, state: State, tangents: Any, beta: Any, gain: Any, transient: Any, periods: Any
) -> tuple[State, Array, Array]:
    """Run the transient, measure mean logarithms by block of some periods, and record overlaps. Traced by JAX.

    Returned are the state, logarithms (BLOCKS, exponents, B) in nats per step, and overlaps (recorded L, M, B).
    """
    context, features = weights.positions.shape[:1] + weights.output.shape[:1]

    def measured_step(carry: PyTree, position: Array) -> tuple[PyTree, None]:
        state, vectors, logs = carry
        state, push = jax.linearize(lambda state: step(weights, position, state, beta, gain)[0], state)
        vectors, lengths = orthonormalize(flatten(jax.vmap(push)(unflatten(vectors, context, features))))
        return (state, vectors, logs + lengths), None

    def block(carry: PyTree, _: None) -> tuple[PyTree, Array]:
        nothing = jnp.zeros((len(tangents), beta.size))
        period = lambda _, carry: jax.lax.scan(measured_step, carry, weights.positions)[0]  # noqa: E731
        state, vectors, logs = jax.lax.fori_loop(0, periods, period, (*carry, nothing))
        return (state, vectors), logs / (periods * context)

    state = jax.lax.fori_loop(0, transient, lambda _, state: run_period(weights, state, beta, gain)[0], state)
    vectors = jnp.broadcast_to(jnp.asarray(tangents)[:, :, None], (*tangents.shape, beta.size))
    (state, _), logs = jax.lax.scan(block, (state, vectors), None, length=BLOCKS + 1)
    state, overlaps = jax.lax.scan(
        lambda state, _: run_period(weights, state, beta, gain), state, None, length=recorded
    )
    return state, logs[1:], overlaps.reshape(-1, *overlaps.shape[2:])  # the first block aligns the vectors


def flatten(tangent: State) -> Array:
    """Join the parts of tangent vectors, shape (exponents, M (2 L - 1), B)."""
    count, systems = tangent.attended.shape[0], tangent.attended.shape[-1]
    parts = [part.reshape(count, -1, systems) for part in tangent]
    return tangent.attended.__array_namespace__().concatenate(parts, axis=1)


def unflatten(vectors: Array, context: int, features: int) -> State:
    """Split tangent vectors as `flatten` joined them."""
    count, _, systems = vectors.shape
    blocks = vectors.reshape(count, 2 * context - 1, features, systems)
    return State(blocks[:, 0], blocks[:, 1:context], blocks[:, context:])


def orthonormalize(vectors: Array) -> tuple[Array, Array]:
    """Orthonormalize (exponents, D, B) one after the other; return them and the logarithms of their lengths.

    For a few short vectors and many systems this is far cheaper than a QR decomposition of each system.
    """
    done: list[Array] = []
    logs = []
    for vector in vectors:
        for other in done:
            vector = vector - (other * vector).sum(0) * other
        length = jnp.maximum(jnp.sqrt((vector**2).sum(0)), TINY)
        done.append(vector / length)
        logs.append(jnp.log(length))
    return jnp.stack(done), jnp.stack(logs)
