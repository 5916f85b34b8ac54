r"""Query-key circuits from all rows of sequences of normalized tokens, stage S4 on the sphere.

No zero token exists there, so logits and values are taken relative to a base token u0, the first of every sequence
(`ledger`):

.. math:: \ln \frac{a_{ij}}{a_{i0}} = \tilde x_t^\top M_i (x_j - u_0)

with M_i = [Theta_i; beta_i^T] and x~ = (x, 1). Sequences are those of `row_reader`, and a form of smaller rank than the
sketch follows as in `sketches`. Logits cannot be made small by short tokens; tokens are clustered around u0 instead,
which shortens x_j - u0, as little as the smallest weight allows.
"""

from dataclasses import replace

import numpy as np
import scipy.linalg

from manyheads.recovery._types import Array, Figures, Generator
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.logits.row_reader import RowReader, Rows
from manyheads.recovery.queries.logits.sketches import SketchedForm, read_forms, sketched_form
from manyheads.recovery.queries.nets.sigmoid_network import EXACT
from manyheads.recovery.queries.rotary.forms import extend
from manyheads.recovery.queries.values.output_spaces import Projections, Sums

# Norm of the random part of a token beside a base of norm one, before both are put on the sphere
SPREADS = (3.0, 1.5, 1.0, 0.6, 0.4, 0.25, 0.15, 0.1)
LEAST = 8e-3  # smallest weight of a pilot at which a spread is accepted


def based_reader(oracle: Oracle, sums: Sums, heads: Projections, base: Array, size: int) -> RowReader:
    """Return the reader of logits relative to a token, with `size` distinct tokens a sequence beside it.

    They are split into sketch tokens and fresh ones so that the fewest tokens are needed.
    """
    group = max(1, round(0.42 * size))
    return RowReader(oracle, sums.read(base), heads, base, group, max(1, size - group))


def least_weight(reader: RowReader, tokens: Array) -> float:
    """Return the smallest weight that the last row of sequences (n, k, d) gives to the base and to tokens behind it."""
    length = tokens.shape[1]
    x = np.concatenate([np.broadcast_to(reader.base, (len(tokens), 1, tokens.shape[2])), tokens], axis=1)
    weights = reader.weights(x, [Rows(length, length, np.ones(length), 1)])[0]
    return float(min(weights.min(), (1 - weights.sum(1)).min()))


def near_tokens(base: Array, basis: Array, directions: Array, spread: float) -> Array:
    """Return tokens on the sphere near the base: directions (n, b) of norm about one, moved by `spread`."""
    radius = np.linalg.norm(base)
    x = base / radius + spread * directions @ basis
    return x * (radius / np.linalg.norm(x, axis=1, keepdims=True))


def choose_base(reader: RowReader, basis: Array, rng: Generator) -> tuple[RowReader, float]:
    """Try bases and spreads on a few sequences each; return the widest spread at which no weight is tiny."""
    size, length = np.linalg.norm(reader.base), reader.sketched + reader.fresh
    bias = reader.origin - reader.base @ reader.heads.projection.sum(0)
    tried: list[tuple[float, RowReader, float]] = []
    for spread in SPREADS:
        for _ in range(2):
            base = rng.standard_normal(len(basis)) @ basis
            base *= size / np.linalg.norm(base)
            found = replace(reader, base=base, origin=bias + base @ reader.heads.projection.sum(0))
            directions = rng.standard_normal((4 * length, len(basis))) / np.sqrt(len(basis))
            least = least_weight(found, near_tokens(base, basis, directions, spread).reshape(4, length, -1))
            tried.append((least, found, spread))
            if least > LEAST:
                return found, spread
    return max(tried, key=lambda one: one[0])[1:]


def read_based_forms(
    reader: RowReader, basis: Array, tokens: tuple[Array, Array], wanted: int, noise: float, figures: Figures
) -> tuple[Array, Array]:
    """Return Theta (m, d, d) and beta (m, d) on the span of orthonormal rows, from sketch tokens and fresh ones."""
    sketch, fresh = tokens
    size, base, wide = float(np.linalg.norm(fresh[0])), reader.base, scipy.linalg.block_diag(basis, 1.0)
    into = np.linalg.pinv(extend(fresh / size) @ wide.T, rcond=1e-12)  # (b + 1, N)
    out = np.linalg.pinv((fresh - base) @ basis.T, rcond=1e-12)  # (b, N)
    # With noise no gap shows: attention is taken to have no larger rank than the values, and verification decides.
    most = None if noise <= EXACT else max(int(reader.heads.ranks.max()), 1)

    def solve(head: int, few: Array, columns: Array, rows: Array) -> SketchedForm:
        queries, keys = extend(few / size) @ wide.T, (few - base) @ basis.T
        return sketched_form(queries, keys, into @ columns, rows @ out.T, noise, most)

    found, _ = read_forms(reader.ask, reader.sketched, sketch, fresh, wanted, solve)
    figures |= {"tokens": reader.sketched + reader.fresh, "least": reader.smallest}
    figures["rank"] = max(one.left.shape[1] for one in found)
    theta = np.array([basis.T @ one.form[:-1] @ basis / size for one in found])
    return theta, np.array([one.form[-1] @ basis for one in found])
