"""Bifurcation scan of the mean-field map of 1-bit self-attention, by continuation.

Each temperature starts from the end of the orbit at the one before it, so the scan follows one attractor as long as it
exists. Where scans up and down differ, several attractors coexist. `lyapunov_spectrum` scans from a fixed start.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from manyheads._arrays import as_floats, takes_arrays
from manyheads._settings import double_precision
from manyheads.errors import ShapeError, UsageError
from manyheads.theory.meanfield.hopfield.dynamics import (
    Sweep,
    fill_window,
    first_state,
    read_initial,
    read_sweep,
    read_weights,
)
from manyheads.theory.meanfield.hopfield.lyapunov import Lengths, LyapunovSpectrum, draw_tangents, run_orbits, summarize
from manyheads.theory.meanfield.hopfield.network import OneBitNetwork

if TYPE_CHECKING:
    from jaxtyping import ArrayLike, Float


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
        logs, overlaps = (np.asarray(part) for part in _compiled_scan()(*given))
    logs, overlaps = (np.moveaxis(part[order, ..., 0], 0, -1) for part in (logs, overlaps))  # betas last
    return summarize(network, lengths, values.shape, logs, overlaps)


@functools.cache
def _compiled_scan() -> Any:
    """Return the compiled loop over temperatures; JAX is imported when it is first called."""
    import jax

    def run(recorded: int, weights: Any, state: Any, tangents: Any, betas: Any, gain: Any, lengths: Any) -> Any:
        def visit(state: Any, beta: Any) -> Any:
            state, logs, overlaps = run_orbits(recorded, weights, state, tangents, beta[None], gain, *lengths)
            return state, (logs, overlaps)

        return jax.lax.scan(visit, state, betas)[1]

    return jax.jit(run, static_argnums=0)
