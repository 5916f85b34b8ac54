"""Oracle of one layer of a Hugging Face checkpoint: the sub-module is called, its weights are not read.

Two functions of a block can be asked:

* `attention`: y = attn(x), the attention sub-module with its causal mask and its positions;
* `block`: y = x + attn(norm(x)), where the norm stands in front of a causal attention (GPT-2, OPT), without the MLP.

torch and transformers are imported when an oracle is made. The layer that the weights themselves say, against which an
answer can be scored, is in `manyheads.recovery.oracle.checkpoint_layers`.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from manyheads._extras import require
from manyheads.errors import UsageError
from manyheads.models import open_checkpoint
from manyheads.models.attention import AttentionConfig, attention_config
from manyheads.models.loading import quiet_transformers
from manyheads.models.modules import Role
from manyheads.models.parameters import ParameterMap, parameter_map
from manyheads.recovery.refusals import NotExtractable

Through = Literal["attention", "block"]
Floats = Literal["float64", "float32"]
Call = Callable[[Any, Any, Any, Any], Any]  # (sub-module, x, mask, positions) -> answer, or a tuple of it and more


@dataclass(frozen=True)
class Place:
    """Place of the attention of a layer and of its norm in a family, and the call of the attention."""

    # Paths below the body of the model, `{layer}` for the number; more than one where releases of transformers differ
    attention: tuple[str, ...]
    norm: tuple[str, ...]
    call: Call  # calls the sub-module


def _masked(module: Any, x: Any, mask: Any, positions: Any) -> Any:
    return module(x, attention_mask=mask)


def _turned(module: Any, x: Any, mask: Any, positions: Any) -> Any:
    return module(x, attention_mask=mask, position_embeddings=positions)


def _bert(module: Any, x: Any, mask: Any, positions: Any) -> Any:
    # Its output sub-module goes on to the residual sum and the norm; what it does before them is the projection.
    mixed = module.self(x, attention_mask=mask)[0]
    return module.output.dense(mixed)


def _plain(module: Any, x: Any, mask: Any, positions: Any) -> Any:
    return module(x)


PLACES: Mapping[str, Place] = {
    "gpt2": Place(("h.{layer}.attn",), ("h.{layer}.ln_1",), _masked),
    "gpt_neox": Place(("layers.{layer}.attention",), ("layers.{layer}.input_layernorm",), _turned),
    "opt": Place(("decoder.layers.{layer}.self_attn",), ("decoder.layers.{layer}.self_attn_layer_norm",), _masked),
    "llama": Place(("layers.{layer}.self_attn",), ("layers.{layer}.input_layernorm",), _turned),
    "mistral": Place(("layers.{layer}.self_attn",), ("layers.{layer}.input_layernorm",), _turned),
    "qwen2": Place(("layers.{layer}.self_attn",), ("layers.{layer}.input_layernorm",), _turned),
    "bert": Place(("encoder.layer.{layer}.attention",), (), _bert),
    "vit": Place(
        ("layers.{layer}.attention", "encoder.layer.{layer}.attention"),
        ("layers.{layer}.layernorm_before", "encoder.layer.{layer}.layernorm_before"),
        _plain,
    ),
}


@dataclass(frozen=True)
class CheckpointOracle:
    """A function of sequences, and what an extraction has to be told about it.

    Calling it on (n, k, d) gives (n, k, d), NumPy in and out, computed in `dtype`.

    Attributes
    ----------
    dim
        Token dimension d.
    causal
        Whether a token attends to itself and to earlier ones only.
    residual
        Whether the input is added to what the layer gives.
    normalized
        Whether the layer sees its tokens through a LayerNorm.
    rotary
        Whether queries and keys are turned by their positions.
    dtype
        In what it computes.
    about
        What it is, in words.
    """

    dim: int
    causal: bool
    residual: bool
    normalized: bool
    rotary: bool
    dtype: Floats
    about: str
    function: Callable[[np.ndarray], np.ndarray] = field(repr=False)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Answer sequences (n, k, d)."""
        return self.function(x)


def checkpoint_oracle(
    path: Path | str,
    layer: int,
    *,
    through: Through = "attention",
    dtype: Floats = "float64",
    follow_links: bool = False,
) -> CheckpointOracle:
    """Make an oracle of one layer of a checkpoint folder.

    The class of transformers is built from the folder's own configuration, with its weights as stored; nothing is
    fetched and no code of the folder is run. In float64 the stored weights are widened, not changed.

    Parameters
    ----------
    path
        A folder with `config.json` and safetensors.
    layer
        Which layer, from 0.
    through
        What is asked: the attention sub-module, or the block x + attn(norm(x)).
    dtype
        In what it computes.
    follow_links
        Whether files may be symbolic links, as in a Hugging Face cache.

    Returns
    -------
    CheckpointOracle
        Its attributes say what extraction has to know.

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
    path = Path(path)
    for name, value, choices in (("through", through, get_args(Through)), ("dtype", dtype, get_args(Floats))):
        if value not in choices:
            raise UsageError(f"{name} = {value!r}: choose from {', '.join(choices)}")
    if not path.is_dir():
        raise UsageError(f"{path}: give a folder with config.json and safetensors, as save_pretrained writes it")
    found = parameter_map(open_checkpoint(path, follow_links=follow_links))
    facts = attention_config(found.config, layer)
    refuse_what_queries_cannot_tell(found, facts, layer, through)
    if (model_type := found.config.family.model_type) not in PLACES:
        raise NotExtractable(
            f"{path} holds a model of the family {model_type}, whose attention is not called here: known are "
            f"{', '.join(PLACES)}"
        )
    module, norm, frequencies = _load(path, model_type, layer, through, dtype)
    function = _function(PLACES[model_type].call, module, norm, frequencies, causal=facts.causal, dtype=dtype)
    what = "the attention sub-module" if through == "attention" else "x + attn(norm(x))"
    return CheckpointOracle(
        dim=facts.width,
        causal=facts.causal,
        residual=through == "block",
        normalized=through == "block",
        rotary=facts.rotary is not None,
        dtype=dtype,
        about=f"{what} of layer {layer} of {path.name} ({model_type}), in {dtype}",
        function=function,
    )


def refuse_what_queries_cannot_tell(found: ParameterMap, facts: AttentionConfig, layer: int, through: Through) -> None:
    """Refuse what no choice of queries could tell, or no method here can."""
    name = f"layer {layer} of a {found.config.family.model_type} model"
    biased = any(found.names(role, "bias", layer) for role in (Role.QUERY, Role.KEY, Role.QUERY_KEY_VALUE))
    if facts.window is not None:
        raise NotExtractable(
            f"{name} sees the last {facts.window} tokens only; the layer that is extracted sees all earlier ones"
        )
    if facts.rotary is not None and facts.rotary.scaling.get("rope_type") in ("dynamic", "longrope"):
        raise NotExtractable(
            f"{name} turns its queries by angles that change with the length of the sequence "
            f"({facts.rotary.scaling['rope_type']}), so that logits are no function of the offset"
        )
    if facts.rotary is not None and biased:
        raise NotExtractable(
            f"{name} has rotary positions and biases on queries and keys: a zero token then has a logit of its own at "
            "every offset, and the gate of the extraction is not known any more. A model without these biases, such "
            "as LLaMA, can be extracted"
        )
    if through == "attention":
        return
    if facts.norm_place == "post":
        raise NotExtractable(
            f"{name} normalizes after the residual sum, norm(x + attn(x)): the norm hides the length of what it is "
            "given, and its input cannot be subtracted. Ask with through='attention'"
        )
    if facts.rotary is not None:
        raise NotExtractable(
            f"{name} has a norm in front of rotary positions: zero tokens, with which positions are told apart, cannot "
            "be sent through the norm. Ask with through='attention'"
        )
    if not facts.causal:
        raise NotExtractable(
            f"{name} lets every token see all others behind a norm; only causal layers are extracted through one, "
            "because all rows of a sequence are read. Ask with through='attention'"
        )


def _load(path: Path, model_type: str, layer: int, through: Through, dtype: Floats) -> tuple[Any, Any, Any]:
    """Return the attention module, the norm or None, and the rotary frequencies or None."""
    torch, transformers = require("torch"), require("transformers")
    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        model = transformers.AutoModel.from_pretrained(
            path,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype="auto",  # as stored: widening is exact, narrowing would not be
            attn_implementation="sdpa",  # the plain one takes its softmax in float32, whatever the model's dtype
        )
    place = PLACES[model_type]
    kind = getattr(torch, dtype)
    module = _find(model, place.attention, layer).to(kind).eval()
    norm = _find(model, place.norm, layer).to(kind).eval() if through == "block" else None
    rotary = getattr(model, "rotary_emb", None)
    frequencies = None if rotary is None else (rotary.inv_freq.detach().to(kind), float(rotary.attention_scaling))
    return module, norm, frequencies


def _find(model: Any, paths: tuple[str, ...], layer: int) -> Any:
    for path in paths:
        with contextlib.suppress(AttributeError):
            return model.get_submodule(path.format(layer=layer))
    raise NotExtractable(
        f"{type(model).__name__} of this release of transformers has no {' or '.join(paths)}; 4.57 to 5.23 have"
    )


def _function(
    call: Call, module: Any, norm: Any, frequencies: Any, *, causal: bool, dtype: Floats
) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function (n, k, d) -> (n, k, d) that calls the sub-module with its mask and positions."""
    torch = require("torch")
    kind = getattr(torch, dtype)

    def answer(x: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            tokens = torch.from_numpy(np.array(x, dtype=dtype))
            length = tokens.shape[1]
            mask = None
            if causal:
                mask = torch.full((length, length), torch.finfo(kind).min, dtype=kind).triu(1)[None, None]
            positions = None
            if frequencies is not None:
                rates, scaling = frequencies
                angles = torch.arange(length, dtype=kind)[:, None] * rates  # (k, N/2)
                angles = torch.cat((angles, angles), -1)[None]
                positions = (scaling * angles.cos(), scaling * angles.sin())
            inside = tokens if norm is None else norm(tokens)
            found = call(module, inside, mask, positions)
            found = found[0] if isinstance(found, tuple) else found
            return (found if norm is None else tokens + found).numpy()

    return answer
