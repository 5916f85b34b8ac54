"""Adam written out in NumPy, with a learning rate and an epsilon for each role."""

import jax
import numpy as np

from manyheads.transformer.weights import roles


def adam_steps(weights, gradient_of, batches, numbers):
    """Train on batches and return weights and losses; numbers: role -> (learning rate, epsilon)."""
    labels, losses = roles(weights), []
    weights = jax.tree.map(np.asarray, weights)
    first = second = jax.tree.map(np.zeros_like, weights)
    for count, batch in enumerate(batches, 1):
        loss, gradient = jax.tree.map(np.asarray, gradient_of(weights, batch))
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
        second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, second, gradient)

        def move(weight, m, v, role, count=count):
            learning_rate, epsilon = numbers[role]
            return weight - learning_rate * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + epsilon)

        weights = jax.tree.map(move, weights, first, second, labels)
        losses.append(float(loss))
    return weights, losses
