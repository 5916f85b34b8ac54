"""PyTorch: parameter groups, initial weights and logit scales of a model, for torch.optim's Adam, AdamW, SGD and Muon.

Nothing is stored on parameters or in files: groups follow from the model, the base and the hyperparameters tuned there.
Frozen parameters and buffers are left out, and named where a factor of the forward pass belongs into them.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from manyheads.errors import UsageError
from manyheads.models.infer.inferred import InferredRoles
from manyheads.models.infer.inferred import infer_roles as infer_roles
from manyheads.models.torch.lazy_torch import Generator, Module, torch
from manyheads.models.torch.model import ModelOptions, read_model, unwrap
from manyheads.scaling.audit.frozen import describe_missing_factors
from manyheads.scaling.parametrization.hyperparameters import BaseHyperparameters
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.parametrization.targets import ForwardMultipliers
from manyheads.scaling.torch.applied_factors import logit_scale, model_targets
from manyheads.transformer.shape import Shape


def torch_groups(
    p: Parametrization,
    model: Module,
    hyperparameters: BaseHyperparameters,
    roles: Mapping[str, str] | str | PathLike[str] | InferredRoles | None = None,
    shape: Shape | Sequence[int] | None = None,
    folded: bool | ForwardMultipliers = True,
    example: Any = None,
    heads: int | None = None,
) -> list[dict[str, Any]]:
    """Sort the trained parameters of a model into groups for torch.optim.Adam, AdamW or SGD, or Muon beside AdamW.

    Parameters
    ----------
    p
        The parametrization.
    model
        A model of transformers, of a family of `manyheads.models.families`; any module whose parameters have the names
        of a family, or of nanoGPT, torchtitan, litgpt or nanochat; or any other with `roles`.
    hyperparameters
        What was tuned at the base.
    roles, shape
        For another module: what `infer_roles` returns, which needs neither `shape` nor `folded`; or pattern of names →
        part (`manyheads.models.parts.PARTS`), or a file of them, and its shape, where the parameters do not tell it.
    folded
        Whether branch, logit and output factors go into the weights (True: a model whose forward pass is the usual
        one), or are applied by the model itself (False: all of `forward_multipliers`, such as a model that is written
        for mup). Where they matter, this is measured on the model, except for families whose forward pass is known. A
        `ForwardMultipliers` says what the model multiplies relative to the base, and is not checked.
    example
        Arguments of a forward pass for that measurement, a tuple or a mapping with at least two sequences; None tries
        token ids.
    heads
        Number of heads, where neither a shape nor a module states it.

    Returns
    -------
    list[dict]
        `params`, `lr`, `weight_decay`, `eps` (with Adam), `names` and `role`: one group for each class. Beside Muon
        `algorithm` says which optimizer takes a group, `"muon"` or `"adamw"`.

    Raises
    ------
    UsageError
        What cannot be read, or cannot be scaled: by name, with what to do.

    Notes
    -----
    A warning names frozen parameters into which a factor of the forward pass belongs, and that do not start with it.
    Weight decay is meant as decoupled (AdamW; for gradient descent both are the same). Heads per group of keys and
    values, and the width of the MLP over d, are taken to be what they were at the base.
    """
    options = ModelOptions(roles, shape, folded, example, heads)
    read, forward, targets, _ = model_targets(p, model, hyperparameters, options)
    for sentence in describe_missing_factors(p, read, hyperparameters, forward):
        warnings.warn(sentence, stacklevel=2)
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for target in targets:
        if target.conflict:
            raise UsageError(f"{target.parameter.name} is one parameter, and {target.conflict}; split it")
        rule = target.factors.rule
        numbers: dict[str, Any] = {"lr": target.learning_rate, "weight_decay": target.weight_decay}
        numbers |= {} if rule == "sgd" else {"eps": target.epsilon}
        numbers |= {"algorithm": "muon" if rule == "muon" else "adamw"} if p.optimizer == "muon" else {}
        empty = {"params": [], **numbers, "names": [], "role": target.role}
        group = groups.setdefault((target.role, *numbers.values()), empty)
        group["params"].append(read.tensors[target.parameter.name])
        group["names"].append(target.parameter.name)
    return list(groups.values())


def initialize_model(
    p: Parametrization,
    model: Module,
    hyperparameters: BaseHyperparameters,
    roles: Mapping[str, str] | str | PathLike[str] | InferredRoles | None = None,
    shape: Shape | Sequence[int] | None = None,
    folded: bool | ForwardMultipliers = True,
    generator: Generator | None = None,
    example: Any = None,
    heads: int | None = None,
) -> None:
    """Draw all trained parameters anew, in place: Gaussian with the std of their class, gains, and zeros.

    Parameters
    ----------
    p, model, hyperparameters, roles, shape, folded, example, heads
        As `torch_groups` takes them.
    generator
        A torch.Generator on the device of the model; None for torch's own.

    Raises
    ------
    UsageError
        A plain module whose stds at the base are not given, or a model on the device `meta`.
    """
    read, _, targets, _ = model_targets(p, model, hyperparameters, ModelOptions(roles, shape, folded, example, heads))
    if missing := sorted({target.role for target in targets if target.initial is None}):
        raise UsageError(f"no std is known for {', '.join(missing)}: give BaseHyperparameters(stds={{role: std}})")
    if any(tensor.is_meta for tensor in read.tensors.values()):
        raise UsageError("a model on the device meta holds no numbers: model.to_empty(device=...) first")
    with torch.no_grad():
        for target in targets:
            parameter: Any = read.tensors[target.parameter.name]
            sharded = hasattr(parameter, "device_mesh")  # every rank draws all of it, and the first one's is scattered
            like = {"dtype": parameter.dtype, "device": parameter.device}
            tensor: Any = torch.empty(parameter.shape, **like) if sharded else parameter
            if target.start == "random":
                tensor.normal_(0.0, target.initial or 0.0, generator=generator)
            else:
                tensor.fill_((target.initial or 0.0) - target.parameter.offset)
            if (row := read.padding.get(target.parameter.name)) is not None:
                tensor[row] = 0
            if sharded:
                mesh, placements = parameter.device_mesh, parameter.placements
                parameter.copy_(torch.distributed.tensor.distribute_tensor(tensor, mesh, placements))


def scale_logits(model: Module, p: Parametrization) -> int:
    """Let every attention layer of a model of transformers scale its logits as a parametrization prescribes.

    Where queries, keys and values share one matrix (GPT-2, GPT-NeoX) the factor cannot be folded into the queries
    alone. The attention modules of transformers 5 keep it as the attribute `scaling`, which is set here, or refused
    where there is none. It is not saved with the weights: call this again after loading. `torch_groups` and `audit`
    read the attribute, so that they notice when it is forgotten. Returned is how many layers were set.
    """
    model = unwrap(model)
    read = read_model(model)
    shape = read.architecture.shape
    if len(read.scales) < shape.depth:
        said = f"{shape.depth} layers, and {len(read.scales)} attention modules with an attribute `scaling`"
        remedy = "use version 5.15 or later, or split query_key_value"
        raise UsageError(f"{said}: this version of transformers scales logits elsewhere; {remedy}")
    for name in read.scales:
        attention: Any = model.get_submodule(name)
        attention.scaling = logit_scale(p, shape.key_dim)
    return len(read.scales)
