r"""Token-wise part of a transformer block, taken out by sequences of one token.

A block with a norm N in front of its attention A and an MLP of any form maps a residual stream x to

.. math:: F(x)_r = g(x_r + A_r(x)) \quad\text{(one after the other)}, \qquad
          F(x)_r = A_r(x) + g(x_r) \quad\text{(parallel)},

g any function of one token. With one token attention is 1 on it: h(u) = F([u]) is g(u + N(u) W), W the sum of the
projections, or N(u) W + g(u). A constant of A is absorbed by g. So, exactly and for every MLP,

.. math:: F(x)_r - h(x_r) = A_r(x) - N(x_r) W \quad\text{(parallel)}, \qquad
          h(u) = F(x)_r \;\Rightarrow\; u - x_r = A_r(x) - N(u) W .

The second needs h inverted by its values. Norms do not change when a token is scaled, up to their epsilon, so that for
tokens of size s h is the identity plus a bounded function with derivatives of order 1/s: u <- u + (F(x)_r - h(u))
contracts by a factor C/s, C a Lipschitz constant of the block, while rounding grows as s. Derived here.
"""

import contextlib
from dataclasses import dataclass

import numpy as np

from manyheads.recovery._types import Array, Generator
from manyheads.recovery.oracle.noise_estimate import root_mean_square
from manyheads.recovery.oracle.oracle import Oracle, Read
from manyheads.recovery.queries.nets.sigmoid_network import EPS
from manyheads.recovery.refusals import LimitError, NotALayer

STAGE = "one-token sequences"
SCALES = (1e2, 1e3)  # sizes of tokens, relative to mean square one, at which a block is looked at
GROWTH = 3.0  # of what a block adds to a token, from one scale to the next; a block without a norm in front has 10
PARALLEL = 1e-6  # relative change of F(x)_r - h(x_r) from one scale to the next where it depends on no MLP
RATE = 1e-2  # contraction of the inversion: about seven one-token sequences a row; 1e-3 takes five, and loses a digit
FREE = 10.0  # scale where nothing is inverted
LARGEST = 1e8  # largest scale
ROUNDS = 12  # one-token sequences a row, at most
PRECISE = 1e-13  # relative precision of answers that is needed
SAFE = 4.0  # factor between contraction at the rows that were measured, and elsewhere


@dataclass(frozen=True)
class TokenWise:
    """The token-wise part of a block, as an oracle."""

    block: Oracle  # the block's own
    parallel: bool  # whether attention and MLP read the same stream and are added
    causal: bool
    centred: bool  # whether the norm in front of the attention subtracts the mean
    scale: float  # root mean square of tokens at which the inversion contracts fast
    rate: float  # its contraction there

    def answer(self, tokens: Array, stage: str | None = STAGE) -> Array:
        """Return h(u) for tokens (..., d), asked once each; without a stage, counted where it is called."""
        flat, place = np.unique(tokens.reshape(-1, tokens.shape[-1]), axis=0, return_inverse=True)
        with contextlib.nullcontext() if stage is None else self.block.stage(stage):
            answers: Array = self.block(flat[:, None], read="last")
        return answers[np.ravel(place)].reshape(tokens.shape)

    def differences(self, x: Array, read: Read) -> tuple[Array, Array]:
        """Return D = A_r(x) - N(u) W (n, rows, d) for rows of sequences x (n, k, d), and u.

        D is u - x_r, or F(x)_r - h(x_r) with u = x_r where attention and MLP are parallel.
        """
        rows = np.arange(x.shape[1])
        rows = rows[-1:] if read == "last" else rows if read == "all" else rows[list(read)]
        moved, base = np.zeros((len(x), len(rows), x.shape[2])), x[:, rows].copy()
        open_ = np.flatnonzero(rows > 0) if self.causal else np.arange(len(rows))  # the first row sees itself alone
        if len(open_):
            answers = self.block(x, read=tuple(int(row) for row in rows[open_]))
            if self.parallel:
                moved[:, open_] = answers - self.answer(base[:, open_])
            else:
                moved[:, open_] = self.invert(answers, base[:, open_])[0]
                base += moved
        return moved, base

    def invert(self, answers: Array, start: Array) -> tuple[Array, float]:
        """Return u - x for h(u) = `answers` (..., d), from u = x; and the largest contraction that was seen."""
        shape, dim = start.shape, start.shape[-1]
        answers, start = answers.reshape(-1, dim), start.reshape(-1, dim)
        moved, left = np.zeros_like(start), np.arange(len(start))
        before, worst = np.full(len(start), np.inf), 0.0
        for _ in range(ROUNDS):
            rest = answers[left] - self.answer(start[left] + moved[left])
            moved[left] += rest
            size, floor = _sizes(rest), EPS * _sizes(start[left])
            contraction = size / before[left]
            told = np.isfinite(before[left]) & (size > 1e2 * floor)
            worst = max(worst, float(contraction[told].max(initial=0.0)))
            before[left] = size
            slow = min(max(SAFE * self.rate, worst), 1.0)
            left = left[(slow * size > SAFE * floor) & ~(contraction > 0.5)]
            if not len(left):
                break
        if worst > 0.5 or len(left):
            what = "no one-token sequence gives the answer of a row: tokens are mixed behind the attention"
            raise NotALayer(what, worst, 0.5)
        return moved.reshape(shape), worst


def open_token_wise(block: Oracle, rng: Generator) -> TokenWise:
    """Find out how a block is built, and the size of tokens at which its inversion contracts by `RATE`."""
    tokens = rng.standard_normal((4, 3, block.dim))
    tokens /= _sizes(tokens)[..., None]
    plain = TokenWise(block, True, False, False, SCALES[-1], 1.0)
    room = block.limits.reach / block.dim**0.5
    if room < SCALES[-1]:
        raise _too_large(SCALES[-1], block)
    with block.stage("structure"):
        added, differences = [], []
        for scale in SCALES:
            x = scale * tokens
            alone = plain.answer(x)
            _check_answers(block, x, alone)
            added.append(alone - x)
            differences.append(block(x, read="all") - alone)
        _check_stream(root_mean_square(added[0]), root_mean_square(added[1]), "adds to a token alone")
        small, large = (each[:, -1] for each in differences)
        size, floor = root_mean_square(large), EPS * SCALES[-1]
        what = f"earlier tokens change no answer: no head reads them, or answers are coarse at size {SCALES[-1]:g}"
        NotALayer.if_below(size, 1e4 * floor, what)
        _check_stream(root_mean_square(small), size, "makes of other tokens")
        causal = root_mean_square(differences[-1][:, 0]) < max(PARALLEL * size, 1e2 * floor)
        shifted = SCALES[-1] * tokens
        shifted[:, :-1] += SCALES[-1]
        centred = root_mean_square(block(shifted, read="last") - block(SCALES[-1] * tokens, read="last")) < 1e-3 * size
        if root_mean_square(large - small) < max(PARALLEL * size, 1e2 * floor):
            return TokenWise(block, True, causal, centred, FREE, 0.0)
        scale = SCALES[-1]
        while scale <= LARGEST:
            if scale > room:
                raise _too_large(scale, block)
            x = scale * tokens
            trial = TokenWise(block, False, causal, centred, scale, RATE)
            try:
                seen = trial.invert(block(x, read="last"), x[:, -1])[1]
            except NotALayer:
                seen = np.inf
            if seen <= RATE:
                return TokenWise(block, False, causal, centred, max(SCALES[0], scale * seen / RATE), RATE)
            scale *= 10
    raise NotALayer(f"one-token sequences of size {LARGEST:g} do not invert the token-wise part", seen, RATE)


def _check_stream(small: float, large: float, what: str) -> None:
    what = f"what the function {what} grows with the tokens: no norm in front of its attention. Extract that alone"
    NotALayer.if_above(large / max(small, np.finfo(float).tiny), GROWTH, what)


def _check_answers(block: Oracle, x: Array, alone: Array) -> None:
    """Refuse answers that differ when they are asked again, or are coarser than double precision."""
    again = block(x[:, :1], read="last")
    size = root_mean_square(alone)
    changed = root_mean_square(again - alone[:, 0]) / size if size > 0 else 0.0
    spacing = np.finfo(block.answer_dtype or np.float64).eps
    coarse = max(changed, float(spacing))
    what = f"answers in {block.answer_dtype} are exact to {coarse:.1g}, expected double precision"
    NotALayer.if_above(coarse, PRECISE, f"{what}: widen the module, or extract its attention alone")


def _too_large(scale: float, block: Oracle) -> LimitError:
    needed = f"tokens of norm {scale * block.dim**0.5:.3g} are needed for an MLP"
    return LimitError(f"{needed}, and the server takes {block.limits.max_norm:g}: extract its attention alone")


def _sizes(x: Array) -> Array:
    """Return the root mean square of every token (..., d)."""
    return np.sqrt(np.mean(x**2, axis=-1))
