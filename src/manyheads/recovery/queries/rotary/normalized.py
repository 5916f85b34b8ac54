r"""Extraction of a layer with rotary positions behind a norm: a LLaMA block through its residual stream.

On the sphere of a norm there is no zero token. Heads come from sequences of one repeated token (`repeated_tokens`),
their projections from W_S and the output spaces as elsewhere. Logits are read from sequences of distinct tokens
relative to the row's own one: with the weights a_j of earlier tokens and a_r of the row's own,

.. math:: y_r - c - x_r W_S = \sum_i \sum_{j<r} a_{ij} (x_j - x_r) W_i, \qquad
          \lambda_j = \ln a_j - \ln a_r = \ell(x_r, x_j, r - j) - q(x_r),\quad q(x) = x^\top \Theta^{(0)} x .

-x is on the sphere when x is: with the signs of every other token changed, the logits of neighbours change sign and q
does not, which gives both. Sequences of tokens whose q is known from others are asked with one pattern of signs. Forms
follow as without a norm (`forms`). Identifiable are P G Theta^(t) G P at offsets t >= 1, its symmetric part at 0,
P G W_i and c, for a norm without a shift; a shift acts as biases of queries and keys do, and is refused, since logits
are then not odd in the key. Derived here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from manyheads.recovery._types import Array, Figures, Generator, Indices
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import SPARING, Effort
from manyheads.recovery.queries.gates.sphere_pairs import read_normalized_sums
from manyheads.recovery.queries.logits.attention_weights import LEAST, solve_weights
from manyheads.recovery.queries.logits.ledger import Ledger
from manyheads.recovery.queries.repeated_tokens import find_repeated_heads
from manyheads.recovery.queries.rotary.method import LogitForms
from manyheads.recovery.queries.scores.refined_heads import refine_spaces
from manyheads.recovery.queries.values.output_spaces import split_projections
from manyheads.recovery.queries.values.projection_sum import Projections, Sums
from manyheads.recovery.refusals import NotALayer
from manyheads.recovery.result.results import Extracted, StageLog

SURE = 1e-4  # attention weight from which a logit counts fully
CLEAN = 1e-9  # leak of a head in another from which output spaces are refined
REPEATS = 2  # tokens that span, times so many: some of their logits are lost


def extract_rotary_on_sphere(oracle: Oracle, noise: float, rng: Generator, effort: Effort = SPARING) -> Extracted:
    """Extract a causal layer behind a norm whose queries and keys are turned by their positions."""
    if not oracle.causal:
        raise NotALayer(
            "rotary positions behind a norm are extracted from causal layers alone: give the function without the norm"
        )
    log = StageLog(oracle)
    with log.stage("sums") as figures:
        sums, norm, basis = read_normalized_sums(oracle, oracle.dim, noise, rng)
        figures |= {"epsilon": norm.epsilon, "centred": norm.centred}
    with log.stage("values") as figures:
        values = _read_values(oracle, sums, basis, noise, rng, effort, figures)
    with log.stage("logits") as figures:
        reader = NormalizedReader(oracle, sums.bias, values.projection, np.sqrt(oracle.dim) * basis[0])
        forms = LogitForms(reader.read, noise, rng, effort, values, sums.bias, basis, 1.0, REPEATS)
        found = forms.read(figures)
    layer: Any = found.of_scaled_tokens(np.sqrt(1 + norm.epsilon))  # tokens of the sphere are longer than u
    longest = layer.offsets if layer.turns is None else None
    acts_on = f"u = {norm.formula}, offset by offset"
    return Extracted(layer, tuple(log.stages), acts_on, norm, longest)


def _read_values(
    oracle: Oracle, sums: Sums, basis: Array, noise: float, rng: Generator, effort: Effort, figures: Figures
) -> Projections:
    """Find the heads, read them at as many directions as their spaces have dimensions, and share out the sum."""
    heads = find_repeated_heads(oracle, basis, np.sqrt(oracle.dim), noise, rng)
    figures |= {"heads": heads.shares.shape[1], "condition of weights": heads.condition, "rank one": heads.residual}
    stacks = heads.output_rows(effort.extra, heads.floor(1e-9), rng)
    assert stacks.ranks is not None
    if heads.leak > CLEAN and stacks.ranks.sum() <= oracle.dim:
        spaces, figures["mixed"] = refine_spaces(oracle, sums, stacks.spaces(), 1.0, rng, sphere=basis)
        rows = [one @ np.linalg.pinv(space) @ space for one, space in zip(stacks.values, spaces, strict=True)]
        stacks = stacks._replace(values=np.array(rows))
    found = split_projections(sums, stacks)
    figures |= stacks.figures() | found.figures()
    return found


@dataclass(frozen=True)
class NormalizedReader:
    """Conversion of answers on the sphere into logits: oracle, c, W (m, d, d), and a token (d,) that fills gaps."""

    ask: Oracle
    bias: Array
    projection: Array
    filler: Array

    def read(self, tokens: Array, pieces: Indices, positions: Indices) -> Ledger:
        """Ask about the sequences tokens[pieces] (n, k) at `positions` (k,): twice until q of every token is known."""
        signed = cover_twice(pieces, len(tokens))
        both = self._read_signed(tokens, pieces[signed], positions)
        others = np.delete(pieces, signed, axis=0)
        if not len(others):
            return both
        rows = both.offset == 0
        weight = both.weight[rows]
        own, sure = np.zeros((2, len(tokens), len(self.projection)))
        np.add.at(own, both.query[rows], weight * both.logits[rows])
        np.add.at(sure, both.query[rows], weight)
        own /= np.maximum(sure, LEAST)
        parts = []
        for row, (ratios, weights) in enumerate(
            self._relative_logits(tokens[others], positions - positions[0]), start=1
        ):
            known = np.minimum(np.minimum(weights[:, :-1], weights[:, -1:]) / SURE, 1.0)
            known = np.minimum(known, sure[others[:, row]][:, None])
            logits = ratios + own[others[:, row]][:, None]
            parts.append(Ledger.of_row(tokens, others, positions, row, logits, known))
        return Ledger.join([both, *parts])

    def _read_signed(self, tokens: Array, pieces: Indices, positions: Indices) -> Ledger:
        """Ask with two patterns of signs, which show q of every token but the first."""
        positions, kept = positions - positions[0], pieces.shape[1]
        chosen, signs = tokens[pieces], np.where(np.arange(kept) % 2, -1.0, 1.0)[:, None]
        plain, turned = self._relative_logits(chosen, positions), self._relative_logits(chosen * signs, positions)
        parts = []
        for row in range(1, kept):
            (one, first), (two, second) = plain[row - 1], turned[row - 1]  # logits and weights, own one last
            odd = (row - np.arange(row)) % 2 == 1
            sure = np.minimum(np.minimum(first, second) / SURE, 1.0)
            sure[:, :-1] = np.minimum(sure[:, :-1], sure[:, -1:])
            near = sure[:, :-1][:, odd] + LEAST
            own = -((one + two)[:, odd] * near).sum(1) / near.sum(1) / 2  # q, (n, m)
            sure[:, -1] = near.max(1)
            logits = np.where(odd[:, None], (one - two) / 2, (one + two) / 2 + own[:, None])
            logits = np.concatenate([logits, own[:, None]], axis=1)
            parts.append(Ledger.of_row(tokens, pieces, positions, row, logits, sure))
        return Ledger.join(parts)

    def _relative_logits(self, chosen: Array, positions: Indices) -> list[tuple[Array, Array]]:
        """Return log-ratios (n, row, m) of earlier tokens to the own one, and weights, of every row but the first."""
        count, kept, dim = chosen.shape
        x = np.broadcast_to(self.filler, (count, positions[-1] + 1, dim)).copy()
        x[:, positions] = chosen
        y = self.ask(x, read="all")[:, positions] - self.bias
        found = []
        for row in range(1, kept):
            own = chosen[:, row]
            seen = chosen[:, :row]
            if positions[row] > row:  # gaps before
                seen = np.concatenate([seen, np.broadcast_to(self.filler, (count, 1, dim))], axis=1)
            values = np.einsum("nkd,mde->nkme", seen - own[:, None], self.projection, optimize=True)
            answers = y[:, [row]] - (own @ self.projection.sum(0))[:, None]
            weights = solve_weights(values, answers, [values.shape[1]])[0]
            weights = np.concatenate([weights[:, :row], 1 - weights.sum(1, keepdims=True)], axis=1)
            weights = np.maximum(weights, LEAST)
            found.append((np.log(weights[:, :-1]) - np.log(weights[:, -1:]), weights))
        return found


def cover_twice(pieces: Indices, tokens: int) -> Indices:
    """Return the places of pieces that hold every token twice behind their first place, or as often as all do.

    Examples
    --------
    >>> cover_twice(np.array([[0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 2, 1]]), 3)
    array([0, 1, 2])
    """
    wanted = np.minimum(np.bincount(pieces[:, 1:].ravel(), minlength=tokens), 2)
    chosen: list[int] = []
    for place, piece in enumerate(pieces):
        if (wanted[piece[1:]] > 0).any():
            chosen.append(place)
            np.subtract.at(wanted, piece[1:], 1)
    return np.array(chosen, np.intp)
