"""Attack on a layer without positions: Levenberg-Marquardt on factors of every head, from random weights.

Independent of the package: nothing but Gaussian sequences, NumPy and the numbers of heads and ranks.
"""

import numpy as np

LENGTH = 4


def unpack(flat, shape):
    """Return query (m, d + 1, r), key, value (m, d, r), output (m, r, d) and bias (d,)."""
    dim, heads, rank = shape
    sizes = [(heads, dim + 1, rank), (heads, dim, rank), (heads, dim, rank), (heads, rank, dim), (dim,)]
    ends = np.cumsum([np.prod(size) for size in sizes])
    return [part.reshape(size) for part, size in zip(np.split(flat, ends[:-1]), sizes, strict=True)]


def answers(flat, x, shape, causal):
    """Return answers (n, k, d) and their derivatives (n k d, weights)."""
    query, key, value, output, bias = unpack(flat, shape)
    count, length, dim = x.shape
    ones = np.concatenate([x, np.ones((count, length, 1))], axis=2)
    hidden = np.where(np.tril(np.ones((length, length))) if causal else np.ones((length, length)), 0.0, -np.inf)
    y, parts = np.tile(bias, (count, length, 1)), [[], [], [], []]
    for q, k, v, o in zip(query, key, value, output, strict=True):
        asked, keys, passed = ones @ q, x @ k, x @ v
        p = np.exp((logits := asked @ keys.swapaxes(1, 2) + hidden) - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        head = p @ passed
        y = y + head @ o
        moved = np.einsum("nrj,nrjv,vo->nrjo", p, passed[:, None] - head[:, :, None], o, optimize=True)
        parts[0].append(np.einsum("nra,nrjo,njf->nroaf", ones, moved, keys, optimize=True))
        parts[1].append(np.einsum("nrjo,njb,nrf->nrobf", moved, x, asked, optimize=True))
        parts[2].append(np.einsum("nra,vo->nroav", p @ x, o))
        parts[3].append(np.einsum("nrv,op->nrovp", head, np.eye(dim)))
    columns = [part.reshape(y.size, -1) for kind in parts for part in kind]
    return y, np.concatenate([*columns, np.tile(np.eye(dim), (count * length, 1))], axis=1)


def descend(flat, x, y, shape, causal, steps, floor=0.0, damping=0.1):
    """Fit by Levenberg-Marquardt; return weights and the squared residual."""
    found, jacobian = answers(flat, x, shape, causal)
    loss = ((y - found) ** 2).sum()
    for _ in range(steps):
        gram, slope = jacobian.T @ jacobian, jacobian.T @ (y - found).ravel()
        metric = np.diag(np.diag(gram) + 1e-6 * np.trace(gram) / len(gram))
        for _ in range(10):
            there = flat + np.linalg.solve(gram + damping * metric, slope)
            new = answers(there, x, shape, causal)
            left = ((y - new[0]) ** 2).sum()
            if np.isfinite(left) and left < loss:
                break
            damping *= 4
        else:
            return flat, loss
        gain, damping = 1 - left / loss, max(damping / 5, 1e-9)
        flat, (found, jacobian), loss = there, new, left
        if loss <= floor or gain < 1e-5:
            break
    return flat, loss


def attack(layer, shape, causal, noise, calls, rng, first=6.0, starts=12):
    """Return the relative squared error on fresh sequences of what `calls` noisy answers show, and what it may be.

    The latter are mean and standard deviation to first order in the noise, for these sequences; infinite if not found.
    """
    dim, heads, rank = shape
    free = heads * (rank * (2 * dim + 1 - rank) + rank * (2 * dim - rank)) + dim
    x, fresh = rng.standard_normal((calls, LENGTH, dim)), rng.standard_normal((1000, LENGTH, dim))
    size = layer(fresh).std()
    y = layer(x) + noise * size * rng.standard_normal(x.shape)
    some = min(calls, int(np.ceil(first * free / (LENGTH * dim))))
    for _ in range(starts):
        flat = rng.standard_normal(heads * rank * (4 * dim + 1) + dim) / dim**0.5
        freedom = max(y[:some].size - free, 1)
        floor = 0.3 * freedom * (noise * size) ** 2
        flat, loss = descend(flat, x[:some], y[:some], shape, causal, 80, floor)
        if loss < 2 * freedom * (noise * size) ** 2:
            flat, _ = descend(flat, x, y, shape, causal, 12, damping=1e-4)
            found, wide = answers(flat, fresh, shape, causal)
            error = float(np.mean((found - layer(fresh)) ** 2) / size**2)
            return error, *scatter(answers(flat, x, shape, causal)[1], wide, noise, free)
    return np.inf, np.inf, np.inf


def scatter(jacobian, wide, noise, free):
    """Return mean and standard deviation of s^2 tr(K M^+), M the information of the answers and K that of fresh ones.

    The errors are J^+ times the noise: a sum of squares of `free` normal numbers, weighed by the eigenvalues of K M^+.
    """
    _, sizes, turn = np.linalg.svd(jacobian, full_matrices=False)
    weights = (np.linalg.svd(wide @ (turn[:free].T / sizes[:free]), compute_uv=False) * noise) ** 2 / len(wide)
    return weights.sum(), (2 * np.sum(weights**2)) ** 0.5
