r"""Extraction from a server that takes the rows of a table of embeddings and no other tokens.

One-token sequences show x W_S + c on the table, rows of longer ones show logits of its tokens: everything is affine or
bilinear in tokens, so that what is found is the layer on the affine span of the table. It is the whole layer if and
only if the differences of the tokens span the space: the matrix [E, 1] has rank d + 1. This is checked before anything
is asked (`check_vocabulary`); how far the table is from failing multiplies all errors.

S0  One token: W_S and c from d + 1 tokens that span best; further ones check that answers are affine. d + 9 calls.
S1  A pair of tokens that shows its heads, by copies alone (`gates.table_pairs`).
S2  Triangles with that pair, until the output spaces are exhausted: 4 calls for each token that is tried where the
    layer is causal, 2 (m + 2) where it is not.
S3  Projections from W_S and the output spaces (`values`). No calls.
S4  Sketches of the attention matrices from all rows, relative to a base token, as on the sphere (`logits.base_token`).

Derived here.
"""

import numpy as np
from scipy.linalg import qr

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery._types import Array, Figures, Generator, Indices
from manyheads.recovery.oracle.noise_estimate import LARGEST, PLAIN, ROUNDING, OracleNoise, root_mean_square
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import BASED, Effort
from manyheads.recovery.queries.gates.table_pairs import Hubs, TablePairs, find_hubs, find_pair_heads, order_triangle
from manyheads.recovery.queries.logits.base_token import based_reader, least_weight, read_based_forms
from manyheads.recovery.queries.logits.row_reader import RowReader
from manyheads.recovery.queries.nets.sigmoid_network import EPS
from manyheads.recovery.queries.rotary.forms import extend
from manyheads.recovery.queries.values.output_spaces import Projections, Sums, read_projections
from manyheads.recovery.queries.values.probes import Stacks
from manyheads.recovery.queries.values.ranks import find_ranks
from manyheads.recovery.refusals import FitError, LimitError, NotALayer, RankBudgetError
from manyheads.recovery.result.results import Extracted, StageLog

FLATTEST = 1e-8  # smallest singular value of [E, 1] over the largest from which the differences span the space
SPARE = 8  # tokens beyond those that span
CHECKED = 8  # tokens beyond those that determine W_S
BASES = 6  # tokens that are tried as a base
BLOCK = 8  # tokens whose triangles are asked about together


def extract_from_vocabulary(oracle: Oracle, noise: float, rng: Generator, effort: Effort = BASED) -> Extracted:
    """Extract a layer from sequences of the tokens of `oracle.limits.vocabulary`."""
    noise = max(noise, EPS)
    table = np.asarray(oracle.limits.vocabulary, np.float64)
    log = StageLog(oracle)
    with log.stage("sums") as figures:
        sums, spanning = _read_sums(oracle, table, noise, rng, figures)
    pairs = TablePairs(oracle, sums, table, noise)
    with log.stage("pairs") as figures:
        hubs = find_hubs(pairs, rng)
        figures |= {"heads": len(hubs.heads.values), "error": hubs.heads.error}

    def read() -> Stacks:
        return _read_stacks(pairs, hubs, rng, effort)

    heads = read_projections(log, sums, read, noise, alone=len(hubs.heads.values) == 1)
    with log.stage("rows") as figures:
        # all logits of the spanning tokens with a few others, more of them where a rank asks for it
        dim = oracle.dim
        size = max(2, int(effort.share * min(dim / len(heads.ranks), *np.maximum(heads.ranks, 1))))
        size = int(min(size, max(2, np.floor((oracle.longest - 1) / 1.5))))
        reader, others = _choose_base(pairs, heads, np.delete(table, spanning, axis=0), size, rng, figures)
        wanted = min(dim, max(int(heads.ranks.max()), 1) + effort.extra, len(others))
        tokens = others[rng.choice(len(others), min(dim, len(others)), replace=False)], table[spanning]
        theta, beta = read_based_forms(reader, np.eye(dim), tokens, wanted, noise, figures)
    layer = AttentionLayer(theta, heads.projection, beta, sums.bias, causal=oracle.causal)
    acts_on = f"the {len(table)} tokens of the vocabulary, and all others by linearity"
    return Extracted(layer, tuple(log.stages), acts_on)


def _read_sums(oracle: Oracle, table: Array, noise: float, rng: Generator, figures: Figures) -> tuple[Sums, Indices]:
    """Read W_S and c from tokens that span best; return them too."""
    dim = table.shape[1]
    order = qr(extend(table / np.sqrt(np.mean(table**2))).T, pivoting=True, mode="r")[1]
    spanning, others = order[: dim + 1], order[dim + 1 :]
    others = rng.choice(others, min(CHECKED, len(others)), replace=False)
    answers = oracle(table[np.concatenate([spanning, others])][:, None])
    solved = np.linalg.lstsq(extend(table[spanning]), answers[: dim + 1], rcond=None)[0]
    sums = Sums(solved[:-1], solved[-1])
    figures["condition"] = condition = float(np.linalg.cond(extend(table[spanning])))
    moved = answers[: dim + 1] - answers[: dim + 1].mean(0)
    size = np.linalg.norm(moved) / np.sqrt(len(moved)) + np.finfo(float).tiny
    rest = np.linalg.norm(sums.read(table[others]) - answers[dim + 1 :], axis=1)
    figures["affine"] = affine = float(rest.max(initial=0.0) / size)
    allowed = max(1e-8, 1e3 * noise * condition)
    NotALayer.if_above(affine, allowed, "answers to one token are not affine in it: no layer, or another vocabulary")
    return sums, spanning


def _read_stacks(pairs: TablePairs, hubs: Hubs, rng: Generator, effort: Effort) -> Stacks:
    """Read triangles with the hubs until the output spaces are exhausted."""
    table, count = pairs.table, len(hubs.heads.values)
    dim = table.shape[1]
    order = [int(one) for one in rng.permutation(len(table)) if one not in (hubs.first, hubs.second)]
    probes = [table[hubs.first] - table[hubs.second]]
    values, errors, dropped, wanted = [hubs.heads.values], [hubs.heads.error], 0, 0
    for start in range(0, len(order), BLOCK):
        block = np.array(order[start : start + BLOCK])
        tokens = table[block]
        # first -> second -> token, and first -> token
        far = pairs.respond(np.repeat(table[[hubs.second]], len(block), axis=0), tokens, count)
        whole = pairs.respond(np.repeat(table[[hubs.first]], len(block), axis=0), tokens, count)
        for token, there, here in zip(tokens, far, whole, strict=True):
            second, third = find_pair_heads(pairs, there, count), find_pair_heads(pairs, here, count)
            ordered = None
            if second is not None and third is not None:
                ordered = order_triangle(hubs.heads.values, second.values, third.values)
            if ordered is None or second is None or third is None:
                dropped += 1
                continue
            better = second.error < third.error
            probes.append((table[hubs.second] if better else table[hubs.first]) - token)
            values.append(ordered[0] if better else ordered[1])
            errors.append(min(second.error, third.error))
        # Rows of larger errors count less, and none more than the best.
        weight = np.median(errors) / np.maximum(errors, np.median(errors))
        rows = np.array(probes) * weight[:, None]
        stacked = np.swapaxes(np.array(values), 0, 1) * weight[:, None]
        levels = np.full(count, float(np.median(errors)))
        ranks = find_ranks(stacked, levels) if len(rows) > 3 else None
        stacks = Stacks(rows, stacked, levels, ranks, dropped, 0)
        if ranks is not None and ranks.sum() <= dim:
            wanted = int(ranks.max()) + effort.extra
            if len(rows) >= wanted:
                return stacks
        if len(rows) >= dim + effort.extra:
            return stacks
    most = max(wanted, dim)
    raise RankBudgetError(f"{len(probes)} tokens show {count} heads: give more or shorter tokens", len(probes), most)


def _choose_base(
    pairs: TablePairs, heads: Projections, table: Array, size: int, rng: Generator, figures: Figures
) -> tuple[RowReader, Array]:
    """Return the reader of the base token whose pilots have the largest of all smallest weights, and other tokens."""
    tried: list[tuple[float, int, RowReader]] = []
    for place in rng.choice(len(table), min(BASES, len(table)), replace=False):
        rest = np.delete(table, place, axis=0)
        reader = based_reader(pairs.oracle, pairs.sums, heads, table[place], size)
        pilot = np.stack([rest[rng.choice(len(rest), size, replace=False)] for _ in range(3)])
        tried.append((least_weight(reader, pilot), int(place), reader))
    figures["pilot"], place, reader = max(tried, key=lambda one: one[0])
    if not figures["pilot"] > 0:
        what = "rows gave attention weights below zero: rough values, or attention too sharp on these tokens"
        raise FitError(what, figures["pilot"], 0.0)
    return reader, np.delete(table, place, axis=0)


def check_vocabulary(table: Array, dim: int) -> None:
    """Refuse tables whose tokens do not determine a layer, before anything is asked."""
    if table.shape[1] != dim:
        raise UsageError(f"vocabulary of shape {table.shape}: expected embeddings (tokens, {dim})")
    centred = (table - table.mean(0)) / np.sqrt(np.mean(table**2) or 1.0)
    singular = np.linalg.svd(centred, compute_uv=False)
    rank = int((singular > FLATTEST * max(singular[0], 1e-300)).sum())
    if rank < dim:
        what = f"the differences of the {len(table)} tokens of the vocabulary span {rank} of {dim} dimensions"
        remedy = f"give {dim + 1} tokens or more that span, or extract the function of their {rank} coordinates"
        raise LimitError(f"{what}: {remedy}")
    if len(table) < 2 * dim + SPARE:
        raise LimitError(f"the vocabulary has {len(table)} tokens: {2 * dim + SPARE} are needed in {dim} dimensions")


def vocabulary_noise(oracle: Oracle, rng: Generator, *, stochastic: bool = False) -> OracleNoise:
    """Measure the noise of an oracle on sequences of three tokens of its vocabulary.

    Asked again, in another order, and with another last token. No sum of two tokens is one, so that answers to one
    token are compared with a linear function where it is read.
    """
    table = oracle.limits.vocabulary
    assert table is not None
    with oracle.stage("noise"):
        a, b, e, f = table[np.array([rng.choice(len(table), 4, replace=False) for _ in range(8)])].swapaxes(0, 1)
        stacks = [np.stack(tokens, 1) for tokens in ((a, b, e), (b, a, e), (a, b, f))]
        asked = np.concatenate(stacks)
        rows, exchanged, continued = np.split(oracle(asked, read="all"), 3)
        again = oracle(asked[:8], read="all")
    size = root_mean_square(rows - rows.mean((0, 1)))
    floor = oracle.limits.spacing(root_mean_square(rows) or 1.0, oracle.answer_dtype or np.float64) / max(size, 1e-300)
    changes = (again - rows, exchanged[:, -1] - rows[:, -1], continued[:, :2] - rows[:, :2])
    repeat, order, later = (root_mean_square(part) / max(size, 1e-300) for part in changes)
    if repeat > ROUNDING * floor and not stochastic:
        what = "the same question is answered differently each time: give noise="
        raise NotALayer(what, repeat, ROUNDING * floor)
    known = max(min(1e3 * floor, PLAIN), 10 * repeat)
    level = max(repeat, order if order <= known else 0.0, floor / 5)
    NotALayer.if_above(level, LARGEST, "the answers are too noisy to tell heads apart")
    measured = (level, repeat, float("nan"), order, later <= known, False, False, order > known)
    return OracleNoise(*measured, str(oracle.answer_dtype), oracle.dim, floor)
