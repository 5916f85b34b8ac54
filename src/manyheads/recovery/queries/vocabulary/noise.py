"""Noise of an oracle that takes the tokens of a vocabulary: asked again, in another order, and with another last token.

No sum of two tokens is one, so that answers to one token are compared with a linear function where it is read
(`vocabulary.method`).
"""

import numpy as np

from manyheads.errors import UsageError
from manyheads.recovery._types import Array, Generator
from manyheads.recovery.oracle.noise_estimate import LARGEST, PLAIN, ROUNDING, OracleNoise, root_mean_square
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.refusals import LimitError, NotALayer

FLATTEST = 1e-8  # smallest singular value of [E, 1] over the largest from which the differences span the space
SPARE = 8  # tokens beyond those that span


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
    """Measure the noise of an oracle on sequences of three tokens of its vocabulary."""
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
