"""Neural tangent kernel (NTK) of the infinite network in closed form, and lazy training with it (richness to zero).

At infinite key dimension and logit exponent 1 attention starts uniform and queries and keys drop out. With J the
average over the allowed tokens, Phi the kernel of the stream, Gamma_oo' that of the backward variable of two read-outs,
and hats for what a branch sees (divided by the root mean squares where the problem normalizes),

    Phi^0 = X,   Phi^l = Phi^{l-1} + b^2 U^l,   U = J Phi J^T (attention) or <phi phi> (MLP),
    Gamma^B_oo' = R_o^T R_o',   Gamma^{l-1} = Gamma^l + b^2 V^l,   V = J^T Gamma J or <phi' phi'> o Gamma,
    K = R Phi^B R^T + (X, Gamma^0) + (beta0^2 / L) sum_l [ (U^l, Gamma^l) + (Phi^{l-1}, V^l) ],

(A, B) the sum of products of entries; outputs then follow f(t) = eta sum_{t'<t} m(t, t') K c Delta(t'). Without
normalization the first step is exact at every richness. Derived here; for pooled attention without an MLP,
K = Xbar [2 (1 + b^2)^L + 2 beta0^2 (1 + b^2)^{L-1}] with Xbar the pooled Gram matrix.
"""

from collections.abc import Callable
from types import MappingProxyType

import numpy as np

from manyheads.errors import UsageError
from manyheads.theory.dmft.problem import Problem

Pair = tuple[np.ndarray, np.ndarray]


def _erf_pair(kernel: np.ndarray) -> Pair:
    """Return <phi phi'> and <dphi dphi'> of erf under a Gaussian (Williams, 1997)."""
    diagonal = np.diag(kernel)
    spread = np.sqrt(np.outer(1 + 2 * diagonal, 1 + 2 * diagonal))
    return 2 / np.pi * np.arcsin(2 * kernel / spread), 4 / np.pi / np.sqrt(spread**2 - 4 * kernel**2)


def _relu_pair(kernel: np.ndarray) -> Pair:
    """Return the arc-cosine kernels of orders 1 and 0 (Cho and Saul, 2009); at zero relu is flat."""
    sizes = np.sqrt(np.outer(np.diag(kernel), np.diag(kernel)))
    alive = sizes > 0
    cosine = np.clip(kernel / np.where(alive, sizes, 1), -1, 1)
    angle = np.arccos(cosine)
    first = sizes * (np.sin(angle) + (np.pi - angle) * cosine) / (2 * np.pi)
    return first, alive * (np.pi - angle) / (2 * np.pi)


PAIRS: MappingProxyType[str, Callable[[np.ndarray], Pair]] = MappingProxyType(
    {"erf": _erf_pair, "relu": _relu_pair, "identity": lambda kernel: (kernel, np.ones_like(kernel))}
)


def neural_tangent_kernel(problem: Problem, activation: str | None = None) -> np.ndarray:
    """Return the neural tangent kernel K (O, O) at initialization, at infinite key dimension and logit exponent 1.

    `activation` is that of an MLP after every attention, ``"erf"``, ``"relu"`` or ``"identity"``; None for none.
    """
    if activation is not None and activation not in PAIRS:
        raise UsageError(f"activation={activation!r}: closed kernels are known here for {', '.join(map(repr, PAIRS))}")
    allowed = problem.attention_mask()
    mean = np.kron(np.eye(problem.samples), allowed / allowed.sum(1, keepdims=True))  # J (PT, PT)
    step = problem.branch * float(problem.depth) ** -problem.depth_exponent
    stream = problem.gram
    branches: list[tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | float]] = []
    for place in range(problem.depth * (1 if activation is None else 2)):
        scale = _scale(problem, stream)
        inner = stream / scale
        if place % 2 and activation is not None:
            written, slopes = PAIRS[activation](inner)
            branches.append((inner, written, slopes, scale))
        else:
            written = mean @ inner @ mean.T
            branches.append((inner, written, None, scale))
        stream = stream + step**2 * written
    last, reading = _scale(problem, stream), problem.pooling
    kernel = reading @ (stream / last) @ reading.T
    for row, one in zip(kernel, reading, strict=True):  # read-out by read-out: pairs of them at once are many
        back = one[:, None] * reading[:, None, :] / last  # Gamma (O, PT, PT) of one read-out with all
        for inner, written, slopes, scale in reversed(branches):
            sent = mean.T @ back @ mean if slopes is None else slopes * back
            row += problem.branch**2 / problem.depth * ((written * back).sum((1, 2)) + (inner * sent).sum((1, 2)))
            back = back + step**2 * sent / scale
        if problem.embedding:
            row += (problem.gram * back).sum((1, 2))
    return kernel


def ntk_outputs(problem: Problem, activation: str | None = None) -> np.ndarray:
    """Return the outputs (S, O, C) of kernel descent with the lazy kernel."""
    kernel = neural_tangent_kernel(problem, activation)
    outputs = np.zeros((problem.steps, problem.outputs, problem.classes))
    errors = np.zeros_like(outputs)
    for moment in range(problem.steps):
        outputs[moment] = (
            problem.learning_rate * kernel @ np.tensordot(problem.memory[moment, :moment], errors[:moment], 1)
        )
        share = problem.loss_weights[moment][:, None]
        errors[moment] = share * problem.loss_function.error(problem.flat_targets, outputs[moment])
    return outputs


def _scale(problem: Problem, stream: np.ndarray) -> np.ndarray | float:
    """Return the outer product of the root mean squares of tokens, where they are normalized."""
    sizes = np.sqrt(np.diag(stream))
    return np.outer(sizes, sizes) if problem.norm else 1.0
