"""Mean-field map of self-attention with 1-bit tokens for any number of features.

In the limit of many neurons at fixed features M and context L, every overlap is its mean: the next token's bits are
independent, so overlaps fluctuate by O(1/sqrt(N)). Weights enter through M projections alone, so no memory term arises.

    m^a_{c,t+1} = (1 - eps) < W^a_c tanh( beta sum_e W^o_e A_{e,t} ) > + eps <W^a_c p_{t+1}>

The mean over neurons is the sum over types of neurons. It agrees with the expansion in correlations of the weights:
tanh is odd, so over the sign patterns sigma = (W^o_1, ..., W^o_M) and the subsets S of odd size,

    < W^a_c f(W^o) > = 2^-M sum_sigma tanh(beta sigma . A) sum_S (prod_{e in S} sigma_e) < W^a_c prod_{e in S} W^o_e >,

pair correlations for M <= 2, and products of three output weights from M = 3 on. The sum over types is derived here.
"""

from __future__ import annotations

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads._extras import ArrayLike, Float, jax
from manyheads._namespaces import Array
from manyheads._settings import double_precision
from manyheads.errors import check_integer
from manyheads.theory.meanfield.hopfield import dynamics
from manyheads.theory.meanfield.hopfield.network import OneBitNetwork


@takes_arrays
def mean_field_trajectory(
    network: OneBitNetwork,
    beta: Float[ArrayLike, "*systems"],
    steps: int,
    gain: Float[ArrayLike, "*systems"] | None = None,
    initial: Float[ArrayLike, "*#systems type"] | None = None,
) -> Float[np.ndarray, "*systems step feature"]:
    """Iterate the mean-field map from a single token; the context grows from 1 to L tokens.

    Parameters
    ----------
    beta, gain
        Inverse temperatures of the output and of attention, of shapes that broadcast; `gain` is the network's if None.
    steps
        Number of tokens after the first one.
    initial
        Mean spins of the first token by type, for all systems or for each; those of the first feature, W^o_1, if None.

    Returns
    -------
    Overlaps <W^o_c s_t> of tokens 1 to `steps` with the output weights, between -1 and 1.

    Raises
    ------
    UsageError
        Negative or infinite inverse temperatures, or an initial token that is no set of mean spins.

    Examples
    --------
    >>> overlaps = mean_field_trajectory(OneBitNetwork.published(), [0.5, 1.4], 50)
    >>> overlaps.shape
    (2, 50, 3)
    """
    steps = check_integer("steps", steps)
    sweep, weights = dynamics.read_sweep(network, beta, gain), dynamics.read_weights(network)
    state, begun = dynamics.fill_window(
        weights, dynamics.first_state(weights, dynamics.read_initial(network, initial, sweep.shape), sweep), sweep
    )
    periods = -(-steps // network.context)
    with double_precision():
        rest = np.asarray(dynamics.compiled(_record)(periods, weights, state, sweep.beta, sweep.gain))
    overlaps = np.concatenate([np.reshape(begun, (-1, *rest.shape[1:])), rest])[:steps]  # (step, M, B)
    return np.moveaxis(overlaps, 2, 0).reshape(*sweep.shape, steps, network.features)


def run_period(
    weights: dynamics.Weights, state: dynamics.State, beta: Array, gain: Array
) -> tuple[dynamics.State, Array]:
    """Take L steps, from position 0; return the state and the overlaps of the L tokens, (L, M, B). Traced by JAX."""
    return jax.lax.scan(lambda state, place: dynamics.step(weights, place, state, beta, gain), state, weights.positions)


def _record(periods: int, weights: dynamics.Weights, state: dynamics.State, beta: Array, gain: Array) -> Array:
    """Return the overlaps of so many periods. Traced by JAX."""
    _, overlaps = jax.lax.scan(lambda state, _: run_period(weights, state, beta, gain), state, None, length=periods)
    return overlaps.reshape(-1, *overlaps.shape[2:])
