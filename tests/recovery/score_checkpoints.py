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
_OSS = {**_WINDOWED, "intermediate_size": 8, "num_local_experts": 2, "num_experts_per_tok": 1}

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
    "gpt-oss, local": ("gpt_oss", _OSS, 0),
    "gpt-oss, global": ("gpt_oss", _OSS, 1),
    "MPT": ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 29}, 0),
}
"""Name -> family, configuration, and the layer that is asked."""

_FULL = {**_GROUPED, "sliding_window": None}

BEHIND_NORMS = {
    "Phi": ("phi", _FULL, 1),
    "OLMo": ("olmo", _FULL, 1),
    "OLMoE": ("olmoe", {**_FULL, "num_experts": 2, "num_experts_per_tok": 1}, 1),
    "Gemma": ("gemma", _FULL, 1),
    "Nemotron": ("nemotron", _FULL, 1),
    "StarCoder 2": ("starcoder2", _FULL, 1),
    "Seed-OSS": ("seed_oss", _FULL, 1),
    "nanochat": ("nanochat", _FULL, 1),
    "Cohere": ("cohere", _FULL, 1),
    "GLM": ("glm", _FULL, 1),
    "Helium": ("helium", _FULL, 1),
    "ERNIE": ("ernie4_5", _FULL, 1),
    "Granite": ("granite", _FULL, 1),
}
"""The same of further models, whose blocks are extracted through the norm in front."""


def tiny_model(name: str, seed: int, *, language: bool = False):
    """Return a random model, and the layer that is asked; with its language head where it is to be trained."""
    import torch
    import transformers

    family, settings, layer = (MODELS | BEHIND_NORMS)[name]
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


def t5_attention(seed: int, *, decoder: bool = True):
    """Return the attention of a random T5 layer with relative biases, 4 heads on 32 dimensions, as a function."""
    import torch
    import transformers
    from transformers.models.t5.modeling_t5 import T5Attention

    from manyheads.models.torch.extractable_attention import wide_mode

    config = transformers.T5Config(d_model=32, d_kv=8, num_heads=4, is_decoder=decoder, dropout_rate=0.0)
    torch.manual_seed(seed)
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double().eval()
    with torch.no_grad():
        for where, weight in module.named_parameters():
            weight.normal_(0.0, 1.0 if "relative" in where else 0.25)

    def answer(x):
        length = x.shape[1]
        mask = torch.full((length, length), torch.finfo(torch.float64).min if decoder else 0.0, dtype=torch.float64)
        with torch.inference_mode(), wide_mode("float64"):
            return module(torch.from_numpy(x), mask=mask.triu(1)[None, None])[0].numpy()

    answer.dim = 32
    return answer
