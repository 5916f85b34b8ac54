"""Every supported family: output identical to the bit, statistics as those of plain attention, refusals by name."""

import sys

import numpy as np
import pytest
from tests.probe.families import FAMILIES, NOT_FUSED, OUTSIDE, batch, build, double, eager_patterns, run

from manyheads.errors import UsageError
from manyheads.probe import record_attention

pytestmark = pytest.mark.torch

SINK = "gpt_oss"
PLACES = [(family, None) for family in FAMILIES]
PLACES += [(family, side) for family, side in (("llama", "left"), ("gpt2", "right"), ("bert", "right"), (SINK, "left"))]


def expected(pattern, inputs, cross):
    """Return means over the rows that count of the figures that a pattern (B, H, n, m) gives, and uniform levels."""
    p = pattern.double().numpy()
    B, H, n, m = p.shape
    seen = p > 0
    counted = seen.any(-1).all(1)  # (B, n)
    if not cross and "attention_mask" in inputs:
        counted &= inputs["attention_mask"].numpy().astype(bool)
    sink = np.maximum(1 - p.sum(-1), 0) if (p.sum(-1) < 1 - 1e-6).any() else np.zeros((B, H, n))
    every = np.concatenate([p, sink[..., None]], axis=-1)
    logs = np.log(np.where(every > 0, every, 1))
    first = np.take_along_axis(p, seen.argmax(-1)[..., None], -1)[..., 0]
    count = seen.sum(-1) + (sink > 0)
    rows = {
        "entropy": -(every * logs).sum(-1),
        "collision": (every**2).sum(-1),
        "first_mass": first,
        "sink_mass": sink,
        "idle_mass": first + sink,
        "distance": np.arange(n) - p @ np.arange(m) / np.where(seen.any(-1), p.sum(-1), 1),
        "entropy_uniform": np.log(np.maximum(count, 1)),
        "collision_uniform": 1 / np.maximum(count, 1),
    }
    # Plain attention of rows that see nothing is not a number.
    return {name: np.where(counted[:, None], value, 0).sum((0, 2)) / counted.sum() for name, value in rows.items()}


def compare(found, patterns, inputs):
    """Return the largest difference of each figure of a dataset from that of patterns."""
    worst = {}
    for layer, name in enumerate(found.module.values):
        cross = found.attention.values[layer] == "cross"
        for key, value in expected(patterns[name], inputs, cross).items():
            if key not in found:
                assert key == "sink_mass"
                assert not value.any()
            elif key == "distance" and cross:
                assert np.isnan(found[key].values[layer]).all()
            else:
                worst[key] = max(worst.get(key, 0.0), float(np.abs(found[key].values[layer] - value).max()))
    return worst


@pytest.mark.parametrize(("family", "padding"), PLACES)
def test_statistics_are_those_of_plain_attention_and_the_output_is_identical(family, padding, seed):
    import torch

    # Plain attention rounds the mask of float64 to -inf, and rows that see nothing are no numbers: float32 there.
    rounded = padding == "left" and family != SINK
    model, inputs = build(family, seed, factor=10.0 if rounded else 20.0), batch(family, seed, padding)
    if not rounded:
        model, inputs = double(model, inputs)
    before = run(model, inputs)
    for rows in (64,) if family in NOT_FUSED else (64, None):
        with record_attention(model, rows=rows) as record:
            assert torch.equal(before, run(model, inputs))
        found = record.dataset()
        patterns = eager_patterns(model, inputs, set(found.module.values))
        # Norms and rotary positions of some families are in float32: hidden states that differ in the last bit of
        # float64 may round to neighbours there.
        assert max(compare(found, patterns, inputs).values()) < 1e-5
        assert found.sizes["layer"] == len(patterns) >= (1 if family == "qwen3_next" else 2)
    assert torch.equal(before, run(model, inputs))
    assert "sink_mass" in found or family != SINK
    assert found.attrs["not_measured"] == ("model.layers.0" if family == "qwen3_next" else "")


@pytest.mark.parametrize("family", OUTSIDE)
def test_models_outside_the_interface_are_refused_by_name(family):
    model = build(family)
    if "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[type(model).__module__]):
        pytest.skip(f"transformers computes {family} through the interface since 5.24")
    with (
        pytest.raises(UsageError, match=rf"\({family}\) computes its attention outside"),
        record_attention(model),
    ):
        pass


def test_an_implementation_whose_masks_are_not_read_is_refused():
    model = build("llama")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(UsageError, match="attends by flash_attention_2"), record_attention(model):
        pass


@pytest.mark.parametrize("family", NOT_FUSED)
def test_what_fused_kernels_do_not_know_is_refused(family):
    model = build(family)
    with record_attention(model, rows=None), pytest.raises(UsageError, match="rows=None takes all rows"):
        run(model, batch(family))
