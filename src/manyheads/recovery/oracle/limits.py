r"""Limits of a server: lengths, norms, sequences a request, rows shown, calls per second, digits of the answers.

Three exact identities of attention without positions let a method ask what a server does not take as it is:

* Tokens that all occur n times have the same last answer as tokens that occur once, so that a smallest length is
  reached by repetition. A causal layer may be padded at the end instead, which also holds with positions.
* Row t of a causal layer is the last row of the first t tokens; row t of one that is not is the last row of the
  sequence with token t at its end. A server that shows last rows answers one row a call.
* What it cannot show cannot matter: by its last rows alone, a causal layer is no other function than one that is not.

Derived here; every restriction is checked where the function is asked (`Oracle`), and nothing beyond it is asked.
"""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.errors import UsageError
from manyheads.recovery._types import Array
from manyheads.recovery.refusals import LimitError, check_positive

SLACK = 1e-5  # share by which a token may exceed the largest norm: it is rounded when it is handed over
MARGIN = 0.98  # of the largest norm, to which tokens are shortened
SLOWEST = 1 / 3600  # calls per second below which one wait would take more than an hour


@dataclass(frozen=True)
class ServerLimits:
    """What a server of a layer takes and shows; the default is no limit.

    Attributes
    ----------
    min_length, max_length
        Tokens of a sequence.
    max_norm
        Largest Euclidean norm of a token.
    max_batch
        Sequences of one request; 1 is one sequence a call of the function.
    last_row
        Only the last row of every sequence is shown: answers (n, d), (n, 1, d), or (n, k, d) with others to ignore.
    calls_per_second
        Sequences that may be asked per second; the extraction waits between requests.
    decimals, bits
        Answers are rounded to so many decimals, or to so many significant bits (53 is double precision).
    vocabulary
        Table of embeddings (V, d) whose rows are the only tokens; None takes every vector.

    Examples
    --------
    >>> limits = ServerLimits(max_length=8, decimals=3)
    >>> limits.round(np.array([0.12345, 2.0]))
    array([0.123, 2.   ])
    """

    min_length: int = constrained(1, Constraint(least=1))
    max_length: int | None = constrained(None, Constraint(least="min_length"))
    max_norm: float | None = None
    max_batch: int | None = constrained(None, Constraint(least=1))
    last_row: bool = False
    calls_per_second: float | None = None
    decimals: int | None = constrained(None, Constraint(least=0, most=17))
    bits: int | None = constrained(None, Constraint(least=2, most=53))
    vocabulary: Array | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_fields(self)
        check_positive(self, "max_norm", "calls_per_second", none="no limit")
        for name in ("max_norm", "calls_per_second"):
            value = np.inf if getattr(self, name) is None else float(getattr(self, name))
            object.__setattr__(self, name, None if value == np.inf else value)
        if self.calls_per_second is not None and self.calls_per_second < SLOWEST:
            raise UsageError(f"calls_per_second={self.calls_per_second:g}: one wait would take more than an hour")
        if self.vocabulary is not None:
            table = np.array(self.vocabulary, np.float64)
            if table.ndim != 2 or not table.size or not np.isfinite(table).all():
                raise UsageError(f"vocabulary of shape {table.shape}: give finite embeddings (tokens, d)")
            object.__setattr__(self, "vocabulary", table)

    @functools.cached_property
    def _rows(self) -> frozenset[bytes]:
        """Rows of the table, as they lie in memory."""
        assert self.vocabulary is not None
        return frozenset(row.tobytes() for row in self.vocabulary + 0.0)

    @property
    def longest(self) -> float:
        """Most tokens of a sequence, infinite if there is no limit."""
        return np.inf if self.max_length is None else self.max_length

    @property
    def reach(self) -> float:
        """Largest norm of a token, infinite if there is no limit."""
        return np.inf if self.max_norm is None else self.max_norm

    def spacing(self, size: float, dtype: Any) -> float:
        """Return the distance between neighbouring numbers of the answers where they have this size."""
        eps = np.finfo(dtype).eps if self.bits is None else max(float(np.finfo(dtype).eps), 2.0 ** (1 - self.bits))
        return max(float(eps) * size, 0.0 if self.decimals is None else 10.0**-self.decimals)

    def round(self, y: Array) -> Array:
        """Round answers to the decimals or bits of the server."""
        if self.decimals is not None:
            y = np.round(y, self.decimals)
        if self.bits is not None:
            fraction, exponent = np.frexp(y)
            y = np.ldexp(np.round(np.ldexp(fraction, self.bits)), exponent - self.bits)
        return y

    def check(self, x: Array) -> None:
        """Refuse sequences (n, k, d) that the server does not take."""
        length, norm = x.shape[1], largest_norm(x)
        if not self.min_length <= length <= self.longest:
            taken = f"the server takes {self.min_length} to {self.longest:g}"
            raise LimitError(f"a sequence of {length} tokens has to be asked, and {taken}: choose another method")
        if norm > self.reach * (1 + SLACK):
            what = f"a token of norm {norm:.3g} is needed, and the server takes {self.reach:.3g}: choose another method"
            raise LimitError(what)
        if self.vocabulary is not None:
            strange = sum(row.tobytes() not in self._rows for row in x.reshape(-1, x.shape[2]) + 0.0)
            if strange:
                tokens = f"{strange} of {x.shape[0] * length} tokens"
                raise LimitError(f"{tokens} are no rows of the vocabulary: the method 'vocabulary' asks rows alone")

    def unit(self, dim: int) -> float:
        """Return the norm of tokens that can be tripled: sqrt(d), or less where norms are limited."""
        return min(float(np.sqrt(dim)), self.reach / 3)

    def shortened(self, x: Array) -> Array:
        """Return tokens (..., d) with those that are longer than the largest norm shortened to it, with a margin."""
        if self.max_norm is None:
            return x
        norms = np.linalg.norm(x, axis=-1, keepdims=True)
        return x * np.minimum(1.0, MARGIN * self.max_norm / np.maximum(norms, np.finfo(float).tiny))

    def fit(self, x: Array) -> Array:
        """Return normal tokens (..., d) as the server takes them: in its unit, or as rows of its vocabulary."""
        if self.vocabulary is not None:
            return self.vocabulary[(1e6 * np.abs(x[..., 0])).astype(int) % len(self.vocabulary)]
        if self.max_norm is None:
            return x
        unit, norms = self.unit(x.shape[-1]), np.linalg.norm(x, axis=-1, keepdims=True)
        return x * np.minimum(unit / np.sqrt(x.shape[-1]), 3 * unit / norms)

    def stretch(self, x: Array, *, pad: bool) -> tuple[Array, slice]:
        """Return sequences that are long enough, and the rows that answer for those of x (n, k, d).

        `pad` appends copies of the last token, which no row of a causal layer sees; otherwise all tokens are repeated.
        """
        length = x.shape[1]
        if length >= self.min_length:
            return x, slice(None)
        if pad:
            return np.concatenate([x, np.repeat(x[:, -1:], self.min_length - length, axis=1)], axis=1), slice(length)
        copies = -(-self.min_length // length)
        return np.repeat(x, copies, axis=1), slice(copies - 1, None, copies)

    def serve(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a function that answers as a server of `function` with these limits does, and refuses what it would.

        The rate is kept by waiting.
        """

        def server(x: Array) -> Array:
            if self.max_batch is not None and len(x) > self.max_batch:
                raise LimitError(f"{len(x)} sequences in one request: this server takes {self.max_batch}")
            self.check(x)
            if self.calls_per_second is not None:
                time.sleep(len(x) / self.calls_per_second)
            y = np.asarray(function(x))
            return self.round(y[:, -1] if self.last_row else y)

        return server


def largest_norm(x: Array) -> float:
    """Return the largest Euclidean norm of a token (..., d)."""
    return float(np.sqrt((x * x).sum(-1).max()))
