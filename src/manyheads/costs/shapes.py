"""Shapes: the integers of an architecture that its cost depends on."""

from dataclasses import dataclass
from typing import Literal, get_args

from manyheads.errors import UsageError, check_integers

Activation = Literal["relu", "gelu", "gelu-tanh", "silu", "tanh"]
Norm = Literal["layernorm", "rmsnorm", "none"]
Biases = Literal["all", "none", "qkv", "output", "mlp", "qkv+output", "qkv+mlp", "output+mlp"]
Positions = Literal["learned", "rotary", "none"]
LARGEST = 10**18
"""No size is larger: a mistake, or a file that means harm; products of a few sizes still have a float."""
WORDS = {"activation": Activation, "norm": Norm, "biases": Biases, "positions": Positions}


@dataclass(frozen=True)
class AttentionShape:
    """One attention core: softmax(Q K^T) V for every sequence and head.

    Parameters
    ----------
    queries
        Queries per sequence, `n`; under a causal mask the last `n` of the keys.
    heads, head_dim
        Query heads `h` and their dimension `d_k`.
    keys
        Keys per sequence, `m`; None means as many as queries.
    value_dim
        Dimension of a value, `d_v`; None means `head_dim`.
    kv_heads
        Heads of keys and values; groups of query heads share them. None means `heads`. It changes bytes, not products.
    batch
        Sequences.
    causal, window
        Mask: no later key; of these the last `window` only (0: all).
    itemsize
        Bytes of a number.

    Raises
    ------
    UsageError
        A size is not a positive integer, `kv_heads` does not divide `heads`, more causal queries than keys, or a
        window without a causal mask.
    """

    queries: int
    heads: int
    head_dim: int
    keys: int | None = None
    value_dim: int | None = None
    kv_heads: int | None = None
    batch: int = 1
    causal: bool = False
    window: int = 0
    itemsize: int = 4

    def __post_init__(self) -> None:
        for name, default in (("keys", self.queries), ("value_dim", self.head_dim), ("kv_heads", self.heads)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        check_integers(
            self, "queries", "heads", "head_dim", "keys", "value_dim", "kv_heads", "batch", "itemsize", most=LARGEST
        )
        check_integers(self, "window", least=0, most=LARGEST)
        if self.heads % self.kv_heads:  # type: ignore[operator]
            raise UsageError(f"AttentionShape: {self.kv_heads} key-value heads do not divide {self.heads} heads")
        if self.causal and self.queries > self.keys:  # type: ignore[operator]
            raise UsageError(f"AttentionShape: {self.queries} causal queries cannot be the last of {self.keys} keys")
        if self.window and not self.causal:
            raise UsageError("AttentionShape: a window needs causal=True")


@dataclass(frozen=True)
class ModelShape:
    """A transformer: `layers` blocks of attention and MLP, with or without embedding and unembedding.

    Parameters
    ----------
    layers, width, heads
        Depth `L`, model dimension `d`, query heads `h`.
    mlp_hidden
        Hidden width of the MLP, `r d`; None means `4 d`, 0 means blocks without MLP.
    kv_heads, head_dim
        Heads of keys and values (None: `heads`) and the dimension of a head (None: `width / heads`).
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
    embedding_width
        Width of the embedding if it is projected to and from `width` (None: it is not).
    patch_features
        Values in an image patch that is projected to `width`; 0 means none.
    special_tokens
        Positions that are not patches, such as a class token.
    classes, class_width
        Rows of a classification head on one position of each sequence, 0 means none, and its inputs (None: `width`).
    token_classes
        Rows of a head on every position that is not over the vocabulary; 0 means none.
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

    Raises
    ------
    UsageError
        A size is out of range, heads do not divide, or an unembedding has no vocabulary.

    Examples
    --------
    >>> ModelShape(layers=12, width=768, heads=12, vocabulary=50257).mlp_hidden
    3072
    """

    layers: int
    width: int
    heads: int
    mlp_hidden: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    gated: bool = False
    vocabulary: int = 0
    unembedding: bool | None = None
    tied: bool = False
    causal: bool = True
    window: int = 0
    embedding_width: int | None = None
    patch_features: int = 0
    special_tokens: int = 0
    classes: int = 0
    class_width: int | None = None
    token_classes: int = 0
    pooled: bool = False
    fixed_length: int = 0
    head_transform: bool = False
    activation: Activation = "gelu"
    norm: Norm = "layernorm"
    biases: Biases = "all"
    positions: Positions = "learned"
    itemsize: int = 4
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_integers(self, "layers", least=0, most=LARGEST)
        check_integers(self, "width", "heads", "itemsize", most=LARGEST)
        if self.head_dim is None:
            if self.width % self.heads:
                raise UsageError(f"ModelShape: width={self.width} is no multiple of heads={self.heads}; give head_dim")
            object.__setattr__(self, "head_dim", self.width // self.heads)
        defaults = (("mlp_hidden", 4 * self.width), ("kv_heads", self.heads), ("unembedding", self.vocabulary > 0))
        for name, default in (*defaults, ("embedding_width", self.width), ("class_width", self.width)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        check_integers(self, "head_dim", "kv_heads", "embedding_width", "class_width", most=LARGEST)
        check_integers(self, "mlp_hidden", "vocabulary", "window", "patch_features", least=0, most=LARGEST)
        check_integers(self, "special_tokens", "classes", "token_classes", "fixed_length", least=0, most=LARGEST)
        if self.heads % self.kv_heads:  # type: ignore[operator]
            raise UsageError(f"ModelShape: {self.kv_heads} key-value heads do not divide {self.heads} heads")
        if self.unembedding and not self.vocabulary:
            raise UsageError("ModelShape: an unembedding needs a vocabulary")
        if self.vocabulary and self.patch_features:
            raise UsageError("ModelShape: either a vocabulary or patch_features, not both")
        if self.embedding_width != self.width and not self.vocabulary:
            raise UsageError("ModelShape: embedding_width needs a vocabulary")
        if self.window and not self.causal:
            raise UsageError("ModelShape: a window needs causal=True")
        for name in ("gated", "unembedding", "tied", "causal", "pooled", "head_transform"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"ModelShape: {name}={getattr(self, name)!r} is neither True nor False")
        for name, kind in WORDS.items():
            known = get_args(kind)
            if getattr(self, name) not in known:
                raise UsageError(f"ModelShape: {name}={getattr(self, name)!r} is none of {', '.join(known)}")

    @property
    def projection_macs(self) -> int:
        """Multiply-adds per token in the four projections of one block: `2 d d_k (h + h_kv)`."""
        return 2 * self.width * self.head_dim * (self.heads + self.kv_heads)  # type: ignore[operator]

    @property
    def mlp_macs(self) -> int:
        """Multiply-adds per token in the MLP of one block: `2 r d^2`, gated `3 r d^2`."""
        return (3 if self.gated else 2) * self.width * self.mlp_hidden  # type: ignore[operator]

    def biased(self, part: Literal["qkv", "output", "mlp"]) -> bool:
        """Tell whether the dense layers of a part of the block have biases."""
        return self.biases == "all" or part in self.biases.split("+")

    def attention(self, queries: int, keys: int, batch: int) -> AttentionShape:
        """Return the attention core of one block."""
        return AttentionShape(
            queries,
            self.heads,
            self.head_dim,  # type: ignore[arg-type]
            keys=keys,
            kv_heads=self.kv_heads,
            batch=batch,
            causal=self.causal,
            window=self.window,
            itemsize=self.itemsize,
        )


@dataclass(frozen=True)
class RecurrentShape:
    """A recurrent network: a cell of `cell_layers` dense layers, applied to one position after the other.

    Parameters
    ----------
    inputs, hidden
        Width of an input, `d_in`, and of the state, `H`. The first layer of the cell reads both.
    cell_layers
        Dense layers in the cell; 1 is an Elman network.
    classes
        Rows of the head on the last state; 0 means none.
    itemsize
        Bytes of a number.
    """

    inputs: int
    hidden: int
    cell_layers: int = 1
    classes: int = 0
    itemsize: int = 4

    def __post_init__(self) -> None:
        check_integers(self, "inputs", "hidden", "cell_layers", "itemsize", most=LARGEST)
        check_integers(self, "classes", least=0, most=LARGEST)


@dataclass(frozen=True)
class PooledShape:
    """An MLP on every position, a mean over positions, a head: blind to the order.

    Parameters
    ----------
    inputs, hidden, layers
        Width of an input, `d`; width `H` and number of the dense layers.
    classes
        Rows of the head on the pooled vector; 0 means none.
    itemsize
        Bytes of a number.
    """

    inputs: int
    hidden: int
    layers: int = 1
    classes: int = 0
    itemsize: int = 4

    def __post_init__(self) -> None:
        check_integers(self, "inputs", "hidden", "layers", "itemsize", most=LARGEST)
        check_integers(self, "classes", least=0, most=LARGEST)


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
