"""Parts of a model family: modules, the roles and layouts of their tensors, and the keys of its configuration."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Self


class Role(StrEnum):
    """Role of a weight in a transformer."""

    part: str  # in the scaling (`manyheads.models.parts`), of a norm without `_gain`, several joined by `+`; or none
    sides: str  # of its weight in names of sizes (`ModelConfig.sizes`), fan-out first
    sort: str  # how a `Module` holds it

    def __new__(cls, value: str, part: str = "", sides: str = "width", sort: str = "linear") -> Self:
        """Make a member whose value is its name."""
        role = str.__new__(cls, value)
        role._value_, role.part, role.sides, role.sort = value, part, sides, sort
        return role

    EMBEDDING = "embedding", "embedding", "vocabulary,embedding_width", "table"
    POSITION = "position", "positional", "positions,width", "table"
    SEGMENT = "segment", "embedding", "segments,width", "table"
    PATCH = "patch", "embedding", "width,patch_features"
    MARKER = "marker", "marker", "width", "bare"  # the class token and the mask token of a vision transformer
    EMBEDDING_PROJECTION = "embedding_projection", "", "width,embedding_width"
    EMBEDDING_NORM = "embedding_norm", "embedding", "width", "norm"
    ATTENTION_NORM = "attention_norm", "attention", "width", "norm"
    QUERY = "query", "query", "queries,width"
    KEY = "key", "key", "keys,width"
    VALUE = "value", "value", "keys,width"
    QUERY_KEY_VALUE = "query_key_value", "query+key+value", "queries+2*keys,width"
    QUERY_NORM = "query_norm", "query", "key_dim", "norm"  # behind the queries, of a head or of all
    KEY_NORM = "key_norm", "key", "key_dim", "norm"
    SINK = "sink", "sink", "heads", "bare"  # a logit of its own for each head, without a value
    RELATIVE_POSITION = "relative_position", "sink", "buckets,heads", "table"  # added to logits, by distance and head
    QUERY_DOWN = "query_down", "query_down", "query_rank,width"  # low-rank factors of latent attention (MLA), and norms
    QUERY_DOWN_NORM = "query_down_norm", "inner", "query_rank", "norm"
    QUERY_UP = "query_up", "query_up", "queries,query_rank"
    KEY_VALUE_DOWN = "key_value_down", "key_value_down", "key_value_rank+rotary_key_dim,width"
    KEY_VALUE_DOWN_NORM = "key_value_down_norm", "inner", "key_value_rank", "norm"
    KEY_VALUE_UP = "key_value_up", "key_value_up", "heads*plain_key_dim+heads*value_dim,key_value_rank"
    MIXED_NORM = "mixed_norm", "inner", "queries", "norm"  # before the output projection
    OUTPUT = "output", "output", "width,queries"
    ATTENTION_POST_NORM = "attention_post_norm", "attention_post", "width", "norm"  # before the residual sum
    ATTENTION_SCALE = ("attention_scale", "branch", "width", "bare")  # layer scale: gains of a branch
    MLP_NORM = "mlp_norm", "mlp", "width", "norm"
    MLP_IN = "mlp_in", "mlp_in", "hidden,width"
    MLP_GATE = "mlp_gate", "mlp_in", "hidden,width"
    MLP_GATE_IN = "mlp_gate_in", "mlp_gate+mlp_in", "2*hidden,width"  # gate and input in one matrix
    MLP_ACTIVATION = "mlp_activation", "activation", "1", "bare"  # trained numbers of the activation
    SCALAR = "scalar", "scalar", "1", "bare"  # trained numbers that multiply the stream, or what is added to it
    GATE = "gate", "gate", "1"  # a matrix whose sigmoid multiplies values or the stream
    VALUE_EMBEDDING = "value_embedding", "value_embedding", "vocabulary,keys", "table"  # of tokens, added to values
    MLP_HIDDEN_NORM = "mlp_hidden_norm", "inner", "hidden", "norm"
    MLP_OUT = "mlp_out", "mlp_out", "width,hidden"
    ROUTER = "router", "router", "experts,width"
    EXPERT_IN = "expert_in", "mlp_in", "experts,2*expert_hidden,width", "bare"  # of all experts, gate and input
    EXPERT_OUT = "expert_out", "mlp_out", "experts,width,expert_hidden", "bare"
    SHARED_GATE = "shared_gate", "router", "1,width"  # one number for the shared expert
    MLP_POST_NORM = "mlp_post_norm", "mlp_post", "width", "norm"
    MLP_SCALE = "mlp_scale", "branch", "width", "bare"
    FINAL_NORM = "final_norm", "final", "width", "norm"
    UNEMBEDDING = "unembedding", "unembedding", "vocabulary,embedding_width"
    UNEMBEDDING_PROJECTION = "unembedding_projection", "", "embedding_width,width"
    HEAD_TRANSFORM = "head_transform", "hidden", "width,width"
    HEAD_NORM = "head_norm", "final", "width", "norm"
    POOLER = "pooler", "hidden", "width,width"
    CLASSIFIER = "classifier", "unembedding", "labels,width"
    BUFFER = "buffer", "", "width", "bare"  # masks, positions and frequencies that old saves contain; not trained


GAINS = (Role.ATTENTION_SCALE, Role.MLP_SCALE)  # roles of bare tensors that multiply

Condition = str
"""Keys of the configuration that must all be true, or false when they begin with `!`; `MAYBE` is open."""

ALWAYS: Condition = "always"
NEVER: Condition = "never"
MAYBE: Condition = "maybe"


@dataclass(frozen=True)
class Module:
    """One module of a family and the tensors it holds.

    Its sort is "linear" (weight and bias), "norm" (gain and bias), "table" (weight) or "bare" (a tensor of that very
    name); sort and sides are those of the role unless given.
    """

    path: str  # its name without the prefix; `{layer}` stands for the number of the layer
    role: Role
    bias: Condition = ALWAYS  # under which condition its bias is stored
    when: Condition = ALWAYS  # under which condition it is stored; `MAYBE`: it may be absent as a whole, as buffers may
    sort: str = ""
    sides: str = ""
    only: str = ""  # layers that have it: "dense" or "sparse" (with experts), "later" (all but the first); empty: all
    saved: tuple[str, ...] = ()  # modules that hold the experts one by one in a file, by their number `{expert}`

    def __post_init__(self) -> None:
        object.__setattr__(self, "sort", self.sort or self.role.sort)
        object.__setattr__(self, "sides", self.sides or self.role.sides)
        object.__setattr__(self, "when", MAYBE if self.role is Role.BUFFER else self.when)

    @property
    def is_bias(self) -> bool:
        """Whether a bare tensor is a bias."""
        return self.sort == "bare" and self.role is not Role.BUFFER and self.path.endswith("bias")

    def at(self, layer: int | None) -> str:
        """Return the path in a layer."""
        return self.path.replace("{layer}", str(layer))


def modules(table: str, bias: Condition = ALWAYS, **facts: Any) -> tuple[Module, ...]:
    """Read modules from a table: a line is a prefix, if any, and then `path=role` or `path=role:condition of the bias`.

    Examples
    --------
    >>> [(each.path, each.bias) for each in modules("h.{layer}. ln_1=attention_norm attn.q=query:qkv_bias")]
    [('h.{layer}.ln_1', 'always'), ('h.{layer}.attn.q', 'qkv_bias')]
    """
    found = []
    for line in table.strip().splitlines():
        words = line.split()
        prefix = "" if "=" in words[0] else words.pop(0)
        for path, _, meaning in (word.partition("=") for word in words):
            role, _, condition = meaning.partition(":")
            found.append(Module(prefix + path, Role(role), condition or bias, **facts))
    return tuple(found)


def head(table: str) -> tuple[Module, ...]:
    """Read modules on top of the body, which may be absent, as their biases may."""
    return modules(table, MAYBE, when=MAYBE)


def lookup_head(path: str = "lm_head") -> Module:
    """Return an unembedding that has no bias."""
    return Module(path, Role.UNEMBEDDING, MAYBE, MAYBE, "table")


CLASSIFIERS = head("score=classifier:never classifier=classifier qa_outputs=classifier")


class Key(NamedTuple):
    """One value of a configuration."""

    name: str  # what `config.json` calls it, several names joined by `|`; empty for a constant of the family
    default: Any  # what transformers takes where it is absent, of the type of the value; None: it follows from others
    null: Any = ...  # what it takes where it is null; `...`: the default


_USUAL = {
    "width": "hidden_size", "heads": "num_attention_heads", "layers": "num_hidden_layers", "eps": "layer_norm_eps",
    "tied": "tie_word_embeddings", "key_dim": "head_dim", "rotary_theta": "rope_theta",
    "rotary_fraction": "partial_rotary_factor", "mlp_hidden": "intermediate_size", "vocabulary": "vocab_size",
    "activation": "hidden_act|hidden_activation", "positions": "max_position_embeddings", "segments": "type_vocab_size",
    "image": "image_size", "patch": "patch_size", "channels": "num_channels",
}  # fmt: skip
_COUNTED = frozenset((
    "mlp_hidden", "mlp_ratio", "vocabulary", "activation", "positions", "segments", "buckets", "embedding_width",
    "image", "patch", "channels", "markers", "mask_ratio", "experts", "active_experts", "expert_hidden",
    "shared_hidden", "shared_experts", "predicted",
))  # fmt: skip


def keys(**given: Any) -> dict[str, Key]:
    """Return keys by canonical name from their defaults, or from tuples of the arguments of `Key`."""
    return {
        name: Key(*value) if isinstance(value, tuple) else Key(_USUAL.get(name, name), value)
        for name, value in given.items()
    }


@dataclass(frozen=True)
class Family:
    """One family of models.

    What is a property of the whole family in some, and of a configuration in others, is the property itself or the key
    that says so.
    """

    model_type: str
    prefixes: tuple[str, ...]  # what may stand before the names of the body
    settings: Mapping[str, Key]  # by canonical name
    body: tuple[Module, ...]
    heads: tuple[Module, ...] = (lookup_head(), *CLASSIFIERS)  # without a prefix
    layout: str = "out,in"  # how linear weights are stored, or "in,out"
    fused: str = ""  # how query, key and value share one matrix: "parts" (all queries, all keys, all values), "heads"
    # (head after head: its query, key, value), "quarters" (the same of four groups, values before keys)
    causal: bool | str = True
    norm: str = "layer"  # or "rms"
    norm_place: str = "pre"  # or "post", or the key that is true for "pre"
    language_heads: tuple[str, ...] = ("ForCausalLM",)  # endings of class names with an unembedding, tied if not stored
    position_offset: int = 0  # rows of the position table before position 0
    renamed_norms: bool = False  # whether norms may hold gamma and beta, as in the oldest saves
    renamed: tuple[tuple[str, str], ...] = ()  # pattern of a name in memory, in transformers 5 → as saved
    parallel: bool | str = False  # whether attention and MLP read the same stream and are added together
    gain_offset: float = 0.0  # what norms add to their parameter to make a gain of it: 1 for Gemma's
    root_width: bool | str = False  # whether embeddings are multiplied by the root of the width
    fixed_scale: bool = False  # whether logits are multiplied by a number that does not follow the key dimension
    bare_query_norms: bool = False  # whether queries are normalized without a gain
    gain_start: float = 1.0  # the gain at which norms start
    blank: tuple[Role, ...] = ()  # roles that start at zero here and elsewhere at random
    plain_start: bool = True  # whether all matrices start at the std that the configuration states
    beyond: str = ""  # why its attention is not read as weights of the common convention, if it is not
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)  # key → value of it that is refused, and why

    def derive(self, model_type: str, settings: Mapping[str, Key] | None = None, **changes: Any) -> Self:
        """Return a family that differs from this one in some keys and properties."""
        return replace(self, model_type=model_type, settings={**self.settings, **(settings or {})}, **changes)

    @cached_property
    def keys(self) -> dict[str, Key]:
        """The settings but for those that only counts of operations need."""
        return {name: key for name, key in self.settings.items() if name not in _COUNTED}

    @cached_property
    def counted(self) -> dict[str, Key]:
        """The settings that only counts of operations need."""
        return {name: key for name, key in self.settings.items() if name in _COUNTED}

    @cached_property
    def ties(self) -> dict[str, str]:
        """Weight of a head → weight whose values it shares when the configuration ties them; the unembedding first."""
        found = [module for module in self.heads if module.role is Role.UNEMBEDDING]
        tied = {f"{module.path}.weight": f"{self.body[0].path}.weight" for module in found if module.sort != "bare"}
        biases = {f"{found[-1].path}.bias": module.path for module in found if module.sort == "bare"}
        return tied | biases

    def saved_name(self, name: str) -> str:
        """Return the name under which a parameter of a model in memory is saved."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name
