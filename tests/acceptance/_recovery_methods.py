"""Calls of every method of extraction over its information limit, on random layers of the kind that it is for."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._recovery_calls import AROUND
from tests.recovery.rotary_layers import planted_rotary_layer
from tests.recovery.score_layers import planted_score_layer

from manyheads.errors import ManyheadsError
from manyheads.recovery import ExtractionOptions, ServerLimits, evaluate_layer, extract_layer, gpt_layer
from manyheads.recovery.oracle.normalization import Normalization
from manyheads.recovery.queries.methods import METHODS

SHAPES = {
    "bounded": [(16, 2), (24, 4)],
    "scores": [(32, 2), (32, 4)],
    "scores-sphere": [(32, 2)],
    "vocabulary": [(16, 2), (32, 2), (32, 4)],
}
OTHERS = [(32, 2), (32, 4), (64, 4)]
KINDS = ("ALiBi", "cap", "head norms", "RoPE with biases")  # scores, in turn


def plain_parameters(dim: int, heads: int, width: int | None = None) -> int:
    """Return how many numbers determine heads of rank d / m on tokens of `width` free dimensions, d by default."""
    width, rank = width or dim, dim // heads
    return dim + heads * rank * ((2 * width + 1 - rank) + (width + dim - rank))


def rotary_parameters(dim: int, heads: int, *, biased: bool = False) -> int:
    """Return the same for rotary positions: a scale and a turn of every plane leave the function as it is."""
    rank = dim // heads
    return dim + heads * rank * (2 * (dim + biased) + 2 * dim - rank) - heads * rank // 2


def score_parameters(dim: int, heads: int, kind: str) -> int:
    """Return the same for other scores."""
    if kind == "RoPE with biases":
        return rotary_parameters(dim, heads, biased=True)
    if kind == "ALiBi":
        return plain_parameters(dim, heads) + heads * (1 - dim // heads)  # slopes, and no biases
    return rotary_parameters(dim, heads) + (1 if kind == "cap" else 2 * dim)  # norms have gains of queries and keys


def _planted(method: str, dim: int, heads: int, seed: int) -> tuple[Callable[..., Any], int, dict[str, Any]]:
    """Return a random function of the class of a method, its number of parameters, and the options to extract it."""
    rng = np.random.default_rng([seed, dim, heads])
    causal = bool(seed % 2)
    if method.startswith("scores"):
        kind = KINDS[seed % len(KINDS)]
        layer = (
            planted_rotary_layer(rng, dim, heads, key_bias=0.5)
            if kind == "RoPE with biases"
            else planted_score_layer(rng, dim, heads, kind)
        )
        parameters = score_parameters(dim, heads, kind)
        if method == "scores":
            return layer, parameters, {"scores": True}
        normalize = Normalization(centred=False)
        return lambda x: x + layer(normalize(x)), parameters, {"scores": True, "normalized": True, "residual": True}
    if method.startswith("rotary"):
        layer, normalize = planted_rotary_layer(rng, dim, heads), Normalization(centred=False)
        if method == "rotary":
            return layer, rotary_parameters(dim, heads), {"rotary": True}
        options = {"rotary": True, "normalized": True, "residual": True}
        return lambda x: x + layer(normalize(x)), rotary_parameters(dim, heads), options
    plain = gpt_layer(rng, dim, heads, causal=causal)
    parameters = plain_parameters(dim, heads)
    if method == "sphere":
        normalize = Normalization(centred=True)
        options = {"normalized": True, "causal": causal}
        return lambda x: evaluate_layer(plain, normalize(x)), plain_parameters(dim, heads, dim - 1), options
    if method == "vocabulary":
        table = rng.standard_normal((6 * dim, dim))
        return lambda x: evaluate_layer(plain, x), parameters, {"limits": ServerLimits(vocabulary=table)}
    if method in ("bounded", "probes"):
        return lambda x: evaluate_layer(plain, x).astype(np.float32), parameters, {"causal": causal, "tolerance": 1e-4}
    return lambda x: evaluate_layer(plain, x), parameters, {"causal": causal}


def _runs(method: str, seeds: list[int]) -> Iterator[tuple[float, dict[str, float]] | str]:
    for dim, heads in SHAPES.get(method, OTHERS):
        for seed in seeds:
            function, parameters, options = _planted(method, dim, heads, seed)
            try:
                found = extract_layer(
                    function, dim, method=method, seed=seed, options=ExtractionOptions(verify=60, **options)
                )
            except ManyheadsError as error:
                yield f"{method} {dim}/{heads}: {type(error).__name__}"
                continue
            if found.heads != heads:
                yield f"{method} {dim}/{heads}: {found.heads} heads"
                continue
            stages = {name: counts.calls for name, counts in found.counts.items() if name not in AROUND}
            yield sum(stages.values()) / (parameters / dim), {n: c / sum(stages.values()) for n, c in stages.items()}


def calls_by_method(folder: Path, seeds: list[int]) -> Measured:
    """Extract random layers by every method; state calls over the limit, and the stage that takes most of them."""
    said, shares, wrong, passed = [], [], [], True
    for method in METHODS:
        runs = list(_runs(method, seeds))
        found = [run for run in runs if not isinstance(run, str)]
        wrong += [run for run in runs if isinstance(run, str)]
        if not found:
            return Measured(f"{method}: nothing found", str(wrong[:3]), ", ".join(map(str, seeds)), False)
        ratios = [ratio for ratio, _ in found]
        names = {name for _, stages in found for name in stages}
        mean = {name: float(np.mean([stages.get(name, 0.0) for _, stages in found])) for name in names}
        dearest = max(mean, key=lambda name: mean[name])
        said.append(f"{method} {np.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]")
        shares.append(f"{method}: {dearest} {mean[dearest]:.0%} ({len(found)} runs)")
        passed &= method in NOISY or float(np.median(ratios)) <= MOST
    extent = (
        f"the dearest stage and its share of calls: {', '.join(shares)}; {len(wrong)} refused or wrong: {wrong[:4]}"
    )
    return Measured(f"median [range]: {', '.join(said)}", extent, ", ".join(map(str, seeds)), passed and not wrong)


MOST = 4.0
NOISY = ("bounded", "probes")  # methods for answers with noise, which need more of them than there are parameters
FIGURES = [
    Figure(
        "calls-methods",
        "calls of an extraction over the information limit, by method",
        f"median at most {MOST:g} of all methods for exact answers; none refused or wrong",
        calls_by_method,
        {"seeds": [0, 1, 2, 3]},
    )
]
