"""Public configurations: parameters as published, forward and training pass as traced, cache as transformers keeps it.

A row without an explanation is equal; every explanation is computed too.
"""

from dataclasses import replace

import pytest
from tests.models import tiny
from tests.models.public import BIASES, PAIRS, PUBLIC, WINDOW, differences
from tests.models.test_registry import PINNED

from manyheads.costs import count, kv_cache_bytes, transformer_cost
from manyheads.models import shape_from_config
from manyheads.models.config import read_config
from manyheads.models.counts import count_parameters

LENGTH = 1024
FAST = ("GPT-2", "OPT-350M", "Pythia-70M", "Llama-3.2-1B", "Gemma-3-1B", "gpt-oss-20b", "DeepSeek-V2-Lite")


def test_the_table_is_large():
    assert len(PUBLIC) >= 40
    assert sum(row.published is not None for row in PUBLIC.values()) >= 40
    assert len({row.config["model_type"] for row in PUBLIC.values()}) >= 30


@pytest.mark.parametrize("name", PUBLIC)
def test_parameters_are_those_that_are_published(name):
    row = PUBLIC[name]
    found = count_parameters(row.config).total
    if row.differs.get("published") == BIASES:
        assert row.published - found == 58 * 256
    elif row.published is not None:
        assert found == row.published


def built(config):
    """Return the model of transformers on the meta device, its batch, and the configuration with its class."""
    from manyheads.models.checkpoints.loading import make_model

    read = read_config(config)
    model, batch = make_model(read.raw, True, LENGTH, 1)
    return model, batch, {**config, "architectures": [type(model).__name__]}


def without_one(shape):
    """Return the shape whose windows hold a token less."""
    kinds = tuple(replace(kind, window=kind.window - 1) if kind.window else kind for kind in shape.blocks)
    return replace(shape, kinds=kinds if shape.kinds else (), window=kinds[0].window)


def check(name, training):
    """Compare a public configuration with transformers on the meta device."""
    import torch

    tiny.skip_before(PINNED, name, "rotary angles are matrix products, and some models do not run on meta", only=PUBLIC)
    torch.set_num_threads(1)
    row = PUBLIC[name]
    model, batch, config = built(row.config)
    shape = shape_from_config(config)
    assert sum(each.numel() for each in model.parameters()) == count_parameters(config).total
    for backward in (False, True) if training else (False,):
        traced = count(model, batch, device="meta", training=backward)
        formula = transformer_cost(shape, LENGTH, training=backward)
        assert traced.to("dense").flops == formula.to("dense").flops
        if differences(name).get("training" if backward else "forward") != PAIRS:
            assert traced.flops == formula.flops
        elif traced.flops != formula.flops:  # some versions compute the pairs of the mask alone
            assert traced.flops == formula.to("dense").flops
    with torch.device("meta"), torch.no_grad():
        model.to(torch.bfloat16)
        kept = model(input_ids=torch.full((1, LENGTH), 2), use_cache=True).past_key_values
    size = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers)
    if row.differs.get("cache") == WINDOW:
        assert size == kv_cache_bytes(without_one(shape), LENGTH, itemsize=2)
        assert size != kv_cache_bytes(shape, LENGTH, itemsize=2)
    elif any(kind.latent for kind in shape.blocks):  # some versions keep keys and values of all heads instead
        numbers = sum(kind.layers * kind.heads * (kind.head_dim + kind.value_dim) for kind in shape.blocks)
        assert size in (kv_cache_bytes(shape, LENGTH, itemsize=2), 2 * LENGTH * numbers)
    else:
        assert size == kv_cache_bytes(shape, LENGTH, itemsize=2)


@pytest.mark.torch
@pytest.mark.parametrize("name", FAST)
def test_small_models_are_those_of_transformers(name):
    check(name, training=name in FAST[:4])


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in FAST])
def test_models_are_those_of_transformers(name):
    check(name, training=PUBLIC[name].config.get("num_hidden_layers", 32) < 100)
