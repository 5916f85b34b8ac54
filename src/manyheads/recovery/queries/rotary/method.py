r"""Extraction of a layer with rotary positions (RoPE).

S0  One-token sequences give c and the sum of the projections. d + 1 calls.
S1  The count gate at one direction: the heads, and what they read there (`count_gates`). About 25 (m + 1) calls.
S2  The same net followed to neighbouring directions, without new unknowns: spaces O_i of the values, and
    W_i = W_S O^+ O_i. (r + few) (2 m + 2) calls.
S3  Walks through two lists of tokens give all logits of the first offset that its sketches need: 2 d (r + few) / k
    calls of k tokens. Random sequences give the core of the second offset, and logits of others that they show.
S4  How heads turn from one offset to the next: every further offset follows. It is believed only if it predicts
    the logits of all offsets that were read; otherwise every offset up to `offsets` is asked about on its own.
F5  All weights at once on random sequences, where answers are noisy (`refinement`).

Without biases of queries and keys. The figures of every step stand in the stages of the result.

Extraction of a layer with rotary positions behind a norm: a LLaMA block through its residual stream.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from manyheads.recovery._types import Array, Figures, Generator, Indices
from manyheads.recovery.layers.rotary import RotaryLayer, Turns
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import SPARING, Effort
from manyheads.recovery.queries.gates.count_gates import ask_counts, find_counted_heads
from manyheads.recovery.queries.gates.sphere_pairs import read_normalized_sums
from manyheads.recovery.queries.logits.ledger import LEAST, Ledger, LedgerReader, alternate, plan, solve_weights
from manyheads.recovery.queries.nets.sigmoid_network import EXACT
from manyheads.recovery.queries.refinement import refine_turned
from manyheads.recovery.queries.repeated_tokens import find_repeated_heads
from manyheads.recovery.queries.rotary import forms
from manyheads.recovery.queries.rotary.forms import Frame
from manyheads.recovery.queries.scores.heads import refine_spaces
from manyheads.recovery.queries.values.output_spaces import Projections, Sums, read_sums, split_projections
from manyheads.recovery.queries.values.probes import Gates, Stacks, read_stacks
from manyheads.recovery.refusals import FitError, NotALayer
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
        heads = find_repeated_heads(oracle, basis, np.sqrt(oracle.dim), noise, rng)
        figures |= {"heads": heads.shares.shape[1], "condition of weights": heads.condition, "rank one": heads.residual}
        stacks = heads.output_rows(effort.extra, heads.floor(1e-9), rng)
        assert stacks.ranks is not None
        if heads.leak > CLEAN and stacks.ranks.sum() <= oracle.dim:
            spaces, figures["mixed"] = refine_spaces(oracle, sums, stacks.spaces(), 1.0, rng, sphere=basis)
            rows = [one @ np.linalg.pinv(space) @ space for one, space in zip(stacks.values, spaces, strict=True)]
            stacks = stacks._replace(values=np.array(rows))
        values = split_projections(sums, stacks)
        figures |= stacks.figures() | values.figures()
    with log.stage("logits") as figures:
        reader = NormalizedReader(oracle, sums.bias, values.projection, np.sqrt(oracle.dim) * basis[0])
        forms = LogitForms(reader.read, noise, rng, effort, values, sums.bias, basis, 1.0, REPEATS)
        found = forms.read(figures)
    layer: Any = found.of_scaled_tokens(np.sqrt(1 + norm.epsilon))  # tokens of the sphere are longer than u
    longest = layer.offsets if layer.turns is None else None
    acts_on = f"u = {norm.formula}, offset by offset"
    return Extracted(layer, tuple(log.stages), acts_on, norm, longest)


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


SIZE = 0.9  # standard deviation of the logits that are read: larger ones leave some weights too small
STEP = 0.3  # length of the step to a neighbouring direction, relative to the direction
# Offsets that measure the frequencies where answers are noisy: errors of the turn grow with the offset
FAR = (4, 16, 64, 112)


def extract_rotary(oracle: Oracle, noise: float, rng: Generator, effort: Effort = SPARING) -> Extracted:
    """Extract a causal layer whose queries and keys are turned by their positions."""
    log = StageLog(oracle)
    with log.stage("sums") as figures:
        sums = read_sums(oracle, oracle.dim)
        figures["linear"] = rest = sums.curvature(oracle, rng, 1)
        what = "the answer to one token is not linear in it: a norm, or no attention layer"
        NotALayer.if_above(rest, max(1e-8, 1e3 * noise), what)
    with log.stage("values") as figures:
        stacks, length = _read_stacks(oracle, sums, noise, rng, effort)
        values = split_projections(sums, stacks)
        figures |= stacks.figures() | values.figures()
    with log.stage("logits") as figures:
        read = LedgerReader(oracle, sums.bias, values.projection).read
        found = LogitForms(read, noise, rng, effort, values, sums.bias, np.eye(oracle.dim), length)
        figures["size"] = found.shorten()
        layer: Any = found.read(figures)
    layer = refine_turned(oracle, layer, noise, rng, log)
    longest = layer.offsets if layer.turns is None else None
    return Extracted(layer, tuple(log.stages), "the tokens, offset by offset", longest=longest)


def _read_stacks(oracle: Oracle, sums: Sums, noise: float, rng: Generator, effort: Effort) -> tuple[Stacks, float]:
    """Find the heads, and follow them until their spaces are exhausted; and a length at which gates move."""
    heads = find_counted_heads(oracle, sums.bias, sums.projection, noise, rng)
    allowed = max(1e-11, 5 * float(heads.net.residual), 30 * noise)
    bases = [np.linalg.qr(rng.standard_normal((oracle.dim,) * 2))[0] for _ in range(3)]
    basis = np.concatenate(bases) * np.linalg.norm(heads.direction)
    floor = max(heads.amplification * max(noise, 1e-15), 1e-12)

    def probes(moves: Array) -> Array:
        return heads.direction + moves

    def ask(moves: Array) -> Array:
        return ask_counts(oracle, sums.bias, heads.gate, probes(moves))

    more = max(4, effort.extra)

    def wanted(ranks: Indices | None, count: int) -> int:
        return more if (oracle.dim if ranks is None else ranks.max()) > count - effort.extra else 0

    levels = max(floor, 1e-9) * np.linalg.norm(heads.net.values, axis=1)
    gates = Gates(heads.gate.net, heads.net, ask, probes, allowed, levels, heads.amplification)
    stacks = read_stacks(gates, basis, wanted, step=STEP, first=more)
    return stacks, float(np.median(heads.gate.scales))


@dataclass
class LogitForms:
    """Logits of walks and of random sequences of one length of token, and the forms that explain them."""

    read_logits: Callable[[Array, Indices, Indices], Ledger]  # of tokens[pieces] at positions
    noise: float
    rng: Generator
    effort: Effort
    values: Projections
    bias: Array
    space: Array  # orthonormal rows (b, d) that span the tokens
    length: float  # of the tokens whose logits are read, relative to root d
    repeats: int = 1  # sets of spanning tokens that are asked about

    @property
    def kept(self) -> int:
        """Tokens of a sequence: an even number beyond two."""
        ranks = self.values.ranks
        kept = max(2, int(self.effort.share * min(len(self.bias) / len(ranks), *ranks)))
        return kept - (kept % 2 if kept > 2 else 0)

    def read(self, figures: Figures) -> RotaryLayer:
        """Read logits, and find the forms of all offsets."""
        dim, most, kept = len(self.space), int(self.values.ranks.max()), self.kept
        exact = self.noise <= EXACT
        few = min(dim, max(most + self.effort.extra * (1 if exact else 3), kept))
        tokens = self._tokens(few), self._basis()
        walk = self.read_logits(np.concatenate(tokens), alternate(few, len(tokens[1]), kept), np.arange(1, kept + 1))
        first = self._forms(walk, *tokens, None if exact else most)
        frames = [frame for frame, _ in first]
        needed = int(self.effort.excess * max(frame.shape[0] ** 2 for frame in frames) * kept / (kept - 1)) + 4
        ledger = Ledger.join([walk, self._read_random({0: needed, 2: needed}, kept)])
        figures.update(tokens=kept, sketches=few, rank=max(frame.shape[0] for frame in frames))
        cores = self._cores(first, ledger, [0, 2], figures)
        found = forms.find_turns(frames, cores)
        rest = forms.turned_residual(found, ledger)
        rest = {offset: rest[offset] for offset in rest if offset != 1}
        figures["turned"] = max(rest.values())
        listed = range(self.effort.offsets)
        if max(rest.values()) < max(1e-5, 1e4 * self.noise):
            for offset in () if exact else FAR:
                far = self._read_random({offset: needed}, kept)
                more = self._cores(first, far, [offset], figures)
                cores = [known | {offset: core[offset]} for known, core in zip(cores, more, strict=True)]
                found = forms.refine_turns(frames, found, cores)
                figures[f"turned to {offset}"] = forms.turned_residual(found, far)[offset]
            turns: Turns | None = found
            cores = [{t: core for t, core in known.items() if t in (0, 1, 2)} for known in cores]
        else:
            turns = None
            others = [t for t in listed if t > 2]
            ledger = Ledger.join([ledger, self._read_random(dict.fromkeys(others, needed), kept)])
            cores = self._cores(first, ledger, [0, *listed[2:]], figures)
        pairs, listing = list(zip(frames, cores, strict=True)), []
        for t in listed:
            own = turns is None or t in cores[0]
            listing.append([frame.form(known[t]) for frame, known in pairs] if own else found.form(t))
        return RotaryLayer(np.array(listing), self.values.projection, self.bias, turns)

    def shorten(self) -> float:
        """Choose the length of tokens at which the logits of the sharpest head have about the size SIZE."""
        size, kept = 0.0, self.kept
        for _ in range(3):
            pieces = np.arange(4 * kept).reshape(4, kept)
            logits = self.read_logits(self._tokens(pieces.size), pieces, np.arange(1, kept + 1)).logits
            size = float(np.median(np.abs(logits), axis=0).max()) / 0.67  # the standard deviation, from the median
            self.length *= float(np.sqrt(np.clip(SIZE / max(size, 1e-9), 1 / 16, 16)))
        return size

    def _tokens(self, count: int) -> Array:
        drawn = self.rng.standard_normal((count, len(self.space))) @ self.space
        return drawn * (self.length * np.sqrt(len(self.bias)) / np.linalg.norm(drawn, axis=1, keepdims=True))

    def _basis(self) -> Array:
        size = (len(self.space),) * 2
        drawn = np.concatenate([np.linalg.qr(self.rng.standard_normal(size))[0] for _ in range(self.repeats)])
        return drawn @ self.space * (self.length * np.sqrt(len(self.bias)))

    def _read_random(self, needed: dict[int, int], kept: int) -> Ledger:
        """Read sequences of random tokens that show at least so many pairs at every offset."""
        parts = []
        for positions, count in plan(needed, kept):
            pieces = np.arange(count * len(positions)).reshape(count, len(positions))
            parts.append(self.read_logits(self._tokens(pieces.size), pieces, positions))
        return Ledger.join(parts)

    def _forms(self, walk: Ledger, few: Array, fresh: Array, most: int | None) -> list[tuple[Frame, Array]]:
        """Find the form of every head at offset 1 from what a walk shows."""
        near = walk.offset == 1
        table = np.full((len(walk.tokens), len(walk.tokens), walk.logits.shape[1]), np.nan)
        weight = np.zeros_like(table)
        table[walk.query[near], walk.key[near]] = walk.logits[near]
        weight[walk.query[near], walk.key[near]] = walk.weight[near]
        first = len(few)
        noise = max(self.noise, 1e-13)
        found = []
        for head in range(walk.logits.shape[1]):
            own, seen = table[..., head], weight[..., head]
            sketch, back = (own[first:, :first], seen[first:, :first]), (own[:first, first:], seen[:first, first:])
            found.append(forms.find_form(sketch, back, (fresh, few), noise, most))
        return found

    def _cores(
        self, found: list[tuple[Frame, Array]], ledger: Ledger, offsets: list[int], figures: Figures
    ) -> list[dict[int, Array]]:
        """Find the cores of all heads at some offsets, beside that at offset 1, and record the worst residual."""
        cores, worst = [{1: core} for _, core in found], 0.0
        for head, (frame, _) in enumerate(found):
            for offset in offsets:
                cores[head][offset], rest = forms.find_core(frame, ledger, head, offset)
                worst = max(worst, rest)
        figures["cores"] = worst
        allowed = max(1e-4, 1e5 * self.noise)
        FitError.if_above(worst, allowed, "the logits of an offset are no form on the spaces of the first: biases")
        return cores
