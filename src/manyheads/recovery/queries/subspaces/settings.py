"""Settings of the subspace method: what the stages ask, sparingly or for more digits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SubspaceSettings:
    """Settings of the stages; the default spends calls sparingly, `accurate()` about twice as many.

    The rows `calls` and `subspaces` of the acceptance lane measure both on random layers.
    """

    # Copies of the two tokens of a pair: every call of S1 and S2 has so many tokens, and reads `after` rows
    before: int = 1
    after: int = 4
    oversampling: float = 1.0  # queries per head in S1, beside four
    tries: int = 8  # points at which S1 takes Jacobians, per probe
    loss: float = 8.0  # error of S2 beside that with all queries of S1, up to which queries are left out
    extra: float = 0.1  # probes of S2 beyond the largest rank, as a share of it; two more are always asked
    share: float = 0.75  # distinct tokens of S4 beside the zero, as a share of the unknowns that can be solved for
    sketch: float = 1.3  # sketch tokens of S4, as a multiple of the largest rank; two more are always used

    @classmethod
    def accurate(cls) -> "SubspaceSettings":
        """Return settings that spend more calls on better-conditioned readings."""
        return cls(before=3, after=9, oversampling=1.5, loss=2.0, extra=1.0, share=0.4, sketch=2.0)
