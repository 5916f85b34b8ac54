"""Tiny models of transformers whose attention scores are not those of plain or of rotary attention."""

_GROUPED = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "vocab_size": 29,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 1,
}
_PLAIN = {name: value for name, value in _GROUPED.items() if name not in ("num_key_value_heads", "head_dim")}
_WINDOWED = {**_GROUPED, "sliding_window": 12}
_GEMMA = {**_WINDOWED, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}

MODELS = {
    "Qwen2": ("qwen2", _GROUPED, 0),
    "Pythia": ("gpt_neox", _PLAIN, 1),
    "Qwen3": ("qwen3", _GROUPED, 0),
    "OLMo 2": ("olmo2", {**_PLAIN, "num_key_value_heads": 2}, 1),
    "Mistral, window": ("mistral", _WINDOWED, 0),
    "Gemma 2, local": ("gemma2", _GEMMA, 0),
    "Gemma 2, global": ("gemma2", _GEMMA, 1),
    "Gemma 3, local": ("gemma3_text", _GEMMA, 0),
    "Gemma 3, global": ("gemma3_text", _GEMMA, 1),
    "BLOOM": ("bloom", {"hidden_size": 32, "n_head": 4, "n_layer": 2, "vocab_size": 29}, 0),
    "MPT": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 29}, 0),
}
"""Name -> family, configuration, and the layer that is asked."""


def tiny_model(name: str, seed: int, *, language: bool = False):
    """Return a random model, and the layer that is asked; with its language head where it is to be trained."""
    import torch
    import transformers

    family, settings, layer = MODELS[name]
    torch.manual_seed(seed)
    kind = transformers.AutoModelForCausalLM if language else transformers.AutoModel
    model = kind.from_config(transformers.AutoConfig.for_model(family, **settings))
    if not language:
        with torch.no_grad():
            for where, weight in model.named_parameters():
                if "norm" in where:  # gains about one: those of Gemma are stored less one
                    weight.add_(0.2 * torch.randn_like(weight))
                else:
                    weight.normal_(0.0, 0.25)
    return model, layer
