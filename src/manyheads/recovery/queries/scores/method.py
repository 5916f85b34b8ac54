r"""Extraction of a layer with any of the attention scores in use.

S0  One-token sequences give c and the sum of the projections. d + 1 calls.
S1  Jacobians of sequences of one repeated token: the heads and their projections (`heads`), whatever the score. 8 d k
    calls of k tokens for each repeated token, and 6 d of two. Where answers to one token are not affine, beside sinks
    (`sinks`).
S2  Two probes say what kind of score it is: how many tokens a row sees (`positions`), whether a zero token has the
    score zero, and, if it has, what the score of twice a key is (`links`).
S3  Scores of pairs of tokens from the weights of rows (`reading`), and with a norm of queries and keys its square as a
    form. What stands between the forms and the scores is taken off.
S4  Spaces of the forms, and forms of two offsets as small linear problems (`rotary.forms`). Where they differ, one turn
    gives all offsets; where they do not, each offset has a term of its own, which is read (`positions`).

Every step is believed only if it predicts scores that were not used. The figures stand in the stages of the result.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from manyheads.recovery._types import Array, Figures, Generator
from manyheads.recovery.layers.rotary import RotaryLayer, Turns
from manyheads.recovery.layers.scores import ScoreLayer
from manyheads.recovery.oracle.limits import MARGIN
from manyheads.recovery.oracle.oracle import Behind, Oracle
from manyheads.recovery.queries.effort import SPARING, Effort
from manyheads.recovery.queries.logits.ledger import Ledger
from manyheads.recovery.queries.nets.sigmoid_network import EXACT
from manyheads.recovery.queries.refinement import refine_turned
from manyheads.recovery.queries.rotary import forms
from manyheads.recovery.queries.rotary.forms import Frame, find_core, find_turns, turned_residual
from manyheads.recovery.queries.scores import links, positions, sinks
from manyheads.recovery.queries.scores.heads import Heads, find_heads
from manyheads.recovery.queries.scores.reading import ScoreReader
from manyheads.recovery.queries.values.output_spaces import read_sums
from manyheads.recovery.refusals import FitError, LimitError, RankBudgetError
from manyheads.recovery.result.results import Extracted, StageLog

SIZE = 0.9  # standard deviation of the scores that are read: larger ones leave some weights too small
LARGEST = 0.7  # the same where the norm of queries and keys keeps them from becoming smaller
SHORTENED = 20  # times that tokens are halved there
LARGE = 2.5  # length of the tokens that show a cap, relative to the others
ROUGH = 3e-3  # misfit of scores that are read from answers in single precision, where weights are small
MERGED = 0.03  # share of the answers that heads may leave unexplained; more is left where several were taken for one
LONGER = (1, 4, 16)  # lengths of the tokens of that check: long ones make heads attend differently
OTHER = 1e-2  # misfit of scores at other offsets beyond which they are of another kind; verification is stricter
UNUSED = (7, 24)  # offsets that are read to check how heads turn


def extract_scores(oracle: Oracle, noise: float, rng: Generator, effort: Effort = SPARING) -> Extracted:
    """Extract a layer whose scores depend on positions, with what may stand between forms and scores."""
    log = StageLog(oracle)
    if oracle.causal:
        layer, _ = _extract(oracle, noise, rng, effort, log)
        return _as_extracted(refine_turned(oracle, layer, noise, rng, log), log)
    if oracle.limits.last_row:
        raise LimitError("rows see later tokens: other scores are read from all rows, and the last alone is shown")
    # every row is the last one of a prefix
    prefixes = Behind(oracle, causal=True, limits=replace(oracle.limits, last_row=True))
    layer, scores = _extract(prefixes, noise, rng, effort, log)
    with log.stage("later tokens") as figures:
        found, misfit = positions.with_later_terms(layer, oracle, scores.reader, scores.tokens, scores.keys, noise)
        figures |= misfit
    return _as_extracted(found, log)


def _as_extracted(layer: RotaryLayer, log: StageLog) -> Extracted:
    """Return a layer as the result of the method."""
    longest = None
    if isinstance(layer, ScoreLayer) and layer.position_bias is not None and layer.slopes is None:
        longest = None if layer.window is not None else layer.position_bias.shape[1]
    parts = layer.parts() if isinstance(layer, ScoreLayer) else []
    acts_on = "the tokens, offset by offset" + "".join(f"; {part}" for part in parts)
    return Extracted(layer, tuple(log.stages), acts_on, longest=longest)  # type: ignore[arg-type]


def _extract(
    oracle: Oracle, noise: float, rng: Generator, effort: Effort, log: StageLog
) -> tuple[RotaryLayer, "_Scores"]:
    """Extract a layer, as far as rows see no later tokens, and return how its scores are read."""
    with log.stage("sums"):
        sums = read_sums(oracle, oracle.dim)
    with log.stage("heads") as figures:
        figures["curvature"] = bent = sums.curvature(oracle, rng, 4)
        beside = bent > max(sinks.CURVED, 1e3 * noise)
        find = sinks.find_heads_beside_sinks if beside else find_heads
        heads = find(oracle, sums, noise, rng)
        bias = sums.bias if heads.bias is None else heads.bias
        figures |= {"heads": len(heads.ranks), "rank": max(heads.ranks), "separation": heads.separation}
        figures |= {"residual": heads.residual, "condition": heads.condition}
    with log.stage("kind") as figures:
        reader = ScoreReader(oracle, bias, heads.projection, None, heads.value_bias)
        scores = _Scores(reader, noise, rng, effort, heads, beside)
        scores.find_kind(figures)
    with log.stage("scores") as figures:
        return scores.read(figures), scores


class _Scores:
    """Scores of pairs of tokens of one length, and the forms that explain them."""

    def __init__(self, reader: ScoreReader, noise: float, rng: Generator, effort: Effort, heads: Heads, sinks: bool):
        self.reader, self.rng, self.effort, self.heads, self.sinks = reader, rng, effort, heads, sinks
        oracle = reader.oracle
        self.answers, self.noise = noise, max(noise, 1e-15, heads.residual)
        self.exact = noise <= EXACT
        self.allowed = max(1e-4 if self.exact else ROUGH, 1e3 * self.noise)
        self.dim, self.length = oracle.dim, 1.0
        self.link, self.kind = links.Link(), "form"
        self.spare = effort.extra if self.exact else self.dim  # tokens beyond those that span
        self.window: int | None = None
        self.longest = MARGIN * oracle.limits.reach / np.sqrt(oracle.dim)  # length that tokens may have
        self.longer = 1.0  # tokens whose norms are read, relative to the others
        most = min(oracle.dim // len(heads.ranks), *heads.ranks)
        what = f"heads of rank {min(heads.ranks)}: query, reference and key are told apart by rank 3 or more"
        RankBudgetError.if_below(most, 3, what)
        taken = 2 + (self.reader.value_bias is not None)  # a query, a reference, and zeros where they pass on something
        self.keys = max(1, int(effort.share * most) - taken)  # keys of a sequence beside them

    # Kind of the scores

    def find_kind(self, figures: Figures) -> None:
        """Find the window, the reference of scores, and what stands between the forms and the scores."""
        self._check_heads(figures)
        oracle = self.reader.oracle
        self.window = positions.find_window(oracle, self.answers, self.rng)
        if self.window is not None:
            what = "rows see fewer than 4 tokens: query, reference and a key at two offsets need as many"
            FitError.if_below(self.window, 4, what)
            self.keys = min(self.keys, self.window - 3)
        total = self.reader.projection.sum(0)
        even = not self.sinks and positions.zeros_attend_evenly(oracle, self.reader.bias, total, self.answers, self.rng)
        figures |= {"window": float(self.window or 0), "zero tokens attend evenly": float(even)}
        figures["size"] = self._shorten(even)
        if even:
            self.kind, cap = links.classify(*self._double(), self.noise)
            if self.kind == "form":  # a cap shows where scores are large
                self.kind, cap = links.classify(*self._double(LARGE), self.noise)
            if self.kind == "norm":
                figures["size"] = self._reach_epsilon(figures["size"])
            self.link = links.Link(cap)
            figures["cap"] = cap or 0.0
        else:
            self._check_affine(figures)

    def _check_heads(self, figures: Figures) -> None:
        """Refuse heads whose weights do not explain the answers about two tokens."""
        drawn, reader = self.rng.spawn(1)[0].standard_normal((8, 2, self.dim)), self.reader
        x = reader.oracle.limits.shortened(np.multiply.outer(LONGER, drawn)).reshape(-1, 2, self.dim)
        y = reader.oracle(x, read="last") - reader.bias
        values = np.einsum("nkd,mde->nkme", x, reader.projection)
        values = values if reader.value_bias is None else values + reader.value_bias
        left = y - np.einsum("nkm,nkme->ne", reader.weights(x, y + reader.bias), values)
        size, left = (np.sum(part.reshape(len(LONGER), -1) ** 2, axis=1) for part in (y, left))
        figures["left by heads"] = rest = float(np.sqrt(left / size).max())
        what = "heads do not explain two tokens: those whose weights depend on the offset alike are not told apart"
        FitError.if_above(rest, max(MERGED, 1e3 * self.answers), what)

    def _check_affine(self, figures: Figures) -> None:
        """Refuse caps and norms beside biases, terms of the offset or sinks, where no token has the score zero."""
        tokens = self.tokens(48)
        scale = min(1.0, self.longest / (3 * self.length))
        tokens = np.concatenate([tokens[:24], *(scale * factor * tokens[24:] for factor in (1, 2, 3))])
        query = np.arange(24)
        one, two, three = (
            self.reader.scores(tokens, query, query[:, None] + 24 * place, [2]).at(2)[2] for place in (1, 2, 3)
        )
        read = np.abs(three) < links.READ
        bent, moved = float(np.linalg.norm((three - 2 * two + one)[read])), float(np.linalg.norm((three - one)[read]))
        figures["bent scores"] = rest = bent / (moved + np.finfo(np.float64).tiny)
        what = "scores are not affine in a key: caps and norms are read, but not beside biases, offsets or sinks"
        FitError.if_above(rest, self.allowed, what)

    def tokens(self, count: int) -> Array:
        """Draw tokens (n, d) of the length whose scores are read."""
        drawn = self.rng.standard_normal((count, self.dim))
        return drawn * (self.length * np.sqrt(self.dim) / np.linalg.norm(drawn, axis=1, keepdims=True))

    def _shorten(self, even: bool) -> float:
        """Choose the length of tokens at which the scores of the sharpest head have about the size SIZE."""
        size = 0.0
        for _ in range(3):
            reference = None if even else self.tokens(1)[0]
            self.reader = replace(self.reader, reference=reference)
            scores = self._read_pairs({2: 24}).at(2)[2]
            before, size = size, float((np.abs(scores - np.median(scores, axis=0))).mean(0).max()) / 0.8
            if 0.8 < before / size < 1.25:  # scores do not depend on the length, or have the right size
                break
            longer = float(np.clip(SIZE / max(size, 1e-9), 1 / 16, 16) ** 0.5)
            self.length = min(self.length * longer, self.longest / 2)
        return size

    def _reach_epsilon(self, size: float) -> float:
        """Shorten tokens behind a norm until its epsilon makes large scores small, and no smaller than needed."""

        def shorten(factor: float) -> float:
            self.length, self.longer = self.length * factor, 10.0
            scores = self._read_pairs({2: 12}).at(2)[2]
            return float(np.abs(scores).mean(0).max()) / 0.8

        before = size
        for _ in range(SHORTENED):
            if size < LARGEST:
                break
            before, size = size, shorten(0.5)
        if size < 0.5 * LARGEST < before:  # the score falls with the square of the length
            size = shorten(min(2.0, (0.8 * LARGEST / size) ** 0.5))
        return size

    def _double(self, scale: float = 1.0) -> tuple[Array, Array]:
        """Return scores (N, m) of keys at offset 2, and of twice these keys."""
        scale = min(scale, self.longest / (2 * self.length))
        tokens = self.tokens(48)
        tokens = np.concatenate([tokens[:24], scale * tokens[24:], 2 * scale * tokens[24:]])
        query = np.arange(24)
        once, twice = (self.reader.scores(tokens, query, query[:, None] + start, [2]).at(2)[2] for start in (24, 48))
        return once, twice

    # Forms

    def read(self, figures: Figures) -> RotaryLayer:
        """Read scores, and find the forms of all offsets."""
        frames = self._frames_behind_norms(figures) if self.kind == "norm" else self._frames()
        count = max(int(np.prod(frame.shape)) for frame in frames)
        used = (1, 2) if self.reader.reference is None else (2, 3)
        ledger = self.link.forms(self._read_pairs(dict.fromkeys(used, int(self.effort.excess * count) + 4)))
        solved = [{t: find_core(frame, ledger, head, t) for t in used} for head, frame in enumerate(frames)]
        cores = [{t: core for t, (core, _) in known.items()} for known in solved]
        worst = max(rest for known in solved for _, rest in known.values())
        figures |= {"rank of forms": max(frame.shape[0] for frame in frames), "cores": worst}
        FitError.if_above(worst, self.allowed, "the scores at some offset are no bilinear form of the tokens")
        both = [np.array([frame.form(core[t]) for frame, core in zip(frames, cores, strict=True)]) for t in used]
        figures["changed"] = changed = positions.relative_change(*both)
        terms = slopes = None
        if changed < self.allowed:
            turns, drawn = _constant_turns(both[0]), (self.tokens, self.keys, self.window, self.noise)
            terms, slopes, rest = positions.read_terms(self.reader, both[0], *drawn)
        else:
            turns = find_turns(frames, cores)
            unused = [t for t in UNUSED if self.window is None or t + 1 < self.window]
            fresh = [self.link.forms(self._read_pairs({t: 4 * self.keys})) for t in unused]
            rest = max([worst, *(max(turned_residual(turns, ledger).values()) for ledger in fresh)])
        figures["other offsets"] = rest
        what = "scores at other offsets are neither rotations nor terms of position, or too sharp to be read"
        FitError.if_above(rest, OTHER, what)
        listing = np.array([turns.form(t) for t in range(self.effort.offsets)])
        if terms is None and self.window is None and self.kind == "form" and not self.sinks:
            return RotaryLayer(listing, self.heads.projection, self.reader.bias, turns)
        layer = ScoreLayer(listing, self.heads.projection, self.reader.bias, turns, **vars(self.link))
        layer = replace(
            layer, window=self.window, position_bias=terms, slopes=slopes, value_bias=self.reader.value_bias
        )
        if not self.sinks:
            return layer
        queries = self.tokens(self.dim + 1 + 2 * self.effort.extra)
        return sinks.complete_sinks(layer, self.reader, queries, self.noise, self.allowed, figures)

    def _read_pairs(self, needed: dict[int, int]) -> Ledger:
        """Read at least so many random pairs of tokens at every offset."""
        parts = []
        offsets = sorted(needed)
        for start in range(0, len(offsets), self.keys):
            some = offsets[start : start + self.keys]
            count = max(needed[offset] for offset in some)
            pieces = np.arange(count * (len(some) + 1)).reshape(count, -1)
            tokens = self.tokens(pieces.size)
            parts.append(self.reader.scores(tokens, pieces[:, 0], pieces[:, 1:], some))
        return Ledger.join(parts)

    def _frames(self) -> list[Frame]:
        """Find the spaces of the forms of all heads."""
        few = min(self.dim + 1, max(self.heads.ranks) + 1 + self.effort.extra)
        sketch, fresh = self.tokens(few), self.tokens(self.dim + 1 + self.spare)
        left = self.link.remove_cap(self._of_queries(fresh, sketch))  # (few, N, m)
        right = self.link.remove_cap(self._of_keys(fresh, sketch))
        sides = zip(np.moveaxis(left, 2, 0), np.moveaxis(right, 2, 0), strict=True)  # (m, few, N)
        return [forms.find_frame((fresh, one.T), (fresh, two), self.noise) for one, two in sides]

    def _of_queries(self, queries: Array, sketch: Array) -> Array:
        """Return scores (few, N, m) of queries (N, d) with sketch keys (few, d), each at an offset of its own."""
        first = 2 if self.reader.reference is not None else 1
        tokens, parts = np.concatenate([queries, sketch]), []
        for start in range(0, len(sketch), self.keys):
            block = len(queries) + np.arange(len(sketch))[start : start + self.keys]
            offsets = list(range(first, first + len(block)))
            found = self.reader.scores(tokens, np.arange(len(queries)), np.tile(block, (len(queries), 1)), offsets)
            parts.append(found.logits.reshape(len(queries), len(block) + 1, -1)[:, :-1])
        return np.moveaxis(np.concatenate(parts, axis=1), 1, 0)

    def _of_keys(self, keys: Array, sketch: Array) -> Array:
        """Return scores (few, N, m) of keys (N, d) with sketch queries (few, d), each at an offset of its own."""
        blocks = [sketch[start : start + self.keys] for start in range(0, len(sketch), self.keys)]
        return np.concatenate([self.reader.follow(keys, block) for block in blocks])

    def _frames_behind_norms(self, figures: Figures) -> list[Frame]:
        """Find the spaces of the forms, and the norms of queries and keys, of all heads."""
        few = min(self.dim, max(self.heads.ranks) + self.effort.extra)
        fresh, sketch = self.tokens(self.dim + 1 + (0 if self.exact else self.dim)), self.tokens(few)
        found = []
        for side, ask in (("queries", self._of_queries), ("keys", self._of_keys)):
            alone = ask(fresh, sketch)  # (few, N, m)
            together = ask(fresh[1:] + fresh[0], sketch)
            ratio, rest = links.relative_norms(alone[:, 0], alone[:, 1:], together)
            figures[f"norms of {side}"] = rest
            FitError.if_above(rest, self.allowed, f"scores of sums of {side} do not combine theirs: no norm")
            linear = np.moveaxis(alone[:, 1:] * ratio, 2, 0)  # (m, few, d): Theta x up to a constant
            table = np.swapaxes(np.linalg.pinv(fresh[1:]) @ np.swapaxes(linear, 1, 2), 1, 2)  # (m, few, d)
            spaces = [forms.row_space(one, self.noise) for one in table]
            squares, rest = self._squares(ask, sketch, table, spaces)
            figures[f"squares of {side}"] = rest
            found.append((spaces, squares))
        (left, query_norm), (right, key_norm) = found
        self.link = links.Link(None, query_norm, key_norm)
        sides = zip(left, right, strict=True)
        return [Frame(np.pad(a, ((0, 1), (0, 0))), forms.beside_one(b), constant=True) for a, b in sides]

    def _squares(
        self, ask: Callable[..., Array], sketch: Array, table: Array, spaces: list[Array]
    ) -> tuple[Array, float]:
        """Read the norms of random tokens, and fit their squares on the spaces of the forms, or on the whole space."""
        some = sketch[: max(2, min(len(sketch), 2 * self.keys))]
        rank = max(space.shape[1] for space in spaces)
        whole = [np.eye(self.dim)] * len(spaces)
        tokens, values = np.zeros((0, self.dim)), np.zeros((0, len(spaces)))
        longer = min(self.longer, self.longest / self.length)
        rest, least = np.inf, 0.03 if self.exact else 0.3  # answers about short tokens have few digits
        for bases, width in ((spaces, rank), (whole, self.dim)):
            count = int(1.3 * (width * (width + 1) // 2 + 1)) + 8 - len(tokens)
            if count > 0:
                drawn = self.tokens(count) * np.exp(self.rng.uniform(np.log(least), np.log(longer), (count, 1)))
                scores = ask(drawn, some)  # (few, N, m)
                linear = np.einsum("mnd,Nd->nNm", table[:, : len(some)], drawn)
                ratio = (linear * scores).sum(0) / (scores**2).sum(0)
                tokens, values = np.concatenate([tokens, drawn]), np.concatenate([values, ratio])
            fits = [links.fit_norm(tokens, values[:, head], basis) for head, basis in enumerate(bases)]
            rest = max(fit[1] for fit in fits)
            if rest < self.allowed:
                break
        else:
            raise FitError("norms of queries or keys are no root of a quadratic form", rest, self.allowed)
        return np.array([fit[0] for fit in fits]), rest


def _constant_turns(form: Array) -> Turns:
    """Return forms (m, d + 1, d + 1) that are the same at all offsets, as turns."""
    wide = form.shape[1]
    identity = (np.eye(wide),) * len(form)
    return Turns(identity, identity, tuple(form), (np.zeros(wide),) * len(form))
