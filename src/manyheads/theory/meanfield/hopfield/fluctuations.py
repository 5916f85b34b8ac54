"""Finite-size fluctuations of self-attention with 1-bit tokens: linear response to the noise of the bits.

Given their fields the bits are independent, so the mean spin of the N_k = pi_k N neurons of type k scatters about mu_k
with variance (1 - mu_k^2) / N_k. To first order the overlaps deviate from the mean field by the response to that noise:

    N Var(m_{c,t}) = sum_{t',k} ( d m_{c,t} / d mu_{k,t'} )^2 (1 - mu_{k,t'}^2) / pi_k.

Derived here. Attention multiplies noise by gamma / sqrt(M), so the first order needs sqrt(N) >> gamma / sqrt(M).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads.errors import check_integer
from manyheads.theory.meanfield.hopfield.dynamics import (
    append_token,
    first_state,
    mean_spins,
    read_initial,
    read_sweep,
    read_weights,
)
from manyheads.theory.meanfield.hopfield.network import OneBitNetwork

if TYPE_CHECKING:
    from jaxtyping import ArrayLike, Float

IMAGINARY = 1e-30  # step of the derivative: along the imaginary axis nothing cancels, so it is exact to rounding


@takes_arrays
def overlap_fluctuations(
    network: OneBitNetwork, beta: float, steps: int, initial: Float[ArrayLike, " type"] | None = None
) -> Float[np.ndarray, "step feature"]:
    """Return sqrt(N) times the standard deviation of the overlaps of tokens 1 to `steps`, to first order in 1/sqrt(N).

    The network, its start and the overlaps are those of `simulate_network`.
    """
    steps, weights = check_integer("steps", steps), read_weights(network)
    kicks = np.eye(steps * network.types).reshape(steps, network.types, -1)  # one system for each time and type
    sweep = read_sweep(network, np.full(kicks.shape[2], float(beta)), None)
    state = first_state(weights, read_initial(network, initial), sweep)
    shares = np.where(network.fractions > 0, network.fractions, np.inf)
    overlaps, noise = np.empty((steps, network.features, kicks.shape[2])), np.empty((steps, network.types))
    for place in range(steps):
        means = mean_spins(weights, state.attended, sweep.beta)
        noise[place] = (1 - means[:, 0].real ** 2) / shares
        kicked = means + 1j * IMAGINARY * kicks[place]
        overlaps[place] = (weights.overlap @ kicked).imag / IMAGINARY
        position = weights.positions[(place + 1) % network.context]
        state = append_token(weights, position, state.keys, state.values, kicked, sweep.gain)
    return np.sqrt((overlaps**2 * noise.ravel()).sum(2))
