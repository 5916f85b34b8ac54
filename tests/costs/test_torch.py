"""PyTorch's FlopCounterMode where it is right, and where it is not: the second list is to shrink."""

import re
from dataclasses import replace

import pytest

from manyheads.costs import ModelShape, count, transformer_cost
from manyheads.costs.conventions import Convention
from manyheads.costs.formulas.decoding import token_cost
from manyheads.costs.formulas.recurrent import pooled_cost, rnn_cost
from manyheads.costs.shapes import PooledShape, RecurrentShape
from manyheads.models import shape_from_config

pytestmark = pytest.mark.torch

B, N, D, H = 2, 64, 48, 4
SHAPE = ModelShape(1, D, H, causal=False)


@pytest.fixture(scope="module")
def torch():
    import torch

    torch.set_num_threads(1)
    return torch


def flops(torch, fn):
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with counter:
        fn()
    # Some versions of transformers compute the angles of rotary positions, a table of constants, as a matrix product.
    modules = counter.get_flop_counts()
    angles = [sum(modules[name].values()) for name in modules if name.endswith(".rotary_emb")]
    return counter.get_total_flops() - sum(angles)


def make_block(torch, fused=False, causal=False):
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
            self.out, self.up, self.down = nn.Linear(D, D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

        def forward(self, x):
            z = F.layer_norm(x, (D,))
            q, k, v = (p(z).view(len(x), -1, H, D // H).transpose(1, 2) for p in self.qkv)
            if fused:
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            else:
                mixed = ((q @ k.mT) * (D // H) ** -0.5).softmax(-1) @ v
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            return x + self.down(F.gelu(self.up(F.layer_norm(x, (D,)))))

    return Block()


def test_block_forward_and_backward(torch):
    block = make_block(torch)
    x = torch.randn(B, N, D)
    wanted = torch.randn(B, N, D, requires_grad=True)
    assert flops(torch, lambda: block(x)) == transformer_cost(SHAPE, N, B).flops
    assert flops(torch, lambda: block(wanted).sum().backward()) == transformer_cost(SHAPE, N, B, training=True).flops
    bare = transformer_cost(SHAPE, N, B, training=True, input_gradient=False)
    assert flops(torch, lambda: block(x).sum().backward()) == bare.flops


def test_checkpointing_stops_early(torch):
    from torch.utils.checkpoint import checkpoint

    block = make_block(torch)
    x = torch.randn(B, N, D, requires_grad=True)
    measured = flops(torch, lambda: checkpoint(block, x, use_reentrant=False).sum().backward())
    assert (
        measured
        == transformer_cost(SHAPE, N, B, True, convention=Convention(recompute="block-needed")).flops
        == 32_243_712
    )


@pytest.mark.parametrize("context", [1, 64, 512])
def test_decoding(torch, context):
    import torch.nn.functional as F

    block = make_block(torch)
    k, v = (torch.randn(B, H, context - 1, D // H) for _ in range(2))

    def step():
        x = torch.randn(B, 1, D)
        q, k1, v1 = (p(x).view(B, 1, H, D // H).transpose(1, 2) for p in block.qkv)
        keys, values = torch.cat([k, k1], 2), torch.cat([v, v1], 2)
        x = x + block.out(((q @ keys.mT).softmax(-1) @ values).transpose(1, 2).reshape(x.shape))
        return x + block.down(F.gelu(block.up(x)))

    assert flops(torch, step) == token_cost(ModelShape(1, D, H), context, B).flops


def test_recurrent_and_pooled_networks(torch):
    x = torch.randn(B, N, D)
    cell = torch.nn.RNN(D, 32, batch_first=True)
    shape = RecurrentShape(D, 32)
    assert flops(torch, lambda: cell(x)) == rnn_cost(shape, N, B).flops
    trained = flops(torch, lambda: cell(x)[1].sum().backward())
    assert trained == rnn_cost(shape, N, B, training=True, scanned=False).flops
    layers = torch.nn.Sequential(torch.nn.Linear(D, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Tanh())
    head = torch.nn.Linear(32, 5)
    pooled = PooledShape(D, 32, 2, 5)
    assert flops(torch, lambda: head(layers(x).mean(1))) == pooled_cost(pooled, N, B).flops
    trained = flops(torch, lambda: head(layers(x).mean(1)).sum().backward())
    assert trained == pooled_cost(pooled, N, B, training=True).flops


def test_deviations_of_torch_are_still_there(torch):
    """Fused attention on CPU counts nothing, the encoder's fast path nothing at all, a causal mask saves nothing."""
    x = torch.randn(B, N, D)
    mha = 2 * 4 * B * N * D * D
    core = transformer_cost(SHAPE, N, B).breakdown()["attention core"]["flops"]
    whole = transformer_cost(SHAPE, N, B).flops
    assert flops(torch, lambda: make_block(torch, fused=True)(x)) == whole - core
    layer = torch.nn.MultiheadAttention(D, H, batch_first=True)
    assert flops(torch, lambda: layer(x, x, x, need_weights=False)) == mha
    assert flops(torch, lambda: layer(x, x, x, need_weights=True)) == mha + core
    encoder = torch.nn.TransformerEncoderLayer(D, H, 4 * D, dropout=0.0, batch_first=True)
    assert flops(torch, lambda: encoder(x)) == whole - core
    encoder.eval()
    with torch.no_grad():
        assert flops(torch, lambda: encoder(x)) == 0
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        causal = flops(torch, lambda: make_block(torch, fused=True, causal=True)(x))
    assert causal == whole
    assert causal > transformer_cost(ModelShape(1, D, H, causal=True), N, B).flops


SIZES = {"num_hidden_layers": 2, "hidden_size": 24, "num_attention_heads": 3}
TEXT = {**SIZES, "vocab_size": 31, "pad_token_id": 0}
GROUPED = {**TEXT, "intermediate_size": 40, "num_key_value_heads": 1}
OPT = {"ffn_dim": 40, "word_embed_proj_dim": 12, "do_layer_norm_before": False}
CONFIGS = {
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 2, "n_embd": 24, "n_head": 3, "vocab_size": 31}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**TEXT, "intermediate_size": 40}),
    "opt": ("OPTForCausalLM", {**TEXT, **OPT}),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", GROUPED),
    "bert": ("BertForMaskedLM", {**TEXT, "intermediate_size": 40}),
    "vit": ("ViTForImageClassification", {**SIZES, "intermediate_size": 40, "image_size": 32, "patch_size": 8}),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_models_of_transformers(torch, family):
    """The whole model, with eager attention, against the shape read from its own configuration."""
    import transformers

    name, fields = CONFIGS[family]
    config = transformers.AutoConfig.for_model(family, **fields)
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config).eval()
    shape = shape_from_config({**config.to_dict(), "architectures": [name]})
    length = shape.fixed_length or 11
    inputs = torch.randn(B, 3, 32, 32) if family == "vit" else torch.randint(1, 31, (B, length))
    with torch.no_grad():
        measured = flops(torch, lambda: model(inputs))
    assert measured == transformer_cost(shape, length, B, convention="dense").flops


@pytest.mark.parametrize("family", CONFIGS)
def test_defaults_are_those_of_transformers(torch, family):
    """A configuration that names nothing but its family, and the same with every field written out."""
    from transformers import AutoConfig

    bare, full = {"model_type": family}, AutoConfig.for_model(family).to_dict()
    bare, full = (replace(shape_from_config(config), notes=()) for config in (bare, full))
    assert bare == full  # but for what the notes say of each


OPTIONS = {"gpt_neox": {"attention_bias": False}, "opt": {"enable_bias": False}, "vit": {"qkv_bias": False}}
BIASED = [(family, {}) for family in CONFIGS] + list(OPTIONS.items())
BIASED += [("llama", {"attention_bias": attention, "mlp_bias": mlp}) for attention, mlp in ((1, 0), (0, 1), (1, 1))]


@pytest.mark.parametrize(("family", "options"), BIASED)
def test_biases_are_those_of_the_model(torch, family, options):
    """Additions of biases are as many as the numbers in the biases of a block's dense layers, for each token."""
    import transformers

    name, fields = CONFIGS[family]
    fields = fields | {option: bool(value) for option, value in options.items()}
    config = transformers.AutoConfig.for_model(family, **fields)
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    numbers = sum(
        parameter.numel()
        for path, parameter in model.named_parameters()
        if path.endswith("bias") and re.search(r"\.\d+\.", path) and not re.search("norm|ln_", path.lower())
    )
    shape = shape_from_config({**config.to_dict(), "architectures": [name]})
    length = shape.fixed_length or 11
    bare = transformer_cost(replace(shape, biases="none"), length, B).elementwise
    assert transformer_cost(shape, length, B).elementwise - bare == B * length * numbers


def test_counter_agrees_with_torch_on_convolutions(torch):
    """Without padding; with it FlopCounterMode counts the products with zeros too."""
    import jax

    x, w = torch.randn(2, 3, 9, 9), torch.randn(5, 3, 3, 3)
    convolve = lambda x, w: jax.lax.conv(x, w, (2, 2), "VALID")  # noqa: E731
    structs = [jax.ShapeDtypeStruct(tuple(t.shape), "float32") for t in (x, w)]
    measured = flops(torch, lambda: torch.nn.functional.conv2d(x, w, stride=2))
    assert measured == count(convolve, *structs).flops
