"""Parts of a model family: modules, the roles and layouts of their tensors, and the keys of its configuration."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple


class Role(StrEnum):
    """Role of a weight in a transformer."""

    EMBEDDING = "embedding"
    POSITION = "position"
    SEGMENT = "segment"
    PATCH = "patch"
    MARKER = "marker"  # the class token and the mask token of a vision transformer
    EMBEDDING_PROJECTION = "embedding_projection"
    EMBEDDING_NORM = "embedding_norm"
    ATTENTION_NORM = "attention_norm"
    QUERY = "query"
    KEY = "key"
    VALUE = "value"
    QUERY_KEY_VALUE = "query_key_value"
    QUERY_NORM = "query_norm"  # behind the queries, of a head or of all
    KEY_NORM = "key_norm"
    SINK = "sink"  # a logit of its own for each head, without a value
    RELATIVE_POSITION = "relative_position"  # added to logits, by distance and head
    QUERY_DOWN = "query_down"  # low-rank factors of latent attention (MLA), and the norms between them
    QUERY_DOWN_NORM = "query_down_norm"
    QUERY_UP = "query_up"
    KEY_VALUE_DOWN = "key_value_down"
    KEY_VALUE_DOWN_NORM = "key_value_down_norm"
    KEY_VALUE_UP = "key_value_up"
    MIXED_NORM = "mixed_norm"  # before the output projection
    OUTPUT = "output"
    ATTENTION_POST_NORM = "attention_post_norm"  # behind the branch, before the residual sum
    ATTENTION_SCALE = "attention_scale"  # layer scale: one gain for each coordinate of a branch
    MLP_NORM = "mlp_norm"
    MLP_IN = "mlp_in"
    MLP_GATE = "mlp_gate"
    MLP_GATE_IN = "mlp_gate_in"  # gate and input in one matrix
    MLP_ACTIVATION = "mlp_activation"  # trained numbers of the activation
    MLP_HIDDEN_NORM = "mlp_hidden_norm"
    MLP_OUT = "mlp_out"
    ROUTER = "router"
    EXPERT_IN = "expert_in"  # of all experts, gate and input
    EXPERT_OUT = "expert_out"
    SHARED_GATE = "shared_gate"  # one number for the shared expert
    MLP_POST_NORM = "mlp_post_norm"
    MLP_SCALE = "mlp_scale"
    FINAL_NORM = "final_norm"
    UNEMBEDDING = "unembedding"
    UNEMBEDDING_PROJECTION = "unembedding_projection"
    HEAD_TRANSFORM = "head_transform"
    HEAD_NORM = "head_norm"
    POOLER = "pooler"
    CLASSIFIER = "classifier"
    BUFFER = "buffer"  # masks, position indices and frequencies that old saves contain; not trained


Condition = tuple[str, ...]
"""Keys of the configuration that must all be true, or false when they begin with `!`; `MAYBE` is open."""

ALWAYS: Condition = ()
NEVER: Condition = ("never",)
MAYBE: Condition = ("maybe",)


@dataclass(frozen=True, slots=True)
class Module:
    """One module of a family and the tensors it holds.

    Attributes
    ----------
    path
        Its name without the prefix; `{layer}` stands for the number of the layer.
    role
        What it does.
    sort
        "linear" (weight and bias), "norm" (gain and bias), "table" (weight), "bare" (a tensor of that very name).
    when, bias
        Under which condition the weight and the bias are stored. `when=MAYBE`: the whole module may be absent.
    sides
        Sides of the weight in names of sizes (`manyheads.models.counts`), joined by `,`; empty: those of its role.
    only
        Layers that have it: "dense" or "sparse" (with experts), "later" (all but the first); empty: all.
    saved
        For the experts of a layer: modules that hold them one by one in a file, where `{expert}` stands for a number.
    """

    path: str
    role: Role
    sort: str = "linear"
    when: Condition = ALWAYS
    bias: Condition = ALWAYS
    sides: str = ""
    only: str = ""
    saved: tuple[str, ...] = ()

    @property
    def is_bias(self) -> bool:
        """Whether a bare tensor is a bias."""
        return self.sort == "bare" and self.role is not Role.BUFFER and self.path.endswith("bias")


class Key(NamedTuple):
    """One value of a configuration.

    Attributes
    ----------
    name
        What `config.json` calls it, several names joined by `|`; empty for a constant of the family.
    default
        What the classes of transformers take where it is absent; its type is the type of the value. None: an integer
        that follows from others, see `manyheads.models.config`.
    null
        What they take where it is null; `...`: the default.
    """

    name: str
    default: Any
    null: Any = ...

    def given(self, raw: Mapping[str, Any]) -> Any:
        """Return what a configuration says under the first of the names that it has, else the default."""
        names = [name for name in self.name.split("|") if name in raw]
        return raw[names[0]] if names else self.default

    def leaves_out(self, raw: Mapping[str, Any]) -> bool:
        """Tell whether the default stands in: no name is there, or its value is null where null means the default."""
        names = [name for name in self.name.split("|") if name in raw]
        return not names or (raw[names[0]] is None and self.null is ... and self.default is not None)


@dataclass(frozen=True)
class Family:
    """One family of models.

    Attributes
    ----------
    model_type
        What `config.json` calls it.
    prefixes
        What may stand before the names of the body.
    body, heads
        The modules behind the prefix, and those that carry none.
    keys
        Canonical name → key of the configuration.
    counted
        The same for what only counts of operations need.
    layout
        How linear weights are stored: "out,in" or "in,out".
    fused
        How query, key and value share one matrix: "" (they do not), "parts" (all queries, all keys, all values) or
        "heads" (head after head: its query, key, value).
    causal, norm, norm_place
        Properties of the whole family: True/False or the key that says so; "layer" or "rms"; "pre" or "post" or the
        key that is true for "pre".
    language_heads
        Endings of the class names that put an unembedding on top; without one stored it is tied to the embedding.
    position_offset
        How many rows of the position table come before position 0.
    renamed_norms
        Whether gains and biases of norms may be called gamma and beta, as the oldest saves do.
    ties
        Weight of a head → weight whose values it shares when the configuration ties them; the unembedding first.
    renamed
        What transformers 5 calls otherwise in memory than in a file: pattern of a name in memory → as saved.
    parallel
        Whether attention and MLP read the same stream and are added together, or the key that says so.
    gain_offset
        What norms add to their parameter to make a gain of it: 1 for Gemma's.
    root_width
        Whether embeddings are multiplied by the root of the width, or the key that says so.
    fixed_scale
        Whether logits are multiplied by a number that does not follow the key dimension.
    gain_start
        The gain at which norms start.
    blank
        Roles that start at zero here and elsewhere at random.
    plain_start
        Whether all matrices start at the std that the configuration states.
    beyond
        Why its attention is not read as weights of the common convention (`manyheads.models.attention_layers`); empty:
        it is.
    refused
        Key → value of it, and why a model with that value is not described.
    """

    model_type: str
    prefixes: tuple[str, ...]
    body: tuple[Module, ...]
    heads: tuple[Module, ...]
    keys: Mapping[str, Key]
    counted: Mapping[str, Key]
    layout: str = "out,in"
    fused: str = ""
    causal: bool | str = True
    norm: str = "layer"
    norm_place: str = "pre"
    language_heads: tuple[str, ...] = ("ForCausalLM",)
    position_offset: int = 0
    renamed_norms: bool = False
    ties: Mapping[str, str] = field(default_factory=dict)
    renamed: tuple[tuple[str, str], ...] = ()
    parallel: bool | str = False
    gain_offset: float = 0.0
    root_width: bool | str = False
    fixed_scale: bool = False
    gain_start: float = 1.0
    blank: tuple[Role, ...] = ()
    plain_start: bool = True
    beyond: str = ""
    refused: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    def saved_name(self, name: str) -> str:
        """Return the name under which a parameter of a model in memory is saved."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name
