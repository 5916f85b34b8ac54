"""Settings of the subspace method: what the stages ask, sparingly or for more digits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SubspaceSettings:
    """Settings of the stages; the default spends calls sparingly, `accurate()` about twice as many."""

    # Copies of the two tokens of a pair: every call of S1 and S2 has so many tokens, and reads `after` rows
    before: int = 1
    after: int = 4
    oversampling: float = 1.0  # queries per head in S1, beside four
    tries: int = 8  # points at which S1 takes Jacobians, per probe
    loss: float = 8.0  # error of S2 beside that with all queries of S1, up to which queries are left out
    extra: float = 0.1  # probes of S2 beyond the largest rank, as a share of it; two more are always asked
    share: float = 0.75  # distinct tokens of S4 beside the zero, as a share of the unknowns that can be solved for
    # Whether S2 asks d probes, so that W is a least-squares solution over them and S4 reads all heads jointly: the
    # separation of the output spaces, whose condition is 400 to 12,000 in trained layers, does not multiply noise then
    whole: bool = False
    step: float = 0.3  # first step from probe to probe, relative to the first probe
    sketch: float = 1.3  # sketch tokens of S4, as a multiple of the largest rank; two more are always used

    @classmethod
    def accurate(cls) -> "SubspaceSettings":
        """Return settings that spend more calls on better-conditioned readings."""
        return cls(before=3, after=9, oversampling=1.5, loss=2.0, extra=1.0, share=0.4, sketch=2.0)


@dataclass(frozen=True)
class ProbeSettings(SubspaceSettings):
    """Settings for answers in single precision: as many probes as dimensions, and ranks that W has."""

    before: int = 2
    after: int = 8
    oversampling: float = 2.0
    tries: int = 12
    loss: float = 3.0
    share: float = 0.35
    whole: bool = True
    step: float = 0.5
    sketch: float = 6.0
