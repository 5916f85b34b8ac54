"""A user's function: what an extraction has to be told about it, and its answers, checked."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manyheads._arrays import COMPLEX, as_native
from manyheads.recovery.refusals import OracleError

LONG = 32  # tokens of a sequence beyond which a function may have refused its length


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


def ask_function(
    function: Callable[[Any], Any], x: np.ndarray, dtype: str = "float64", *, last_row: bool = False
) -> np.ndarray:
    """Call an oracle's function on a copy of x (n, k, d) and return its answers as NumPy, checked.

    `last_row` takes answers (n, d), (n, 1, d) or (n, k, d), and returns last rows (n, 1, d).
    Of a tuple, the first entry is the answer. Answers in bfloat16 come back in float32, which holds them exactly; other
    floating-point types stay as they are.
    """
    given = f"sequences of shape {x.shape}"
    try:
        y = function(np.array(x, dtype=dtype))
        y = y[0] if isinstance(y, tuple) and y else y  # beside attention weights, or a cache
        if hasattr(y, "detach"):  # a tensor of PyTorch, which is not imported here
            y = y.detach().cpu()
            y = y.float() if "bfloat16" in str(y.dtype) else y
        y = np.asarray(as_native(y, "the answer", COMPLEX))
    except Exception as error:
        hint = "With a store, earlier answers are kept"
        if isinstance(error, TypeError) and "ndarray" in str(error):
            hint = "It is given NumPy arrays: convert them in it, or give the module of PyTorch itself"
        elif x.shape[1] > LONG:
            hint += "; if it takes shorter sequences only, say so by limits=ServerLimits(max_length=...), --max-length"
        raise OracleError(f"the oracle raised {type(error).__name__} on {given}: {error}. {hint}") from error
    if y.dtype.name == "bfloat16":
        y = y.astype(np.float32)
    if y.dtype.kind != "f":
        raise OracleError(f"the oracle answered {given} in {y.dtype}: expected real floating-point numbers")
    if last_row and y.shape in ((len(x), x.shape[2]), (len(x), 1, x.shape[2]), x.shape):
        y = y.reshape(len(x), -1, x.shape[2])[:, -1:]
    elif y.shape != x.shape:
        expected = "that of the last rows" if last_row else "the same shape"
        raise OracleError(f"the oracle answered {given} with shape {y.shape}: expected {expected}")
    if not np.isfinite(y).all():
        bad = int((~np.isfinite(y)).any((1, 2)).sum())
        raise OracleError(f"the oracle answered {bad} of {len(x)} {given} with NaN or infinite numbers")
    return y
