"""Parameters of a checkpoint and their roles: every name explained by the table of the family, or refused."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manyheads.models.checkpoints.checkpoint import Checkpoint
from manyheads.models.config import ModelConfig, read_config
from manyheads.models.modules import GAINS, MAYBE, Module, Role
from manyheads.models.refusals import ConfigInvalid, FileMissing, WeightsMismatch, shorten


@dataclass(frozen=True, slots=True)
class ParameterRole:
    """Meaning of one name of a family."""

    role: Role
    kind: str  # "weight", "bias", "gain" (of a norm) or "buffer"
    layer: int | None  # None outside the layers
    layout: str  # "out,in" or "in,out" for matrices that multiply a vector, "" for tables, vectors and bare tensors

    def parts(self, name: str) -> tuple[str, ...]:
        """Return the parts (`manyheads.models.parts.PARTS`) of the parameter with this name."""
        if self.role.sort == "norm" or self.role in GAINS:
            return (f"{self.role.part}_{'gain' if self.kind == 'gain' else 'shift'}",)
        biased = "_bias" if self.kind == "bias" else ""
        if self.role is Role.MARKER and name.endswith("mask_token"):
            return ("blank",)
        return tuple(f"{each}{biased}" for each in self.role.part.split("+"))


@dataclass(frozen=True)
class ParameterMap:
    """The names of a model, explained by `recognize`."""

    config: ModelConfig
    prefix: str  # before the names of the body
    roles: Mapping[str, ParameterRole]  # of the names that are present
    tied: Mapping[str, str]  # weight of a head → weight that it shares its values with, be the first stored or not
    unembedding: str | None  # the stored weight that turns the stream into logits over tokens, if there is one

    def names(self, role: Role, kind: str = "weight", layer: int | None = None) -> tuple[str, ...]:
        """Return the names of one role, kind and layer; none when the checkpoint has no such weight."""
        return tuple(
            name for name, found in self.roles.items() if (found.role, found.kind, found.layer) == (role, kind, layer)
        )


@dataclass(frozen=True, slots=True)
class Weight:
    """One weight of a checkpoint: its tensor as stored, and what it means (`ParameterRole`)."""

    name: str
    role: Role
    kind: str
    layer: int | None
    shape: tuple[int, ...]
    dtype: str
    layout: str
    tied_to: str | None = None  # the weight that it shares its values with


def recognize(
    raw: ModelConfig | Mapping[str, Any], names: Iterable[str], path: Path | str = "config.json"
) -> ParameterMap:
    """Explain every name of a checkpoint by its configuration, or refuse; `path` is where they come from."""
    path, names = Path(path), list(names)
    config = raw if isinstance(raw, ModelConfig) else read_config(raw, path, complete=True)
    family, layers = config.family, config.values["layers"]
    if layers > len(names):
        raise WeightsMismatch(path, f"{layers:,} layers in {len(names):,} tensors")
    known = set(names)
    prefix = _find_prefix(config, known)
    roles, absent = match_names(config, prefix, known)
    if strangers := [name for name in names if name not in roles]:
        raise WeightsMismatch(
            path,
            f"the family {family.model_type} does not explain {len(strangers)} of {len(names)} names: "
            f"{shorten(strangers)}",
            f"{WeightsMismatch.usual}, and that no adapter, wrapper or quantizer renamed the weights",
        )
    if absent:
        found = f"the family {family.model_type} also needs {len(absent)} tensors: {', '.join(list(absent)[:5])}"
        raise WeightsMismatch(path, found, f"{WeightsMismatch.usual}, and that the save is complete")
    tied, unembedding = _tie(config, prefix, known)
    return ParameterMap(
        config, prefix, MappingProxyType({name: roles[name] for name in names}), MappingProxyType(tied), unembedding
    )


def match_names(
    config: ModelConfig, prefix: str, known: set[str]
) -> tuple[dict[str, ParameterRole], dict[str, ParameterRole]]:
    """Return the meaning of the names that a family explains, and of those that it needs and are absent."""
    roles, absent = {}, {}
    for name, role, required in expected_names(config, prefix, known):
        if name in known:
            roles[name] = role
        elif required:
            absent[name] = role
    return roles, absent


def parameter_map(checkpoint: Checkpoint) -> ParameterMap:
    """Explain the names of an open checkpoint by its configuration."""
    if checkpoint.config is None:
        found = "no config.json beside the weights"
        raise FileMissing(checkpoint.path, found, "open the folder that holds config.json, or pass config=")
    return recognize(checkpoint.config, [*checkpoint.names, *checkpoint.aliases], checkpoint.path)


def parameter_roles(checkpoint: Checkpoint) -> tuple[Weight, ...]:
    """State the role of every weight of a checkpoint.

    Returns
    -------
    tuple[Weight, ...]
        One for each stored tensor in the order of the files, then one for each alias that a file's metadata names.
        Tied weights that are stored twice are compared (by sha256) and carry `tied_to`.

    Raises
    ------
    ConfigInvalid
        The configuration ties two weights that are stored with different values.
    CheckpointRefused
        The family is unknown or does not explain every name, see `recognize`.
    """
    found = parameter_map(checkpoint)
    weights = []
    for name in (*checkpoint.names, *checkpoint.aliases):
        role, entry = found.roles[name], checkpoint.entry(name)
        tied_to = checkpoint.aliases.get(name)
        if tied_to is None and name in found.tied:
            tied_to = found.tied[name]
            other = checkpoint.entry(tied_to)
            same_kind = (entry.dtype, entry.shape) == (other.dtype, other.shape)
            if not same_kind or checkpoint.fingerprint(name) != checkpoint.fingerprint(tied_to):
                raise ConfigInvalid(
                    checkpoint.path,
                    f"{name} and {tied_to} are tied by the configuration and differ",
                    "set tie_word_embeddings to what was trained; readers disagree about which of the two counts",
                )
        weights.append(Weight(name, role.role, role.kind, role.layer, entry.shape, entry.dtype, role.layout, tied_to))
    return tuple(weights)


def _find_prefix(config: ModelConfig, known: set[str]) -> str:
    """Find the prefix under which the first module of the body, which every model has, is present."""
    family = config.family
    anchors = {prefix: next(expected_names(config, prefix, known))[0] for prefix in family.prefixes}
    found = [prefix for prefix, anchor in anchors.items() if anchor in known]
    if not found:
        raise WeightsMismatch(
            config.path,
            f"the family {family.model_type} begins with {' or '.join(anchors.values())}, none of which is among "
            f"{shorten(sorted(known)) or 'no names'}",
            f"{WeightsMismatch.usual}, and that no adapter, wrapper or quantizer renamed the weights",
        )
    return found[0]


def expected_names(config: ModelConfig, prefix: str, known: set[str]) -> Iterator[tuple[str, ParameterRole, bool]]:
    """Go through every name the family may hold: the name, its meaning, and whether it has to be there."""
    for module in config.family.body:
        for layer in range(config.values["layers"]) if "{layer}" in module.path else [None]:
            if not config.has(module.only, layer):
                continue
            path = prefix + module.at(layer)
            if module.saved and path not in known:
                for saved in module.saved:  # the experts of a layer one by one
                    for expert in range(config.counted["experts"]):
                        name = prefix + saved.replace("{layer}", str(layer)).replace("{expert}", str(expert))
                        yield f"{name}.weight", ParameterRole(module.role, "weight", layer, "out,in"), True
            else:
                yield from _tensors(config, module, path, layer, known)
    for module in config.family.heads:
        yield from _tensors(config, module, module.path, None, known)


def _tensors(
    config: ModelConfig, module: Module, path: str, layer: int | None, known: set[str]
) -> Iterator[tuple[str, ParameterRole, bool]]:
    """Go through the names of one module."""
    gain, bias = ".weight", ".bias"
    if module.sort == "norm" and config.family.renamed_norms and path + ".gamma" in known:
        gain, bias = ".gamma", ".beta"
    kind = "gain" if module.sort == "norm" or module.role in GAINS else "weight"
    if module.sort == "bare":
        kind = "buffer" if module.role is Role.BUFFER else "bias" if module.is_bias else kind
        gain = ""
    layout = ""
    if module.sort == "linear":  # a family's layout is that of its blocks; heads and patches are always (out, in, ...)
        layout = config.family.layout if "{layer}" in module.path else "out,in"
    # A module that may be absent is absent as a whole: its weight without its bias is half a download.
    open_ended = module.when == MAYBE and not {path + gain, path + bias} & known
    if config.may_hold(module.when):
        role = ParameterRole(module.role, kind, layer, layout if kind == "weight" else "")
        shared = config.values.get("tied", False) and path + gain in config.family.ties  # saved once
        yield path + gain, role, not (open_ended or (shared and module.when == MAYBE))
    if module.sort in ("linear", "norm") and config.may_hold(module.bias):
        yield path + bias, ParameterRole(module.role, "bias", layer, ""), not (open_ended or module.bias == MAYBE)


def _tie(config: ModelConfig, prefix: str, known: set[str]) -> tuple[dict[str, str], str | None]:
    """Say which weights of heads share the values of others, and which stored weight is the unembedding."""
    is_language_model = config.built_with(*config.family.language_heads)
    tied: dict[str, str] = {}
    unembedding = None
    for number, (head, source) in enumerate(config.family.ties.items()):
        source = source if source in known else prefix + source
        if config.values["tied"] and source in known and (is_language_model or head in known):
            tied[head] = source
        if number == 0:
            unembedding = tied.get(head, head if head in known else None)
            if is_language_model and unembedding is None:
                found = f"{head} is neither stored nor tied"
                raise WeightsMismatch(config.path, found, f"{WeightsMismatch.usual}, and that the save is complete")
    return tied, unembedding
