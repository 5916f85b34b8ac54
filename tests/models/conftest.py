"""Files made by hand, byte by byte, so that they can break any rule; and a tiny checkpoint of each family."""

import json

import numpy as np
import pytest
import safetensors.numpy


def make_bytes(table, data=b"", *, length=None):
    """A file from a header (a table, or raw bytes) and data; `length` overrides the eight bytes of length."""
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


@pytest.fixture
def craft(tmp_path):
    """Write a hand-made file and return its path."""

    def write(table, data=b"", *, length=None, name="model.safetensors"):
        path = tmp_path / name
        path.write_bytes(make_bytes(table, data, length=length))
        return path

    return write


# --- tiny checkpoints with the names that transformers writes, spelled out here independently of the tables ----------

WIDTH, HEADS, LAYERS, INNER, WORDS, PLACES = 12, 3, 2, 20, 7, 6


def _vector(*names):
    return {f"{name}.{end}": (WIDTH,) for name in names for end in ("weight", "bias")}


def _linear(name, inputs, outputs, bias=True, turned=False):
    shape = (inputs, outputs) if turned else (outputs, inputs)
    return {f"{name}.weight": shape} | ({f"{name}.bias": (outputs,)} if bias else {})


def _gpt2():
    shapes = {"wte.weight": (WORDS, WIDTH), "wpe.weight": (PLACES, WIDTH), **_vector("ln_f")}
    for h in (f"h.{layer}" for layer in range(LAYERS)):
        shapes |= _vector(f"{h}.ln_1", f"{h}.ln_2")
        shapes |= _linear(f"{h}.attn.c_attn", WIDTH, 3 * WIDTH, turned=True)
        shapes |= _linear(f"{h}.attn.c_proj", WIDTH, WIDTH, turned=True)
        shapes |= _linear(f"{h}.mlp.c_fc", WIDTH, INNER, turned=True)
        shapes |= _linear(f"{h}.mlp.c_proj", INNER, WIDTH, turned=True)
    config = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS, "architectures": ["GPT2LMHeadModel"]}
    return config, {f"transformer.{name}": shape for name, shape in shapes.items()}


_SIZES = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS}


def _gpt_neox():
    shapes = {"embed_in.weight": (WORDS, WIDTH), **_vector("final_layer_norm")}
    for h in (f"layers.{layer}" for layer in range(LAYERS)):
        shapes |= _vector(f"{h}.input_layernorm", f"{h}.post_attention_layernorm")
        shapes |= _linear(f"{h}.attention.query_key_value", WIDTH, 3 * WIDTH)
        shapes |= _linear(f"{h}.attention.dense", WIDTH, WIDTH)
        shapes |= _linear(f"{h}.mlp.dense_h_to_4h", WIDTH, INNER) | _linear(f"{h}.mlp.dense_4h_to_h", INNER, WIDTH)
        shapes |= {f"{h}.attention.bias": (1, 1, 4, 4), f"{h}.attention.rotary_emb.inv_freq": (1,)}
    shapes = {f"gpt_neox.{name}": shape for name, shape in shapes.items()}
    config = {**_SIZES, "rotary_pct": 0.5, "rotary_emb_base": 100, "architectures": ["GPTNeoXForCausalLM"]}
    return config, shapes | {"embed_out.weight": (WORDS, WIDTH)}


def _opt():
    shapes = {"embed_tokens.weight": (WORDS, 8), "embed_positions.weight": (PLACES + 2, WIDTH)}
    shapes |= _linear("project_in", 8, WIDTH, False) | _linear("project_out", WIDTH, 8, False)
    for h in (f"layers.{layer}" for layer in range(LAYERS)):
        shapes |= _vector(f"{h}.self_attn_layer_norm", f"{h}.final_layer_norm")
        for name in "qkv":
            shapes |= _linear(f"{h}.self_attn.{name}_proj", WIDTH, WIDTH)
        shapes |= _linear(f"{h}.self_attn.out_proj", WIDTH, WIDTH)
        shapes |= _linear(f"{h}.fc1", WIDTH, INNER) | _linear(f"{h}.fc2", INNER, WIDTH)
    config = {**_SIZES, "do_layer_norm_before": False, "architectures": ["OPTForCausalLM"]}
    return config, {f"model.decoder.{name}": shape for name, shape in shapes.items()}


def _gated(heads, groups, key_dim, qkv_bias):
    shapes = {"embed_tokens.weight": (WORDS, WIDTH), "norm.weight": (WIDTH,)}
    for h in (f"layers.{layer}" for layer in range(LAYERS)):
        shapes |= {f"{h}.input_layernorm.weight": (WIDTH,), f"{h}.post_attention_layernorm.weight": (WIDTH,)}
        for name, count in zip("qkv", (heads, groups, groups), strict=True):
            shapes |= _linear(f"{h}.self_attn.{name}_proj", WIDTH, count * key_dim, qkv_bias)
        shapes |= _linear(f"{h}.self_attn.o_proj", heads * key_dim, WIDTH, False)
        shapes |= _linear(f"{h}.mlp.gate_proj", WIDTH, INNER, False) | _linear(f"{h}.mlp.up_proj", WIDTH, INNER, False)
        shapes |= _linear(f"{h}.mlp.down_proj", INNER, WIDTH, False)
    return {f"model.{name}": shape for name, shape in shapes.items()}


def _llama():
    config = {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "rope_theta": 5e5}
    scaling = {"rope_type": "llama3", "factor": 8.0}
    config |= {"architectures": ["LlamaForCausalLM"], "rope_scaling": scaling}
    return config, _gated(4, 2, 6, False) | {"lm_head.weight": (WORDS, WIDTH)}


def _qwen2():
    config = {**_SIZES, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    config |= {"architectures": ["Qwen2ForCausalLM"], "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    return config, _gated(6, 2, 2, True)


def _bert():
    body = {f"embeddings.{name}_embeddings.weight": (size, WIDTH) for name, size in
            (("word", WORDS), ("position", PLACES), ("token_type", 2))}  # fmt: skip
    body |= _vector("embeddings.LayerNorm") | {"embeddings.position_ids": (1, PLACES)}
    for h in (f"encoder.layer.{layer}" for layer in range(LAYERS)):
        for name in ("query", "key", "value"):
            body |= _linear(f"{h}.attention.self.{name}", WIDTH, WIDTH)
        body |= _linear(f"{h}.attention.output.dense", WIDTH, WIDTH)
        body |= _linear(f"{h}.intermediate.dense", WIDTH, INNER) | _linear(f"{h}.output.dense", INNER, WIDTH)
        body |= _vector(f"{h}.attention.output.LayerNorm", f"{h}.output.LayerNorm")
    body |= _linear("pooler.dense", WIDTH, WIDTH)
    shapes = {f"bert.{name}": shape for name, shape in body.items()}
    # The oldest saves call the gain and the bias of a norm gamma and beta.
    swap = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, old in swap.items():
        shapes = {name.replace(new, old): shape for name, shape in shapes.items()}
    shapes |= {"cls.predictions.bias": (WORDS,), **_linear("cls.predictions.transform.dense", WIDTH, WIDTH)}
    shapes |= {f"cls.predictions.transform.LayerNorm.{end}": (WIDTH,) for end in ("gamma", "beta")}
    shapes |= {"cls.predictions.decoder.weight": (WORDS, WIDTH), **_linear("cls.seq_relationship", WIDTH, 2)}
    return {**_SIZES, "architectures": ["BertForPreTraining"]}, shapes


def _vit():
    shapes = {"embeddings.cls_token": (1, 1, WIDTH), "embeddings.position_embeddings": (1, 5, WIDTH)}
    shapes |= {"embeddings.patch_embeddings.projection.weight": (WIDTH, 3, 2, 2)}
    shapes |= {"embeddings.patch_embeddings.projection.bias": (WIDTH,), **_vector("layernorm")}
    for h in (f"encoder.layer.{layer}" for layer in range(LAYERS)):
        shapes |= _vector(f"{h}.layernorm_before", f"{h}.layernorm_after")
        for name in ("query", "key", "value"):
            shapes |= _linear(f"{h}.attention.attention.{name}", WIDTH, WIDTH, bias=False)
        shapes |= _linear(f"{h}.attention.output.dense", WIDTH, WIDTH)
        shapes |= _linear(f"{h}.intermediate.dense", WIDTH, INNER) | _linear(f"{h}.output.dense", INNER, WIDTH)
    shapes = {f"vit.{name}": shape for name, shape in shapes.items()} | _linear("classifier", WIDTH, 4)
    return {**_SIZES, "qkv_bias": False, "architectures": ["ViTForImageClassification"]}, shapes


FAMILIES = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "opt": _opt,
    "llama": _llama,
    "qwen2": _qwen2,
    "bert": _bert,
    "vit": _vit,
}


@pytest.fixture(params=sorted(FAMILIES))
def model(request, tmp_path, rng):
    """One tiny checkpoint of each family: (model type, configuration, arrays, folder)."""
    config, shapes = FAMILIES[request.param]()
    config = {"model_type": request.param, **config}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    if request.param == "bert":  # stored although it is tied, as older saves do
        arrays["cls.predictions.decoder.weight"] = arrays["bert.embeddings.word_embeddings.weight"].copy()
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return request.param, config, arrays, tmp_path
