"""Model families as data: modules, the roles and layouts of their tensors, and the keys of their configurations.

A module of sort "linear" holds `<path>.weight` and perhaps `<path>.bias`; which of them have to be there follows from
the configuration, so that a checkpoint is explained completely or refused.

Source of names, keys and defaults: the model classes of Hugging Face transformers (4.57 to 5.23), as they are saved.
"""

from collections.abc import Mapping

from manyheads.models.families import encoders, experts, gated, plain, vision
from manyheads.models.modules import Family

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for table in (plain, gated, experts, encoders, vision)
    for family in vars(table).values()
    if isinstance(family, Family)
}
"""The known families by the `model_type` of their configuration."""

_CROSS = "its decoder reads an encoder by cross-attention, which is not described"
_STATE = "its layers keep a state in place of attention, whose size is a sum over tokens and is not derived"
_MIXED = "some of its layers keep a state in place of attention, whose size is not derived"
_POSITIONS = (
    "its logits have terms of position beside q.k that are trained in every layer, and these have no derivation"
)
_STAGES = "its width and heads change from stage to stage, and the theory has one width"
_SPARSE = "what a position attends to depends on a pattern of blocks or on landmarks, which is not described"
UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5", "switch_transformers", "bart", "mbart", "marian", "pegasus",
                     "blenderbot", "m2m_100", "led", "whisper", "plbart", "prophetnet", "speech_to_text"), _CROSS),
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"), _STATE),
    **dict.fromkeys(("jamba", "qwen3_next", "lfm2", "falcon_h1", "recurrent_gemma", "zamba", "zamba2", "bamba",
                     "kimi_linear", "minimax", "granitemoehybrid"), _MIXED),
    **dict.fromkeys(("deberta", "deberta-v2", "xlnet", "funnel"), _POSITIONS),
    **dict.fromkeys(("swin", "swinv2", "segformer", "pvt", "hiera", "mvp"), _STAGES),
    **dict.fromkeys(("longformer", "big_bird", "nystromformer", "reformer"), _SPARSE),
    "albert": "all its layers share one set of weights, so that a gradient is a sum over layers, which is not derived",
    "diffllama": "its attention is a difference of two softmaxes with trained weights, which is not derived",
    "convbert": "half of its heads are convolutions, which have no role",
    "jetmoe": "its attention heads are experts that a router chooses, which is not derived",
    "llama4_text": "its layers alternate chunked and global attention with a temperature that follows the position",
    "wav2vec2": "convolutions over the waveform stand below its blocks and have no role",
    "hubert": "convolutions over the waveform stand below its blocks and have no role",
}  # fmt: skip
"""Known families that are refused, and why."""
