"""What a recovery returns: the layer, how it was found, stage by stage, and a certificate on fresh sequences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from manyheads.attention import AttentionLayer


@dataclass(frozen=True)
class Stage:
    """One stage: its name, its figures (errors, gaps, ranks, calls: plain numbers) and the CPU seconds it took."""

    name: str
    figures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True)
class Recovery:
    """A recovered layer beside its evidence.

    Attributes
    ----------
    layer
        The layer in the form (Theta, W), float64.
    certificate
        The statement that was checked on fresh sequences, and its figures.
    stages
        The stages in the order in which they ran.
    method
        Name of the method that produced it.
    """

    layer: "AttentionLayer"
    certificate: Any
    stages: tuple[Stage, ...]
    method: str

    @property
    def heads(self) -> int:
        """Number of heads that were found."""
        return self.layer.heads
