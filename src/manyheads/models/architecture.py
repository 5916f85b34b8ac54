"""Architecture of a model outside this library, from a Hugging Face configuration or a map of parameter names.

Nothing is guessed: a name that is not explained is refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any

from manyheads.errors import UsageError
from manyheads.models.checkpoints.files import parse_json
from manyheads.models.config import ModelConfig, read_config
from manyheads.models.modules import Role
from manyheads.models.names import NamedParts, join_layers, match_families, propose_roles
from manyheads.models.parameters import ParameterMap, recognize
from manyheads.models.parts import PARTS, UNDERIVED, Architecture, Parameter
from manyheads.models.refusals import CheckpointRefused, WeightsMismatch
from manyheads.transformer.shape import Shape

OTHER_HEAD = "another head reads the same norm"
LARGEST_STD = 1e30  # no family starts its weights at such a std; float32 still holds it


@dataclass(frozen=True)
class Body:
    """Blocks of a model, as its configuration states them."""

    shape: Shape  # key dimension, heads, depth
    post_norm: bool  # whether blocks normalize after adding to the stream
    fused: bool  # whether queries, keys and values share one matrix
    tied: bool  # whether embedding and unembedding are one
    experts: tuple[int, int] = (0, 0)  # how many there are, and how many a token visits
    latent: tuple[float, ...] = ()  # latent attention: dimensions with positions and of values over N, query latents


def read_architecture(
    config: Mapping[str, Any], names: Iterable[str | Sequence[str]], frozen: Collection[str] = ()
) -> Architecture:
    """Return the architecture of a model of transformers, of a family of `manyheads.models.families`.

    `names` are those of all its parameters, as in memory or as saved; those of a shared one together, as a sequence.
    `frozen` are the first names of those that are not trained.

    Notes
    -----
    Where the base is given by N, H and L alone, heads per group and the width of the MLP over d are taken to be what
    they are here.
    """
    groups = _groups(names)
    known = _recognize(config, groups)
    body = _read_body(known.config)
    family = known.config.family
    shape, post = body.shape, body.post_norm
    std = _read_std(config) if family.plain_start else None
    for name, part in known.roles.items():
        if part.role in (Role.EMBEDDING_PROJECTION, Role.UNEMBEDDING_PROJECTION):
            raise _narrow(name, known.config.values["width"])
    saved = family.saved_name
    named = [(group, [known.roles[saved(name)] for name in group]) for group in groups]
    tied = any({Role.EMBEDDING, Role.UNEMBEDDING} <= {part.role for part in parts} for _, parts in named)
    closing, reason = _closing(known, post) if tied else (None, "")
    parameters: dict[bool, list[Parameter]] = {True: [], False: []}  # by whether they are frozen
    for group, parts in named:
        means = {
            ("blank",) if part.role in family.blank and part.kind == "weight" else part.parts(name)
            for part, name in zip(parts, group, strict=True)
        }
        closes = closing is not None and parts[0].role is closing
        parameter = _parameter(group, means, closes)
        if parameter.parts == ("branch_gain",):
            parameter = replace(parameter, value=known.config.values.get("layer_scale"))
        elif parameter.parts == ("router_bias",):
            parameter = replace(parameter, value=std)
        elif parameter.start == "one":
            parameter = replace(parameter, offset=family.gain_offset, value=family.gain_start)
        parameters[group[0] in frozen].append(parameter)
    if tied and not reason and not any(each.closes and each.start == "one" for each in parameters[False]):
        reason = "its last norm has no gain that is trained"
    trained, resting = (tuple(parameters[each]) for each in (False, True))
    facts: dict[str, Any] = {
        "root_width": known.config.root_width,
        "fixed_scale": family.fixed_scale,
        "interleaved": family.fused == "heads",
        "normed": frozenset(["logit"] if family.bare_query_norms else []),
    }
    return Architecture(shape, trained, family.model_type, post, std, reason, frozen=resting, **facts)


def apply_role_map(
    roles: Mapping[str, str],
    shape: Shape | Sequence[int],
    names: Iterable[str | Sequence[str]],
    frozen: Iterable[str | Sequence[str]] = (),
) -> Architecture:
    """Return the architecture of a plain model by a map from patterns of names to parts.

    The first pattern that fits counts; `"query+key+value"` is a matrix that holds all three. Names of a shared
    parameter stand together; patterns may fit frozen parameters as well.

    Examples
    --------
    >>> roles = {"table": "embedding", "*.q.bias": "query_bias"}
    >>> architecture = apply_role_map(roles, Shape(4, 2, 1), ["table", "0.q.bias"])
    >>> [(parameter.name, parameter.start) for parameter in architecture.parameters]
    [('table', 'random'), ('0.q.bias', 'zero')]
    """
    trained, resting = _groups(names), _groups(frozen)
    return join_parameters(match_roles(roles, trained, resting), Shape.of(shape), trained, resting)


def match_roles(
    roles: Mapping[str, str], trained: Iterable[Sequence[str]], resting: Iterable[Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Return the parts of all parameters that a pattern of a role map fits, by name; trained ones need one."""
    if not isinstance(roles, Mapping) or not all(isinstance(word, str) for pair in roles.items() for word in pair):
        raise UsageError(f'roles={roles!r}: expected a map from patterns of names to parts, {{"*.wq.weight": "query"}}')
    if wrong := [
        f"{pattern!r} is given the role {piece!r}" + (f", {UNDERIVED[piece]}" if piece in UNDERIVED else "")
        for pattern, part in roles.items()
        for piece in part.split("+")
        if piece not in PARTS
    ]:
        raise UsageError(f"{'; '.join(wrong)}: choose from {', '.join(PARTS)}")
    every = [name for group in (*trained, *resting) for name in group]
    fitting = {name: next((pattern for pattern in roles if fnmatchcase(name, pattern)), None) for name in every}
    if unknown := [name for group in trained for name in group if fitting[name] is None]:
        said = f"no pattern of the role map fits the parameter {unknown[0]!r}{_more(unknown)}"
        raise UsageError(f"{said}: add a line for each, or freeze them\n{propose_roles(unknown, {})}")
    if idle := [pattern for pattern in roles if pattern not in fitting.values() and pattern != "*"]:
        raise UsageError(f"the pattern {idle[0]!r}{_more(idle)} of the role map fits no parameter: mend or remove it")
    return {name: tuple(roles[pattern].split("+")) for name, pattern in fitting.items() if pattern is not None}


def join_parameters(
    parts: Mapping[str, tuple[str, ...]],
    shape: Shape,
    names: Iterable[Sequence[str]],
    frozen: Iterable[Sequence[str]] = (),
    **facts: Any,
) -> Architecture:
    """Return the architecture of a plain model from the parts of its parameters, by name."""
    found: list[list[Parameter]] = [[], []]  # trained, frozen
    for place, groups in enumerate((names, frozen)):
        for group in groups:
            if means := {parts[name] for name in group if name in parts}:
                found[place].append(_parameter(tuple(group), means, closes=False))
    reason = ""
    if any(parameter.tied for some in found for parameter in some):
        ends = [parameter.name for parameter in found[0] if parameter.parts[0] == "final_gain"]
        reason = "" if len(ends) == 1 else f"it has {len(ends)} parameters of role final_gain that are trained"
        if any("unembedding" in parameter.parts for some in found for parameter in some):
            reason = reason or OTHER_HEAD
        if not reason:
            last = ("final_gain", "final_shift")
            found = [[replace(each, closes=each.parts[0] in last) for each in some] for some in found]
    return Architecture(shape, tuple(found[0]), open_end=reason, frozen=tuple(found[1]), **facts)


def read_roles(path: str | PathLike[str]) -> dict[str, str]:
    """Read a role map from a file: JSON, TOML (`"pattern" = "part"`), or the lines that an error proposes."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        if text.lstrip().startswith("{"):
            found = parse_json(text.encode(), Path(path))
        else:
            text = re.sub(r"(?m)^(roles = \{|\})\s*$", "", text)
            found = tomllib.loads(re.sub(r'": ("[^"\n]*"),', r'" = \1', text))
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or getattr(error, "found", error)
        raise UsageError(f'roles {path}: {said}; expected lines such as "*.wq.weight" = "query"') from error
    return found.get("roles", found)


def _more(names: Sequence[str]) -> str:
    """Return how many more there are, and their names with layers joined."""
    joined = [name for name in dict.fromkeys(map(join_layers, names[1:])) if name != join_layers(names[0])]
    return f" (and {len(names) - 1} more{': ' * bool(joined)}{', '.join(joined)})" if len(names) > 1 else ""


def _groups(names: Iterable[str | Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the names of each parameter; one alone is a text."""
    return [(each,) if isinstance(each, str) else tuple(each) for each in names]


def _recognize(config: Mapping[str, Any], groups: list[tuple[str, ...]]) -> ParameterMap:
    # Which heads are tied is seen on the parameters themselves; without a class name nothing is asked for twice.
    config = {key: value for key, value in config.items() if key != "architectures"}
    try:
        read = read_config(config, "model", complete=True)
        return recognize(read, [read.family.saved_name(name) for group in groups for name in group], "model")
    except CheckpointRefused as refused:
        names = [name for group in groups for name in group]
        proposed = propose_roles(names, match_families(names)[0].parts) if isinstance(refused, WeightsMismatch) else ""
        raise UsageError(
            f"{refused.found}. Roles are never guessed: for adapters, cross-attention, experts and families that are "
            f"not known, give every trained parameter a part with roles={{pattern: part}}\n{proposed}".rstrip()
        ) from refused


def read_names(groups: Sequence[Sequence[str]], frozen: Collection[str], owner: str) -> NamedParts:
    """Read a model by the names of its parameters alone, those of a shared one together; or refuse, with a role map."""
    every = [name for group in groups for name in group]
    found = match_families(every)
    if len(found) != 1 or found[0].strangers or found[0].absent:
        families = " and ".join(each.family.model_type for each in found)
        known, absent = (found[0].parts, found[0].absent) if len(found) == 1 else ({}, ())
        near = f"; {families}, the nearest, leaves {len(every) - len(known)}" if known else ""
        near += f", and needs {', '.join(absent)}" if absent else f"; {families} differ" if len(found) > 1 else ""
        raise UsageError(
            f"{owner} has no configuration of transformers, and no family explains all {len(every)} names of its "
            f"parameters{near}: complete these roles, and give them as roles= (--roles FILE)\n"
            f"{propose_roles(every, known)}"
        )
    parts, reasons = found[0].parts, dict[str, list[str]]()
    for group in groups:
        means = {parts[name] for name in group}
        if len(group) > 1 and means not in ({("embedding",), ("unembedding",)}, {("unembedding_bias",)}):
            said = f"{' = '.join(group)} is one parameter at several places"
            raise UsageError(f"{said}: its gradient is a sum over them, which is not derived; give each its own")
        if group[0] not in frozen and (reason := UNDERIVED.get(parts[group[0]][0])):
            reasons.setdefault(reason, []).append(group[0])
    if reasons:
        said = "; ".join(f"{names[0]}{_more(names)}: {reason}" for reason, names in reasons.items())
        raise UsageError(f"{said}; leave them out, or freeze them")
    if not any("unembedding" in each for each in parts.values()):
        said = "a table that is read out without a module of its own is tied, which no name shows"
        remedy = "give it one, lm_head.weight = the table, or give roles="
        raise UsageError(f"{owner} has no parameter that reads out: {said}; {remedy}")
    return found[0]


def read_body(config: ModelConfig | Mapping[str, Any]) -> Body:
    """Read what a configuration says of the blocks, without the names of their parameters."""
    try:
        return _read_body(config if isinstance(config, ModelConfig) else read_config(config, "model"))
    except CheckpointRefused as refused:
        raise UsageError(f"{refused.found}") from refused


def _read_body(config: ModelConfig) -> Body:
    """Refuse attention that the theory does not describe."""
    values, raw = config.values, config.raw
    if any(module.role is Role.MLP_ACTIVATION for module in config.family.body):
        raise UsageError(f"the family {config.family.model_type}: {UNDERIVED['activation']}")
    width, heads, key_dim = values["width"], values["heads"], values["key_dim"]
    if not values["layers"]:
        raise UsageError("a model without layers: depth is a positive integer")
    if (values.get("scaled") is False and not config.family.fixed_scale) or values.get("scaled_by_layer"):
        said = "attention without the factor N^-1/2, or with one that depends on the layer, is not described here"
        raise UsageError(f"{said}: set scale_attn_weights=True and scale_attn_by_inverse_layer_idx=False")
    if raw.get("add_cross_attention") or raw.get("is_encoder_decoder"):
        raise UsageError("cross-attention is not described here: train the decoder alone, or give roles= and shape=")
    sizes = config.sizes
    if sizes["embedding_width"] != width:
        raise _narrow(config.family.counted["embedding_width"].name, width)
    shape = Shape(
        key_dim,
        heads,
        values["layers"],
        stream=None if width == heads * key_dim else width,
        key_heads=values["key_value_heads"],
        hidden=None if "experts" in sizes else sizes["hidden"],
        query_rank=values.get("query_rank") or None,
        key_value_rank=values.get("key_value_rank"),
    )
    experts = sizes.get("experts", 0), sizes.get("active_experts", 0)
    latent: tuple[float, ...] = ()
    if shape.key_value_rank:
        latent = (values["rotary_key_dim"] / key_dim, values["value_dim"] / key_dim, float(bool(shape.query_rank)))
    return Body(shape, config.post_norm, bool(config.family.fused), bool(values.get("tied")), experts, latent)


def _narrow(name: str, width: int) -> UsageError:
    return UsageError(
        f"{name}: an embedding narrower than the stream is not described here; make it {width}, or "
        "give roles= and shape="
    )


def _read_std(config: Mapping[str, Any]) -> float:
    """Return the standard deviation at which a family starts its weights, chosen as transformers does."""
    name = "initializer_range" if config.get("initializer_range") else "init_std"
    std = config.get(name) or 0.02
    if isinstance(std, bool) or not isinstance(std, int | float) or not 0 < std < LARGEST_STD:
        raise UsageError(f"{name} is {str(std)[:80]!r}, not a standard deviation of initial weights, such as 0.02")
    return float(std)


def _closing(parameters: ParameterMap, post: bool) -> tuple[Role | None, str]:
    """Return the norm that the tied unembedding alone reads, or why there is none."""
    present = {part.role for part in parameters.roles.values()}
    if Role.HEAD_NORM in present:
        return Role.HEAD_NORM, ""
    if post or Role.FINAL_NORM not in present:
        return None, "no norm of its own stands before it"
    if present & {Role.CLASSIFIER, Role.POOLER}:
        return None, OTHER_HEAD
    return Role.FINAL_NORM, ""


def _parameter(names: tuple[str, ...], means: set[tuple[str, ...]], closes: bool) -> Parameter:
    """Join the meanings of a parameter that may have several names."""
    if means in ({("embedding",), ("unembedding",)}, {("embedding", "unembedding")}):
        return Parameter(names[0], ("embedding",), tied=True)
    if len(means) > 1:
        shown = " and ".join("+".join(each) for each in sorted(means))
        raise UsageError(f"{' = '.join(names)} is one parameter in the roles {shown}: only embeddings can be tied")
    return Parameter(names[0], means.pop(), closes=closes)
