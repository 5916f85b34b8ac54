"""Oracle of one layer of a Hugging Face model: the sub-module is called, its weights are not read.

The model is a checkpoint folder or an object of transformers in memory; an attention sub-module alone does as well.
Three functions of a block can be asked:

* `attention`: y = attn(x), the attention sub-module with its causal mask and its positions;
* `block`: y = x + attn(norm(x)), where the norm stands in front (GPT-2, OPT, ViT, LLaMA), without the MLP;
* `block-with-mlp`: the block as the model calls it, attention and MLP behind it or beside it.

torch and transformers are imported when an oracle is made. The layer that the weights themselves say, against which an
answer can be scored, is in `manyheads.recovery.oracle.checkpoint_layers`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from manyheads._extras import require
from manyheads.errors import UsageError
from manyheads.models import open_checkpoint
from manyheads.models.attention_layers import AttentionConfig, attention_config, unread
from manyheads.models.checkpoints.loading import quiet_transformers
from manyheads.models.config import ModelConfig, read_config
from manyheads.models.modules import Role
from manyheads.models.parameters import parameter_map
from manyheads.models.refusals import NotExtractable
from manyheads.models.torch import extractable_attention
from manyheads.recovery.oracle.answers import LayerOracle

Through = Literal["attention", "block", "block-with-mlp"]
Floats = Literal["float64", "float32"]
ASKED: Mapping[Through, str] = MappingProxyType(
    {"attention": "the attention sub-module", "block": "x + attn(norm(x))", "block-with-mlp": "the block with its MLP"}
)


def checkpoint_oracle(
    model: Any, layer: int, *, through: Through = "attention", dtype: Floats = "float64", follow_links: bool = False
) -> LayerOracle:
    """Make an oracle of one layer of a checkpoint folder, or of a model of transformers.

    Of a folder the class of transformers is built from the folder's own configuration, with its weights as stored;
    nothing is fetched and no code of the folder is run; `follow_links` takes files that are symbolic links, as in a
    Hugging Face cache. A model in memory (`transformers.PreTrainedModel`) stays as it is: the sub-module is copied. In
    float64 the weights are widened, not changed. Layers count from 0.

    Raises
    ------
    NotExtractable
        What was asked is no function that queries determine as a layer; the message says why.
    CheckpointRefused
        The folder cannot be read safely, or its family is unknown.
    UsageError
        No such layer, or an argument that is none of its choices.
    ExtraMissing
        torch or transformers is not installed.
    """
    for name, value, choices in (("through", through, get_args(Through)), ("dtype", dtype, get_args(Floats))):
        if value not in choices:
            raise UsageError(f"{name} = {value!r}: choose from {', '.join(choices)}")
    if hasattr(model, "named_parameters"):
        config, about = _configuration(model), type(model).__name__
    else:
        path = Path(model)
        if not path.is_dir():
            raise UsageError(f"{path}: give a folder with config.json and safetensors, as save_pretrained writes it")
        config, about = parameter_map(open_checkpoint(path, follow_links=follow_links)).config, path.name
    facts = _facts(config, layer)
    refuse_what_queries_cannot_tell(config, facts, layer, through)
    if not hasattr(model, "named_parameters"):
        model = _load(path)
    module, norm = extractable_attention.find_attention(model, config.family, layer)
    module = extractable_attention.find_block(model, config.family, layer) if through == "block-with-mlp" else module
    positions = None if facts.rotary is None else extractable_attention.rotary_frequencies(model, model.config, layer)
    block = through == "block"
    if block and norm is None:
        raise NotExtractable(f"layer {layer} of {about} has no norm before attention: ask with through='attention'")
    asked = module, norm if block else None, positions
    oracle = _as_oracle(asked, config, facts, dtype, f"{ASKED[through]} of layer {layer} of {about}")
    scores = has_other_scores(config, facts, norms=through != "block-with-mlp")
    scores = scores or (through != "attention" and _turns_a_shift(config, facts))
    kind: dict[str, Any] = {"residual": block, "normalized": through != "attention", "mlp": through == "block-with-mlp"}
    return replace(oracle, scores=scores, **kind)


def attention_module_oracle(module: Any, dtype: Floats = "float64") -> LayerOracle:
    """Make an oracle of an attention sub-module of transformers, such as `model.model.layers[3].self_attn`."""
    config = _configuration(module)
    name = type(module).__name__
    if "Attention" not in name:
        what = f"{name} is a part of a model, and not its attention: give that, or the model with layer= and through="
        raise NotExtractable(what)
    layer = next((part.layer_idx for part in module.modules() if getattr(part, "layer_idx", None) is not None), 0)
    facts = _facts(config, layer)
    refuse_what_queries_cannot_tell(config, facts, layer, "attention")
    raw = next(part.config for part in module.modules() if hasattr(part, "config"))
    positions = None if facts.rotary is None else extractable_attention.rotary_frequencies(module, raw, layer)
    asked = module, None, positions
    return _as_oracle(asked, config, facts, dtype, name)


def _as_oracle(asked: Any, config: ModelConfig, facts: AttentionConfig, dtype: Floats, about: str) -> LayerOracle:
    """Return modules of a model with their norm and positions as a function, with the facts of their attention."""
    function = extractable_attention.attention_function(*asked, dtype=dtype, causal=facts.causal, window=facts.window)
    itself = extractable_attention.native_function(*asked, causal=facts.causal, window=facts.window)
    scores, rotary = has_other_scores(config, facts), facts.rotary is not None
    about = f"{about} ({config.family.model_type}), in {dtype}"
    stated = (function, facts.width, facts.causal, False, False, rotary, scores)
    return LayerOracle(*stated, dtype=dtype, about=about, itself=itself)


def _configuration(module: Any) -> ModelConfig:
    """Return the configuration of a model of transformers, or of a part of one."""
    raw = next((part.config for part in module.modules() if hasattr(getattr(part, "config", None), "to_dict")), None)
    if raw is None:
        raise UsageError(f"{type(module).__name__} has no configuration of transformers: give its attention sub-module")
    said: Mapping[str, Any] = raw.to_dict()
    return read_config(said, type(module).__name__)


def _facts(config: ModelConfig, layer: int) -> AttentionConfig:
    """Return the facts of a layer, or say why the attention of its family is not asked."""
    if reason := unread(config, any_score=True):
        what = f"the attention of {config.family.model_type} is not extracted here: {reason}. Give it as a function"
        raise NotExtractable(what)
    return attention_config(config, layer, any_score=True)


def has_other_scores(config: ModelConfig, facts: AttentionConfig, *, norms: bool = True) -> bool:
    """Tell whether scores are more than those of plain or of rotary attention: biases, norms, caps, terms, windows."""
    biased = facts.rotary is not None and config.has_biases(Role.QUERY, Role.KEY, Role.QUERY_KEY_VALUE)
    return biased or facts.window is not None or bool(unread(config, norms=norms))


def refuse_what_queries_cannot_tell(config: ModelConfig, facts: AttentionConfig, layer: int, through: Through) -> None:
    """Refuse what no choice of queries could tell, or no method here can."""
    name = f"layer {layer} of a {config.family.model_type} model"
    if facts.rotary is not None and facts.rotary.scaling.get("rope_type") in ("dynamic", "longrope"):
        why = f"turns queries by angles that change with the length, {facts.rotary.scaling['rope_type']}"
        raise NotExtractable(f"{name} {why}: logits are no function of the offset")
    if through == "attention":
        return
    roles = {one.role for one in config.family.body}
    refused = {
        "normalizes after the residual sum, norm(x + attn(x)): x cannot be subtracted": facts.norm_place == "post",
        "normalizes what its attention adds, x + norm(attn(x)): no sum over tokens": Role.ATTENTION_POST_NORM in roles,
        "has learned sinks: they hide the epsilon of the norm in front": Role.SINK in roles,
    }
    for why, is_so in refused.items():
        if is_so:
            raise NotExtractable(f"{name} {why}. Ask with through='attention'")
    if through == "block" or facts.parallel:
        return
    if has_other_scores(config, facts, norms=False) or _turns_a_shift(config, facts):
        why = "has a window, scores beyond plain or plain rotary ones, or a LayerNorm in front of rotary positions"
        raise NotExtractable(f"{name} {why}, not extracted with an MLP behind. Ask with through='block'")


def _turns_a_shift(config: ModelConfig, facts: AttentionConfig) -> bool:
    """Tell whether rotary positions turn what they make of the shift of a LayerNorm."""
    return facts.rotary is not None and facts.norm == "layer" and config.has_biases(Role.ATTENTION_NORM)


def _load(path: Path) -> Any:
    """Return the body of the model of a checkpoint folder."""
    torch, transformers = require("torch"), require("transformers")
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        return transformers.AutoModel.from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype="auto",  # as stored: widening is exact, narrowing would not be
            attn_implementation="eager",  # every family has it; `attention_function` chooses
        )
