r"""Merged key-query weights: all eigenvectors are learned in one drop, whose time course is a reduced equation.

Gradient flow of head i with value :math:`v_i` and matrix :math:`U_i` is :math:`\dot v_i = \langle U_i, G\rangle`,
:math:`\dot U_i = v_iG`. Near zero :math:`G = \Lambda^2`, and one mode of each head grows,

.. math:: v_i = \langle U_i, \hat G\rangle = \tfrac12(v_i(0) + \langle U_i(0), \hat G\rangle)e^{\gamma t}, \qquad
          \hat G = \Lambda^2/\gamma, \quad \gamma = \|\Lambda^2\|_F,

along :math:`\Lambda^2`, in which all eigenvectors take part. So all heads become equal up to their sizes, and with
:math:`s = |v|`, :math:`s(0) = \tfrac12|v(0) + \langle U(0), \hat G\rangle|` and :math:`u_d = sw_d`

.. math:: \dot s = \sum_dw_dg_d, \qquad \dot w_d = sg_d, \qquad g_d = \lambda_d^2 - m_d\lambda_du_d, \qquad
          s^2 - |w|^2 = 0 .

The drop is at :math:`\gamma^{-1}\ln(1/\text{std})`, up to a constant. If all eigenvalues are equal,
:math:`u = u^*/(1 + (u^*/u(0) - 1)e^{-2\gamma t})`.

Source: Zhang, Singh, Latham, Saxe (arXiv 2501.16265) for the single drop and white inputs; the effective initial size
and the reduced equation for any spectrum are derived here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.integrate import solve_ivp

from manyheads.errors import CertificateError, UsageError
from manyheads.theory.meanfield.incontext.linear_attention.heads import MergedHeads, check_heads
from manyheads.theory.meanfield.incontext.linear_attention.regression import InContextRegression
from manyheads.theory.meanfield.initial_value import solve_initial_value

PRECISION: dict[str, Any] = {"method": "DOP853", "rtol": 1e-9, "atol": 1e-14}


@dataclass(frozen=True)
class SingleDrop:
    """Predicted training with merged key-query weights from the effective initial size s(0)."""

    task: InContextRegression
    size: float

    @property
    def half_times(self) -> Float[np.ndarray, " dim"]:
        """Time at which half of each eigenvector is learned."""
        crossings = [lambda time, state, d=d: self._shares(state)[d] - 0.5 for d in range(self.task.dim)]
        slowest = self.task.spectrum[-1] ** 2
        horizon = (np.log1p(1 / self.size) + 10) / slowest + 10 / (slowest * self.task.spectrum[-1])
        found = solve_ivp(self._field, (0.0, float(horizon)), self._start(), events=crossings, **PRECISION)
        return np.asarray([times[0] if len(times) else np.inf for times in found.t_events])

    def learned(self, times: Float[np.ndarray, " time"]) -> Float[np.ndarray, "time dim"]:
        """Return the share of its optimum that the circuit has reached along each eigenvector."""
        remedy = "the reduced equation of merged heads could not be solved to the last time: end earlier"
        return self._shares(solve_initial_value(self._field, self._start(), times, remedy, **PRECISION).T)

    def _shares(self, state: np.ndarray) -> np.ndarray:
        """Return u / u* from s and w, state of shape (1 + D,) or (1 + D, T)."""
        return (state[0] * state[1:]).T / self.task.optimum

    def _start(self) -> np.ndarray:
        """Return s and w at time 0, (1 + D,)."""
        squared = self.task.spectrum**2
        return self.size * np.concatenate([[1.0], squared / np.linalg.norm(squared)])

    def _field(self, time: float, state: np.ndarray) -> np.ndarray:
        """Return the derivative of s and w."""
        slope = self.task.spectrum**2 * (1 - self._shares(state))  # g, as m u* = lambda
        return np.concatenate([[state[1:] @ slope], state[0] * slope])


def predict_single_drop(task: InContextRegression, heads: MergedHeads) -> SingleDrop:
    """Predict the drop of merged heads from their initial weights."""
    check_heads(task, heads)
    value, matrix = (np.asarray(weight, np.float64) for weight in heads)
    if matrix.shape[1:] != (task.dim, task.dim):
        raise UsageError(f"key-query weights of shape {matrix.shape}: expected (H, {task.dim}, {task.dim})")
    squared = task.spectrum**2
    mode = value + np.einsum("hdd,d->h", matrix, squared) / np.linalg.norm(squared)
    size = float(np.linalg.norm(mode) / 2)
    if not size > 0:
        raise CertificateError("no head grows: draw other weights", measured=size, threshold=0.0)
    return SingleDrop(task, size)
