"""Planted lags on a text: its tokens and its own table, and how well a fit finds what was planted."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.data import load_text
from manyheads.data.characters import Vocabulary, build_vocabulary
from manyheads.errors import CertificateError
from manyheads.theory.bigram.lags.fit import fit_lags
from manyheads.theory.bigram.lags.result import LagFit
from manyheads.theory.bigram.lags.streams import plant_lags


@lru_cache(maxsize=2)
def prepare(path: Path | None, size: int) -> tuple[Vocabulary, np.ndarray, np.ndarray]:
    """Return the vocabulary, the tokens in lower case, and the table of what follows what, columns summing to one."""
    content = load_text(path).content.lower()
    vocabulary = build_vocabulary(content, size)
    tokens = vocabulary.encode(content)
    counts = np.full((len(vocabulary), len(vocabulary)), 0.1)
    np.add.at(counts, (tokens[1:], tokens[:-1]), 1.0)
    return vocabulary, tokens, counts / counts.sum(0)


def try_fit(*args: Any, **kwargs: Any) -> LagFit | None:
    """Fit lags; None if there are too few samples: then nothing is found, and that is the result.

    That text has no table in common to all lags is known.
    """
    with suppress(CertificateError), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "one transition table for all lags is rejected", UserWarning)
        return fit_lags(*args, **kwargs)
    return None


def plant_evenly(
    rng: np.random.Generator, streams: Sequence[np.ndarray], table: np.ndarray, lags: int, planted: int
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Draw lags beyond 0 for every symbol, and targets of streams; return where the lags are, (N, lags), and those."""
    drawn = np.stack([np.sort(rng.choice(np.arange(1, lags), planted, replace=False)) for _ in table])
    weights = rng.dirichlet(np.full(planted, 20.0), size=len(table))  # of two lags, between a third and two thirds
    truth = np.zeros((len(table), lags), bool)
    np.put_along_axis(truth, drawn, True, 1)
    return truth, [plant_lags(rng, stream, table, drawn, weights) for stream in streams]


def measure_planted(fit: LagFit | None, truth: np.ndarray, table: np.ndarray, planted: int) -> dict[str, float]:
    """Return how many planted lags a fit found, how many empty ones it chose, and how near its transition is."""
    if fit is None:
        return dict.fromkeys(("recall", "false", "cosine"), 0.0)
    chosen = fit.attention > 0
    return {
        "recall": float(fit.counts @ share_of_lags(truth, fit.top(planted)) / fit.counts.sum()),
        "false": float((chosen & ~truth).sum() / (~truth).sum()),
        "cosine": _cosine(fit, table),
    }


def share_of_lags(truth: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the share of true lags among the chosen ones, (N,); -1 is no lag."""
    hits = np.take_along_axis(truth, np.maximum(chosen, 0), 1) & (chosen >= 0)
    return np.asarray(hits.sum(1) / truth.sum(1))


def _cosine(fit: LagFit, table: np.ndarray) -> float:
    """Return the cosine of the fitted and the planted transition, weighted by the frequencies of the symbols."""
    planted = table - fit.mean[:, None]
    weights = fit.counts / fit.counts.sum()
    inner = [float(weights @ (a * b).sum(0)) for a, b in ((fit.value, planted), (fit.value, fit.value), (planted,) * 2)]
    return inner[0] / (inner[1] * inner[2]) ** 0.5
