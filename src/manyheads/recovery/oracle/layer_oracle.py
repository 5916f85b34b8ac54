"""A function of sequences together with what an extraction has to be told about it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LayerOracle:
    """A function of sequences (n, k, d) -> (n, k, d), and what an extraction has to be told about it."""

    function: Callable[[Any], Any] = field(repr=False)
    dim: int  # of a token
    # Properties of the function, as in `ExtractionOptions`; None where they are not known
    causal: bool | None = None
    residual: bool = False
    normalized: bool | None = None
    rotary: bool = False
    scores: bool = False
    mlp: bool = False
    dtype: str = "float64"  # in which the tokens are handed over
    about: str = "a function"  # what it is, in words
    # A model in its own floating-point type, and that type, if a copy in another one is asked
    itself: tuple[Callable[[Any], Any], str] | None = field(default=None, repr=False)

    def __call__(self, x: Any) -> Any:
        """Answer sequences (n, k, d)."""
        return self.function(x)
