"""Shapes: the integers of an architecture that its cost depends on."""

from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

from manyheads._constraints import CHECKED, Constraint, check_fields, constrained
from manyheads.errors import UsageError, check_integer

Activation = Literal["relu", "gelu", "gelu-tanh", "silu", "tanh"]
Norm = Literal["layernorm", "rmsnorm", "none"]
Biases = Literal["all", "none", "qkv", "output", "mlp", "qkv+output", "qkv+mlp", "output+mlp"]
Positions = Literal["learned", "rotary", "none"]
LARGEST = 10**18
"""No size is larger: a mistake, or a file that means harm; products of a few sizes still have a float."""


def _size(default: Any = MISSING, least: int = 1) -> Any:
    """Declare an integer from `least` to `LARGEST`."""
    return constrained(default, Constraint(least=least, most=LARGEST))


def _fill(shape: Any, defaults: dict[str, object]) -> None:
    """Set the fields of a shape that are None, and check all."""
    for name, default in defaults.items():
        if getattr(shape, name) is None:
            object.__setattr__(shape, name, default)
    check_fields(shape, f"{type(shape).__name__}: ")
    if shape.heads % shape.kv_heads:
        raise UsageError(f"{type(shape).__name__}: {shape.kv_heads} key-value heads do not divide {shape.heads} heads")


def heads_per_device(heads: int, devices: int) -> int:
    """Return how many of the key-value heads each of so many devices holds: a part of them, or one with others."""
    if heads % check_integer("devices", devices) and devices % heads:
        raise UsageError(f"{devices} devices and {heads} key-value heads: expected one to divide the other")
    return max(heads // devices, 1)


@dataclass(frozen=True)
class AttentionShape:
    """One attention core: softmax(Q K^T) V for every sequence and head.

    Mask: no later key under a causal one, the `n` queries being the last of the `m` keys; of these the last `window`
    only (0: all), without a causal mask those at most half a window away.

    Raises `UsageError`: a size is not a positive integer, `kv_heads` does not divide `heads`, more causal queries than
    keys, or another number of them under a window of both sides.
    """

    queries: int = _size()  # per sequence, n
    heads: int = _size()  # of the queries, h
    head_dim: int = _size()  # of a query or key, d_k
    keys: int | None = _size(None)  # per sequence, m; None: as many as queries
    value_dim: int | None = _size(None)  # d_v; None: `head_dim`
    kv_heads: int | None = _size(None)  # which groups of query heads share; None: `heads`. It changes bytes alone
    batch: int = _size(1)  # sequences
    causal: bool = False
    window: int = _size(0, 0)
    itemsize: int = _size(4)  # bytes of a number

    def __post_init__(self) -> None:
        _fill(self, {"keys": self.queries, "value_dim": self.head_dim, "kv_heads": self.heads})
        if self.window and not self.causal and self.queries != self.keys:
            raise UsageError(f"AttentionShape: a window of both sides, and {self.queries} queries of {self.keys} keys")
        if self.causal and self.queries > (self.keys or self.queries):
            raise UsageError(f"AttentionShape: {self.queries} causal queries cannot be the last of {self.keys} keys")


@dataclass(frozen=True)
class Experts:
    """Experts of an MLP: a router sends each token to `active` of `count`, each of hidden width `hidden`."""

    count: int = _size()
    active: int = _size()
    hidden: int = _size()
    shared_gate: bool = False  # whether one trained number of a token multiplies what the shared expert returns

    def __post_init__(self) -> None:
        check_fields(self, "Experts: ")
        if self.active > self.count:
            raise UsageError(f"Experts: active={self.active}, expected at most count={self.count}")
        if not isinstance(self.shared_gate, bool):
            raise UsageError(f"Experts: shared_gate={self.shared_gate!r} is neither True nor False")


@dataclass(frozen=True)
class Latent:
    """Latent attention (MLA): keys and values from a common vector of `key_value_rank` numbers, which is cached.

    Beside it every token has one key part of `rotary_dim`, turned by its position and shared by all heads. Queries come
    from a vector of `query_rank` numbers, or from the stream where it is 0.
    """

    key_value_rank: int = _size()
    rotary_dim: int = _size(0, 0)
    query_rank: int = _size(0, 0)

    def __post_init__(self) -> None:
        check_fields(self, "Latent: ")

    @property
    def cached(self) -> int:
        """Numbers that the cache of a layer keeps of a token."""
        return self.key_value_rank + self.rotary_dim


@dataclass(frozen=True)
class ModelShape:
    """A transformer: `layers` blocks of attention and MLP, with or without embedding and unembedding.

    Raises `UsageError`: a size is out of range, heads do not divide, or an unembedding has no vocabulary.

    Parameters
    ----------
    layers, width, heads
        Depth `L`, model dimension `d`, query heads `h`.
    mlp_hidden
        Hidden width of the MLP, `r d`; None means `4 d`, 0 means blocks without MLP.
    kv_heads, head_dim, value_dim
        Heads of keys and values (None: `heads`), the dimension of a query or key (None: `width / heads`) and of a value
        (None: `head_dim`).
    latent
        Low-rank factors of keys and values, None for full matrices.
    experts
        Experts beside an MLP that every token visits (the shared expert; `mlp_hidden` 0: none), None for no experts.
    kinds
        For layers that are not all alike a shape for each kind, the first layer's first; their `layers` add up to
        `layers`. Of these shapes only what stands in a block is read, and `name`, which says what layers they are.
    gated
        Whether the MLP has a gate: three matrices instead of two.
    vocabulary
        Rows of the token embedding; 0 means vectors come in.
    unembedding
        Whether logits over the vocabulary are computed, for every position.
    tied
        Whether embedding and unembedding share their matrix (it changes bytes only).
    causal, window
        Mask of the attention.
    embedding_width, projects_back
        Width of the embedding if it is projected to `width` (None: it is not), and whether the stream is projected back
        (None: with an unembedding).
    patch_features
        Values in an image patch that is projected to `width`; 0 means none.
    special_tokens, dropped_patches
        Positions that are not patches, such as a class token, and patches that are projected and then left out.
    classes, class_width, token_classes
        Rows of a classification head on one position of each sequence, 0 means none, and its inputs (None: `width`);
        rows of a head on every position that is not over the vocabulary.
    pooled
        Whether a dense `d x d` layer and activation act on one position of each sequence.
    fixed_length
        The length that an input has if all have the same, such as the patches of an image; 0 means any.
    head_transform
        Whether a dense `d x d` layer, activation and norm stand before a head on every position.
    activation, norm, positions
        What the elementwise columns depend on.
    biases
        Which dense layers of a block have biases: ``"qkv"`` (queries, keys and values), ``"output"`` (the output
        projection), ``"mlp"``, two of them joined by ``+``, ``"all"`` or ``"none"``. Elementwise too.
    itemsize
        Bytes of a number.
    notes
        Remarks that every cost of this shape carries.

    Examples
    --------
    >>> ModelShape(layers=12, width=768, heads=12, vocabulary=50257).mlp_hidden
    3072
    """

    layers: int = _size(least=0)
    width: int = _size()
    heads: int = _size()
    mlp_hidden: int | None = _size(None, 0)
    kv_heads: int | None = _size(None)
    head_dim: int | None = _size(None)
    gated: bool = False
    vocabulary: int = _size(0, 0)
    unembedding: bool | None = None
    tied: bool = False
    causal: bool = True
    window: int = _size(0, 0)
    embedding_width: int | None = _size(None)
    patch_features: int = _size(0, 0)
    special_tokens: int = _size(0, 0)
    dropped_patches: int = _size(0, 0)
    classes: int = _size(0, 0)
    class_width: int | None = _size(None)
    token_classes: int = _size(0, 0)
    pooled: bool = False
    fixed_length: int = _size(0, 0)
    head_transform: bool = False
    activation: Activation = field(default="gelu", metadata=CHECKED)
    norm: Norm = field(default="layernorm", metadata=CHECKED)
    biases: Biases = field(default="all", metadata=CHECKED)
    positions: Positions = field(default="learned", metadata=CHECKED)
    itemsize: int = _size(4)
    notes: tuple[str, ...] = ()
    value_dim: int | None = _size(None)
    latent: Latent | None = None
    experts: Experts | None = None
    kinds: tuple["ModelShape", ...] = ()
    name: str = ""
    projects_back: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self, "ModelShape: ")
        if self.head_dim is None and self.width % self.heads:
            raise UsageError(f"ModelShape: width={self.width} is no multiple of heads={self.heads}; give head_dim")
        width, vocabulary = self.width, self.vocabulary
        whole = {"embedding_width": width, "class_width": width, "unembedding": vocabulary > 0}
        whole |= {"projects_back": whole["unembedding"] if self.unembedding is None else self.unembedding}
        _fill(self, {"head_dim": width // self.heads, "mlp_hidden": 4 * width, "kv_heads": self.heads, **whole})
        _fill(self, {"value_dim": self.head_dim})
        if self.unembedding and not vocabulary:
            raise UsageError("ModelShape: an unembedding needs a vocabulary")
        if vocabulary and self.patch_features:
            raise UsageError("ModelShape: either a vocabulary or patch_features, not both")
        if self.embedding_width != width and not vocabulary:
            raise UsageError("ModelShape: embedding_width needs a vocabulary")
        for name in ("gated", "unembedding", "tied", "causal", "pooled", "head_transform", "projects_back"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"ModelShape: {name}={getattr(self, name)!r} is neither True nor False")
        for name, kind in (("latent", Latent), ("experts", Experts)):
            if not isinstance(getattr(self, name), kind | None):
                raise UsageError(f"ModelShape: {name}={getattr(self, name)!r}, expected a {kind.__name__} or None")
        if self.latent and self.latent.rotary_dim > (self.head_dim or 0):
            raise UsageError(f"ModelShape: {self.latent.rotary_dim} turned components of head_dim={self.head_dim}")
        if not isinstance(self.kinds, tuple) or not all(isinstance(kind, ModelShape) for kind in self.kinds):
            raise UsageError(f"ModelShape: kinds={self.kinds!r:.80}, expected a tuple of ModelShape")
        counts = [kind.layers for kind in self.kinds]
        if counts and (self.layers != sum(counts) or not all(counts)):
            raise UsageError(f"ModelShape: layers={self.layers}, and its kinds have {', '.join(map(str, counts))}")
        if len(named := [each.name for each in self.kinds if each.name]) > len(set(named)):
            raise UsageError(f"ModelShape: kinds named {', '.join(map(str, named))}: expected a name for each, or none")
        for each in self.kinds:
            if each.kinds or (each.width, each.causal) != (self.width, self.causal):
                wanted = f"expected no kinds of theirs, width={self.width} and causal={self.causal}"
                raise UsageError(f"ModelShape: kinds of width={each.width} and causal={each.causal}, {wanted}")

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads, `h d_k`."""
        return self.heads * (self.head_dim or 0)

    @property
    def key_width(self) -> int:
        """Width of the keys of all heads, `h_kv d_k`."""
        return (self.kv_heads or 0) * (self.head_dim or 0)

    @property
    def mixture_width(self) -> int:
        """Width of what the output projection reads, `h d_v`."""
        return self.heads * (self.value_dim or 0)

    @property
    def cached_numbers(self) -> int:
        """Numbers that the cache of one block keeps of a token: `h_kv (d_k + d_v)`, or those of a latent vector."""
        return (
            self.latent.cached if self.latent else (self.kv_heads or 0) * ((self.head_dim or 0) + (self.value_dim or 0))
        )

    @property
    def inward_macs(self) -> int:
        """Multiply-adds per token from the stream to the queries, keys and values of one block."""
        if not (latent := self.latent):
            return self.width * (self.query_width + self.cached_numbers)
        query = latent.query_rank * (self.width + self.query_width) or self.width * self.query_width
        keys = self.query_width - self.heads * latent.rotary_dim  # of all heads, without the part that turns
        return query + self.width * latent.cached + latent.key_value_rank * (keys + self.mixture_width)

    @property
    def projection_macs(self) -> int:
        """Multiply-adds per token in the projections of one block: `2 d d_k (h + h_kv)` where all are plain."""
        return self.inward_macs + self.width * self.mixture_width

    @property
    def expert_macs(self) -> int:
        """Multiply-adds per token in one expert."""
        return (3 if self.gated else 2) * self.width * (self.experts.hidden if self.experts else 0)

    @property
    def mlp_macs(self) -> int:
        """Multiply-adds per token in the MLP of one block: `2 r d^2`, gated `3 r d^2`; visited experts, router."""
        dense = (3 if self.gated else 2) * self.width * (self.mlp_hidden or 0)
        experts = self.experts
        return dense + (experts.active * self.expert_macs + self.routed * self.width if experts else 0)

    @property
    def routed(self) -> int:
        """Numbers that decide about experts: one for each, and the gate of the shared one."""
        return self.experts.count + self.experts.shared_gate if self.experts else 0

    @property
    def blocks(self) -> tuple["ModelShape", ...]:
        """The kinds of layers: `kinds`, or the shape itself where all are alike."""
        return self.kinds or (self,)

    def biased(self, part: Literal["qkv", "output", "mlp"]) -> bool:
        """Tell whether the dense layers of a part of the block have biases."""
        return self.biases == "all" or part in self.biases.split("+")

    def attention(self, queries: int, keys: int, batch: int, cached: bool = False) -> AttentionShape:
        """Return the attention core of one block; over `cached` latent vectors its heads share these."""
        same = {name: getattr(self, name) for name in ("kv_heads", "causal", "window", "itemsize", "value_dim")}
        if cached and self.latent:  # the factors of keys and values act on queries and mixture
            same |= {"kv_heads": 1, "value_dim": self.latent.key_value_rank}
            return AttentionShape(queries, self.heads, self.latent.cached, keys, batch=batch, **same)
        return AttentionShape(queries, self.heads, self.head_dim or 0, keys, batch=batch, **same)


@dataclass(frozen=True)
class RecurrentShape:
    """A recurrent network: a cell of `cell_layers` dense layers, applied to one position after the other.

    The first layer of the cell reads an input of width `d_in` and the state of width `H`; a cell of one layer is an
    Elman network.
    """

    inputs: int = _size()
    hidden: int = _size()
    cell_layers: int = _size(1)
    classes: int = _size(0, 0)  # rows of the head on the last state; 0 means none
    itemsize: int = _size(4)  # bytes of a number

    def __post_init__(self) -> None:
        check_fields(self, "RecurrentShape: ")


@dataclass(frozen=True)
class PooledShape:
    """An MLP on every position, a mean over positions, a head: blind to the order."""

    inputs: int = _size()  # width d of an input
    hidden: int = _size()  # width H of the dense layers
    layers: int = _size(1)
    classes: int = _size(0, 0)  # rows of the head on the pooled vector; 0 means none
    itemsize: int = _size(4)  # bytes of a number

    def __post_init__(self) -> None:
        check_fields(self, "PooledShape: ")


# Elementwise operations of a value, and its transcendental functions, in the forward and in the backward pass, where
# the backward pass may use what the forward pass kept. A stated convention: implementations fuse and reorder.
#   name: (forward, transcendental forward, backward, transcendental backward)
ELEMENTWISE_ACTIVATION: dict[str, tuple[int, int, int, int]] = {
    "relu": (1, 0, 1, 0),  # max | select
    "tanh": (0, 1, 3, 0),  # tanh | 1 - t^2, times the incoming gradient
    "silu": (3, 1, 5, 0),  # negate, exp, add, divide | s (1 + x (1 - s)) dy
    "gelu": (4, 1, 8, 1),  # x (1 + erf(x / sqrt 2)) / 2 | Phi(x) + x phi(x), times dy
    "gelu-tanh": (8, 1, 12, 0),  # x (1 + tanh(c (x + a x^3))) / 2 | its derivative from the kept tanh
}
#   name: operations a value forward and backward (gain and bias with their gradients included); one rsqrt a row
ELEMENTWISE_NORM: dict[str, tuple[int, int]] = {
    "layernorm": (7, 11),  # sum, subtract, square, sum, scale, gain, bias
    "rmsnorm": (4, 8),  # square, sum, scale, gain
    "none": (0, 0),
}
# Scale, maximum, subtract, sum, divide, and exp apart; a mask adds one. Backward: p dp, sum, subtract, times p, scale.
ELEMENTWISE_SCORE = {"forward": 5, "mask": 1, "transcendental": 1, "backward": 5}
