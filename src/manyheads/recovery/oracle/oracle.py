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
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from manyheads._arrays import COMPLEX, as_native, takes_arrays
from manyheads.errors import UsageError, check_integer
from manyheads.recovery.oracle.query_cache import QueryCache
from manyheads.recovery.refusals import BudgetSpent, OracleError
from manyheads.study.progress import announce

if TYPE_CHECKING:
    from jaxtyping import Float

    from manyheads.attention import AttentionLayer

Read = Literal["last", "all"]


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
        return Counts(
            self.calls + other.calls,
            self.tokens + other.tokens,
            self.numbers + other.numbers,
            max(self.largest_norm, other.largest_norm),
            self.stored + other.stored,
            self.oracle_seconds + other.oracle_seconds,
            self.own_seconds + other.own_seconds,
        )


@dataclass(frozen=True)
class Budget:
    """Budget of an extraction, stored answers included; None is no limit. Seconds are of the clock."""

    calls: float | None = None
    tokens: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not value > 0:
                raise UsageError(f"a budget of {value} {name}: give a positive number, or None for no limit")


@dataclass(frozen=True)
class OracleSettings:
    """Settings of the oracle."""

    causal: bool = True  # whether a token attends to itself and to earlier ones only
    residual: bool = False  # whether the function adds its input to what the layer gives; it is subtracted again
    dtype: str = "float64"  # floating-point type in which the tokens are handed over. The answers may have any.
    batch: int = 1 << 14  # most tokens that are handed over at once
    budget: Budget = field(default_factory=Budget)  # what may be asked in all
    progress: bool | None = False  # show a line on standard error while asking; None shows it when that is a terminal

    def __post_init__(self) -> None:
        check_integer("batch", self.batch)
        try:
            kind: str = np.dtype(self.dtype).kind
        except TypeError:
            kind = "none"
        if kind != "f":
            raise UsageError(f"dtype = {self.dtype!r}: tokens are handed over as float16, float32 or float64")


class Oracle:
    """A function (n, k, d) -> (n, k, d) that is asked in batches, checked, counted, and remembered.

    Parameters
    ----------
    function
        Takes sequences (n, k, d) as a NumPy array, which it may overwrite, and returns answers of the same shape:
        NumPy, JAX, or a tensor of PyTorch, of any real floating-point dtype.
    dim
        Token dimension d.
    settings
        How it is asked.
    store
        Folder of the query cache, so that an interrupted extraction asks nothing twice; None for no cache.

    Raises
    ------
    FileRefused
        The folder holds something else, or, when asked, the answers of another oracle.
    OracleError
        When asked: the function raised, or answered with another shape, another dtype, NaN or infinite numbers.
    BudgetSpent
        When asked: the question would go beyond the budget.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.recovery import Oracle
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
        """Ask about sequences (n, k, d); return the last rows (n, d) or all rows (n, k, d), float64."""
        x = np.ascontiguousarray(x, np.float64)
        if x.ndim != 3 or x.shape[2] != self.dim or 0 in x.shape:
            raise UsageError(f"sequences of shape {x.shape}: the oracle takes (n, k, {self.dim})")
        if read not in ("last", "all"):
            raise UsageError(f"read = {read!r}: the rows read are 'last' or 'all'")
        if not np.isfinite(x).all():
            raise FloatingPointError("a question to the oracle holds NaN or infinite numbers")
        step = max(1, self.settings.batch // x.shape[1])
        pieces = (x[start : start + step] for start in range(0, len(x), step))
        y = np.concatenate([self._answer(piece, read) for piece in pieces]).astype(np.float64)
        if self.settings.residual:
            y -= x[:, -1] if read == "last" else x
        return y

    @takes_arrays
    def ask(self, x: "Float[np.ndarray, 'n k d']") -> "Float[np.ndarray, 'n k d']":
        """Ask about one batch (n, k, d) past the store; return all rows as they came, the input not subtracted."""
        self._afford(*x.shape[:2])
        self._tick("own_seconds")
        try:
            y = ask_function(self.function, x, self.settings.dtype)
        finally:
            self._tick("oracle_seconds")
        if self.answer_dtype not in (None, y.dtype):
            raise OracleError(f"the oracle answered in {y.dtype}, and in {self.answer_dtype} before")
        self.answer_dtype = y.dtype
        self._count(x, y.size, 0)
        return y

    def _answer(self, x: np.ndarray, read: Read) -> np.ndarray:
        if self.cache is None:
            return self._fresh(x, read)
        if not self.cache.attached:
            with self.stage("fingerprint"):
                self.cache.attach(self.dim, self.settings.dtype, self.ask)
        keys = self.cache.keys(x, read)
        found = self.cache.find(keys)
        missing = np.array([answer is None for answer in found])
        if not missing.all():
            known = x[~missing]
            self._afford(*known.shape[:2])
            self._count(known, known.size if read == "all" else known[:, -1].size, len(known))
        if missing.any():
            fresh = iter(self.cache.keep([keys[i] for i in np.flatnonzero(missing)], self._fresh(x[missing], read)))
            found = [next(fresh) if answer is None else answer for answer in found]
        return np.stack([answer for answer in found if answer is not None])

    def _fresh(self, x: np.ndarray, read: Read) -> np.ndarray:
        """Ask, and keep the rows that are read; no others are counted as read."""
        y = self.ask(x)
        if read == "all":
            return y
        tally = self._tallies[self._name]
        self._tallies[self._name] = replace(tally, numbers=tally.numbers - y.size + y[:, -1].size)
        return y[:, -1]

    def _afford(self, calls: int, length: int) -> None:
        budget = self.settings.budget
        if budget == Budget():
            return
        spent = self.total
        after = {
            "calls": spent.calls + calls,
            "tokens": spent.tokens + calls * length,
            "seconds": time.monotonic() - self._started,
        }
        for name, allowed in asdict(budget).items():
            if allowed is not None and after[name] > allowed:
                raise BudgetSpent(
                    f"{allowed:g} {name} are allowed; the next {calls} calls of {length} tokens would make "
                    f"{after[name]:g} {name}. Allow more; answers that were stored are not asked again"
                )

    def _count(self, x: np.ndarray, numbers: int, stored: int) -> None:
        norm = float(np.sqrt((x * x).sum(-1).max()))
        one = Counts(len(x), x.shape[0] * x.shape[1], numbers, norm, stored)
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


def ask_function(function: Callable[[Any], Any], x: np.ndarray, dtype: str = "float64") -> np.ndarray:
    """Call an oracle's function on a copy of x (n, k, d) and return its answers as NumPy, checked.

    Answers in bfloat16 come back in float32, which holds them exactly; other floating-point types stay as they are.
    """
    given = f"sequences of shape {x.shape}"
    try:
        y = function(np.array(x, dtype=dtype))
        if hasattr(y, "detach"):  # a tensor of PyTorch, which is not imported here
            y = y.detach().cpu()
            y = y.float() if "bfloat16" in str(y.dtype) else y
        y = np.asarray(as_native(y, "the answer", COMPLEX))
    except Exception as error:
        raise OracleError(
            f"the oracle raised {type(error).__name__} on {given}: {error}. With a store, earlier answers are kept"
        ) from error
    if y.dtype.name == "bfloat16":
        y = y.astype(np.float32)
    if y.dtype.kind != "f":
        raise OracleError(f"the oracle answered {given} in {y.dtype}: expected real floating-point numbers")
    if y.shape != x.shape:
        raise OracleError(f"the oracle answered {given} with shape {y.shape}: expected the same shape")
    if not np.isfinite(y).all():
        bad = int((~np.isfinite(y)).any((1, 2)).sum())
        raise OracleError(f"the oracle answered {bad} of {len(x)} {given} with NaN or infinite numbers")
    return y
