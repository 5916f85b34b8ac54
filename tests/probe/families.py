"""Tiny random models of transformers, one of each family, with weights large enough for sharp attention."""

import copy

LENGTH = 12
WINDOW = 5
SIZES = {"vocab_size": 29, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2}
NARROW = {**GROUPED, "head_dim": 8}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
LATENT |= {"n_routed_experts": 4, "first_k_dense_replace": 2, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
SPEECH = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
SPEECH |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 4, "max_source_positions": 8}
MARKERS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

# A name, the classes of configuration and model, and the configuration.
FAMILIES = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 29, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", SIZES),
    "opt": ("OPTConfig", "OPTForCausalLM", {**SIZES, "ffn_dim": 16, "word_embed_proj_dim": 32}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", NARROW),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        # Older versions of transformers choose sdpa, which leaves the soft-cap out.
        {**NARROW, **MIXED, "attn_logit_softcapping": 10.0, "attn_implementation": "eager"},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**NARROW, **MIXED}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**NARROW, **MIXED, **EXPERTS, "num_local_experts": 4}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", SIZES),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", {**SIZES, **MIXED}),
    "bert": ("BertConfig", "BertModel", SIZES),
    "modernbert": ("ModernBertConfig", "ModernBertModel", {**SIZES, **MARKERS, "local_attention": 2 * WINDOW}),
    "vit": (
        "ViTConfig",
        "ViTModel",
        {**{key: value for key, value in SIZES.items() if key != "vocab_size"}, "image_size": 8, "patch_size": 4},
    ),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**SIZES, **LATENT, **EXPERTS}),
    "t5": (
        "T5Config",
        "T5Model",
        {"vocab_size": 29, "d_model": 32, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 4},
    ),
    "whisper": ("WhisperConfig", "WhisperModel", {**SPEECH, **MARKERS, "vocab_size": 29, "decoder_start_token_id": 1}),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **NARROW,
            **EXPERTS,
            **LINEAR,
            "num_experts": 4,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
}
OUTSIDE = {
    "bloom": ("BloomConfig", "BloomForCausalLM", {"vocab_size": 29, "hidden_size": 16, "n_layer": 1, "n_head": 2}),
    "mpt": ("MptConfig", "MptForCausalLM", {"vocab_size": 29, "d_model": 16, "n_layers": 1, "n_heads": 2}),
    "gptj": (
        "GPTJConfig",
        "GPTJForCausalLM",
        {"vocab_size": 29, "n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4},
    ),
    "falcon": ("FalconConfig", "FalconForCausalLM", {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 1}),
}
OUTSIDE["falcon"][2]["num_attention_heads"] = 2
NOT_FUSED = ("gemma2", "t5")


def build(family, seed=0, factor=20.0, **changes):
    """Return a random model of a family; its matrices are `factor` times those of the initialization, sinks normal.

    Gains of query and key norms are 3: logits reach 10 to 50, which plain attention in float32 can still hold.
    """
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    configuration, model, given = {**FAMILIES, **OUTSIDE}[family]
    config = getattr(transformers, configuration)(**{**given, **changes})
    built = getattr(transformers, model)(config).eval()
    with torch.no_grad():
        for name, tensor in built.named_parameters():
            if tensor.dim() > 1:
                tensor.mul_(1.5 if family == "t5" else factor)  # whose logits have no scale
            if "q_norm" in name or "k_norm" in name:
                tensor.fill_(2.0 if family == "gemma3" else 3.0)  # where the gain is 1 + weight
            if name.endswith("sinks"):
                tensor.normal_()
    return built


def batch(family, seed=0, padding=None):
    """Return a batch of two sequences; `padding` is None, "left" or "right", of four tokens in the second."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    ids = torch.randint(3, 29, (2, LENGTH), generator=generator)
    if family == "whisper":
        return {"input_features": torch.randn(2, 4, 16, generator=generator), "decoder_input_ids": ids}
    if family == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids[:, :7]}
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    if padding:
        mask[1, :4] = padding == "right"
        mask[1, -4:] = padding == "left"
    return {"input_ids": ids} | ({"attention_mask": mask} if padding else {})


def run(model, inputs):
    """Return the logits or the last hidden state of a model without gradients."""
    import torch

    with torch.no_grad():
        output = model(**inputs)
    return (output.logits if getattr(output, "logits", None) is not None else output.last_hidden_state).clone()


def eager_patterns(model, inputs, names):
    """Return the attention patterns (B, H, n, m) of modules in plain attention: name → tensor."""
    import torch

    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    for part in model.modules():  # configurations of encoder and decoder are not reached by all versions
        if hasattr(part, "config"):
            part.config._attn_implementation_internal = "eager"
    found = {}

    def keep(name):
        def hook(module, given, output):
            found[name] = output[-1]

        return hook

    for name, module in model.named_modules():
        if name in names:
            module.register_forward_hook(keep(name))
    with torch.no_grad():
        model(**inputs)
    return found


def double(model, inputs):
    """Return a model and its inputs in float64."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the fused one refuses float64
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    return model.double(), inputs
