r"""Extraction behind a norm of a layer with any attention score: the norm is inverted, and tokens are free again.

A norm whose epsilon is not zero maps all tokens x (of mean zero, for a LayerNorm) one to one onto an open ball,

.. math:: u = \frac{x}{\sqrt{|x|^2 / d + \epsilon}}, \qquad |u|^2 < d, \qquad
          x = u \sqrt{\frac{\epsilon}{1 - |u|^2 / d}},

so that any u of the ball can be asked, the zero token included. Asked in z = R u the layer is one without a norm whose
tokens are no longer than R sqrt(d), which `algorithm` extracts; R is a unit. Tokens that are asked have the size of
sqrt(epsilon): a residual connection adds little to the answers, and takes no digits from them.

Of a norm with gain g and shift b in front, G = diag(g), and P the projector off the vector of ones for a LayerNorm, the
function determines epsilon, P G W_i, c + sum_i b W_i, and the forms of the tokens (u, 1) for the queries (P G W_Q, b
W_Q + b_Q) and keys (P G W_K, b W_K + b_K) up to what no softmax sees. It does not determine gain or shift for
themselves. Derived here.
"""

import dataclasses

import numpy as np

from manyheads.recovery._types import Array, Generator
from manyheads.recovery.oracle.normalization import Normalization
from manyheads.recovery.oracle.oracle import Behind, Oracle, Read
from manyheads.recovery.queries.effort import SPARING, Effort
from manyheads.recovery.queries.gates.sphere_pairs import read_norm
from manyheads.recovery.queries.scores.method import extract_scores
from manyheads.recovery.refusals import FitError, NotALayer
from manyheads.recovery.result.results import Extracted, StageLog

UNIT = 3.0  # R: tokens of the method, of norm sqrt(d), are a third as long as the ball is wide


class BehindNorm(Behind):
    """An oracle behind a norm, asked about z = UNIT u."""

    def __init__(self, oracle: Oracle, norm: Normalization):
        super().__init__(oracle, limits=dataclasses.replace(oracle.limits, max_norm=UNIT * float(np.sqrt(oracle.dim))))
        self.norm = norm

    def answer(self, x: Array, read: Read) -> Array:
        """Ask about the tokens that the norm makes u of."""
        self.limits.check(x)
        return self.behind(self.norm.inverse(x / UNIT), read)


def extract_scores_behind_norm(oracle: Oracle, noise: float, rng: Generator, effort: Effort = SPARING) -> Extracted:
    """Extract a causal layer behind a norm whose scores depend on positions, with what may stand in them."""
    if not oracle.causal:
        raise NotALayer("other scores behind a norm are read of causal layers")
    log = StageLog(oracle)
    with log.stage("norm") as figures:
        norm, _ = read_norm(oracle, oracle.dim, noise, rng)
        figures |= {"epsilon": norm.epsilon, "centred": norm.centred}
        why = "the norm in front shows no epsilon: on a sphere plain rotary scores alone are read"
        FitError.if_below(norm.epsilon, 1e-300, why)
    found = extract_scores(BehindNorm(oracle, norm), noise, rng, effort)
    layer = found.layer.of_scaled_tokens(UNIT)  # type: ignore[attr-defined]
    parts = found.acts_on.partition(";")[2]
    acts_on = f"u = {norm.formula}, offset by offset" + (f";{parts}" if parts else "")
    return dataclasses.replace(found, layer=layer, stages=(*log.stages, *found.stages), acts_on=acts_on, prepare=norm)
