"""Transformers: parts, block, whole model; their items in forward, backward and recomputed passes."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from manyheads.costs.conventions import Convention
from manyheads.costs.cost import Cost, Item, merge
from manyheads.costs.formulas.memory import stored_matrices
from manyheads.costs.shapes import (
    ELEMENTWISE_ACTIVATION,
    ELEMENTWISE_NORM,
    ELEMENTWISE_SCORE,
    AttentionShape,
    ModelShape,
)
from manyheads.costs.tally import NOTHING, Tally, pair
from manyheads.errors import UsageError, check_integers


@dataclass(frozen=True)
class Part:
    """One named step of a forward pass.

    A product `Y = X W` of `macs` multiply-adds has a backward pass of twice as many: `dX = dY W^T` and `dW = X^T dY`.
    """

    name: str
    macs: Tally = NOTHING
    forward: Tally = NOTHING  # elementwise operations and transcendental functions of each pass
    exp: Tally = NOTHING
    backward: Tally = NOTHING
    backward_exp: Tally = NOTHING
    scores: Tally = NOTHING  # that pass through a softmax
    scores_macs: Tally = NOTHING  # multiply-adds that recreate the scores alone
    idle: int = 0  # multiply-adds among those of the backward pass whose gradient nobody asks for
    again: Literal["block", "last", ""] = ""  # whether block recomputation repeats the step; "last" ends a block
    embedding: bool = False  # whether the products exist only for one-hot rows
    unvisited: bool = False  # whether they are of experts that a token does not visit


def dense_part(
    name: str, rows: int, macs: int, *, bias: int = 0, idle: int = 0, again: Literal["block", "last", ""] = ""
) -> Part:
    """Return the part of a dense layer on `rows` rows: `macs` multiply-adds and `bias` additions a row."""
    adds = Tally.of(rows * bias)
    return Part(name, Tally.of(rows * macs), forward=adds, backward=adds, idle=idle, again=again)


def pass_items(parts: Iterable[Part], training: bool) -> tuple[Item, ...]:
    """Spread parts over the stages of a forward pass, or of a forward and backward pass with all its recomputations."""
    items: list[Item] = []
    for part in parts:
        forward = Item(part.name, "forward", part.macs, part.scores, part.forward, part.exp)
        forward = replace(forward, embedding=part.embedding, unvisited=part.unvisited)
        items.append(forward)
        if not training:
            continue
        needed, elementwise = 2 * part.macs + Tally.of(-part.idle), (part.backward, part.backward_exp)
        backward = replace(forward, stage="backward", macs=needed, scores=2 * part.scores)
        items.append(replace(backward, elementwise=elementwise[0], transcendental=elementwise[1]))
        if part.idle:
            items.append(Item(part.name, "idle", Tally.of(part.idle), embedding=part.embedding))
        if part.again:
            items.append(replace(forward, stage="block-again" if part.again == "block" else "last-again"))
        if part.scores_macs:
            items.append(replace(forward, stage="scores-again", macs=part.scores_macs))
    return tuple(items)


def size_note(itemsize: int) -> str:
    """Return the note on the numbers that bytes are counted for."""
    return f"bytes are those of numbers of {itemsize} bytes"


def cost_of(
    items: Iterable[Item], moved: int, itemsize: int, convention: str | Convention, notes: tuple[str, ...] = ()
) -> Cost:
    """Return the cost of items that move so many bytes between them and memory."""
    traffic = Item("inputs and outputs", bytes=moved)
    return Cost(merge((*items, traffic)), notes=(*notes, size_note(itemsize))).to(convention)


def attention_part(shape: AttentionShape) -> Part:
    """Return the core of one layer as a part."""
    keys = shape.keys or shape.queries
    pairs = shape.batch * shape.heads * pair(shape.queries, keys, shape.causal, shape.window)
    per_score = ELEMENTWISE_SCORE["forward"] + (ELEMENTWISE_SCORE["mask"] if shape.causal else 0)
    macs = (shape.head_dim + (shape.value_dim or shape.head_dim)) * pairs
    exp, backward = (ELEMENTWISE_SCORE[name] * pairs for name in ("transcendental", "backward"))
    part = Part("attention core", macs, per_score * pairs, exp, backward, again="block")
    return replace(part, scores=pairs, scores_macs=shape.head_dim * pairs)


def attention_cost(shape: AttentionShape, training: bool = False, convention: str | Convention = "exact") -> Cost:
    r"""Count the attention core, `softmax(Q K^T / sqrt(d_k) + M) V` for `b` sequences and `h` heads.

    .. math:: 2\, b h\, p\, (d_k + d_v) \;\text{FLOPs}, \qquad p = nm \;\text{or, causal,}\; nm - n(n-1)/2 .

    The backward pass takes twice as many; recreating the scores in it takes `2 b h p d_k` more. Grouped queries change
    the bytes only. In `training` the backward pass is counted too, with gradients for queries, keys and values.

    Notes
    -----
    Elementwise, a score takes 5 operations (scale, maximum, subtract, sum, divide), one more if it may be masked, and
    one exp; in the backward pass 5. Bytes are queries, keys, values and output, once; with the backward pass their
    gradients too.

    Examples
    --------
    >>> core = attention_cost(AttentionShape(queries=64, heads=4, head_dim=12, batch=2))
    >>> core.flops, attention_cost(AttentionShape(64, 4, 12, batch=2, causal=True)).flops
    (1572864, 798720)
    """
    rows = shape.queries * shape.heads + (shape.keys or shape.queries) * (shape.kv_heads or shape.heads)
    values = shape.batch * rows * (shape.head_dim + (shape.value_dim or shape.head_dim))
    moved = values * shape.itemsize * (2 if training else 1)
    return cost_of(pass_items([attention_part(shape)], training), moved, shape.itemsize, convention)


@dataclass(frozen=True)
class Call:
    """Sizes of one call: `queries` positions of each of `batch` sequences against `keys` positions, `cached` or not."""

    queries: int
    keys: int
    batch: int = 1
    cached: bool = False

    def __post_init__(self) -> None:
        check_integers(self, "queries", "keys", "batch")

    @property
    def tokens(self) -> int:
        """Positions computed."""
        return self.queries * self.batch


def projection_parts(shape: ModelShape, call: Call) -> tuple[Part, Part]:
    """Return the projections of one layer: to queries, keys and values, and the output."""
    turned, biased = shape.query_width + shape.key_width, shape.query_width + shape.cached_numbers
    if latent := shape.latent:  # biases stand on what is read from the stream, if it is narrow
        turned, biased = (shape.heads + 1) * latent.rotary_dim, latent.query_rank + latent.cached
    # A rotation is two products and a sum for each value of a query or key, in both passes.
    adds = (biased if shape.biased("qkv") else 0) + (3 * turned if shape.positions == "rotary" else 0)
    inward = dense_part("query, key, value", call.tokens, shape.inward_macs, bias=adds, again="block")
    if latent:
        norms = norm_part(shape, call, "", 1, 0, width=latent.query_rank + latent.key_value_rank)
        inward = replace(inward, forward=inward.forward + norms.forward, backward=inward.backward + norms.backward)
        inward = replace(inward, exp=(1 + bool(latent.query_rank)) * norms.exp)
    added = shape.width if shape.biased("output") else 0
    return inward, dense_part(
        "output projection", call.tokens, shape.width * shape.mixture_width, bias=added, again="block"
    )


def activation_part(shape: ModelShape, values: int, name: str = "activation") -> Part:
    """Return the activation of so many values."""
    forward, exp, backward, backward_exp = (Tally.of(values * k) for k in ELEMENTWISE_ACTIVATION[shape.activation])
    return Part(name, forward=forward, exp=exp, backward=backward, backward_exp=backward_exp)


def mlp_parts(shape: ModelShape, call: Call) -> tuple[Part, ...]:
    """Return the MLP of one layer: router, in (gate included), activation, out."""
    if not (hidden := shape.mlp_hidden or 0):
        return expert_parts(shape, call)
    gates = 2 if shape.gated else 1
    bias = shape.biased("mlp") and not shape.experts
    inward = gates * shape.width * hidden
    outward = dense_part("mlp out", call.tokens, shape.width * hidden, bias=shape.width if bias else 0, again="last")
    return (
        dense_part("mlp in", call.tokens, inward, bias=gates * hidden if bias else 0, again="block"),
        gate_part(shape, call.tokens * hidden),
        outward,
        *expert_parts(shape, call),
    )


def gate_part(shape: ModelShape, values: int) -> Part:
    """Return the activation of so many hidden values, with the product of gate and value and its two gradients."""
    part = replace(activation_part(shape, values), again="block")
    products = Tally.of(values if shape.gated else 0)
    return replace(part, forward=part.forward + products, backward=part.backward + 2 * products)


def expert_parts(shape: ModelShape, call: Call) -> tuple[Part, ...]:
    """Return the experts of one layer, those that a token visits and those that it does not."""
    if not (experts := shape.experts):
        return ()
    gates, values = (2 if shape.gated else 1), call.tokens * experts.hidden
    bias = shape.biased("mlp")
    found = [dense_part("router", call.tokens, shape.width * shape.routed, bias=bias * experts.count, again="block")]
    for visited, unvisited in ((experts.active, False), (experts.count - experts.active, True)):
        added = visited * gates * experts.hidden if bias else 0, visited * shape.width if bias else 0
        rows, one_way = call.tokens, visited * shape.width * experts.hidden
        sum_of_experts = visited * 2 * shape.width  # each times the router's number
        parts = (
            dense_part("experts in", rows, gates * one_way, bias=added[0], again="block"),
            gate_part(shape, visited * values),
            dense_part("experts out", rows, one_way, bias=added[1] + sum_of_experts, again="last"),
        )
        found += [replace(part, unvisited=unvisited) for part in parts]
    return tuple(found)


def norm_part(shape: ModelShape, call: Call, name: str, norms: int, residuals: int, width: int | None = None) -> Part:
    """Return norms (one rsqrt a row) and residual additions (one a value, in both passes)."""
    forward, backward = ELEMENTWISE_NORM[shape.norm]
    values = call.tokens * (shape.width if width is None else width)
    roots = call.tokens * norms if shape.norm != "none" else 0
    there, back = (Tally.of(values * (norms * each + residuals)) for each in (forward, backward))
    return Part(name, forward=there, exp=Tally.of(roots), backward=back, again="block" if residuals else "")


def block_parts(shape: ModelShape, call: Call) -> tuple[Part, ...]:
    """Return the parts of one block."""
    inward, outward = projection_parts(shape, call)
    core = attention_part(shape.attention(call.queries, call.keys, call.batch, call.cached))
    mlp = mlp_parts(shape, call)
    branches = 2 if mlp else 1
    norms = norm_part(shape, call, "norms and residual", branches, branches)
    if not mlp:  # then the output projection ends the block
        outward = replace(outward, again="last")
    return (inward, core, outward, *mlp, norms)


def edge_parts(shape: ModelShape, call: Call) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Return what stands below and above the blocks."""
    width, inner, tokens = shape.width, shape.embedding_width or shape.width, call.tokens
    below: list[Part] = []
    above: list[Part] = []
    positions = width if shape.positions == "learned" else 0
    if shape.vocabulary:
        table = tokens * shape.vocabulary * inner
        below.append(Part("embedding", Tally.of(table), idle=table, embedding=True))
        if positions:
            below.append(dense_part("positions", tokens, 0, bias=positions))
    if inner != width:
        below.append(dense_part("embedding projection", tokens, inner * width))
    if shape.patch_features:
        if call.queries <= shape.special_tokens:
            raise UsageError(f"length {call.queries} leaves no patch beside {shape.special_tokens} special tokens")
        patches = call.batch * (call.queries - shape.special_tokens + shape.dropped_patches)
        macs = shape.patch_features * width
        below.append(dense_part("patch projection", patches, macs, bias=width, idle=patches * macs))
        below.append(dense_part("positions", tokens + call.batch * shape.dropped_patches, 0, bias=positions))
    if shape.unembedding or shape.classes or shape.token_classes:
        above.append(norm_part(shape, call, "final norm", norms=1, residuals=0))
    if shape.head_transform:
        above.append(dense_part("head transform", tokens, width * width, bias=width))
        above.append(activation_part(shape, tokens * width, "head activation"))
    if inner != width and shape.projects_back:
        above.append(dense_part("unembedding projection", tokens, inner * width))
    if shape.unembedding:
        above.append(dense_part("unembedding", tokens, inner * shape.vocabulary))
    if shape.token_classes:
        above.append(
            dense_part("token classes", tokens, (inner if shape.projects_back else width) * shape.token_classes)
        )
    if shape.pooled:
        above.append(dense_part("pooler", call.batch, width * width, bias=width))
        above.append(activation_part(replace(shape, activation="tanh"), call.batch * width, "pooler activation"))
    if shape.classes:
        macs = (shape.class_width or width) * shape.classes
        above.append(dense_part("classes", call.batch, macs, bias=shape.classes))
    return tuple(below), tuple(above)


def model_items(shape: ModelShape, call: Call, training: bool, input_gradient: bool) -> tuple[Item, ...]:
    """Return the items of one call of the whole model, without traffic."""
    below, above = edge_parts(shape, call)
    if not input_gradient:  # what stands below is frozen: nothing of its backward pass is asked for
        below = tuple(replace(part, idle=2 * part.macs.dense) for part in below)
    blocks: tuple[Item, ...] = ()
    for kind in shape.blocks:
        blocks += tuple(item.times(kind.layers) for item in pass_items(block_parts(kind, call), training))
    if training and not input_gradient and shape.layers:
        # The gradient of the projections' input takes as many multiply-adds as the matrices that read it.
        first, latent = shape.blocks[0], shape.blocks[0].latent
        read = (
            first.inward_macs
            if not latent
            else first.width * ((latent.query_rank or first.query_width) + latent.cached)
        )
        saved = Tally.of(call.tokens * read)
        blocks += (Item(blocks[0].name, "backward", macs=-1 * saved), Item(blocks[0].name, "idle", macs=saved))
    return merge((*pass_items(below, training), *blocks, *pass_items(above, training)))


def _model_traffic(shape: ModelShape, call: Call, training: bool, input_gradient: bool) -> int:
    size, weights = shape.itemsize, stored_matrices(shape, call.tokens)
    vectors = call.tokens * shape.width * size
    patches = call.batch * (call.queries - shape.special_tokens + shape.dropped_patches) * shape.patch_features * size
    inputs = patches if shape.patch_features else 4 * call.tokens if shape.vocabulary else vectors  # ids are int32
    if training:
        gradients = weights * size + (vectors if input_gradient and inputs == vectors and not shape.vocabulary else 0)
        return inputs + weights * size + gradients
    each = (shape.vocabulary if shape.unembedding else 0) + shape.token_classes
    logits = (call.tokens * each + call.batch * shape.classes) * size
    return inputs + weights * size + (logits or vectors)


def layer_costs(
    shape: ModelShape, length: int, batch: int = 1, training: bool = False, convention: str | Convention = "exact"
) -> dict[str, Cost]:
    """Count one layer of each kind, by the names of the layers; bytes are left out.

    Examples
    --------
    >>> near, far = ModelShape(5, 48, 4, window=8, name="0-4"), ModelShape(1, 48, 4, name="5")
    >>> found = layer_costs(ModelShape(6, 48, 4, kinds=(near, far)), 64)
    >>> {layers: cost.flops for layers, cost in found.items()}
    {'0-4': 3631872, '5': 3938304}
    """
    call, found, start = Call(length, length, batch), {}, 0
    for kind in shape.blocks:
        last = start + kind.layers - 1
        name, start = kind.name or (f"{start}-{last}" if last > start else f"{start}"), last + 1
        found[name] = Cost(pass_items(block_parts(kind, call), training)).to(convention)
    return found


def transformer_cost(
    shape: ModelShape,
    length: int,
    batch: int = 1,
    training: bool = False,
    input_gradient: bool = True,
    convention: str | Convention = "exact",
) -> Cost:
    r"""Count one pass of a transformer over `b` sequences of `n` tokens.

    .. math:: F = L\, b n \left[(8 + 4r)\, d^2 + 4 n d\right] + 2\, b n d V

    for as many key-value heads as heads, no gate and no mask; the general form takes every size of `ModelShape`.
    Training takes `3 F`, less `6 b n d^2` if the first block's input needs no gradient, and with recomputed blocks
    (convention ``recompute="block"``) one more forward pass of the blocks.

    Raises `UsageError`: a size that is not positive, or an unknown convention.

    Parameters
    ----------
    shape
        Sizes of the model; `manyheads.models.shape_from_config` reads one from a file.
    length, batch
        Tokens of a sequence, `n`, and sequences, `b`.
    training
        Whether the backward pass is counted too, with gradients for every weight.
    input_gradient
        Whether the first block's input needs a gradient. It does if an embedding below it is trained; a trained
        gain of its first norm needs it as well.
    convention
        How the result is read: the name of a preset or a `Convention`.

    Returns
    -------
    Cost
        Items: embedding, query, key, value, attention core, output projection, router, mlp in, activation, mlp out,
        experts in, experts out, norms, unembedding. Elementwise work follows the tables of `manyheads.costs.shapes`;
        losses and optimizers are not in.

    Examples
    --------
    >>> shape = ModelShape(layers=1, width=48, heads=4, causal=False)
    >>> transformer_cost(shape, 64, batch=2).flops
    8650752
    >>> transformer_cost(shape, 64, 2, training=True, input_gradient=False).flops
    24182784
    """
    call = Call(length, length, batch)
    items = model_items(shape, call, training, input_gradient)
    moved = _model_traffic(shape, call, training, input_gradient)
    return cost_of(items, moved, shape.itemsize, convention, shape.notes)
