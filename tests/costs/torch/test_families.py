"""Counts of traced models of transformers beside the closed forms, family by family."""

import subprocess
import sys

import pytest
from tests.models import tiny

import manyheads as mh
from manyheads.costs import transformer_cost
from manyheads.models import shape_from_config
from manyheads.models.families import FAMILIES

pytestmark = pytest.mark.torch
LENGTH, BATCH = 13, 2
OWN_ATTENTION = ("xglm", "gptj", "codegen", "gpt_neo", "openai-gpt", "bloom", "falcon", "mpt")
FAST = ("llama", "gemma2", "vit")


def make(family, attention):
    import torch

    more = {"n_group": 1, "topk_group": 1} if family == "deepseek_v3" else {}
    model = tiny.build(family, heads=4, width=32, layers=2, hidden=40, **more).eval()
    try:
        model.set_attn_implementation(attention)
    except ValueError:
        return None
    if "pixel_values" in model.main_input_name:
        batch = {"pixel_values": torch.randn(BATCH, 3, model.config.image_size, model.config.image_size)}
    else:
        batch = {"input_ids": torch.randint(2, 29, (BATCH, LENGTH))}
    return model, batch, {**model.config.to_dict(), "architectures": [type(model).__name__]}


def closed_forms(config):
    """Return exact and dense FLOPs of a forward pass, and exact ones of training."""
    shape = shape_from_config(config)
    length = shape.fixed_length or LENGTH
    costs = [transformer_cost(shape, length, BATCH, training) for training in (False, True)]
    return [cost.to(convention).flops for cost in costs for convention in ("exact", "dense")]


def traced(model, batch, device):
    forward, training = (mh.count(model, batch, training=each, device=device) for each in (False, True))
    return forward, training


def angles(cost):
    """FLOPs of the angles of positions, which transformers before 5.23 takes by a matrix product without gradient."""
    return sum(row["flops"] for name, row in cost.by_module().breakdown().items() if "rotary" in name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "family", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]
)
def test_a_traced_model_counts_as_the_closed_form(family, attention):
    tiny.skip_before((5, 23), family, "its experts are a loop over what the data choose, which has no count on meta")
    made = make(family, attention)
    if made is None:
        pytest.skip("no such attention")
    model, batch, config = made
    forward, training = traced(model, batch, None)
    exact, dense, exact_training, dense_training = (each + angles(forward) for each in closed_forms(config))
    assert forward.to("dense").flops == dense
    assert training.to("dense").flops == dense_training
    meta = traced(model, batch, "meta")
    assert [each.items for each in meta] == [forward.items, training.items]
    if forward.flops != exact:  # eager attention, and families that have no other
        assert forward.notes[0] == "2 attention layers compute all pairs: masked ones are counted"
        assert attention == "eager" or family in OWN_ATTENTION
        assert (forward.flops, training.flops) == (dense, dense_training)
    else:
        assert training.flops == exact_training


LARGE = """
import resource, time, torch, transformers, manyheads as mh
from manyheads.costs import transformer_cost
from manyheads.models import shape_from_config
sizes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
config = transformers.LlamaConfig(**sizes, intermediate_size=28672, vocab_size=128256, max_position_embeddings=8192)
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config)
import manyheads.costs.torch.counter
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before, start = peak(), time.process_time()
cost = mh.count(model, torch.ones(1, 8192, dtype=torch.long), training=True, device="meta")
assert time.process_time() - start < 5
assert peak() - before < 100_000
shape = shape_from_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
outside = {}  # angles of positions: a matrix product before transformers 5.23
for name in ("exact", "halved", "dense", "mac"):
    rows = cost.to(name).by_module().breakdown()
    outside[name] = sum(row["flops"] for row_name, row in rows.items() if "rotary" in row_name)
    assert cost.to(name).flops - outside[name] == transformer_cost(shape, 8192, training=True, convention=name).flops
assert cost.flops - outside["exact"] == 3_680_063_270_682_624
"""


@pytest.mark.slow
def test_a_model_of_70_billion_parameters_in_no_memory():
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
