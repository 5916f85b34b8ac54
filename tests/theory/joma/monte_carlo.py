"""Monte Carlo estimate of the gradient of theorem 3."""

import jax
import numpy as np

CHUNK = 1 << 16


def sampled_gradient(mixture, weights, activation, samples, key):
    """Return the mean of a phi'(v . x + c) x over fresh samples, and the standard error of each coordinate."""
    sums, squares, chunks = 0.0, 0.0, -(-samples // CHUNK)
    size = min(samples, CHUNK)

    @jax.jit
    def draw_terms(key):
        x, a = mixture.draw(key, size)
        return (a * activation.derivative(x @ weights + mixture.offset))[:, None] * x

    with jax.enable_x64(True):
        for part in jax.random.split(key, chunks):
            terms = np.asarray(draw_terms(part))
            sums, squares = sums + terms.sum(0), squares + (terms**2).sum(0)
    mean = sums / (chunks * size)
    return mean, np.sqrt((squares / (chunks * size) - mean**2) / (chunks * size - 1))
