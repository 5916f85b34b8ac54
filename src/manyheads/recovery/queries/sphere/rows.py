r"""Query-key circuits from all rows of sequences of normalized tokens, stage S4 on the sphere.

No zero token exists there, so logits and values are taken relative to a base token u0, the first of every sequence:

.. math:: y_t - c - u_0 W_S = \sum_i \sum_j a_{ij} (x_j - u_0) W_i, \qquad
          \ln \frac{a_{ij}}{a_{i0}} = \tilde x_t^\top M_i (x_j - u_0)

with M_i = [Theta_i; beta_i^T] and x~ = (x, 1). Sequences are [u0, U_g, A_p, U_g]: few sketch tokens U, fresh tokens A
that span. Rows of A show M_i on the sketch tokens, the second rows of U show their logits on all of A, and a form of
smaller rank than the sketch follows from both as in `rotary.forms`. Logits cannot be made small by short tokens; tokens
are clustered around u0 instead, which shortens x_j - u0, as little as the smallest weight allows. Tokens of U stand
twice, and share their weight. Without a causal mask the first rows of U see all of A already, and U stands once.
"""

from dataclasses import dataclass, replace

import numpy as np
import scipy.linalg

from manyheads.recovery._types import Array, Ask, Generator, Indices
from manyheads.recovery.queries.projection_sum import Sums
from manyheads.recovery.queries.rotary.forms import NOTHING, extend, split_core
from manyheads.recovery.queries.rotary.logits import solve_weights

# Norm of the random part of a token beside a base of norm one, before both are put on the sphere
SPREADS = (3.0, 1.5, 1.0, 0.6, 0.4, 0.25, 0.15, 0.1)
LEAST = 8e-3  # smallest weight of a pilot at which a spread is accepted


@dataclass(frozen=True)
class SketchSettings:
    """Settings of extractions that read sketches of the attention matrices relative to a base token."""

    extra: int = 4  # differences, and sketch tokens, beyond the rank
    share: float = 0.6  # distinct tokens of a sequence, relative to the most whose weights can be separated


@dataclass(frozen=True)
class SphereRows:
    """Asks about sequences on the sphere and reads logits relative to the base."""

    # The oracle, W_S and c, W (m, d, d), as they act on tokens of the sphere
    ask: Ask
    sums: Sums
    projection: Array
    basis: Array  # orthonormal rows (b, d) that span the tokens
    base: Array  # u0 (d,), of norm sqrt d
    causal: bool = True

    def tokens(self, directions: Array, spread: float) -> Array:
        """Return tokens on the sphere near the base: directions (n, d) of norm about one, moved by `spread`."""
        radius = np.linalg.norm(self.base)
        x = self.base / radius + spread * directions
        return x * (radius / np.linalg.norm(x, axis=1, keepdims=True))

    def read(self, x: Array, row: int, columns: Indices, copies: Array, y: Array) -> tuple[Array, float]:
        """Return logits (n, K, m) of the distinct tokens `columns` in a row of x (n, k, d), and the least weight."""
        values = np.einsum("nkd,mde->nkme", x[:, columns] - self.base, self.projection, optimize=True)
        weights = solve_weights(values, y[:, row])
        rest = 1 - weights.sum(1, keepdims=True)
        weights = weights / copies[:, None]
        least = float(min(weights.min(), rest.min()))
        return np.log(np.maximum(weights, 1e-14)) - np.log(np.maximum(rest, 1e-14)), least

    def answers(self, x: Array) -> Array:
        """Ask, and take off what the base alone gives."""
        return self.ask(x, read="all") - self.sums.read(self.base)


def choose_base(rows: SphereRows, length: int, rng: Generator) -> tuple[SphereRows, float]:
    """Try bases and spreads on a few sequences each; return the widest spread at which no weight is tiny."""
    radius = np.linalg.norm(rows.base)
    tried: list[tuple[float, SphereRows, float]] = []
    for spread in SPREADS:
        for _ in range(2):
            base = rng.standard_normal(len(rows.basis)) @ rows.basis
            found = replace(rows, base=base * radius / np.linalg.norm(base))
            x = found.tokens(_directions(rows.basis, 4 * length, rng), spread).reshape(4, length, -1)
            x = np.concatenate([np.repeat(found.base[None, None], 4, axis=0), x], axis=1)
            columns = np.arange(1, length + 1)
            least = found.read(x, length, columns, np.ones(length), found.answers(x))[1]
            tried.append((least, found, spread))
            if least > LEAST:
                return found, spread
    return max(tried, key=lambda one: one[0])[1:]


def _directions(basis: Array, count: int, rng: Generator) -> Array:
    return rng.standard_normal((count, len(basis))) @ basis / np.sqrt(len(basis))


@dataclass(frozen=True)
class Sketched:
    """Logits of all heads: of fresh queries on sketch keys (N, n, m), of sketch queries on fresh keys (n, N, m)."""

    few: Array
    fresh: Array
    sketch: Array
    back: Array
    least: float


def read_sketches(rows: SphereRows, few: int, size: int, spread: float, rng: Generator) -> Sketched:
    """Ask about sketch tokens and fresh ones on the sphere, `size` distinct tokens a sequence."""
    group, block = _blocks(size)
    few = -(-few // group) * group
    spare = len(rows.basis) + 1 + (-(len(rows.basis) + 1)) % block
    axes = np.concatenate([rows.basis, -rows.basis[: spare - len(rows.basis)]])
    sketch = rows.tokens(_directions(rows.basis, few, rng), spread)
    return read_pairs_of(rows, sketch, rows.tokens(axes, spread), size)


def _blocks(size: int) -> tuple[int, int]:
    """Return the sketch tokens and the fresh ones of a sequence: the split that needs the fewest tokens."""
    group = max(1, round(0.42 * size))
    return group, max(1, size - group)


def read_pairs_of(rows: SphereRows, sketch_tokens: Array, fresh: Array, size: int) -> Sketched:
    """Ask about all blocks of sketch tokens (n, d) against all blocks of fresh ones (N, d)."""
    group, block = _blocks(size)
    sketch_tokens = np.resize(sketch_tokens, (-(-len(sketch_tokens) // group) * group, sketch_tokens.shape[1]))
    fresh = np.resize(fresh, (-(-len(fresh) // block) * block, fresh.shape[1]))
    few, spare, heads = len(sketch_tokens), len(fresh), len(rows.projection)
    forward, back = np.zeros((spare, few, heads)), np.zeros((few, spare, heads))
    least = 1.0
    blocks = np.arange(spare).reshape(-1, block)
    for first in range(0, few, group):
        mine = np.arange(first, first + group)
        own = np.repeat(sketch_tokens[None, mine], len(blocks), axis=0)
        base = np.repeat(rows.base[None, None], len(blocks), axis=0)
        x = np.concatenate([base, own, fresh[blocks], *([own] if rows.causal else [])], axis=1)
        y = rows.answers(x)
        for j in range(block):
            row = 1 + group + j
            seen = np.arange(1, (row if rows.causal else group + block) + 1)
            logits, smallest = rows.read(x, row, seen, np.ones(len(seen)), y)
            forward[blocks[:, j][:, None], mine] = logits[:, :group]
            least = min(least, smallest)
        for j in range(group):
            row, columns = 1 + group + block + j if rows.causal else 1 + j, np.arange(1, 1 + group + block)
            copies = np.where((columns <= j + 1) & rows.causal, 2.0, 1.0)
            logits, smallest = rows.read(x, row, columns, copies, y)
            back[mine[j], blocks] = logits[:, group:]
            least = min(least, smallest)
    return Sketched(sketch_tokens, fresh, forward, back, least)


def solve_forms(
    rows: SphereRows, seen: Sketched, cut: float, most: int | None = None
) -> tuple[Array, Array, list[int]]:
    """Return Theta (m, d, d), beta (m, d) and the ranks of the forms [Theta; beta] from their sketches."""
    radius = np.linalg.norm(rows.base)
    into = np.linalg.pinv(
        extend(seen.fresh / radius) @ scipy.linalg.block_diag(rows.basis, 1.0).T, rcond=1e-12
    )  # (b + 1, N)
    out = np.linalg.pinv((seen.fresh - rows.base) @ rows.basis.T, rcond=1e-12)  # (b, N)
    keys = (seen.few - rows.base) @ rows.basis.T  # (n, b)
    theta, beta, ranks = [], [], []
    for head in range(len(rows.projection)):
        columns, back = into @ seen.sketch[:, :, head], seen.back[:, :, head] @ out.T
        silent = bool(np.abs(seen.sketch[:, :, head]).max() < NOTHING)
        u, s, v = split_core(back @ keys.T, keys.shape[1], cut, silent=silent, most=most)
        form = (columns @ v.T / s) @ (u.T @ back)  # (b + 1, b)
        theta.append(rows.basis.T @ form[:-1] @ rows.basis / radius)
        beta.append(form[-1] @ rows.basis)
        ranks.append(len(s))
    return np.array(theta), np.array(beta), ranks
