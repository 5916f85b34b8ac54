"""The tools beyond the paper: screening, the transfer test, lags of streams, each with seeds and sizes in full."""

from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._studies import study, words_of

from manyheads.bigram import (
    Batch,
    TransferSettings,
    draw_correlated,
    fit_lags,
    plant_lags,
    predict_screening,
    predict_transfer,
    screen,
    transfer_test,
)
from manyheads.bigram.screening import chi_square
from manyheads.bigram.streams import read_streams
from manyheads.bigram.studies.lags import prepare
from manyheads.bigram.studies.screening import ScreeningCost, draw_even, search
from manyheads.bigram.studies.transfer import TransferCost


def growth(folder: Path, lengths: list[int], seeds: int) -> Measured:
    """Search until screening puts all positions first, at every length; compare medians."""
    bench = ScreeningCost()
    figures = []
    for length in lengths:
        rngs = [np.random.default_rng([seed, length]) for seed in range(seeds)]
        found = [search(rng, bench._task(length, rng), lambda c: chi_square(c)[0][None])[0] for rng in rngs]
        law = predict_screening(bench._task(length, rngs[0]))
        figures.append((float(np.median(found)), float(np.exp(np.mean(np.log(found)))), law))
    middles = np.asarray([middle for middle, _, _ in figures])
    ratio = float(middles[-1] / middles[0])
    shown = ", ".join(
        f"{length}: {m:.0f} (mean of logs {g:.0f}, law {p:.0f})"
        for length, (m, g, p) in zip(lengths, figures, strict=True)
    )
    return Measured(f"{ratio:.2f} times", shown, f"0-{seeds - 1}", ratio <= 2.5)


def recall(folder: Path, size: int, lags: int, planted: int, seeds: int) -> Measured:
    """Plant lags on a stretch of the text and count how many are among the strongest of the fit and of chi-square."""
    vocabulary, tokens, table = prepare(None, 32)
    symbols, found, counted = len(vocabulary), [], []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, size])
        begin = int(rng.integers(len(tokens) - size * 5 // 4 - lags - 2))
        stream = tokens[begin : begin + size * 5 // 4 + lags]  # a fifth is held out
        places = np.stack([rng.choice(np.arange(1, lags), planted, replace=False) for _ in range(symbols)])
        first = rng.uniform(0.35, 0.65, symbols)
        targets = plant_lags(rng, stream, table, places, np.stack([first, 1 - first], 1))
        fit = fit_lags(stream, lags, targets=targets, vocabulary=symbols)
        data, _ = read_streams(stream, lags, targets, symbols).split(0.2)
        table_scores = screen(data.windows, data.queries, data.targets, vocabulary=symbols)
        best = np.argsort(table_scores.dof - table_scores.scores, axis=1)[:, :planted]
        shares = fit.counts / fit.counts.sum()
        for kept, chosen in ((found, fit.top(planted)), (counted, best)):
            kept.append(float(shares @ (chosen[:, :, None] == places[:, None, :]).any(1).mean(1)))
    extent = f"smallest {min(found):.4f}; chi-square of each lag {np.mean(counted):.3f}"
    return Measured(f"{np.mean(found):.4f} of the lags", extent, f"0-{seeds - 1}", float(np.mean(found)) >= 0.98)


def flatness(folder: Path, correlations: list[float], length: int, seeds: int) -> Measured:
    """Search until the scores of each matrix put all positions first; compare samples times rho^2."""
    bench, rho, logs = TransferCost(), np.asarray(correlations), []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, length])
        task = bench._task(length, rng)
        values = np.stack([draw_correlated(rng, task, one) for one in rho])
        found = search(rng, task, lambda c, v=values: np.einsum("ktyx,ryx->rkt", c, v, optimize=True))
        logs.append(np.log(found * rho**2))
    level = np.exp(np.mean(logs, 0))
    ratio = float(level.max() / level.min())
    law = predict_transfer(task, task.centred)
    shown = ", ".join(f"{one:g}: {value:.0f}" for one, value in zip(rho, level, strict=True))
    return Measured(f"{ratio:.2f}", f"samples times rho^2 by rho {shown}; law {law:.0f}", f"0-{seeds - 1}", ratio < 1.6)


def estimates(folder: Path, correlations: list[float], length: int, size: int, seeds: int) -> Measured:
    """Estimate each correlation from a pilot; the estimate is right where it is a half or more, and low below."""
    bench, rows, deviations = TransferCost(), [], []
    for seed in range(seeds):
        rng = np.random.default_rng([seed, length])
        task = bench._task(length, rng)
        batch = Batch(*draw_even(rng, task, size))
        settings = TransferSettings(energy=task.transition_energy)
        tests = [transfer_test(draw_correlated(rng, task, rho), batch, 2, settings=settings) for rho in correlations]
        rows.append([test.correlation for test in tests])
        deviations.append([test.strongest for test in tests])
    means, spreads, largest = np.mean(rows, 0), np.std(rows, 0, ddof=1), np.median(deviations, 0)
    shown = ", ".join(
        f"{rho:g}: {mean:.2f} (sd {spread:.2f}, z {z:.1f})"
        for rho, mean, spread, z in zip(correlations, means, spreads, largest, strict=True)
    )
    rho = np.asarray(correlations)
    passed = (np.abs(means - rho)[rho >= 0.5] <= 0.07).all() and (means[rho < 0.5] <= rho[rho < 0.5] + 0.07).all()
    return Measured(shown, f"{length} positions, pilot of {size}", f"0-{seeds - 1}", bool(passed))


FIGURES = [
    Figure(
        "screening-growth",
        "samples of screening from 250 to 64,000 tokens",
        "at most 2.5 times",
        growth,
        {"lengths": [250, 64_000], "seeds": 24},
    ),
    Figure(
        "planted-lags",
        "planted lags found on real text at 20,000 samples",
        "at least 0.98, mean over the seeds, weighted by frequency",
        recall,
        {"size": 20_000, "lags": 64, "planted": 2, "seeds": 8},
    ),
    Figure(
        "transfer-flat",
        "samples times rho^2 at correlations 1, .5, .25",
        "largest over smallest below 1.6",
        flatness,
        {"correlations": [1.0, 0.5, 0.25], "length": 4000, "seeds": 8},
    ),
    Figure(
        "transfer-estimate",
        "correlation that a pilot shows",
        "mean within .07 of the truth from .5 on, not above it by more below",
        estimates,
        {"correlations": [1.0, 0.7, 0.5, 0.35, 0.25, 0.1], "length": 4000, "size": 8000, "seeds": 8},
    ),
    *(
        Figure(
            f"study-{name}",
            f"verdicts of bigram/{name}",
            "every outcome as expected",
            study,
            {"name": f"bigram/{name}", "replicates": 8},
            command=words_of(f"bigram/{name}", 8),
        )
        for name in ("lags", "screening", "transfer")
    ),
]
