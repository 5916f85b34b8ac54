"""Monte Carlo estimate of the gradient of theorem 3."""

import jax
import numpy as np

CHUNK = 1 << 16


def sampled_gradient(mixture, weights, activation, samples, key):
    """Return the mean of a phi'(v . x + c) x over fresh samples, and the standard error of each coordinate."""
    sums, squares, chunks = 0.0, 0.0, -(-samples // CHUNK)
    size = min(samples, CHUNK)
    with jax.enable_x64(True):
        for part in jax.random.split(key, chunks):
            x, a = (np.asarray(each) for each in mixture.draw(part, size))
            terms = (a * np.asarray(activation.derivative(x @ weights + mixture.offset)))[:, None] * x
            sums, squares = sums + terms.sum(0), squares + (terms**2).sum(0)
    mean = sums / (chunks * size)
    return mean, np.sqrt((squares / (chunks * size) - mean**2) / (chunks * size - 1))
