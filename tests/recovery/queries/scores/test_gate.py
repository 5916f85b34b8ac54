"""Layers whose heads repeated tokens do not tell apart: the reason of a refusal, and plain attention that is found."""

import dataclasses

import numpy as np
import pytest
from tests.recovery.rotary_layers import planted_rotary_layer

import manyheads as mh
from manyheads.recovery import ExtractionOptions, compare_layers, evaluate_layer, gpt_layer
from manyheads.recovery.layers.scores import ScoreLayer
from manyheads.recovery.refusals import FitError

DIM = 16
FEW = ExtractionOptions(scores=True, verify=60, tries=1, progress=False)


def without_positions(rng, heads, **given):
    """Return a layer whose forms are the same at all offsets."""
    base = planted_rotary_layer(rng, DIM, heads, key_bias=given.pop("key_bias", 0.5))
    identity = (np.eye(DIM + 1),) * heads
    turns = dataclasses.replace(
        base.turns, left=identity, turn=identity, first=tuple(base.turns.form(1)), shift=(np.zeros(DIM + 1),) * heads
    )
    forms = np.array([turns.form(offset) for offset in range(4)])
    return ScoreLayer(forms, base.projection, base.bias, turns, **given)


@pytest.mark.parametrize(
    "given",
    [
        {"window": 9},
        {"sink": np.zeros(2)},
        {"cap": 3.0, "key_bias": 0.0},
        {"position_bias": -0.5 * np.ones((2, 1)) * np.arange(200), "slopes": np.full(2, -0.5)},
    ],
    ids=["window", "softmax off by one", "cap", "equal slopes"],
)
def test_heads_that_depend_on_the_offset_alike_are_refused_with_that_reason(given, rng):
    with pytest.raises(FitError, match="whose weights depend on the offset alike"):
        mh.extract_layer(without_positions(rng, 2, **given), DIM, options=FEW)


def test_a_cap_beside_rotary_biases_is_refused_with_that_reason(rng):
    base = planted_rotary_layer(rng, DIM, 2, key_bias=0.5)
    layer = ScoreLayer(base.forms, base.projection, base.bias, base.turns, cap=4.0)
    with pytest.raises(FitError, match=r"not affine in a key.* not beside biases"):
        mh.extract_layer(layer, DIM, options=FEW)


@pytest.mark.parametrize("said", ["scores", "rotary"])
def test_plain_attention_is_found_whatever_is_said_of_its_positions(said, rng):
    layer = gpt_layer(rng, DIM, 2)
    options = ExtractionOptions(verify=60, progress=False, **{said: True})
    found = mh.extract_layer(lambda x: evaluate_layer(layer, x), DIM, options=options)
    assert (found.heads, found.method) == (2, "subspaces")
    assert compare_layers(layer, found.layer).theta < 1e-6
