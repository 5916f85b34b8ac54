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
from manyheads.recovery.queries.logits.ledger import Ledger, LedgerReader, alternate, plan
from manyheads.recovery.queries.nets.sigmoid_network import EXACT
from manyheads.recovery.queries.refinement import refine_turned
from manyheads.recovery.queries.rotary import forms
from manyheads.recovery.queries.rotary.forms import Frame
from manyheads.recovery.queries.values.output_spaces import split_projections
from manyheads.recovery.queries.values.probes import Gates, Stacks, read_stacks
from manyheads.recovery.queries.values.projection_sum import Projections, Sums, read_sums
from manyheads.recovery.refusals import FitError, NotALayer
from manyheads.recovery.result.results import Extracted, StageLog

SIZE = 0.9  # standard deviation of the logits that are read: larger ones leave some weights too small
STEP = 0.3  # length of the step to a neighbouring direction, relative to the direction
# Offsets that measure the frequencies where answers are noisy: errors of the turn grow with the offset
FAR = (4, 16, 64, 112)


def extract_rotary(oracle: Oracle, noise: float, rng: Generator, effort: Effort = SPARING) -> Extracted:
    """Extract a causal layer whose queries and keys are turned by their positions."""
    log = StageLog(oracle)
    with log.stage("sums") as figures:
        sums = _read_linear(oracle, noise, rng, figures)
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


def _read_linear(oracle: Oracle, noise: float, rng: Generator, figures: Figures) -> Sums:
    """Read W_S and c, and refuse a function whose answers to one token are not affine."""
    sums = read_sums(oracle, oracle.dim)
    figures["linear"] = rest = sums.curvature(oracle, rng, 1)
    what = "the answer to one token is not linear in it: a norm, or no attention layer"
    NotALayer.if_above(rest, max(1e-8, 1e3 * noise), what)
    return sums


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
