r"""Query-key circuits Theta_i and key biases from all rows of a sequence, stage S4.

Every row t of the answer to x_0 = 0, x_1, ..., x_T is linear in the attention weights of that row,

.. math:: y_t - c = \sum_i \sum_j a^i_{tj}\, x_j W_i, \qquad
    \ln \frac{a^i_{tj}}{a^i_{t0}} = x_t^\top \Theta_i x_j + \beta_i^\top x_j,

because the zero token reads nothing and has logit zero; its weight is what the others leave of one (`row_reader`, with
sketch tokens and an orthonormal basis). Sequences cover all pairs of groups; with r or more sketch tokens, Theta_i of
rank r is known (`sketches`).

Heads of rank one read one number of a token, so that a row shows no two weights. Their logits are read off pairs
instead, where copies of q + v and q have one gate a head and the values v W_i are known: q^T Theta_i v + beta_i^T v for
q in the basis and v in the sketch and the other way round, and for q = 0 (2 nu d + d calls).

Heads that leave enough tokens without values for them are read with such tokens, in groups (`unseen_tokens`): fewer
sequences wherever that is possible.

The weights are solved per head, from the answers in the coordinates O^+ of its output space (at most r unknowns), or
jointly for all heads (at most d unknowns), which is the better conditioned and the dearer way.

Sequences and logits by multiplicities are derived here.
"""

import contextlib

import numpy as np

from manyheads.recovery._types import Array, Generator, Indices
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import Effort
from manyheads.recovery.queries.logits.pair_logits import PairReader
from manyheads.recovery.queries.logits.row_plan import UnseenPlan, plan_groups, sketch_tokens
from manyheads.recovery.queries.logits.row_reader import Attentions, RowReader, check_agreement
from manyheads.recovery.queries.logits.sketches import SketchedForm, read_forms, sketched_form
from manyheads.recovery.queries.logits.unseen_tokens import read_with_unseen_tokens
from manyheads.recovery.queries.values.projection_sum import Projections
from manyheads.recovery.refusals import FitError

SHORTEST = {True: 5, False: 3}  # tokens of the shortest sequence whose rows show both sketches, by causality
HIDDEN = 1e-5  # weights below this are lost in the errors of the others: shorter tokens have larger ones
Reader = RowReader | PairReader
SHORTER = 2  # how often tokens are halved because weights were hidden


def read_rows(
    oracle: Oracle, bias: Array, heads: Projections, rng: Generator, effort: Effort, *, noise: float = 0.0
) -> Attentions:
    """Read Theta and beta of all heads; heads whose logits are noise have Theta = 0 and beta as measured."""
    dim, count = len(bias), len(heads.projection)
    theta, beta, ranks = np.zeros((count, dim, dim)), np.zeros((count, dim)), np.zeros(count, np.intp)
    apart, scale, smallest = 0.0, np.inf, 1.0
    for group in plan_groups(oracle, heads, dim, effort):
        chosen = group.heads
        found = None
        if group.plan is not None:
            with contextlib.suppress(FitError):
                reader = RowReader.of(oracle, bias, heads.take(chosen), effort)
                found = _read_group(reader, rng, effort, noise, group.plan)
        if found is None:
            found = _read_group(_choose_reader(oracle, bias, heads, chosen, effort), rng, effort, noise)
        theta[chosen], beta[chosen], ranks[chosen] = found.theta, found.key_bias, found.ranks
        apart, scale, smallest = max(apart, found.noise), min(scale, found.scale), min(smallest, found.smallest)
    return Attentions(theta, beta, ranks, apart, scale, smallest)


def _read_group(
    reader: Reader, rng: Generator, effort: Effort, noise: float, plan: UnseenPlan | None = None
) -> Attentions:
    """Read the heads of a group, with shorter tokens where weights are hidden."""
    scale = reader.find_scale(rng)
    for remaining in reversed(range(SHORTER + 1)):
        try:
            if plan is not None and isinstance(reader, RowReader):
                return read_with_unseen_tokens(reader, plan, scale, rng, noise)
            return _read_at(scale, reader, rng, effort, noise)
        except FitError:
            # Only where weights too small to be read explain it do shorter tokens help.
            if not remaining or reader.smallest > HIDDEN:
                raise
            scale, reader.smallest = scale / 2, 1.0
    raise AssertionError


def _read_at(scale: float, reader: Reader, rng: Generator, effort: Effort, noise: float) -> Attentions:
    """Ask tokens of one norm, until the sketch is wide enough for every head."""
    heads, dim = reader.heads, len(reader.base)
    norm = np.sqrt(dim) * scale
    basis, sketch = (np.linalg.qr(rng.standard_normal((dim, dim)))[0] * norm for _ in range(2))
    widest = int(heads.ranks.max()) if heads.splits is not None else min(dim, max(4, dim // len(heads.projection)))

    def solve(head: int, tokens: Array, columns: Array, rows: Array) -> SketchedForm:
        sides = basis.T @ columns / norm**2, rows @ basis / norm**2
        return sketched_form(tokens, tokens, *sides, noise, int(heads.ranks[head]) if effort.whole else None)

    found, biases = read_forms(reader, sketch, basis, sketch_tokens(widest, dim, effort), solve)
    apart = max(one.error for one in found)
    check_agreement(apart, heads, noise)
    ranks = np.array([dim if one.rank is None else one.rank for one in found], np.intp)
    return Attentions(
        np.stack([one.form for one in found]), biases @ basis / norm**2, ranks, apart, scale, reader.smallest
    )


def _choose_reader(oracle: Oracle, bias: Array, heads: Projections, chosen: Indices, effort: Effort) -> Reader:
    """Return the reader of rows, or that of pairs where rows do not show two weights of every head, or are short."""
    count, dim = len(heads.projection), len(bias)
    ranks = heads.ranks[chosen]
    least = int(ranks[ranks > 0].min(initial=dim))
    if least < 2 or (heads.splits is None and dim // count < 2) or oracle.longest < SHORTEST[oracle.causal]:
        return PairReader(oracle, bias, heads, chosen)
    return RowReader.of(oracle, bias, heads.take(chosen), effort)
