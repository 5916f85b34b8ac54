"""A PyTorch model as it is read: its architecture, tensors by name, logit scales, padding, frozen parameters.

Wrappers (`torch.compile`, DistributedDataParallel) are looked through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

from manyheads.errors import UsageError
from manyheads.models.architecture import join_parameters, match_roles, read_architecture, read_names, read_roles
from manyheads.models.families import FAMILIES, UNSUPPORTED
from manyheads.models.parts import UNDERIVED, Architecture, ForwardMultipliers, Parameter
from manyheads.models.torch.lazy_torch import Module, Tensor, torch
from manyheads.models.torch.sizes import read_shape
from manyheads.transformer.shape import Shape

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")
INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Of those that prefix names, what may stand around a part of a model as well, a compiled block."""
SIZES = ("key_dim", "heads", "depth", "width")  # of a given shape; what was read says more


@dataclass(frozen=True)
class ModelOptions:
    """Options for reading a model, as `torch_groups` takes them."""

    roles: Any = None  # pattern → part, a file that holds such a map, or what `infer_roles` returns
    shape: Shape | Sequence[int] | None = None
    folded: bool | ForwardMultipliers = True
    example: Any = None
    heads: int | None = None  # where no module states them, and no shape is given


@dataclass(frozen=True)
class TorchModel:
    """A model that has been read."""

    architecture: Architecture  # its trained parameters by name
    tensors: Mapping[str, Tensor]  # name → parameter
    scales: Mapping[str, float]  # name of an attention module → the factor of its logits, where it says so
    padding: Mapping[str, int]  # name of a table → the row that stands for no token, which is zero and stays so
    frozen: Mapping[str, Tensor]  # name → parameter that is not trained


def read_model(model: Module, reading: ModelOptions | None = None) -> TorchModel:
    """Find the shape of a model and the part of every trained parameter."""
    reading = reading or ModelOptions()
    model = unwrap(model)
    found = _name_tensors(model)
    names = {key: group for key, (group, _) in found.items()}
    tensors = {group[0]: tensor for group, tensor in found.values()}
    frozen = {name for name, tensor in tensors.items() if not tensor.requires_grad}
    if len(frozen) == len(tensors):
        raise UsageError(f"{type(model).__name__} has no trained parameter: requires_grad is False for all of them")
    config, scales = getattr(model, "config", None), {}
    shape = None if reading.shape is None else Shape.of(reading.shape)
    trained = [group for group in names.values() if group[0] not in frozen]
    resting = [group for group in names.values() if group[0] in frozen]
    roles = read_roles(reading.roles) if isinstance(reading.roles, str | PathLike) else reading.roles
    if callable(read := getattr(roles, "read_architecture", None)):  # of `manyheads.scaling.infer_roles`
        architecture, said = read(model), "the forward pass shows"
    elif roles is None and (raw := read_raw(config)) is not None:
        said = "the configuration says"
        architecture = _complete_parameters(read_architecture(raw, names.values(), frozen), model, tensors)
        scales = {name: float(module.scaling) for name, module in _attention(model, architecture).items()}
    else:
        said, facts = "its parameters say", {}
        if roles is not None:
            parts = match_roles(roles, trained, resting)
        else:
            named = read_names([*trained, *resting], frozen, type(model).__name__)
            parts = {name: each for name, each in named.parts.items() if each[0] not in UNDERIVED}
            facts = {"post_norm": named.post_norm, "interleaved": named.family.fused == "heads"}
        heads = reading.heads or (shape.heads if shape else None)
        sizes = shape if roles is not None and shape else read_shape(model, parts, tensors, heads)
        architecture = _complete_parameters(join_parameters(parts, sizes, trained, resting, **facts), model, tensors)
        if roles is not None:
            _check_sizes(architecture, tensors, complete=not frozen)
    if shape and any(getattr(shape, name) != getattr(architecture.shape, name) for name in SIZES):
        raise UsageError(f"shape={shape}, and {said} {architecture.shape}: leave shape out")
    kept, held = ({name: t for name, t in tensors.items() if (name in frozen) is each} for each in (False, True))
    return TorchModel(architecture, kept, scales, _padding(model, names), held)


def read_raw(config: Any) -> Mapping[str, Any] | None:
    """Return the content of a configuration of transformers; None for any other."""
    raw = config.to_dict() if callable(getattr(config, "to_dict", None)) else None
    model_type = raw.get("model_type") if isinstance(raw, Mapping) else None
    return raw if isinstance(model_type, str) and model_type in {*FAMILIES, *UNSUPPORTED} else None


def find_unknown(model: Module) -> str:
    """Return why the parts of a model without role map are not known; empty where its configuration or names tell."""
    model = unwrap(model)
    names = _name_tensors(model)
    frozen = {group[0] for group, tensor in names.values() if not tensor.requires_grad}
    try:
        if read_raw(getattr(model, "config", None)) is None:
            read_names([group for group, _ in names.values()], frozen, type(model).__name__)
    except UsageError as error:
        return str(error).partition("\n")[0]
    return ""


def _name_tensors(model: Module) -> dict[int, tuple[list[str], Tensor]]:
    """Return the names of every parameter, without what wrappers put into them, and its tensor."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        plain = ".".join(piece for piece in name.split(".") if piece not in INNER)
        found.setdefault(id(tensor), ([], tensor))[0].append(plain)
    return found


def unwrap(model: Module) -> Any:
    """Return the model inside wrappers that only prefix its names."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{type(model).__name__} is no torch.nn.Module: give the model itself")
    while True:
        children = dict(model.named_children())
        if len(children) != 1 or next(iter(children)) not in WRAPPERS or list(model.parameters(recurse=False)):
            return model
        model = next(iter(children.values()))


def _complete_parameters(architecture: Architecture, model: Module, tensors: Mapping[str, Tensor]) -> Architecture:
    """Complete parameters from their tensors and modules: number of axes, dense inputs, offsets of gains.

    1 + w multiplies in Gemma's norms, and starts at w = 0.
    """
    owners = {id(t): module for module in model.modules() for t in module.parameters(recurse=False)}
    dense = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)

    def complete(parameter: Parameter) -> Parameter:
        tensor = tensors[parameter.name]
        owner, parameter = owners[id(tensor)], replace(parameter, axes=tensor.dim())
        if parameter.parts == ("embedding",) and not parameter.tied and isinstance(owner, dense):
            return replace(parameter, parts=("patch",))
        if parameter.start == "one" and not architecture.family:
            return replace(parameter, offset=_measure_offset(owner, tensor))
        return parameter

    trained, frozen = (tuple(map(complete, each)) for each in (architecture.parameters, architecture.frozen))
    return replace(architecture, parameters=trained, frozen=frozen)


def _measure_offset(module: Module, tensor: Tensor) -> float:
    """Return c if a norm multiplies by c + w, from what it makes of w = 0 and w = 1; 0 for what is no such module."""
    if tensor.is_meta or tensor.dim() != 1 or not tensor.is_floating_point():
        return 0.0
    own = dict(module.named_parameters(recurse=False))
    like: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}  # plain tensors, also where it is sharded
    drawn = torch.randn(2, len(tensor), generator=torch.Generator().manual_seed(0)).to(**like)

    def run(level: float) -> Tensor:
        exchanged = {key: torch.full(each.shape, level * (each is tensor), **like) for key, each in own.items()}
        return torch.func.functional_call(module, exchanged, (drawn,)).double()

    try:
        with torch.no_grad():
            zero, one = run(0.0), run(1.0)
    except Exception:  # whatever a module raises that is no norm of one vector
        return 0.0
    slope = (one - zero).abs().sum()
    offset = float(zero.abs().sum() / slope) if zero.shape == drawn.shape and slope > 0 else 0.0
    near = max(1e-3, 8 * torch.finfo(tensor.dtype).eps)
    return float(round(offset)) if abs(offset - round(offset)) < near else 0.0


def _attention(model: Module, architecture: Architecture) -> dict[str, Any]:
    """Return the modules above the query projections that carry a number `scaling`, by name."""
    found = {}
    for parameter in (*architecture.parameters, *architecture.frozen):  # frozen queries have a scale all the same
        if parameter.parts[0] in ("query", "query_up"):
            name = parameter.name.rsplit(".", 2)[0]
            module = model.get_submodule(name)
            if isinstance(getattr(module, "scaling", None), float):
                found[name] = module
    return found


def _check_sizes(architecture: Architecture, tensors: Mapping[str, Tensor], complete: bool) -> None:
    """Refuse a shape that the matrices of attention contradict: its width is on one of their sides."""
    shape, queries = architecture.shape, 0
    for parameter in architecture.parameters:
        sides = tuple(tensors[parameter.name].shape)
        queries += "query" in parameter.parts
        if parameter.parts[0] in ("query", "key", "value", "output") and len(sides) > 1 and shape.width not in sides:
            said = f"N = {shape.key_dim}, H = {shape.heads}, a stream of width {shape.width}"
            own = f"{parameter.name} ({'+'.join(parameter.parts)}) has the sides {sides}"
            raise UsageError(f"{own}, and shape says {said}: correct one of them")
    if complete and queries > 1 and queries % shape.depth:  # one alone may be shared by all layers, or hold them all
        raise UsageError(f"{queries} query matrices and L = {shape.depth} layers: correct the shape or the role map")


def _padding(model: Module, names: Mapping[int, list[str]]) -> dict[str, int]:
    return {
        names[id(module.weight)][0]: module.padding_idx
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None and id(module.weight) in names
    }
