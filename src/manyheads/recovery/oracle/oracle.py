"""Oracle of a black-box function: batched, checked, counted and cached queries.

A call is one sequence. Every query of an extraction passes through here, so the counts of a recovery are complete. The
answers of the user's function are checked for shape, dtype and finite numbers.
"""

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads._constraints import Constraint, check_fields, constrained
from manyheads._extras import Float
from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError, check_integer
from manyheads.recovery._types import Array
from manyheads.recovery.oracle.answers import ask_function
from manyheads.recovery.oracle.limits import ServerLimits, largest_norm
from manyheads.recovery.oracle.query_cache import QueryCache
from manyheads.recovery.refusals import BudgetSpent, OracleError, check_positive
from manyheads.study.execution.progress import announce

Rows = Literal["last", "all"]
Read = Rows | tuple[int, ...]
MORE = "Allow more; answers that were stored are not asked again"
REQUESTS = 16  # requests of a limited server whose answers are stored together


@dataclass(frozen=True)
class Counts:
    """Queries of one stage, or of all, to the oracle."""

    # Sequences, and their tokens
    calls: int = 0
    tokens: int = 0
    numbers: int = 0  # numbers of the answers that were read: the last row, or all rows
    largest_norm: float = 0.0  # largest Euclidean norm of a token
    stored: int = 0  # calls among `calls` that were answered from the store, without the oracle
    # CPU seconds inside the oracle, and outside
    oracle_seconds: float = 0.0
    own_seconds: float = 0.0

    def __add__(self, other: "Counts") -> "Counts":
        sums = {name: value + getattr(other, name) for name, value in vars(self).items()}
        return Counts(**sums | {"largest_norm": max(self.largest_norm, other.largest_norm)})


@dataclass(frozen=True)
class Budget:
    """Budget of an extraction, stored answers included; None is no limit. Seconds are of the clock."""

    calls: float | None = None
    tokens: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        check_positive(self, "calls", "tokens", "seconds", none="no limit")


@dataclass(frozen=True)
class OracleSettings:
    """Settings of the oracle."""

    causal: bool = True  # whether a token attends to itself and to earlier ones only
    residual: bool = False  # whether the function adds its input to what the layer gives; it is subtracted again
    dtype: str = "float64"  # floating-point type in which the tokens are handed over; the answers may have any
    batch: int = constrained(1 << 14, Constraint(least=1))  # most tokens that are handed over at once
    budget: Budget = field(default_factory=Budget)  # what may be asked in all
    progress: bool | None = False  # show a line on standard error while asking; None shows it when that is a terminal
    limits: ServerLimits = field(default_factory=ServerLimits)  # what the server takes and shows
    pad: bool = False  # lengthen sequences at their end, which causal layers do not see, and not by repetition

    def __post_init__(self) -> None:
        check_fields(self)
        try:
            dtype: np.dtype | None = np.dtype(self.dtype)
        except TypeError:
            dtype = None
        if dtype is None or dtype.kind != "f":
            raise UsageError(f"dtype={self.dtype!r}: expected a floating-point dtype of NumPy, such as float32")
        object.__setattr__(self, "dtype", dtype.name)


class Oracle:
    """A function (n, k, d) -> (n, k, d) that is asked in batches within its limits, checked, counted, and remembered.

    The function takes sequences as a NumPy array, which it may overwrite, and returns answers of the same shape: NumPy,
    JAX, or a tensor of PyTorch, of any real floating-point dtype. `store` is the folder of the query cache, so that an
    interrupted extraction asks nothing twice; None for no cache.

    Raises
    ------
    FileRefused
        The folder holds something else, or, when asked, the answers of another oracle.
    OracleError
        When asked: the function raised, or answered with another shape, another dtype, NaN or infinite numbers.
    BudgetSpent
        When asked: the question would go beyond the budget.
    LimitError
        When asked: the server does not take the sequence.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.recovery.oracle.oracle import Oracle
    >>> oracle = Oracle(lambda x: 2 * x, dim=3)
    >>> with oracle.stage("doubling"):
    ...     oracle(np.ones((5, 4, 3)), read="last").shape
    (5, 3)
    >>> counts = oracle.counts["doubling"]
    >>> counts.calls, counts.tokens, counts.numbers, round(counts.largest_norm, 3)
    (5, 20, 15, 1.732)
    """

    def __repr__(self) -> str:
        return f"Oracle(dim={self.dim}, {self.total.calls:,} calls so far)"

    def __init__(
        self,
        function: Callable[[Any], Any],
        dim: int,
        settings: OracleSettings | None = None,
        store: str | os.PathLike[str] | None = None,
    ):
        if not callable(function):
            raise UsageError(f"the oracle is a {type(function).__name__}: give a function (n, k, d) -> (n, k, d)")
        self.function, self.dim, self.settings = function, check_integer("dim", dim), settings or OracleSettings()
        self.cache = None if store is None else QueryCache(store)
        self.answer_dtype: np.dtype | None = None
        self._tallies: dict[str, Counts] = {}
        self._name = "other"
        self._started, self._mark = time.monotonic(), time.process_time()
        self._free = self._started  # when the rate allows the next request
        self._say: Callable[..., None] | None = None
        self._chatty = False  # whether every batch is worth a word, or every stage

    @classmethod
    def of(cls, layer: "AttentionLayer", **settings: Any) -> "Oracle":
        """Return the oracle of a layer that is known, evaluated in NumPy float64; `settings` as in `OracleSettings`."""
        from manyheads.recovery.layers.evaluation import evaluate_layer

        chosen = OracleSettings(**{"causal": bool(layer.causal)} | settings)
        residual = chosen.residual
        return cls(lambda x: evaluate_layer(layer, x) + (x if residual else 0.0), layer.dim, chosen)

    @property
    def causal(self) -> bool:
        """Whether a token attends to itself and to earlier ones only."""
        return self.settings.causal

    @property
    def residual(self) -> bool:
        """Whether the input is subtracted from the answers."""
        return self.settings.residual

    @property
    def limits(self) -> ServerLimits:
        """What the server takes and shows."""
        return self.settings.limits

    @property
    def longest(self) -> float:
        """Most tokens of a sequence up to which every length can be asked, lengthened where it is too short."""
        limits, pad = self.limits, self.settings.pad
        if pad or limits.max_length is None:
            return limits.longest
        long = [k for k in range(1, limits.min_length) if -(-limits.min_length // k) * k > limits.max_length]
        return min(long) - 1 if long else limits.max_length

    @property
    def unit(self) -> float:
        """Norm of a token of which threefold multiples may be asked: sqrt(d), or less where norms are limited."""
        return self.limits.unit(self.dim)

    @property
    def counts(self) -> Mapping[str, Counts]:
        """Queries of every stage, in the order in which the stages first ran."""
        self._tick("own_seconds")
        return {name: counts for name, counts in self._tallies.items() if counts.calls or name != "other"}

    @property
    def total(self) -> Counts:
        """Queries of all stages together."""
        return sum(self.counts.values(), Counts())

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count and time under this name what is asked within; stages may be nested and entered again."""
        self._tick("own_seconds")
        before, self._name = self._name, name
        try:
            yield
        finally:
            self._tick("own_seconds")
            if not self._chatty:
                self._report()
            self._name = before

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """Show on standard error, while the block runs, the stage and what was asked so far, if the settings say so."""
        show = self.settings.progress
        if not (sys.stderr.isatty() if show is None else show):
            yield
            return
        from rich.console import Console

        console = Console(stderr=True)
        with console.status("asking the oracle") if console.is_terminal else contextlib.nullcontext() as status:
            self._say = functools.partial(announce, show=True) if status is None else status.update
            self._chatty = status is not None
            try:
                yield
            finally:
                self._say = None

    @takes_arrays
    def __call__(
        self, x: "Float[np.ndarray, 'n k d']", read: Read = "last"
    ) -> "Float[np.ndarray, 'n d'] | Float[np.ndarray, 'n k d']":
        """Ask about sequences (n, k, d); return the last rows (n, d), all rows (n, k, d) or some of them, float64."""
        x = np.ascontiguousarray(x, np.float64)
        if x.ndim != 3 or x.shape[2] != self.dim or 0 in x.shape:
            raise UsageError(f"sequences of shape {x.shape}: the oracle takes (n, k, {self.dim})")
        if read not in ("last", "all") and not isinstance(read, tuple):
            raise UsageError(f"read = {read!r}: the rows read are 'last', 'all' or a tuple of rows")
        if not np.isfinite(x).all():
            raise FloatingPointError("a question to the oracle holds NaN or infinite numbers")
        if read != "last" and self.limits.last_row:
            return np.stack([self(part) for part in self._prefixes(x, read)], axis=1)
        if isinstance(read, tuple):
            return self(x, "all")[:, list(read)]
        step = max(1, self.settings.batch // x.shape[1])
        if self._request < np.inf:
            step = min(step, REQUESTS * int(self._request))
        pieces = (x[start : start + step] for start in range(0, len(x), step))
        y = np.concatenate([self._answer(piece, read) for piece in pieces]).astype(np.float64)
        if self.settings.residual:
            y -= x[:, -1] if read == "last" else x
        return y

    @takes_arrays
    def ask(self, x: "Float[np.ndarray, 'n k d']") -> "Float[np.ndarray, 'n k d']":
        """Ask about one batch (n, k, d) past the store; return all rows as they came, the input not subtracted."""
        parts = self._prefixes(x, "all") if self.limits.last_row else [x]
        return np.concatenate([self._ask(part) for part in parts], axis=1)

    def _prefixes(self, x: Array, read: Read) -> Iterator[Array]:
        """Return for some rows of x (n, k, d) the sequences of which they are the last rows."""
        length = x.shape[1]
        for row in range(length) if isinstance(read, str) else read:
            place = row % length
            yield x[:, : place + 1] if self.causal else np.roll(x, -1 - place, axis=1)

    @property
    def _request(self) -> float:
        """Most sequences of one request: those of about a second where there is a rate."""
        rate, batch = self.limits.calls_per_second, self.limits.max_batch
        return min(np.inf if rate is None else max(1.0, rate // 1), np.inf if batch is None else batch)

    def _ask(self, x: Array) -> Array:
        """Ask in requests that the server takes; return the rows that it shows, in the type in which they came."""
        sent, rows = self.limits.stretch(x, pad=self.settings.pad)
        self.limits.check(sent)
        self._afford(*sent.shape[:2])
        size = len(sent) if self._request == np.inf else int(self._request)
        y = np.concatenate([self._send(sent[start : start + size]) for start in range(0, len(sent), size)])
        y = y if self.limits.last_row else y[:, rows]
        self._count(sent, y.size, 0)
        return y

    def _send(self, x: Array) -> Array:
        """Send one request, when the rate allows it."""
        self._tick("own_seconds")
        try:
            self._wait(len(x))
            y = ask_function(self.function, x, self.settings.dtype, last_row=self.limits.last_row)
        finally:
            self._tick("oracle_seconds")
        if self.answer_dtype not in (None, y.dtype):
            raise OracleError(f"the oracle answered in {y.dtype}, and in {self.answer_dtype} before")
        self.answer_dtype = y.dtype
        return y

    def _wait(self, calls: int) -> None:
        """Wait until the rate allows so many calls, unless the seconds of the budget end before."""
        if self.limits.calls_per_second is None:
            return
        now = time.monotonic()
        wait, allowed = self._free - now, self.settings.budget.seconds
        if allowed is not None and now + wait - self._started > allowed:
            rate = f"the rate of {self.limits.calls_per_second:g} calls a second leaves no more"
            raise BudgetSpent(f"{allowed:g} seconds are allowed, and {rate}. {MORE}")
        time.sleep(max(0.0, wait))
        self._free = max(now, self._free) + calls / self.limits.calls_per_second

    def _answer(self, x: Array, read: Rows) -> Array:
        if self.cache is None:
            return self._ask_anew(x, read)
        if not self.cache.attached:
            with self.stage("fingerprint"):
                longest = self.limits.max_length
                self.cache.attach(self.dim, self.settings.dtype, self.ask, lambda x: self.limits.fit(x[:, :longest]))
        keys = self.cache.keys(x, read)
        found = self.cache.find(keys)
        missing = np.array([answer is None for answer in found])
        if not missing.all():
            known = x[~missing]
            sent = self.limits.stretch(known, pad=self.settings.pad)[0]
            self._afford(*sent.shape[:2])
            self._count(sent, known.size if read == "all" else known[:, -1].size, len(known))
        if missing.any():
            fresh = iter(self.cache.keep([keys[i] for i in np.flatnonzero(missing)], self._ask_anew(x[missing], read)))
            found = [next(fresh) if answer is None else answer for answer in found]
        return np.stack([answer for answer in found if answer is not None])

    def _ask_anew(self, x: Array, read: Rows) -> Array:
        """Ask, and keep the rows that are read; no others are counted as read."""
        y = self._ask(x)
        if read == "all":
            return y
        tally = self._tallies[self._name]
        self._tallies[self._name] = replace(tally, numbers=tally.numbers - y.size + y[:, -1].size)
        return y[:, -1]

    def _afford(self, calls: int, length: int) -> None:
        budget = self.settings.budget
        if budget == Budget():
            return
        spent, seconds = self.total, time.monotonic() - self._started
        after = {"calls": spent.calls + calls, "tokens": spent.tokens + calls * length, "seconds": seconds}
        for name, allowed in asdict(budget).items():
            if allowed is not None and after[name] > allowed:
                more = f"the next {calls} calls of {length} tokens would make {after[name]:g}"
                raise BudgetSpent(f"{allowed:g} {name} are allowed; {more}. {MORE}")

    def _count(self, x: Array, numbers: int, stored: int) -> None:
        one = Counts(len(x), x.shape[0] * x.shape[1], numbers, largest_norm(x), stored)
        self._tallies[self._name] = self._tallies.get(self._name, Counts()) + one
        if self._chatty:
            self._report()

    def _report(self) -> None:
        if self._say is not None:
            total = self.total
            self._say(f"{self._name}: {total.calls:,} calls, {total.tokens:,} tokens, {total.stored:,} from the store")

    def _tick(self, clock: str) -> None:
        now = time.process_time()
        spent, self._mark = now - self._mark, now
        tally = self._tallies.get(self._name, Counts())
        self._tallies[self._name] = replace(tally, **{clock: getattr(tally, clock) + spent})


class Behind(Oracle):
    """An oracle that asks another one, which counts; `answer` replies to sequences (n, k, d) by what that one says."""

    def __init__(self, behind: Oracle, answer: Callable[[Array, Read], Array] | None = None, **settings: Any):
        super().__init__(behind.function, behind.dim, replace(behind.settings, **settings))
        self.behind, self.answer, self.answer_dtype = behind, answer or behind, behind.answer_dtype

    def __call__(self, x: Array, read: Read = "last") -> Array:
        """Ask about sequences (n, k, d); return the last rows (n, d), all rows (n, k, d) or some of them."""
        if read != "last" and self.limits.last_row:
            return np.stack([self(part) for part in self._prefixes(x, read)], axis=1)
        return self.answer(x, read)

    @property
    def counts(self) -> Mapping[str, Counts]:
        """Queries of every stage to the oracle behind."""
        return self.behind.counts

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count under this name what the oracle behind is asked within."""
        with self.behind.stage(name):
            yield
