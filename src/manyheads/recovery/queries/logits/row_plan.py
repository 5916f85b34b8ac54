"""Groups of heads whose attention is read from the same sequences, and the tokens of these sequences."""

from dataclasses import dataclass

import numpy as np

from manyheads.recovery._types import Indices
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.effort import Effort
from manyheads.recovery.queries.logits.sketches import SPARE
from manyheads.recovery.queries.values.projection_sum import Projections

FEWEST = 4  # distinct tokens beside the zero, if the rank allows it: with two or three, calls are many
PILOT = 4  # sequences that the choice of a scale takes, mostly


@dataclass(frozen=True)
class Group:
    """Heads that are read together, with tokens whose values are zero in all of them where there is a plan for it."""

    heads: Indices
    plan: "UnseenPlan | None" = None


@dataclass(frozen=True)
class UnseenPlan:
    """Numbers of a reading with tokens whose values are zero in all heads of the group."""

    seen: int  # tokens of a sequence with values, T
    space: int  # dimensions of the values of the group together
    queries: int  # sketch tokens
    keys: int  # sequences of the first part
    rounds: int  # how often every query is asked in the second part
    parts: int  # sequences of a round

    @classmethod
    def of(cls, ranks: Indices, dim: int, effort: Effort) -> "UnseenPlan | None":
        """Return the plan for heads of these ranks; None where too few tokens are unseen, or a head sees one token."""
        space, widest, least = int(ranks.sum()), int(ranks.max()), int(ranks.min())
        queries = sketch_tokens(widest, dim, effort)
        if least < 2 or widest + SPARE > dim - space:
            return None
        seen = tokens_of_row(least, effort)
        # d - 1 directions, the one that the first parts leave out, and a spare one that shows errors
        keys = -(-(dim - 1) // (seen - 1)) + (1 if seen > 2 else 2)
        return cls(seen, space, queries, keys, -(-queries // (seen - 1)), -(-space // seen))

    @property
    def sequences(self) -> int:
        """Sequences of both parts."""
        return self.keys + self.rounds * self.parts

    def longest(self, dim: int, causal: bool) -> int:
        """Return the length of the longest sequence."""
        most = -(-(dim - self.space) // self.parts)
        return 1 + max(self.seen + self.queries + causal, (1 + causal) * self.seen + most)


def plan_groups(oracle: Oracle, heads: Projections, dim: int, effort: Effort) -> list[Group]:
    """Divide heads by their ranks, and choose how each group is read, so that sequences are fewest."""
    order = np.argsort(heads.ranks, kind="stable")
    if heads.splits is None:
        return [Group(order)]

    def cost(group: Indices) -> tuple[float, Group]:
        ranks = heads.ranks[group]
        ways = [(_count_sequences(ranks, dim, effort), Group(group))]
        plan = UnseenPlan.of(ranks, dim, effort)
        if plan is not None and plan.longest(dim, oracle.causal) <= oracle.longest:
            ways.append((float(plan.sequences), Group(group, plan)))
        return min(ways, key=lambda way: way[0])

    best: list[tuple[float, list[Group]]] = [(0.0, [])]  # of the first heads in order
    for end in range(1, len(order) + 1):
        options = []
        for start in range(end):
            sequences, group = cost(order[start:end])
            options.append((best[start][0] + sequences + PILOT, [*best[start][1], group]))
        best.append(min(options, key=lambda option: option[0]))
    return best[-1][1]


def _count_sequences(ranks: Indices, dim: int, effort: Effort) -> float:
    """Return how many sequences are asked where all tokens have values."""
    least, widest = int(ranks[ranks > 0].min(initial=dim)), int(ranks.max())
    wanted = sketch_tokens(widest, dim, effort)
    if least < 2:
        return 2.0 * wanted * dim + dim
    sketched, fresh = split_tokens(least, effort)
    return float(np.ceil(wanted / sketched) * np.ceil(dim / fresh))


def sketch_tokens(widest: int, dim: int, effort: Effort) -> int:
    """Return the number of sketch tokens for heads of this rank."""
    return min(dim, int(np.ceil(effort.sketch * widest)) + SPARE)


def tokens_of_row(most: int, effort: Effort) -> int:
    """Return the distinct tokens of a sequence of which a row shows at most so many weights."""
    return max(2, min(most, FEWEST), round(effort.share * most))


def split_tokens(most: int, effort: Effort) -> tuple[int, int]:
    """Return the sketch tokens and the fresh ones of a sequence of which a row shows at most so many weights."""
    kept = tokens_of_row(most, effort)
    sketched = max(1, round((np.sqrt(2) - 1) * kept))
    return sketched, max(1, kept - sketched)
