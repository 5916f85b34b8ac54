r"""Logits of learned sinks, relative to which scores are known whole.

What the tokens of a row leave of 1 is the weight of the sink, so that scores are known relative to its logit z_i, what
depends on the query alone included:

.. math:: \ln a_i(q, y_0) - \ln\Big(1 - \sum_j a_i(q, x_j)\Big) = s_i(q, y_0, t_0) - z_i .

Of scores that were read relative to those of a token y_0, this is what they lack. With s_i = x~_r^T Theta x~_j and a
column space L of Theta that does not hold e = (0, ..., 0, 1), as it does not where heads are of rank d or less, the
constant -z_i is beside L, and z_i is determined; terms of position are 0 at the offset 0. Derived here.
"""

from dataclasses import replace

import numpy as np

from manyheads.recovery._types import Array, Figures
from manyheads.recovery.layers.scores import ScoreLayer
from manyheads.recovery.queries.logits.attention_weights import log_ratios
from manyheads.recovery.queries.rotary.forms import extend
from manyheads.recovery.queries.scores import forms
from manyheads.recovery.queries.scores.reading import ScoreReader
from manyheads.recovery.refusals import FitError


def complete(
    layer: ScoreLayer, reader: ScoreReader, queries: Array, noise: float, allowed: float, figures: Figures
) -> ScoreLayer:
    """Return a layer with the logits of its sinks, and with what its forms lack of the query alone."""
    assert reader.reference is not None
    assert layer.turns is not None
    x = np.stack([np.broadcast_to(reader.reference, queries.shape), queries], axis=1)
    weights = reader.weights(x, reader.oracle(x, read="last"))  # (n, 2, m)
    apart = layer.logits(x)[:, :, 1, 0].T - log_ratios(weights)[:, 0]
    trust = np.sqrt(np.clip(weights[:, 0] * (1 - weights.sum(1)), 0.0, 1.0))
    terms, one = layer.position_bias, np.eye(layer.dim + 1)[:, -1:]
    found, shift, worst = [], [], 0.0
    for head, form in enumerate(layer.form(1)):
        space = np.concatenate([forms.row_space(form[:, :-1].T, noise), one], axis=1)  # L, and e
        features, own = extend(queries) @ space, trust[:, head]
        solved = np.linalg.lstsq(features * own[:, None], apart[:, head] * own, rcond=1e-12)[0]
        misfit = np.linalg.norm((features @ solved - apart[:, head]) * own) / np.linalg.norm(own)
        worst = max(worst, float(misfit))
        constant = np.linalg.lstsq(space, form[:, -1], rcond=None)[0][-1]
        found.append(solved[-1] - constant - (0.0 if terms is None else terms[head, 0]))
        more = space[:, :-1] @ solved[:-1] + constant * one[:, 0]  # what the last column has too much
        shift.append(layer.turns.shift[head] + np.linalg.lstsq(layer.turns.left[head], more, rcond=None)[0])
    figures["sinks"] = worst
    FitError.if_above(worst, allowed, "the logits of sinks are no constants: what they depend on is of another kind")
    turns = replace(layer.turns, shift=tuple(shift))
    forms_ = np.array([turns.form(t) for t in range(layer.offsets)])
    terms = None if terms is None else terms - terms[:, :1]
    return replace(layer, forms=forms_, turns=turns, sink=np.array(found), position_bias=terms)
