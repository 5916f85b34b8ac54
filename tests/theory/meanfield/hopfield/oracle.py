"""Self-attention with 1-bit tokens written a second time, with explicit bits and plain loops."""

import numpy as np


def run(network, beta, steps, neurons=None, rng=None, gain=None):
    """Return the overlaps of one run with explicit bits, or of their means when there is no generator: (steps, M)."""
    counts = np.rint(network.fractions * (neurons or network.types)).astype(int)
    if neurons is None:
        assert len(set(network.fractions)) == 1
    output, query, key, value = (
        np.repeat(weights, counts, axis=1) for weights in (network.output, network.query, network.key, network.value)
    )
    features, total = output.shape
    bits, eps, gain = network.positional.shape[2], network.positional_weight, network.gain if gain is None else gain
    spins, keys, values, found, attended = output[0].copy(), [], [], [], np.zeros(features)
    for t in range(steps + 1):
        if t:
            chance = [
                0.5 * (1 + np.tanh(beta * sum(output[c, i] * attended[c] for c in range(features))))
                for i in range(total)
            ]
            spins = 2 * np.array(chance) - 1 if rng is None else np.where(rng.random(total) < chance, 1.0, -1.0)
            found.append(output @ spins / total)
        place = t % 2**bits
        code = [1.0 if place >> (bits - 1 - j) & 1 else -1.0 for j in range(bits)]
        overlaps = [
            [
                (1 - eps) * weights[c] @ spins / total
                + eps * sum(w * p for w, p in zip(extra[c], code, strict=True)) / max(bits, 1)
                for c in range(features)
            ]
            for weights, extra in zip((query, key, value), network.positional, strict=True)
        ]
        keys, values = [*keys, overlaps[1]][-(2**bits) :], [*values, overlaps[2]][-(2**bits) :]
        logits = np.array([gain / np.sqrt(features) * np.dot(overlaps[0], one) for one in keys])
        weights = np.exp(logits - logits.max())
        attended = sum(w * np.array(v) for w, v in zip(weights / weights.sum(), values, strict=True))
    return np.array(found)
