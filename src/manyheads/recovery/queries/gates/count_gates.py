r"""Count gate: separation of heads by the number of zero tokens in front of a token.

Under RoPE a pair of tokens is of little use: the logit of a token on itself and that on its neighbour belong to
different forms. But a zero token has the logit 0 at every offset, and nothing is read from it. After n zero tokens the
last row of [0, ..., 0, q] is

.. math:: y - c = \sum_i \frac{a_i}{a_i + n} W_i^\top q = \sum_i \sigma(s^2 \vartheta_i - \ln n) \, s W_i^\top e,
          \qquad a_i = e^{q^\top \Theta_i^{(0)} q},\ q = s e,\ \vartheta_i = e^\top \Theta_i^{(0)} e

so n and the length s move the gates of all heads at once, by known amounts, and without touching what is read. The
responses at one direction e are a net with a single unknown per head. It starts from a linear problem: with
z(n) = sum_i w_i a_i / (a_i + n), z(0) = sum_i w_i,

.. math:: n z(n) = (z(0) - z(n)) M, \qquad M = \sum_i a_i w_i^+ w_i \text{ on the span of the } w_i,

whose eigenvalues are the a_i and whose left eigenvectors are the w_i = W_i^T e. Derived here.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import qr

from manyheads.recovery._types import Array, Ask, Generator, Indices
from manyheads.recovery.queries.nets.sigmoid_network import NetDesign, PairNets, fit_nets, net_amplification
from manyheads.recovery.refusals import FitError, NotALayer

COUNTS = (1, 2, 4, 8, 16, 32)
SCALES = (0.5, 0.75, 1.0, 1.3)
STARTS = 96
FEW, USABLE = 4, 3e3
MOST = 16  # heads at most: more gates that differ by one number each are not told apart in float64


@dataclass(frozen=True)
class CountGate:
    """Queries along a direction e: the lengths s (K,) of the token and the numbers n (K,) of zeros before it."""

    scales: Array
    counts: Indices

    @property
    def net(self) -> NetDesign:
        """The net of the responses over s: slopes multiply s², and ln n shifts all gates."""
        return NetDesign.of(self.scales[:, None] ** 2, np.log(self.counts))

    def take(self, rows: Indices) -> "CountGate":
        """Keep some of the questions."""
        return CountGate(self.scales[rows], self.counts[rows])


def ask_counts(ask: Ask, bias: Array, gate: CountGate, directions: Array) -> Array:
    """Return the responses (b, K, d) to directions (b, d), each divided by the length of its token."""
    directions = np.atleast_2d(directions)
    found = np.empty((len(directions), len(gate.counts), directions.shape[1]))
    for count in np.unique(gate.counts):
        rows = np.flatnonzero(gate.counts == count)
        x = np.zeros((len(directions) * len(rows), count + 1, directions.shape[1]))
        x[:, -1] = (directions[:, None] * gate.scales[rows, None]).reshape(len(x), -1)
        y = ask(x, read="last") - bias
        found[:, rows] = y.reshape(len(directions), len(rows), -1) / gate.scales[rows, None]
    return found


@dataclass(frozen=True)
class CountedHeads:
    """The heads at one direction: the direction (d,), what is asked of its neighbours, and the net found there."""

    direction: Array
    gate: CountGate
    net: PairNets
    amplification: float


def find_counted_heads(
    ask: Ask, bias: Array, total: Array, noise: float, rng: Generator, tries: int = 16
) -> CountedHeads:
    """Find the heads at the best of a few random directions."""
    best: CountedHeads | None = None
    residual, moved = np.inf, False
    allowed = max(1e-9, 100 * noise)
    for attempt in range(tries):
        if best is not None and attempt >= FEW and best.amplification < USABLE:
            break
        direction = rng.standard_normal(len(bias))
        direction *= np.sqrt(len(bias)) / np.linalg.norm(direction)
        scale = _moving_scale(ask, bias, total, direction)
        if scale is None:
            continue
        moved = True
        scales, counts = (part.ravel() for part in np.meshgrid(np.multiply(SCALES, scale), COUNTS, indexing="ij"))
        gate = CountGate(scales, counts)
        answers = ask_counts(ask, bias, gate, direction)[0]
        spectrum = np.linalg.svd(answers, compute_uv=False)
        heads = int((spectrum > max(60 * noise, 1e-10) * spectrum[0]).sum())
        FitError.if_below(heads, 1, "the answers to one token behind zeros vanish: no head reads the tokens")
        what = f"{heads} dimensions of a token behind zeros: too many heads, no rotary positions, or noisy answers"
        FitError.if_above(heads, MOST, what)
        starts = _starts(gate, answers, direction @ total, heads, rng)
        net = fit_nets(gate.net, np.repeat(answers[None], STARTS + 1, axis=0), starts)
        net = net.one(int(np.argmin(net.residual)))
        residual = min(residual, float(net.residual))
        if net.residual > allowed:
            continue
        amplification = float(net_amplification(gate.net, net)[1].max())
        found = CountedHeads(direction, gate.take(_choose_rows(gate, net)), net, amplification)
        if best is None or (heads, -amplification) > (len(best.net.values), -best.amplification):
            best = found
        if best.amplification < 10 * heads:
            break
    if not moved:
        raise FitError("the number of zero tokens does not change what is read: no head attends by content", 0.0, 0.35)
    if best is None:
        why = "zero tokens have logits of their own: biases of queries or keys, or no rotary positions"
        raise NotALayer(why, residual, allowed)
    return best


def _moving_scale(ask: Ask, bias: Array, total: Array, direction: Array) -> float | None:
    """Return the length, relative to sqrt d, at which one zero in front moves the gates without saturating them."""
    scale, even = 1.0, direction @ total / 2
    for _ in range(24):
        answer = ask_counts(ask, bias, CountGate(np.array([scale]), np.array([1])), direction)[0, 0]
        moved = np.linalg.norm(answer - even) / np.linalg.norm(even)  # about the mean |tanh(logit / 2)|
        if 0.35 < moved < 0.75:
            return scale
        scale *= 1.35 if moved <= 0.35 else 0.8
    return scale if scale <= 100 else None


def _starts(gate: CountGate, answers: Array, whole: Array, heads: int, rng: Generator) -> Array:
    """Return starting slopes (STARTS + 1, m, 1): the eigenvalues of the linear problem, and random ones."""
    size = float(np.median(gate.scales**2))
    slopes = rng.standard_normal((STARTS + 1, heads, 1)) * rng.choice([0.7, 1.5, 3.0], (STARTS + 1, 1, 1)) / size
    basis = np.linalg.svd(answers, full_matrices=False)[2][:heads]
    for scale in np.unique(gate.scales):
        rows = gate.scales == scale
        counts, responses = gate.counts[rows, None], answers[rows] @ basis.T
        if len(counts) < heads:
            continue
        weights = 1 / (1 + counts)
        pencil = np.linalg.lstsq(weights * (whole @ basis.T - responses), weights * counts * responses, rcond=None)[0]
        slopes[np.flatnonzero(np.unique(gate.scales) == scale)[0], :, 0] = (
            np.log(np.clip(np.abs(np.linalg.eigvals(pencil)), 1e-6, 1e6)) / scale**2
        )
    return slopes


def _choose_rows(gate: CountGate, net: PairNets) -> Indices:
    """Rows of the gate that determine the net best: twice as many as heads, and two to spare for the residual."""
    units = gate.net.units(net.slopes)
    derivatives = units * (1 - units) * gate.scales[:, None] ** 2
    rows = np.concatenate([units, derivatives / np.abs(derivatives).max(0).clip(1e-300)], axis=1)  # (K, 2 m)
    wanted = min(len(rows), 2 * len(net.slopes) + 2)
    return np.sort(qr(rows.T, pivoting=True, mode="r")[1][:wanted])
