r"""Jennrich's method for pairs: pencils of Jacobians, and starting logits in closed form.

Jacobians of the answers in the query, at two points or with two shifts, share their factors: J = E diag(du_i/dl) T.
Their pencil has the columns of E, the directions of the values, as eigenvectors.

References
----------
Harshman (1970), Foundations of the PARAFAC procedure, UCLA Working Papers in Phonetics 16 (Jennrich's method).
"""

import itertools

import numpy as np
from scipy.special import expit

from manyheads.recovery._types import Array
from manyheads.recovery.queries.nets.sigmoid_network import EPS, read_gates


class Pencils:
    """Eigenvectors of the pencils of all pairs of Jacobians whose eigenvalues are real and distinct."""

    def __init__(self, across: bool = True) -> None:
        self.across = across  # whether Jacobians at different points share their factors
        self.jacobians: list[Array] = []
        self.found: list[tuple[float, float, Array]] = []
        self._conditions: list[float] = []

    def extend(self, jacobians: list[Array]) -> None:
        """Add Jacobians, and the pencils that they make with each other and with those before."""
        start = len(self.jacobians)
        self.jacobians += jacobians
        self._conditions += [float(np.linalg.cond(jacobian)) for jacobian in jacobians]
        for below, above in itertools.permutations(range(len(self.jacobians)), 2):
            if (max if self.across else min)(below, above) >= start and self._conditions[below] < 0.1 / EPS:
                self._try(below, above)
        self.found.sort(key=lambda item: -item[0])

    def _try(self, below: int, above: int) -> None:
        try:
            values, frame = np.linalg.eig(np.linalg.solve(self.jacobians[below].T, self.jacobians[above].T).T)
        except np.linalg.LinAlgError:
            return
        size = np.abs(values).max()
        if not np.isfinite(size) or np.abs(values.imag).max() > 1e-3 * size:
            return
        ordered = np.sort(values.real)
        relative = np.diff(ordered) / np.maximum(np.maximum(np.abs(ordered[1:]), np.abs(ordered[:-1])), 1e-3)
        distance = float(relative.min()) if len(relative) else 9.0
        if distance > 0:
            self.found.append((distance / self._conditions[below], distance, frame.real))


def start_net(answers: Array, frame: Array, shifts: Array) -> Array | None:
    r"""Return logits (m, n) in closed form from answers (n, K, m) in the axes, and the directions of the values.

    In the frame the answers are z = d u(l, s), and with x = e^l, a = e^s: u = a (x - 1) / ((x + a)(1 + a)). The ratio
    at two shifts gives x, then z gives the amplitude d; its median over the queries where both are safe is taken, and
    each logit read where its gate is nearest to one half.
    """
    try:
        shares = np.linalg.solve(frame, answers.reshape(-1, answers.shape[2]).T).T.reshape(answers.shape)
    except np.linalg.LinAlgError:
        return None
    low, high = np.exp(shifts[0]), np.exp(shifts[-1])
    with np.errstate(all="ignore"):
        ratio = shares[:, 0] / shares[:, -1] * (high * (1 + low)) / (low * (1 + high))  # (n, m)
        odds = (high - ratio * low) / (ratio - 1)
        logits = np.log(odds)
        units = expit(logits - shifts[0]) - expit(-shifts[0])
        amplitude = shares[:, 0] / units
    safe = np.isfinite(amplitude) & (np.abs(logits) < 6)
    found = np.empty(answers.shape[2])
    for head in range(answers.shape[2]):
        rows = np.flatnonzero(safe[:, head])
        if not len(rows):
            return None
        strong = rows[np.abs(shares[rows, 0, head]) >= np.median(np.abs(shares[rows, 0, head]))]
        found[head] = np.median(amplitude[strong, head])
    gates = shares / found + expit(-shifts)[:, None]  # (n, K, m)
    start = read_gates(gates, shifts, 1e-3).T
    return start if np.isfinite(start).all() else None
