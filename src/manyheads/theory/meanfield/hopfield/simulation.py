"""Exact simulation of finite self-attention networks with 1-bit tokens, and their fluctuations to first order.

Neurons of a type have equal fields and independent bits, so the sum over the N_k neurons of type k is
2 Binomial(N_k, p_k) - N_k: the same distribution as with explicit bits, at a cost independent of N.

Given their fields the bits are independent, so the mean spin of the N_k = pi_k N neurons of type k scatters about mu_k
with variance (1 - mu_k^2) / N_k. To first order the overlaps deviate from the mean field by the response to that noise:

    N Var(m_{c,t}) = sum_{t',k} ( d m_{c,t} / d mu_{k,t'} )^2 (1 - mu_{k,t'}^2) / pi_k.

Attention multiplies noise by gamma / sqrt(M), so the first order needs sqrt(N) >> gamma / sqrt(M). Simulation by types
and linear response are derived here.
"""

from __future__ import annotations

import numpy as np

from manyheads._arrays import as_integers, check_generator, takes_arrays
from manyheads._extras import ArrayLike, Float, Int
from manyheads.errors import ShapeError, UsageError, check_integer
from manyheads.theory.meanfield.hopfield import dynamics
from manyheads.theory.meanfield.hopfield.network import OneBitNetwork

IMAGINARY = 1e-30  # step of the derivative: along the imaginary axis nothing cancels, so it is exact to rounding


@takes_arrays
def simulate_network(
    network: OneBitNetwork,
    beta: Float[ArrayLike, "*systems"],
    steps: int,
    neurons: Int[ArrayLike, "*systems"],
    rng: np.random.Generator,
    gain: Float[ArrayLike, "*systems"] | None = None,
    initial: Float[ArrayLike, " type"] | None = None,
) -> Float[np.ndarray, "*systems step feature"]:
    """Run finite networks from a single token; the context grows from 1 to L tokens.

    Parameters
    ----------
    beta, neurons, gain
        Inverse temperatures and sizes N, of shapes that broadcast; every system is an independent run. The shares
        times N must be whole (`OneBitNetwork.with_neurons`).
    steps
        Number of tokens after the first one.
    initial
        Spins of the first token by type; those of the first feature, W^o_1, if None.

    Returns
    -------
    Overlaps <W^o_c s_t> of tokens 1 to `steps` with the output weights, between -1 and 1.

    Raises
    ------
    UsageError
        Shares that are no whole numbers of neurons, inverse temperatures that are negative or infinite, or an `rng`
        that is no generator.

    Examples
    --------
    >>> sizes = np.full(8, 300)
    >>> simulate_network(OneBitNetwork.published(), 0.5, 20, sizes, np.random.default_rng(0)).shape
    (8, 20, 3)
    """
    steps, rng = check_integer("steps", steps), check_generator(rng)
    sizes = as_integers(neurons, "neurons")
    if (sizes < 1).any():
        raise UsageError("neurons: expected integers of at least 1")
    sweep, weights = dynamics.read_sweep(network, beta, gain), dynamics.read_weights(network)
    try:
        shape = np.broadcast_shapes(sweep.shape, sizes.shape)
    except ValueError as error:
        raise ShapeError(f"beta and gain {sweep.shape} and neurons {sizes.shape} do not broadcast") from error
    spread = [np.broadcast_to(part.reshape(sweep.shape), shape).ravel() for part in sweep[:2]]
    sweep = sweep._replace(beta=spread[0], gain=spread[1], shape=shape)
    known = {int(size): network.counts(int(size)) for size in np.unique(sizes)}
    counts = np.stack([known[int(size)] for size in np.broadcast_to(sizes, shape).ravel()], axis=1)  # (C, B)
    state = dynamics.first_state(weights, dynamics.read_initial(network, initial), sweep)
    overlaps = np.empty((steps, network.features, sweep.beta.size))
    for place in range(steps):
        chance = (1 + dynamics.mean_spins(weights, state.attended, sweep.beta)) / 2
        spins = 2 * rng.binomial(counts, np.clip(chance, 0, 1)) / np.maximum(counts, 1) - 1
        overlaps[place] = weights.overlap @ spins
        position = weights.positions[(place + 1) % network.context]
        state = dynamics.append_token(weights, position, state.keys, state.values, spins, sweep.gain)
    return np.moveaxis(overlaps, 2, 0).reshape(*shape, steps, network.features)


@takes_arrays
def overlap_fluctuations(
    network: OneBitNetwork, beta: float, steps: int, initial: Float[ArrayLike, " type"] | None = None
) -> Float[np.ndarray, "step feature"]:
    """Return sqrt(N) times the standard deviation of the overlaps of tokens 1 to `steps`, to first order in 1/sqrt(N).

    The network, its start and the overlaps are those of `simulate_network`.
    """
    steps, weights = check_integer("steps", steps), dynamics.read_weights(network)
    kicks = np.eye(steps * network.types).reshape(steps, network.types, -1)  # one system for each time and type
    sweep = dynamics.read_sweep(network, np.full(kicks.shape[2], float(beta)), None)
    state = dynamics.first_state(weights, dynamics.read_initial(network, initial), sweep)
    shares = np.where(network.fractions > 0, network.fractions, np.inf)
    overlaps, noise = np.empty((steps, network.features, kicks.shape[2])), np.empty((steps, network.types))
    for place in range(steps):
        means = dynamics.mean_spins(weights, state.attended, sweep.beta)
        noise[place] = (1 - means[:, 0].real ** 2) / shares
        kicked = means + 1j * IMAGINARY * kicks[place]
        overlaps[place] = (weights.overlap @ kicked).imag / IMAGINARY
        position = weights.positions[(place + 1) % network.context]
        state = dynamics.append_token(weights, position, state.keys, state.values, kicked, sweep.gain)
    return np.sqrt((overlaps**2 * noise.ravel()).sum(2))
