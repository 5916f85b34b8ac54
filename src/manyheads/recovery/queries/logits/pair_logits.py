"""Logits of pairs at known values, for heads of any rank.

With v W_i known for all heads, and linearly independent, the answer to copies of q + v and q is a linear system for the
gates, whose logits are q^T Theta_i v + beta_i^T v. Any rank of the heads will do, rank one included.
"""

import numpy as np
from scipy.special import expit

from manyheads.recovery._types import Array, Generator, Indices
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.gates.pairs import Pairs
from manyheads.recovery.queries.nets.sigmoid_network import read_gates
from manyheads.recovery.queries.values.projection_sum import Projections, Sums

# Where the 98% quantile of the pilot's logits has to lie: larger ones hide weights, smaller ones drown in noise
LOGITS = (1.0, 3.2)
SMALLEST = 1e-9  # weights are read down to this size


def read_logits(answers: Array, values: Array, shifts: Array, least: float = 1e-3) -> Array:
    """Read the logits (n, m) off answers (n, K, d) to heads of known values, at the shift nearest to half a gate."""
    gates = answers @ np.linalg.pinv(values) + expit(-shifts)[:, None]  # (n, K, m)
    return read_gates(gates, shifts, least)


class PairReader:
    """Reads logits off pairs: at known values v W_i the gates of all heads follow from one answer."""

    sketched = 8

    def __init__(self, oracle: Oracle, bias: Array, heads: Projections, chosen: Indices):
        self.heads, self.base, self.smallest = heads.take(chosen), np.zeros(len(bias)), 1.0
        self.chosen, self.projection = chosen, heads.projection
        self.pairs = Pairs.within(oracle, Sums(heads.projection.sum(0), bias), 1, 4, 0.0)

    def find_scale(self, rng: Generator) -> float:
        """Return the scale of tokens at which the logits of random pairs are moderate."""
        dim = len(self.base)
        queries, probe = rng.standard_normal((16, dim)), rng.standard_normal((1, dim))
        # queries and probes stand together in one token
        norms = np.linalg.norm(np.concatenate([queries, probe]), axis=1)
        most = self.pairs.reach / 2 / max(np.sqrt(dim), float(norms.max()))
        scale = min(1.0, most)
        for _ in range(12):
            size = float(np.quantile(np.abs(self.logits(scale * queries, scale * probe)), 0.98))
            if LOGITS[0] <= size <= LOGITS[1]:
                break
            # Logits are bilinear: beyond what can be read they are at least this large.
            scale = min(most, scale * float(np.clip(np.sqrt(0.6 * LOGITS[1] / max(size, 1e-9)), 1 / 8, 8)))
        return scale

    def ask(self, group: Array, basis: Array) -> tuple[Array, Array, Array]:
        """Return what `RowReader.ask` does."""
        zero = self.base[None]
        biases = self.logits(zero, basis)[:, 0]  # (d, m): beta . v
        sketched = self.logits(zero, group)[:, 0]  # (g, m)
        columns = self.logits(basis, group) - sketched[:, None]  # (g, d, m)
        rows = self.logits(group, basis) - biases[:, None]  # (d, g, m)
        return columns.transpose(2, 1, 0), rows.transpose(2, 1, 0), biases.T

    def logits(self, queries: Array, probes: Array) -> Array:
        """Read q^T Theta_i v + beta_i^T v (b, n, m) of all queries (n, d) and probes (b, d)."""
        answers = self.pairs.respond(queries, probes)  # (b, n, K, d)
        values = np.swapaxes(probes @ self.projection, 0, 1)  # (b, m, d)
        shifts = self.pairs.shifts
        found = [read_logits(one, value, shifts, SMALLEST) for one, value in zip(answers, values, strict=True)]
        return np.array(found)[..., self.chosen]
