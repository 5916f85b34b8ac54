r"""Extraction of a layer whose scores depend on positions, with biases of queries and keys.

S0  One-token sequences give c and the sum of the projections. d + 1 calls.
S1  Jacobians of sequences of one repeated token: the heads and their projections (`heads`), whatever the score. 4 d k
    calls of k tokens for each repeated token.
S2  Scores of pairs of tokens from the weights of last rows (`reading`), and the spaces of the forms.
S3  Forms of some offsets as small linear problems, and how heads turn from one offset to the next (`forms`); they are
    believed only if they predict scores at offsets that were not used.

The figures of every step stand in the stages of the result.
"""

from dataclasses import dataclass

import numpy as np

from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.projection_sum import Sums, read_sums
from manyheads.recovery.queries.rotary.forms import turned_residual
from manyheads.recovery.queries.rotary.logits import Ledger
from manyheads.recovery.queries.scores import forms
from manyheads.recovery.queries.scores.heads import Heads, find_heads
from manyheads.recovery.queries.scores.reading import ScoreReader
from manyheads.recovery.queries.sigmoid_network import Array
from manyheads.recovery.refusals import FitError, RankBudgetError
from manyheads.recovery.results import Extracted, StageLog

SIZE = 0.9  # standard deviation of the scores that are read: larger ones leave some weights too small
UNUSED = (7, 24)  # offsets that are read to check how heads turn


@dataclass(frozen=True)
class ScoreSettings:
    """Settings of the extraction of a layer with any score."""

    offsets: int = 16  # offsets 0 .. offsets - 1 at which forms are listed in the result
    extra: int = 4  # sketch tokens beyond the rank
    excess: float = 1.5  # scores asked for, relative to the unknown numbers of a core
    share: float = 0.6  # tokens of a sequence, relative to the most whose weights can be separated

    @classmethod
    def accurate(cls) -> "ScoreSettings":
        """Return settings that spend more calls on better-conditioned readings."""
        return cls(extra=8, excess=3.0, share=0.4)


def extract_scores(
    oracle: Oracle, noise: float, rng: np.random.Generator, settings: ScoreSettings | None = None
) -> Extracted:
    """Extract a causal layer whose scores are bilinear forms of tokens with biases, one for each offset."""
    settings = settings or ScoreSettings()
    log = StageLog(oracle)
    with log.stage("sums"):
        sums = read_sums(oracle, oracle.dim)
    with log.stage("heads") as figures:
        heads = find_heads(oracle, sums, noise, rng)
        figures |= {"heads": len(heads.ranks), "rank": max(heads.ranks), "separation": heads.separation}
        figures |= {"residual": heads.residual, "condition": heads.condition}
    with log.stage("scores") as figures:
        layer = _Scores(oracle, noise, rng, settings, sums, heads).read(figures)
    longest = layer.offsets if layer.turns is None else None
    return Extracted(layer, tuple(log.stages), "the tokens, offset by offset", predict=layer, longest=longest)  # type: ignore[arg-type]


class _Scores:
    """Scores of pairs of tokens of one length, and the forms that explain them."""

    def __init__(
        self,
        oracle: Oracle,
        noise: float,
        rng: np.random.Generator,
        settings: ScoreSettings,
        sums: Sums,
        heads: Heads,
    ):
        self.rng, self.settings, self.heads = rng, settings, heads
        self.noise = max(noise, 1e-15, heads.residual)
        self.dim, self.length = oracle.dim, 1.0
        most = min(oracle.dim // len(heads.ranks), *heads.ranks)
        self.keys = max(1, int(settings.share * most) - 2)  # keys of a sequence beside the query and the reference
        if most < 3:
            raise RankBudgetError(
                f"heads of rank {min(heads.ranks)}: the weights of a query, a reference and a key are told apart by "
                "heads of rank 3 or more",
                measured=float(most),
                threshold=3.0,
            )
        self.reader = ScoreReader(oracle, sums.bias, heads.projection, np.zeros(oracle.dim))

    def read(self, figures: dict[str, float]) -> RotaryLayer:
        """Read scores, and find the forms of all offsets."""
        figures["size"] = self._shorten()
        frames = self._frames()
        count = max(frame.left.shape[1] * frame.right.shape[1] for frame in frames)
        needed = int(self.settings.excess * count) + 4
        used = (2, 3)
        ledger = self._random(dict.fromkeys(used, needed))
        cores: list[dict[int, Array]] = [{} for _ in frames]
        worst = 0.0
        for offset in used:
            for head, frame in enumerate(frames):
                cores[head][offset], rest = forms.find_core(frame, ledger, head, offset)
                worst = max(worst, rest)
        figures |= {"rank of forms": max(frame.left.shape[1] for frame in frames), "cores": worst}
        allowed = max(1e-4, 1e3 * self.noise)
        if worst > allowed:
            raise FitError(
                "the scores at some offset are no bilinear form of the tokens",
                measured=worst,
                threshold=allowed,
            )
        turns = forms.find_turns(frames, cores)
        fresh = self._random(dict.fromkeys(UNUSED, 4 * self.keys))
        figures["turned"] = turned = max(turned_residual(turns, fresh).values())
        if turned > allowed:
            raise FitError(
                "forms at several offsets do not follow from each other by rotations of queries and keys",
                measured=turned,
                threshold=allowed,
            )
        listing = np.array([turns.form(t) for t in range(self.settings.offsets)])
        return RotaryLayer(listing, self.heads.projection, self.reader.bias, turns)

    def _tokens(self, count: int) -> Array:
        drawn = self.rng.standard_normal((count, self.dim))
        return drawn * (self.length * np.sqrt(self.dim) / np.linalg.norm(drawn, axis=1, keepdims=True))

    def _shorten(self) -> float:
        """Choose the length of tokens at which the scores of the sharpest head have about the size SIZE."""
        size = 0.0
        for _ in range(3):
            self.reader = ScoreReader(self.reader.oracle, self.reader.bias, self.reader.projection, self._tokens(1)[0])
            scores = self._random({2: 24}).at(2)[2]
            size = float((np.abs(scores - np.median(scores, axis=0))).mean(0).max()) / 0.8
            self.length *= float(np.clip(SIZE / max(size, 1e-9), 1 / 16, 16) ** 0.5)
        return size

    def _random(self, needed: dict[int, int]) -> Ledger:
        """Read at least so many random pairs of tokens at every offset."""
        parts = []
        offsets = sorted(needed)
        for start in range(0, len(offsets), self.keys):
            some = offsets[start : start + self.keys]
            count = max(needed[offset] for offset in some)
            pieces = np.arange(count * (len(some) + 1)).reshape(count, -1)
            tokens = self._tokens(pieces.size)
            parts.append(self.reader.scores(tokens, pieces[:, 0], pieces[:, 1:], some))
        return Ledger.joined(parts)

    def _frames(self) -> list[forms.Frame]:
        """Find the spaces of the forms of all heads."""
        dim, few = self.dim, min(self.dim + 1, max(self.heads.ranks) + 1 + self.settings.extra)
        tokens = np.concatenate([self._tokens(few), self._tokens(dim + 1 + self.settings.extra)])
        sketch, fresh = np.arange(few), np.arange(few, len(tokens))
        offsets = list(range(2, 2 + self.keys))
        # every fresh token as a query of all sketch keys, which are cut into blocks of one sequence
        columns = []
        for start in range(0, few, self.keys):
            block = sketch[start : start + self.keys]
            keys = np.tile(block, (len(fresh), 1))
            columns.append(self._table(tokens, fresh, keys, offsets[: len(block)]))
        # every fresh token as a key of all sketch queries
        queries = [sketch[start : start + self.keys] for start in range(0, few, self.keys)]
        rows = [self.reader.follow(tokens[fresh], tokens[block]) for block in queries]
        left = np.concatenate(columns, axis=1)  # (N, few, m)
        right = np.concatenate(rows)  # (rows, N, m)
        return [
            forms.find_frame((tokens[fresh], left[:, :, head]), (tokens[fresh], [right[:, :, head]]), self.noise)
            for head in range(len(self.heads.ranks))
        ]

    def _table(self, tokens: Array, query: np.ndarray, keys: np.ndarray, offsets: list[int]) -> Array:
        """Return scores (n, k, m) of queries with keys (n, k), without those of queries with themselves."""
        found = self.reader.scores(tokens, query, keys, offsets).logits
        return found.reshape(len(query), keys.shape[1] + 1, -1)[:, :-1]
