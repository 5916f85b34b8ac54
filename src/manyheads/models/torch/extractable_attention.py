"""Attention sub-modules of transformers in memory: found by the table of families, and called with mask and positions.

Where a module stands in a model follows from the roles of its weights (`manyheads.models.families`), and what it has to
be called with from its own signature. torch and transformers are imported when they are needed.
"""

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.models.modules import Family, Module, Role
from manyheads.models.refusals import NotExtractable
from manyheads.models.torch.lazy_torch import Module as Network
from manyheads.models.torch.lazy_torch import Tensor, torch

Array = NDArray[Any]
Answer = Callable[[Array], Array]
Turns = tuple[Tensor, float]  # angles of positions, and the factor of their cosines and sines

WIDE = ("float32", "float64")  # what NumPy holds
OF_ATTENTION = (Role.QUERY, Role.KEY, Role.VALUE, Role.QUERY_KEY_VALUE, Role.OUTPUT)


def find_attention(model: Network, family: Family, layer: int) -> tuple[Network, Network | None]:
    """Return the attention sub-module of a layer of a model, and the norm in front of or behind it, None if absent.

    The sub-module is the smallest one that holds all weights of queries, keys, values and outputs.
    """
    found = _in_memory(model, family, layer)

    def places(*roles: Role) -> list[list[str]]:
        return [path.split(".") for module, path in found.items() if module.role in roles]

    weights = places(*OF_ATTENTION)
    if not weights:
        raise NotExtractable(
            f"{type(model).__name__} has no attention weights in layer {layer} under the names of the family "
            f"{family.model_type}: was it renamed or wrapped? Give the attention sub-module itself"
        )
    common = [parts[0] for parts in zip(*weights, strict=False) if len(set(parts)) == 1]
    norms = places(Role.ATTENTION_NORM)
    if norms:
        return model.get_submodule(".".join(common)), model.get_submodule(".".join(norms[0]))
    block = find_block(model, family, layer)
    return model.get_submodule(".".join(common)), getattr(block, "input_layernorm", None)  # OLMo: without weights


def find_block(model: Network, family: Family, layer: int) -> Network:
    """Return the module of a whole block: what stands under the number of the layer."""
    for module, path in _in_memory(model, family, layer).items():
        if module.role in OF_ATTENTION:
            parts = path.split(".")
            return model.get_submodule(".".join(parts[: parts.index(str(layer)) + 1]))
    raise NotExtractable(f"{type(model).__name__} has no block {layer} under the names of {family.model_type}")


def _in_memory(model: Network, family: Family, layer: int) -> dict[Module, str]:
    """Return the paths in memory of the modules of a layer that the model has."""
    saved = {family.saved_name(name): name for name, _ in model.named_parameters(remove_duplicate=False)}
    found: dict[Module, str] = {}
    for module in family.body:
        for name in (f"{prefix}{module.at(layer)}.weight" for prefix in family.prefixes):
            if name in saved:
                found.setdefault(module, saved[name].rpartition(".")[0])
    return found


def attention_function(
    module: Any,
    norm: Network | None,
    positions: Turns | None,
    *,
    causal: bool,
    dtype: str,
    window: int | None = None,
    widened: bool = True,
) -> Answer:
    """Return the function (n, k, d) -> (n, k, d) of a copy of a sub-module, x + attn(norm(x)) where a norm is given.

    The copy computes in `dtype`, by scaled-dot-product attention where that knows its scores (no caps, no sinks). Of a
    window, a token sees the last `window` tokens, itself included. Unless `widened`, what the code of transformers
    narrows to single precision, angles of positions among it, stays so.
    """
    kind = getattr(torch, dtype)
    fine = kind if widened else torch.float32  # of angles
    module, norm = widen(module, dtype), None if norm is None else widen(norm, dtype)
    for part in module.modules():
        if hasattr(getattr(part, "config", None), "_attn_implementation"):
            capped = getattr(module, "attn_logit_softcapping", None) is not None or hasattr(module, "sinks")
            part.config._attn_implementation = "eager" if capped else "sdpa"
        if hasattr(getattr(part, "config", None), "_experts_implementation"):
            part.config._experts_implementation = "eager"  # grouped products know no double precision
    device = next(module.parameters()).device
    neighbours = _turns_neighbours(module)
    halved = hasattr(sys.modules[type(module).__module__], "_apply_rotary_emb")  # gpt-oss: one cosine a pair

    def answer(x: Array) -> Array:
        with torch.inference_mode(), wide_mode(dtype if widened else ""):
            tokens = torch.from_numpy(np.array(x)).to(device, kind)
            length = tokens.shape[1]
            mask = None
            if causal:
                mask = torch.full((length, length), torch.finfo(kind).min, dtype=kind, device=device)
                mask = mask.triu(1) if window is None else mask.triu(1) + mask.tril(-window)
                mask = mask.expand(len(tokens), 1, length, length)
            turned = None
            if positions is not None:
                rates, scaling = positions
                angles = torch.arange(length, dtype=fine, device=device)[:, None] * rates.to(device, fine)  # (k, N/2)
                if not halved:
                    angles = angles.repeat_interleave(2, -1) if neighbours else torch.cat((angles, angles), -1)
                angles = angles[None]
                turned = ((scaling * angles.cos()).to(kind), (scaling * angles.sin()).to(kind))
            found = _call(module, tokens if norm is None else norm(tokens), mask, turned)
            found = (found if norm is None else tokens + found).cpu()
            return (found if dtype in WIDE else found.double()).numpy()

    return answer


def native_function(module: Any, norm: Network | None, positions: Turns | None, **said: Any) -> tuple[Answer, str]:
    """Return the same function in the floating-point type of the module itself, and that type."""
    kind = str(next(module.parameters()).dtype).removeprefix("torch.")
    return attention_function(module, norm, positions, dtype=kind, widened=False, **said), kind


def _turns_neighbours(module: Any) -> bool:
    """Tell whether the code of a module wants each angle twice in a row, and not all angles twice (Cohere)."""
    source = vars(sys.modules[type(module).__module__])
    tables = [value for name, value in source.items() if name.endswith("RotaryEmbedding")]
    return any("repeat_interleave" in inspect.getsource(table.forward) for table in tables)


def _call(module: Any, x: Any, mask: Any, positions: Any) -> Any:
    """Call a sub-module or a block with what its signature asks for; what BERT's attention adds behind is left out."""
    output = getattr(module, "output", None)
    if output is not None and hasattr(module, "self"):
        return output.dense(_call(module.self, x, mask, positions))
    taken = inspect.signature(module.forward).parameters
    given = {"attention_mask": mask, "position_embeddings": positions, "alibi": None}
    source, length = vars(sys.modules[type(module).__module__]), x.shape[1]
    if "build_mpt_alibi_tensor" in source:
        slopes = source["build_mpt_alibi_tensor"](module.n_heads, length, device=x.device)
        given |= {"position_bias": slopes.to(x.dtype), "attention_mask": mask[:, 0, :, :][:, None] < 0}
    elif "build_alibi_tensor" in source and "residual" in taken:  # BLOOM, which adds what the block is given
        ones = source["torch"].ones(len(x), length, device=x.device)
        given |= {"alibi": source["build_alibi_tensor"](ones, module.num_heads, x.dtype), "residual": 0 * x}
    found = module(x, **{name: value for name, value in given.items() if name in taken})
    return found[0] if isinstance(found, tuple | list) else found


def wide_mode(dtype: str) -> Any:
    """Return a context in which float64 stays float64 where code of transformers narrows (norms, softmax, ALiBi)."""
    if dtype != "float64":
        return contextlib.nullcontext()

    class Wide(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
            named = dict(named or {})
            if function is torch.Tensor.float and not given[0].is_floating_point():  # positions
                return given[0].double()
            if given and isinstance(given[0], torch.Tensor) and given[0].dtype == torch.float64:
                if function is torch.Tensor.float:
                    return given[0]
                given = tuple(torch.float64 if one is torch.float32 else one for one in given)
                if named.get("dtype") is torch.float32:
                    named["dtype"] = torch.float64
            return function(*given, **named)

    return Wide()


def widen(module: Network, dtype: str) -> Network:
    """Return a copy of a module in another precision, in evaluation mode; the module itself stays as it is."""
    return copy.deepcopy(module).to(getattr(torch, dtype)).eval()


def rotary_frequencies(model: Network, config: Any, layer: int = 0) -> Turns:
    """Return the angles by which one position turns (N/2,) and the factor of cosines and sines, as the model has them.

    `model` is a model or a part of one; a part without them gets them from the class that its own file defines. Layers
    may have angles of their own, by their type.
    """
    kinds = getattr(config, "layer_types", None)
    kind = f"{kinds[layer]}_" if kinds else ""
    named = next((part for part in model.modules() if hasattr(part, f"{kind}inv_freq")), None)
    if named is not None and kind:
        return getattr(named, f"{kind}inv_freq").detach(), float(getattr(named, f"{kind}attention_scaling"))
    rotary: Any = next((part for part in model.modules() if hasattr(part, "inv_freq")), None)
    if rotary is None:
        source = vars(sys.modules[type(model).__module__])
        classes = [value for name, value in source.items() if name.endswith("RotaryEmbedding")]
        if not classes:
            raise NotExtractable(
                f"{type(model).__name__} turns queries and keys, and the angles are not found beside it: give the "
                "whole model, with layer="
            )
        rotary = classes[0](config=config)
        if kind and hasattr(rotary, f"{kind}inv_freq"):
            return getattr(rotary, f"{kind}inv_freq").detach(), float(getattr(rotary, f"{kind}attention_scaling"))
    return rotary.inv_freq.detach(), float(rotary.attention_scaling)
