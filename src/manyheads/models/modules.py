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
    OUTPUT = "output"
    MLP_NORM = "mlp_norm"
    MLP_IN = "mlp_in"
    MLP_GATE = "mlp_gate"
    MLP_OUT = "mlp_out"
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
    """

    path: str
    role: Role
    sort: str = "linear"
    when: Condition = ALWAYS
    bias: Condition = ALWAYS


class Key(NamedTuple):
    """One value of a configuration.

    Attributes
    ----------
    name
        What `config.json` calls it; empty for a constant of the family.
    default
        What the classes of transformers take where it is absent; its type is the type of the value. None: an integer
        that follows from others, see `manyheads.models.config`.
    null
        What they take where it is null; `...`: the default.
    """

    name: str
    default: Any
    null: Any = ...


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

    def saved_name(self, name: str) -> str:
        """Return the name under which a parameter of a model in memory is saved."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name
