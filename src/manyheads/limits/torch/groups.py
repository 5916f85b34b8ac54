"""PyTorch: parameter groups, initial weights and logit scales of a model, for torch.optim's Adam, AdamW and SGD.

Nothing is written on parameters, and there is no file of base shapes: groups follow from the model, the base and what
was tuned there, each time they are asked for. Wrappers (`torch.compile`, DistributedDataParallel) are looked through;
frozen parameters and buffers are left out, and named where a factor of the forward pass belongs into them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from manyheads._extras import require
from manyheads.errors import UsageError
from manyheads.limits.parametrization.architecture import Architecture, Parameter, read_config, read_map
from manyheads.limits.parametrization.targets import BaseHyperparameters, ForwardMultipliers, parameter_targets
from manyheads.limits.torch.applied_factors import find_multipliers, logit_scale
from manyheads.limits.torch.frozen import describe_missing_factors
from manyheads.transformer.shape import Shape

if TYPE_CHECKING:
    from manyheads.limits.parametrization.parametrization import Parametrization

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")
INNER = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Of those that prefix names, what may stand around a part of a model as well, a compiled block."""


@dataclass(frozen=True)
class ModelOptions:
    """How a model is to be read.

    Attributes
    ----------
    roles, shape, folded, example
        As `torch_groups` takes them.

    Examples
    --------
    >>> ModelOptions().folded
    True
    """

    roles: Mapping[str, str] | None = None
    shape: Shape | None = None
    folded: bool | ForwardMultipliers = True
    example: Any = None


@dataclass(frozen=True)
class TorchModel:
    """A model that has been read.

    Attributes
    ----------
    architecture
        Its trained parameters by name.
    tensors
        Name → parameter.
    scales
        Name of an attention module → the number by which it multiplies its logits, where it says so.
    padding
        Name of a table → the row that stands for no token, which is zero and stays so.
    frozen
        Name → parameter that is not trained.
    """

    architecture: Architecture
    tensors: Mapping[str, Any]
    scales: Mapping[str, float]
    padding: Mapping[str, int]
    frozen: Mapping[str, Any]


def read_model(model: Any, reading: ModelOptions | None = None) -> TorchModel:
    """Find the shape of a model and the part of every trained parameter.

    Raises
    ------
    UsageError
        No module, none of its parameters trained, a plain module without roles and shape, or whatever `read_config` and
        `read_map` refuse.
    ExtraMissing
        torch is not installed.
    """
    reading = reading or ModelOptions()
    model = unwrap(model)
    names: dict[int, list[str]] = {}
    tensors: dict[str, Any] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        name = ".".join(piece for piece in name.split(".") if piece not in INNER)
        names.setdefault(id(tensor), []).append(name)
        tensors.setdefault(names[id(tensor)][0], tensor)
    frozen = {name for name, tensor in tensors.items() if not tensor.requires_grad}
    if len(frozen) == len(tensors):
        raise UsageError(f"{type(model).__name__} has no trained parameter: requires_grad is False for all of them")
    config, scales = getattr(model, "config", None), {}
    if reading.roles is not None:
        if reading.shape is None:
            raise UsageError("roles without a shape: give shape=Shape(key_dim, heads, depth) beside the role map")
        trained = [group for group in names.values() if group[0] not in frozen]
        resting = [group for group in names.values() if group[0] in frozen]
        architecture = _add_offsets(read_map(reading.roles, reading.shape, trained, resting), model, tensors)
        _check_sizes(architecture, tensors, complete=not frozen)
    elif config is None or not hasattr(config, "to_dict"):
        raise UsageError(
            f"{type(model).__name__} has no configuration of transformers: give roles={{pattern: part}} and "
            "shape=Shape(key_dim, heads, depth)"
        )
    else:
        architecture = read_config(config.to_dict(), names.values(), frozen)
        scales = {name: float(module.scaling) for name, module in _attention(model, architecture).items()}
        if reading.shape not in (None, architecture.shape):
            raise UsageError(f"shape={reading.shape}, and the configuration says {architecture.shape}: leave shape out")
    return TorchModel(
        architecture,
        {name: tensor for name, tensor in tensors.items() if name not in frozen},
        scales,
        _padding(model, names),
        {name: tensor for name, tensor in tensors.items() if name in frozen},
    )


def torch_groups(
    p: Parametrization,
    model: Any,
    hyperparameters: BaseHyperparameters,
    roles: Mapping[str, str] | None = None,
    shape: Shape | Sequence[int] | None = None,
    folded: bool | ForwardMultipliers = True,
    example: Any = None,
) -> list[dict[str, Any]]:
    """Sort the trained parameters of a model into groups for torch.optim.Adam, AdamW or SGD.

    Parameters
    ----------
    p
        The parametrization.
    model
        A model of transformers (GPT-2, GPT-NeoX, OPT, LLaMA, Qwen2, BERT, ViT), or any module with `roles`.
    hyperparameters
        What was tuned at the base.
    roles, shape
        For a plain module: pattern of names → part (`manyheads.limits.parametrization.architecture.PARTS`), and its
        shape.
    folded
        Whether branch, logit and output factors go into the weights (True: a model whose forward pass is the usual
        one), or are applied by the model itself (False: all of `forward_multipliers`, such as a model that is written
        for mup). Where they matter, this is measured on the model, except for families whose forward pass is known. A
        `ForwardMultipliers` says what the model multiplies relative to the base, and is believed.
    example
        Arguments of a forward pass for that measurement, a tuple or a mapping with at least two sequences; None tries
        token ids.

    Returns
    -------
    list[dict]
        `params`, `lr`, `weight_decay`, `eps` (with Adam), `names` and `role`: one group for each class.

    Raises
    ------
    UsageError
        What cannot be read, or cannot be scaled: by name, with what to do.

    Warns
    -----
    UserWarning
        A factor of the forward pass belongs into frozen parameters, and they do not start with it.

    Notes
    -----
    Weight decay is meant as decoupled (AdamW; for gradient descent both are the same). Heads per group of keys and
    values, and the width of the MLP over d, are taken to be what they were at the base.
    """
    reading = ModelOptions(roles, None if shape is None else Shape.of(shape), folded, example)
    read = read_model(model, reading)
    forward = find_multipliers(p, unwrap(model), read, reading)
    targets = parameter_targets(p, read.architecture, hyperparameters, forward)
    for sentence in describe_missing_factors(p, read, hyperparameters, forward):
        warnings.warn(sentence, stacklevel=2)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for target in targets:
        numbers = {"lr": target.learning_rate, "weight_decay": target.weight_decay}
        numbers |= {"eps": target.epsilon} if p.optimizer == "adam" else {}
        empty = {"params": [], **numbers, "names": [], "role": target.role}
        group = groups.setdefault((target.role, *numbers.values()), empty)
        group["params"].append(read.tensors[target.parameter.name])
        group["names"].append(target.parameter.name)
    return list(groups.values())


def initialise_model(
    p: Parametrization,
    model: Any,
    hyperparameters: BaseHyperparameters,
    roles: Mapping[str, str] | None = None,
    shape: Shape | Sequence[int] | None = None,
    folded: bool | ForwardMultipliers = True,
    generator: Any = None,
    example: Any = None,
) -> None:
    """Draw all trained parameters anew, in place: Gaussian with the std of their class, gains, and zeros.

    Parameters
    ----------
    p, model, hyperparameters, roles, shape, folded, example
        As `torch_groups` takes them.
    generator
        A torch.Generator on the device of the model; None for torch's own.

    Raises
    ------
    UsageError
        A plain module whose stds at the base are not given, or a model on the device `meta`.
    """
    torch = require("torch")
    reading = ModelOptions(roles, None if shape is None else Shape.of(shape), folded, example)
    read = read_model(model, reading)
    targets = parameter_targets(
        p, read.architecture, hyperparameters, find_multipliers(p, unwrap(model), read, reading)
    )
    if missing := sorted({target.role for target in targets if target.initial is None}):
        raise UsageError(
            f"no std is known for the roles {', '.join(missing)}: give BaseHyperparameters(stds={{role: standard "
            "deviation at the base}})"
        )
    if any(tensor.is_meta for tensor in read.tensors.values()):
        raise UsageError("a model on the device meta holds no numbers: model.to_empty(device=...) first")
    with torch.no_grad():
        for target in targets:
            tensor = read.tensors[target.parameter.name]
            if target.start == "random":
                tensor.normal_(0.0, target.initial, generator=generator)
            else:
                tensor.fill_((target.initial or 0.0) - target.parameter.offset)
            if (row := read.padding.get(target.parameter.name)) is not None:
                tensor[row] = 0


def scale_logits(model: Any, p: Parametrization) -> int:
    """Let every attention layer of a model of transformers scale its logits as a parametrization wants it.

    Where queries, keys and values share one matrix (GPT-2, GPT-NeoX) the factor cannot be folded into the queries
    alone. The attention modules of transformers 5 keep it as the attribute `scaling`, which is set here. It is not
    saved with the weights: call this again after loading. `torch_groups` and `audit` read the attribute, so that they
    notice when it is forgotten.

    Returns
    -------
    int
        How many layers were set.

    Raises
    ------
    UsageError
        The attention modules have no such attribute.
    """
    model = unwrap(model)
    read = read_model(model)
    shape = read.architecture.shape
    if len(read.scales) < shape.depth:
        raise UsageError(
            f"{shape.depth} layers, and {len(read.scales)} attention modules with an attribute `scaling`: "
            "this version of transformers scales logits elsewhere; use version 5.15 or later, or split query_key_value"
        )
    for name in read.scales:
        model.get_submodule(name).scaling = logit_scale(p, shape.key_dim)
    return len(read.scales)


def unwrap(model: Any) -> Any:
    """Return the model inside wrappers that only prefix its names."""
    torch = require("torch")
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{type(model).__name__} is no torch.nn.Module: give the model itself")
    while True:
        children = dict(model.named_children())
        if len(children) != 1 or next(iter(children)) not in WRAPPERS or list(model.parameters(recurse=False)):
            return model
        model = next(iter(children.values()))


def _add_offsets(architecture: Architecture, model: Any, tensors: Mapping[str, Any]) -> Architecture:
    """Say of gains what their modules add to them: 1 + w multiplies in Gemma's norms, and starts at w = 0."""
    owners = {id(t): module for module in model.modules() for t in module.parameters(recurse=False)}

    def add(parameter: Parameter) -> Parameter:
        tensor = tensors[parameter.name]
        return (
            parameter
            if parameter.start != "one"
            else replace(parameter, offset=_measure_offset(owners[id(tensor)], tensor))
        )

    return replace(
        architecture, parameters=tuple(map(add, architecture.parameters)), frozen=tuple(map(add, architecture.frozen))
    )


def _measure_offset(module: Any, tensor: Any) -> float:
    """Return c if a norm multiplies by c + w, from what it makes of w = 0 and w = 1; 0 for what is no such module."""
    torch = require("torch")
    if tensor.is_meta or tensor.dim() != 1 or not tensor.is_floating_point():
        return 0.0
    own = dict(module.named_parameters(recurse=False))
    drawn = torch.randn(2, len(tensor), generator=torch.Generator().manual_seed(0)).to(tensor)

    def run(level: float) -> Any:
        exchanged = {key: torch.full_like(each, level * (each is tensor)) for key, each in own.items()}
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


def _attention(model: Any, architecture: Architecture) -> dict[str, Any]:
    """Return the modules above the query projections that carry a number `scaling`, by name."""
    found = {}
    for parameter in (*architecture.parameters, *architecture.frozen):  # frozen queries have a scale all the same
        if parameter.parts[0] == "query":
            name = parameter.name.rsplit(".", 2)[0]
            module = model.get_submodule(name)
            if isinstance(getattr(module, "scaling", None), float):
                found[name] = module
    return found


def _check_sizes(architecture: Architecture, tensors: Mapping[str, Any], complete: bool) -> None:
    """Refuse a shape that the matrices of attention contradict: its width is on one of their sides."""
    shape, queries = architecture.shape, 0
    for parameter in architecture.parameters:
        sides = tuple(tensors[parameter.name].shape)
        queries += "query" in parameter.parts
        if parameter.parts[0] in ("query", "key", "value", "output") and len(sides) > 1 and shape.width not in sides:
            raise UsageError(
                f"{parameter.name} ({'+'.join(parameter.parts)}) has the sides {sides}, and shape says "
                f"N = {shape.key_dim}, H = {shape.heads}, a stream of width {shape.width}: correct one of them"
            )
    if complete and queries > 1 and queries % shape.depth:  # one alone may be shared by all layers, or hold them all
        raise UsageError(f"{queries} query matrices and L = {shape.depth} layers: correct the shape or the role map")


def _padding(model: Any, names: Mapping[int, list[str]]) -> dict[str, int]:
    torch = require("torch")
    return {
        names[id(module.weight)][0]: module.padding_idx
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None and id(module.weight) in names
    }
