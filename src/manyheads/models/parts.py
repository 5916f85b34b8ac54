"""Trained parameters of a model by their parts: the class that scales them, their init, the factor they can carry.

A *part* is what one array does, in the names of the library's own transformer (`query`, `query_bias`, `attention_gain`,
...) and a few more that other models have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.transformer.scaling import ROLE_OF
from manyheads.transformer.shape import Shape

HIDDEN = "hidden"
"""A matrix of d inputs and d outputs above the blocks: no branch, so it scales with width as W_V does, not with L."""
ROUTER = "router"  # a read-out within a block: from d inputs to one logit for each expert
SINK = "sink"  # a logit of attention that is a weight: of a sink, or of a distance
LATENT = ("query_down", "query_up", "key_value_down", "key_value_up")
"""Low-rank factors of latent attention (MLA): from the stream to a latent, and from it to the heads."""

PARTS: Mapping[str, str] = {
    **ROLE_OF,
    **{part: part for part in LATENT},
    **dict.fromkeys(("query_down_bias", "key_value_down_bias"), "bias"),
    "embedding_bias": "positional",  # of patches: it adds to the stream as a position does
    # Of a norm on the stream below the blocks: no branch, as the last norm.
    **dict.fromkeys(("embedding_gain", "embedding_shift"), "final_norm"),
    "patch": "embedding",  # a matrix of pixels: its inputs are dense, where those of a table are one-hot
    "marker": "positional",  # a token that is a weight
    "blank": "positional",  # the same, starting at zero
    "hidden": HIDDEN,
    "hidden_bias": "final_norm",  # moves by order one above the blocks
    "mlp_gate": "mlp_in",
    "mlp_gate_bias": "bias",
    **dict.fromkeys(("query_gain", "query_shift", "key_gain", "key_shift"), "norm"),  # on the queries of a head
    **dict.fromkeys(("attention_post_gain", "mlp_post_gain"), "norm"),  # behind a branch, before the sum
    "branch_gain": "norm",  # layer scale, without a norm
    "inner_gain": "norm",  # of a norm within a branch
    "router": ROUTER,
    "router_bias": "bias",
    "sink": SINK,
}
"""Part → role."""

CARRIES: Mapping[str, str] = {
    **dict.fromkeys(("query", "query_bias", "query_up", "query_gain", "query_shift"), "logit"),
    **dict.fromkeys(("attention_post_gain", "mlp_post_gain", "output", "output_bias"), "branch"),
    **dict.fromkeys(("mlp_out", "mlp_out_bias"), "branch"),
    **dict.fromkeys(("embedding", "patch"), "embedding"),
}
"""Part → the factor of the forward pass that multiplies it, and that it can therefore absorb."""

UNDERIVED: Mapping[str, str] = {
    "latent": "the low-rank factors of latent attention (MLA) have parts of their own: query_down, query_up, "
    "key_value_down, key_value_up, and inner_gain for the norms between them",
    "expert": "how experts scale if their number, or the number that a token visits, changes is not derived; if "
    "neither does, an expert's matrices are mlp_in, mlp_gate and mlp_out",
    "linear_attention": "the size of the state of linear attention, a sum over tokens, is not derived",
    "activation": "how trained numbers of an activation start and move is not described",
    "scalar": "it multiplies the stream, or what is added to it, by trained numbers: scalars have no derived role",
    "gate": "it multiplies what is added by a trained sigmoid of a few channels, whose scaling is not derived",
    "value_embedding": "it adds a row for each token to the values, whose scaling beside them is not derived",
    "soft_cap": "a cap on logits that follows N or L is not derived; a constant one needs no part",
}
"""Names that role maps often hold and that have no role, with the reason."""

Start = Literal["random", "one", "zero"]


def init_of(part: str) -> Start:
    """Return how a part starts: gains at one, shifts, biases and blank tokens at zero, the rest at random."""
    if part.endswith("gain"):
        return "one"
    return "zero" if part.endswith(("shift", "bias", "blank")) else "random"


@dataclass(frozen=True)
class Parameter:
    """One trained parameter."""

    name: str  # its name, the first of them where it has several
    parts: tuple[str, ...]  # what it does: one of `PARTS`; three where queries, keys and values share a matrix
    tied: bool = False  # whether it is the embedding and the unembedding at once; `parts` then says embedding
    closes: bool = False  # whether its norm is read by the tied unembedding alone, and so can carry its multiplier
    offset: float = 0.0  # what the module adds to make a gain of it: 1 for Gemma's norms, which multiply by 1 + w
    value: float | None = None  # at which it starts, where that is not its part's default: layer scale
    axes: int | None = None  # how many its tensor has; None if that is not known

    @property
    def start(self) -> Start:
        """Default init."""
        return init_of(self.parts[0])


@dataclass(frozen=True)
class Architecture:
    """The trained parameters of one model and its shape."""

    shape: Shape  # key dimension, heads, depth
    parameters: tuple[Parameter, ...]  # one for each parameter, shared ones once
    family: str = ""  # the `model_type` of its configuration, empty for a plain module
    post_norm: bool = False  # whether blocks normalize after adding to the stream
    std: float | None = None  # the standard deviation at which the family starts its weights, None for a plain module
    open_end: str = field(default="", repr=False)  # why no norm can carry the multiplier of a tied unembedding, if so
    root_width: bool = False  # whether embeddings are multiplied by the root of the width
    fixed_scale: bool = False  # whether logits are multiplied by a constant of the configuration
    interleaved: bool = False  # whether a matrix of queries, keys and values holds those of one head after another
    frozen: tuple[Parameter, ...] = field(default=(), repr=False)  # not trained, as far as they are explained
    forward: ForwardMultipliers | None = None  # multiplied relative to the base, where a trace of both shows it
    normed: frozenset[str] = frozenset()  # factors, logit or branch, that a norm without a gain keeps from the weights

    @property
    def normed_queries(self) -> bool:
        """Whether a norm with a gain stands behind the queries (QK-norm)."""
        return any("query_gain" in each.parts for each in (*self.parameters, *self.frozen))

    @property
    def latent(self) -> bool:
        """Whether queries, or keys and values, come from a latent of low rank (MLA)."""
        return any(part in LATENT for each in (*self.parameters, *self.frozen) for part in each.parts)

    @property
    def carries(self) -> Mapping[str, str]:
        """Part → the factor of the forward pass that it can absorb: a norm behind a weight leaves it to its gain."""
        parts = {part for each in (*self.parameters, *self.frozen) for part in each.parts}
        eaten = {"query", "query_bias"} if self.normed_queries else set()
        eaten |= {"query", "query_bias"} if "query_up" in parts else {"query_up"}
        eaten |= {"output", "output_bias"} if "attention_post_gain" in parts else set()
        eaten |= {"mlp_out", "mlp_out_bias"} if "mlp_post_gain" in parts else set()
        return {part: factor for part, factor in CARRIES.items() if part not in eaten}


MULTIPLIER = Constraint(above=0, below=1e100)


@dataclass(frozen=True)
class ForwardMultipliers:
    """Multipliers of a forward pass, relative to those of the model that was tuned at the base.

    Attributes
    ----------
    branch
        Of every branch; the parametrization asks for (L / L0) to the minus alpha_L.
    logit
        Of the logits; it asks for (N / N0) to the minus alpha_A, and the usual model has (N / N0) to the minus 1/2.
    output
        Of the outputs; it asks for d0 / d over gamma0, if the read-out starts and trains as an embedding does.
    embedding
        Of the embeddings; it asks for none, and Gemma has (d / d0) to the 1/2.

    Raises
    ------
    UsageError
        A number that is not positive.
    """

    branch: float = constrained(1.0, MULTIPLIER)
    logit: float = constrained(1.0, MULTIPLIER)
    output: float = constrained(1.0, MULTIPLIER)
    embedding: float = constrained(1.0, MULTIPLIER)

    def __post_init__(self) -> None:
        check_fields(self, "ForwardMultipliers: ")
