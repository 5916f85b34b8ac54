"""Random layers with the scores in use: norms of queries and keys, caps, windows, terms of position."""

import dataclasses

import numpy as np
from tests.recovery.rotary_layers import planted_rotary_layer

from manyheads.recovery.layers.scores import ScoreLayer

KINDS = (
    "head norms",
    "joint norms",
    "cap",
    "window",
    "window and norms",
    "ALiBi",
    "buckets",
    "buckets of later tokens",
    "ALiBi and biases",
    "sinks",
    "sinks, biases and window",
    "sinks and ALiBi",
)


def planted_score_layer(rng: np.random.Generator, dim: int, heads: int, kind: str) -> ScoreLayer:
    """Return a random layer with scores of a kind."""
    biased = "biases" in kind
    base = planted_rotary_layer(rng, dim, heads, key_bias=0.5 * biased)
    given = {}
    if "norms" in kind:
        for name, side in (("query_norm", base.turns.left), ("key_norm", [part.T for part in base.turns.first])):
            gains = rng.uniform(0.5, 2.0, (heads, dim // heads))
            squares = np.array([one[:-1] * gain @ one[:-1].T for one, gain in zip(side, gains, strict=True)])
            if kind == "joint norms":
                squares = np.broadcast_to(squares.mean(0), squares.shape)
            squares = squares / np.trace(squares, axis1=1, axis2=2)[:, None, None]
            given[name] = np.pad(squares, ((0, 0), (0, 1), (0, 1)))
            given[name][:, -1, -1] = 1e-6
    if "cap" in kind:
        given["cap"] = 5.0
    if "window" in kind:
        given["window"] = 11
    forms, turns = base.forms, base.turns
    if "ALiBi" in kind or "buckets" in kind:
        identity = (np.eye(dim + 1),) * heads
        still = base.turns.form(1)
        turns = dataclasses.replace(
            turns, left=identity, turn=identity, first=tuple(still), shift=(np.zeros(dim + 1),) * heads
        )
        forms = np.array([turns.form(t) for t in range(4)])
        slopes = 2.0 ** (-8 * np.arange(1, heads + 1) / heads)
        given["position_bias"], given["slopes"] = -slopes[:, None] * np.arange(200), -slopes
        if "buckets" in kind:
            edges = np.searchsorted([1, 2, 3, 4, 6, 9, 13, 20, 30, 50, 80, 110], np.arange(200), side="right")
            given["position_bias"], given["slopes"] = rng.standard_normal((heads, 13))[:, edges], None
    if "later" in kind:
        own = given["position_bias"][:, :1]
        given["later_bias"] = np.concatenate([own, rng.standard_normal((heads, 13))[:, edges][:, 1:]], axis=1)
    if "sinks" in kind:
        given["sink"] = rng.standard_normal(heads)
        if biased:
            spaces = [np.linalg.svd(one)[2][: dim // heads] for one in base.projection]
            given["value_bias"] = np.array([0.5 * rng.standard_normal(dim) @ one.T @ one for one in spaces])
    return ScoreLayer(forms, base.projection, base.bias, turns, **given)
