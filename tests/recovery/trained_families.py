"""Tiny models of many families of transformers: as they are initialized, and trained on text or digits."""

from functools import lru_cache
from pathlib import Path

import numpy as np

from manyheads.data import load_digits
from manyheads.data.characters import read_characters
from manyheads.models.config import read_config
from manyheads.models.torch.extractable_attention import find_attention, wide_mode

LAYERS, HEADS, VOCABULARY, LENGTH, BATCH, RATE = 2, 4, 30, 48, 16, 5e-3
MASK, MASKED = VOCABULARY - 1, 0.15  # the token of a hidden character, and the share that is hidden
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": LAYERS,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
"""What every family is given; one that has no such setting keeps its own."""

_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_WINDOWED = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
_IMAGES = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
_LATENT = {
    "num_key_value_heads": HEADS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}

DECODERS = {
    "gpt2": {},
    "gpt_bigcode": {},
    "biogpt": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "phi": {},
    "starcoder2": {},
    "nemotron": {},
    "stablelm": {},
    "falcon": {},
    "bloom": {},
    "mpt": {},
    "llama": {},
    "mistral": {"sliding_window": 12},
    "mixtral": {**_EXPERTS, "sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "arcee": {},
    "gemma": {},
    "gemma2": _WINDOWED,
    "gemma3_text": _WINDOWED,
    "olmo": {},
    "olmo2": {},
    "gpt_oss": _EXPERTS,
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": LAYERS, "n_routed_experts": 4},
}
ENCODERS = {
    "bert": {},
    "roberta": {},
    "roberta-prelayernorm": {},
    "electra": {"embedding_size": 32},
    "distilbert": {"hidden_dim": 48},
    "mpnet": {},
}
VISION = {"vit": _IMAGES, "dinov2": _IMAGES, "beit": _IMAGES}
FAMILIES = {**DECODERS, **ENCODERS, **VISION}


def family_model(family: str, seed: int):
    """Return a model with the head of its objective, as transformers initializes it."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    given = {**SIZES, **FAMILIES[family]}
    if family == "falcon":  # derives it
        del given["head_dim"]
    config = transformers.AutoConfig.for_model(family, **given)
    heads = {**dict.fromkeys(VISION, "ImageClassification"), **dict.fromkeys(ENCODERS, "MaskedLM")}
    return getattr(transformers, f"AutoModelFor{heads.get(family, 'CausalLM')}").from_config(config)


@lru_cache(maxsize=1)
def _characters(text: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return training and held-out characters of a text; rare ones share a token."""
    _, (training, held) = read_characters(text)
    return np.minimum(training, MASK - 1), np.minimum(held, MASK - 1)


@lru_cache(maxsize=1)
def _images() -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    return digits.images.astype(np.float32)[:, None] / 8 - 1, digits.labels.astype(np.int64)


def train(model, family: str, text: Path, seed: int, steps: int) -> tuple[float, float]:
    """Train a model by its own objective: next or hidden characters, labels of digits; return first and last losses."""
    import torch

    optimizer = torch.optim.AdamW(model.train().parameters(), lr=RATE)
    draws, losses = np.random.default_rng([seed, 2]), []
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 20, 2 * (1 - step / steps))
        given, wanted = batch(family, text, draws)
        logits = model(**given).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return float(np.mean(losses[:10])), float(np.mean(losses[-10:]))


def batch(family: str, text: Path, draws: np.random.Generator, *, held: bool = False):
    """Return what a model is given, and what it has to say of it (-100: nothing)."""
    import torch

    if family in VISION:
        images, labels = _images()
        chosen = draws.integers(*((1500, len(labels)) if held else (0, 1500)), size=BATCH)
        return {"pixel_values": torch.from_numpy(images[chosen])}, torch.from_numpy(labels[chosen])
    characters = _characters(text)[held]
    starts = draws.integers(len(characters) - LENGTH, size=BATCH)
    windows = np.stack([characters[start : start + LENGTH] for start in starts]).astype(np.int64)
    if family in DECODERS:
        return {"input_ids": torch.from_numpy(windows[:, :-1])}, torch.from_numpy(windows[:, 1:].copy())
    hidden = draws.random(windows.shape) < MASKED
    given = torch.from_numpy(np.where(hidden, MASK, windows))
    return {"input_ids": given}, torch.from_numpy(np.where(hidden, windows, -100))


def attention_pairs(model, family: str, layer: int, given) -> tuple[np.ndarray, np.ndarray]:
    """Return what the attention of a layer is given inside the model, and what its output map answers, in float64."""
    import copy

    import torch

    wide = copy.deepcopy(model.base_model).double().eval()
    wide.config._experts_implementation = "eager"  # the grouped product of experts has no double precision
    known = read_config(wide.config.to_dict(), family).family
    module, _ = find_attention(wide, known, layer)
    outputs = ("c_proj", "o_proj", "out_proj", "dense", "out_lin")
    output = [part for name, part in module.named_modules() if name.endswith(outputs)][-1]
    seen: dict[str, np.ndarray] = {}

    def before(_, words, named):
        seen["x"] = (named["hidden_states"] if "hidden_states" in named else words[0]).numpy()

    inner = getattr(module, "self", module)  # behind the norm that a pre-norm RoBERTa keeps beside it
    hooks = [
        inner.register_forward_pre_hook(before, with_kwargs=True),
        output.register_forward_hook(lambda _, __, y: seen.update(y=y.numpy())),
    ]
    with torch.inference_mode(), wide_mode("float64"):
        wide(**{name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in given.items()})
    for hook in hooks:
        hook.remove()
    return seen["x"], seen["y"]
