"""A function of sequences together with what an extraction has to be told about it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LayerOracle:
    """A function of sequences, and what an extraction has to be told about it.

    Calling it on (n, k, d) gives (n, k, d).

    Attributes
    ----------
    function
        Takes and returns sequences (n, k, d).
    dim
        Token dimension d.
    causal
        Whether a token attends to itself and to earlier ones only; None where it is not known.
    residual
        Whether the input is added to what the layer gives.
    normalized
        Whether the layer sees its tokens through a norm; None where it is not known.
    rotary
        Whether queries and keys are turned by their positions.
    scores
        Whether attention scores are others: RoPE with biases, norms of queries and keys, caps, windows, ALiBi, tables,
        learned sinks.
    mlp
        Whether it is a whole transformer block: attention and an MLP through the residual stream.
    dtype
        In which the tokens are handed over.
    about
        What it is, in words.
    itself
        The function of a model in its own floating-point type, and that type, if a copy in another one is asked.
    """

    function: Callable[[Any], Any] = field(repr=False)
    dim: int
    causal: bool | None = None
    residual: bool = False
    normalized: bool | None = None
    rotary: bool = False
    scores: bool = False
    mlp: bool = False
    dtype: str = "float64"
    about: str = "a function"
    itself: tuple[Callable[[Any], Any], str] | None = field(default=None, repr=False)

    def __call__(self, x: Any) -> Any:
        """Answer sequences (n, k, d)."""
        return self.function(x)
