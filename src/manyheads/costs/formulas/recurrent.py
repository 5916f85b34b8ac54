"""Recurrent networks, and an MLP that pools over positions."""

from manyheads.costs.conventions import Convention
from manyheads.costs.cost import Cost
from manyheads.costs.formulas.model import Call, Part, cost_of, dense_part, pass_items
from manyheads.costs.shapes import PooledShape, RecurrentShape
from manyheads.costs.tally import Tally


def _tanh_part(values: int) -> Part:
    return Part("activation", exp=Tally.of(values), backward=Tally.of(3 * values))


def rnn_cost(
    shape: RecurrentShape,
    length: int,
    batch: int = 1,
    training: bool = False,
    convention: str | Convention = "exact",
    scanned: bool = True,
) -> Cost:
    r"""Count a recurrent network over `n` positions: `h <- cell(x_t, h)`, tanh a layer, head on the last state.

    .. math:: 2\, b n \left[(d_{in} + H) H + (L_c - 1) H^2\right] + 2\, b H C

    Training takes `3 F - 2 b n H d_in`, since inputs need no gradient.

    Unless `scanned`, the first step of the backward pass leaves out the gradient of the constant initial state,
    `2 b H^2`.
    """
    steps, hidden = Call(length, length, batch).tokens, shape.hidden
    constant = 0 if scanned else batch * hidden * hidden
    parts = [
        dense_part("input to state", steps, shape.inputs * hidden, bias=hidden, idle=steps * shape.inputs * hidden),
        # Two products of the first layer meet in one state: an addition in each pass.
        dense_part("state to state", steps, hidden * hidden, bias=hidden, idle=constant),
        _tanh_part(steps * hidden * shape.cell_layers),
    ]
    if shape.cell_layers > 1:
        inner = shape.cell_layers - 1
        parts.append(dense_part("deeper cell", steps, inner * hidden * hidden, bias=inner * hidden))
    weights = (shape.inputs + hidden) * hidden + (shape.cell_layers - 1) * hidden * hidden
    return _with_head(shape, parts, weights, steps, batch, training, convention)


def pooled_cost(
    shape: PooledShape, length: int, batch: int = 1, training: bool = False, convention: str | Convention = "exact"
) -> Cost:
    r"""Count an MLP on each of `n` positions, tanh after each layer, a mean over positions, and a head.

    .. math:: 2\, b n \left[d H + (L - 1) H^2\right] + 2\, b H C

    and `b n H` additions for the mean. Training takes `3 F - 2 b n d H`.
    """
    rows, hidden = Call(length, length, batch).tokens, shape.hidden
    first = shape.inputs * hidden
    parts = [dense_part("first layer", rows, first, bias=hidden, idle=rows * first)]
    if shape.layers > 1:
        inner = shape.layers - 1
        parts.append(dense_part("further layers", rows, inner * hidden * hidden, bias=inner * hidden))
    adds = Tally.of(rows * hidden + batch * hidden)  # a sum over positions, and a division by their number
    parts += [_tanh_part(rows * hidden * shape.layers), Part("mean", forward=adds, backward=adds)]
    weights = first + (shape.layers - 1) * hidden * hidden
    return _with_head(shape, parts, weights, rows, batch, training, convention)


def _with_head(shape: RecurrentShape | PooledShape, parts: list[Part], weights: int, rows: int, batch: int,
               training: bool, convention: str | Convention) -> Cost:  # fmt: skip
    """Return the cost of parts and of the head on top of them."""
    if shape.classes:
        parts.append(dense_part("head", batch, shape.hidden * shape.classes, bias=shape.classes))
    weights += shape.hidden * shape.classes
    outputs = weights if training else batch * (shape.classes or shape.hidden)
    moved = shape.itemsize * (rows * shape.inputs + weights + outputs)
    return cost_of(pass_items(parts, training), moved, shape.itemsize, convention)
