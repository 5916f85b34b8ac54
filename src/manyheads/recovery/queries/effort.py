"""Effort of an extraction: what the stages ask, sparingly or for more digits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """Numbers that decide between calls and digits; the default spends calls sparingly."""

    # Tokens of a sequence, relative to the most whose weights can be separated
    share: float = 0.75
    extra: int = 4  # directions, and sketch tokens, beyond the rank
    offsets: int = 16  # offsets 0 .. offsets - 1 at which forms are listed in the result
    excess: float = 1.5  # logits or scores asked for, relative to the unknown numbers of a core
    # Copies of the two tokens of a pair: every call has so many tokens, and reads `after` rows
    before: int = 1
    after: int = 4
    oversampling: float = 1.0  # queries per head at the first probe of pairs, beside four
    tries: int = 8  # points at which Jacobians are taken, per probe
    loss: float = 8.0  # error of values beside that with all queries, up to which queries are left out
    surplus: float = 0.1  # probes of pairs beyond the largest rank, as a share of it; two more are always asked
    # Whether as many probes are asked as there are dimensions, so that W is a least-squares solution over them and all
    # heads are read jointly: the separation of the output spaces, whose condition is 400 to 12,000 in trained layers,
    # does not multiply noise then
    whole: bool = False
    step: float = 0.3  # first step from probe to probe, relative to the first probe
    sketch: float = 1.3  # sketch tokens of rows, as a multiple of the largest rank; two more are always used
    # Queries at every probe of the bounded method, against the d + 1 + m that determine a net; None follows the noise
    queries: float | None = None


SPARING = Effort()
# About twice as many calls on better-conditioned readings
ACCURATE = Effort(0.4, 8, excess=3.0, before=3, after=9, oversampling=1.5, loss=2.0, surplus=1.0, sketch=2.0)
# For answers in single precision: as many probes as dimensions, and ranks that W has
PROBES = Effort(0.35, before=2, after=8, oversampling=2.0, tries=12, loss=3.0, whole=True, step=0.5, sketch=6.0)
# Of tokens that cannot be made short, beside a base token
BASED = Effort(share=0.6, loss=3.0, surplus=0.25)
BOUNDED = Effort(tries=12)
