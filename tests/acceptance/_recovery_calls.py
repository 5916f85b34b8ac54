"""Calls of an extraction over its information limit: random layers of even and of uneven ranks, and of one head."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured

import manyheads as mh
from manyheads.attention import AttentionLayer
from manyheads.errors import ManyheadsError
from manyheads.recovery import ExtractionOptions, compare_layers, evaluate_layer, gpt_layer
from manyheads.recovery.layers.panels import describe_heads, free_parameters

SHAPES = {
    "several": [(32, 2), (32, 4), (48, 6), (64, 2), (64, 4), (64, 8), (96, 12), (128, 4), (128, 8)],
    "one": [(16, 1), (32, 1), (64, 1), (128, 1)],
    "uneven": [(32, 2), (32, 3), (48, 4), (64, 3), (64, 5), (96, 4)],
}
SEEDS = [810, 811, 812, 813, 2910, 2911, 2912, 2913]
AROUND = ("noise", "selection", "verification")  # stages that do not extract


def uneven_layer(rng: np.random.Generator, dim: int, heads: int, causal: bool) -> AttentionLayer:
    """Return a layer whose heads divide at most d dimensions at random, each at least two of them."""
    shares = rng.dirichlet(np.full(heads, 1.5))
    ranks = 2 + np.floor(shares * (dim - 2 * heads)).astype(int)
    parts = [gpt_layer(rng, dim, 1, rank=int(rank)) for rank in ranks]
    theta, projection, beta = (
        np.concatenate([np.asarray(getattr(part, name)) for part in parts])
        for name in ("theta", "projection", "key_bias")
    )
    return AttentionLayer(theta, projection, beta, parts[0].bias, causal=causal)


def _layers(kind: str, causal: bool, seeds: Iterable[int]) -> Iterator[tuple[int, AttentionLayer]]:
    for seed in seeds:
        for dim, heads in SHAPES[kind]:
            rng = np.random.default_rng([seed, dim, heads])
            uneven = uneven_layer(rng, dim, heads, causal) if kind == "uneven" else None
            yield seed, uneven or gpt_layer(rng, dim, heads, causal=causal)


def calls_over_limit(folder: Path, kind: str, seeds: list[int], median: float) -> Measured:
    """Extract random layers; the limit is the number of free parameters over the d numbers of a call's last row."""
    said, wrong, passed = [], [], True
    for causal in (True, False):
        ratios, whole, errors = [], [], []
        for seed, layer in _layers(kind, causal, seeds):
            dim = layer.dim
            limit = free_parameters(dim, describe_heads(layer, 1e-9)) / dim
            try:
                found = mh.extract_layer(
                    lambda x, layer=layer: evaluate_layer(layer, x),
                    dim,
                    seed=seed,
                    options=ExtractionOptions(causal=causal, verify=60),
                )
            except ManyheadsError as error:
                wrong.append(f"d {dim}, {layer.heads} heads: {type(error).__name__}")
                continue
            ratios.append(sum(c.calls for name, c in found.counts.items() if name not in AROUND) / limit)
            whole.append(sum(c.calls for name, c in found.counts.items() if name != "verification") / limit)
            if found.heads != layer.heads:
                wrong.append(f"d {dim}, {layer.heads} heads: {found.heads} found")
                continue
            compared = compare_layers(layer, found.layer)
            errors.append(max(compared.theta, compared.projection))
        said.append(
            f"{'causal' if causal else 'full'} {np.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]"
            f" (with noise and selection {np.median(whole):.2f}), errors up to {max(errors):.0e}"
        )
        passed &= float(np.median(ratios)) <= median
    shapes = ", ".join(f"{dim}/{heads}" for dim, heads in SHAPES[kind])
    extent = f"d/heads {shapes}, {len(seeds)} layers each, causal and full; {len(wrong)} refused or wrong: {wrong[:3]}"
    figure = f"calls over the limit, median [range]: {'; '.join(said)}"
    return Measured(figure, extent, ", ".join(map(str, seeds)), passed and not wrong)


def _figure(kind: str, words: str, median: float) -> Figure:
    return Figure(
        f"calls-{kind}",
        f"calls of an extraction over the information limit, {words}",
        f"median at most {median:g}, causal and full; none refused or wrong",
        calls_over_limit,
        {"kind": kind, "seeds": SEEDS, "median": median},
    )


FIGURES = [
    _figure("several", "two heads and more of rank d / m", 2.0),
    _figure("one", "one head of full rank", 4.0),
    _figure("uneven", "heads of uneven ranks", 2.0),
]
