"""One step of self-attention with 1-bit tokens, for mean-field and finite networks, in NumPy or in JAX.

The state after token t is what later tokens read of it: the attended values A_t, and the keys and values of the
latest L - 1 tokens, newest first. While the context grows the window is shorter. The last axis of every array counts
independent systems.

    next token:  mu_k = tanh( beta sum_c W^o_{c,k} A_c ),
                 or 2 Binomial(N_k, (1 + mu_k) / 2) / N_k - 1 in a finite network,
    m^a = (1 - eps) sum_k pi_k W^a_k mu_k + eps <W^a p>,     A = softmax(gamma / sqrt(M) m^q . keys) . values
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from manyheads._arrays import as_floats
from manyheads._extras import jax
from manyheads._namespaces import Array
from manyheads.errors import ShapeError, UsageError
from manyheads.theory.meanfield.hopfield.network import OneBitNetwork

Result = TypeVar("Result")


class Weights(NamedTuple):
    """Weights as the step uses them."""

    output: Array  # (M, C)
    readers: Array  # (3 M, C): query, key and value, with the shares of the types and 1 - eps
    overlap: Array  # (M, C): output weights with the shares of the types
    positions: Array  # (L, 3, M)


class State(NamedTuple):
    """State after a token: the part of the past that later tokens read; the last axis counts systems."""

    attended: Array  # (M, B)
    keys: Array  # (tokens, M, B), newest first
    values: Array  # (tokens, M, B)


class Sweep(NamedTuple):
    """Inverse temperatures of the systems, shape (B,), and the shape they were given in."""

    beta: np.ndarray
    gain: np.ndarray
    shape: tuple[int, ...]


def read_weights(network: OneBitNetwork) -> Weights:
    """Return the weights of a network."""
    stacked = np.concatenate([network.query, network.key, network.value])
    readers = (1 - network.positional_weight) * stacked * network.fractions
    return Weights(network.output, readers, network.output * network.fractions, network.position_overlaps())


def read_sweep(network: OneBitNetwork, beta: ArrayLike, gain: ArrayLike | None) -> Sweep:
    """Check inverse temperatures and broadcast them to one axis of systems."""
    gain = network.gain if gain is None else gain
    betas, gains = as_floats(beta, "beta"), as_floats(gain, "gain")
    for name, values in (("beta", betas), ("gain", gains)):
        if not (np.isfinite(values) & (values >= 0)).all():
            raise UsageError(f"{name}: expected finite numbers of at least 0")
    try:
        betas, gains = np.broadcast_arrays(betas, gains)
    except ValueError as error:
        raise ShapeError(f"beta {betas.shape} and gain {gains.shape} do not broadcast") from error
    if not betas.size:
        raise ShapeError(f"beta and gain {betas.shape}: expected at least one system")
    return Sweep(betas.ravel(), gains.ravel(), betas.shape)


def read_initial(network: OneBitNetwork, initial: ArrayLike | None, systems: tuple[int, ...] = ()) -> np.ndarray:
    """Return the mean spins of the first token by type, shape (C, 1), or (C, B) if each system has its own.

    By default they are those of the first feature, W^o_1.
    """
    spins = network.output[0] if initial is None else as_floats(initial, "initial")
    if spins.shape not in ((network.types,), (*systems, network.types)) or not (np.abs(spins) <= 1).all():
        raise UsageError(f"initial: expected {network.types} mean spins from -1 to 1, one for each type of neurons")
    return spins.reshape(-1, network.types).T


def first_state(weights: Weights, spins: np.ndarray, sweep: Sweep) -> State:
    """Return the state after the first token, whose mean spins are given, shape (C, B) or (C, 1)."""
    means = np.broadcast_to(spins, (len(spins), sweep.beta.size))
    nothing = np.zeros((0, weights.output.shape[0], sweep.beta.size))
    return append_token(weights, weights.positions[0], nothing, nothing, means, sweep.gain)


def mean_spins(weights: Weights, attended: Array, beta: Array) -> Array:
    """Return the mean spins of the next token by type, shape (C, B)."""
    xp = attended.__array_namespace__()
    return xp.tanh(beta * xp.tensordot(weights.output.T, attended, 1))


def append_token(weights: Weights, position: Array, keys: Array, values: Array, means: Array, gain: Array) -> State:
    """Append a token with mean spins (C, B) at a position (3, M) to the window and attend from it."""
    xp, features = means.__array_namespace__(), weights.output.shape[0]
    overlaps = xp.tensordot(weights.readers, means, 1).reshape(3, features, -1) + position[:, :, None]
    query, key, value = overlaps[0], overlaps[1:2], overlaps[2:3]
    keys, values = xp.concatenate([key, keys]), xp.concatenate([value, values])
    logits = gain / features**0.5 * (query * keys).sum(1)  # (tokens, B)
    scores = xp.exp(logits - logits.max(0))
    attended = (scores[:, None] * values).sum(0) / scores.sum(0)
    kept = weights.positions.shape[0] - 1
    return State(attended, keys[:kept], values[:kept])


def step(weights: Weights, position: Array, state: State, beta: Array, gain: Array) -> tuple[State, Array]:
    """Take one mean-field step; return the state and the overlaps of the new token with the output weights, (M, B)."""
    means = mean_spins(weights, state.attended, beta)
    overlaps = means.__array_namespace__().tensordot(weights.overlap, means, 1)
    return append_token(weights, position, state.keys, state.values, means, gain), overlaps


def fill_window(weights: Weights, state: State, sweep: Sweep) -> tuple[State, list[np.ndarray]]:
    """Take the L - 1 mean-field steps after token 0: the window is then full and the next token has position 0."""
    overlaps = []
    for position in weights.positions[1:]:
        state, overlap = step(weights, position, state, sweep.beta, sweep.gain)
        overlaps.append(overlap)
    return state, overlaps


@functools.cache
def compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return a function, compiled for each value of its first argument; JAX is imported when it is first called."""
    return jax.jit(function, static_argnums=0)
