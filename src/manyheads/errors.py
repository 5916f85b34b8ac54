"""The errors of manyheads: each says what was given, what was expected, and what to do.

Every error raised on purpose derives from `ManyheadsError`, so a caller can catch them all; each also derives from the
built-in it resembles, so a caller who does not know manyheads is not surprised. The command line turns `UsageError`
into exit status 2 and every other one into 3.
"""

import functools
import inspect
import operator
from collections.abc import Sequence


class ManyheadsError(Exception):
    """Base of all errors that manyheads raises on purpose."""


class UsageError(ManyheadsError, ValueError):
    """An argument cannot mean what was asked for: refused before any work starts."""


class ShapeError(UsageError):
    """Arrays whose shapes or dtypes do not fit together."""


def check_call(name: str, function: object, *arguments: str, returns: str = "") -> None:
    """Refuse a user's function that cannot be called with these arguments, given by name."""
    taken = f"of ({', '.join(arguments)})" if arguments else "without arguments"
    expected = f"expected a function {taken}{returns}"
    if not callable(function):
        raise UsageError(f"{name} is {type(function).__name__}: {expected}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # its signature is not available
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise UsageError(f"{name}{str(signature)[:100]} takes other arguments: {expected}") from None


def check_integer(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """Return an integer argument of any integer type but bool as Python's, and refuse one outside the range."""
    allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
    try:
        number = operator.index(value) if not isinstance(value, bool) else None  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least or (most is not None and number > most):
        large = number is not None and number.bit_length() > 64  # Python refuses to print thousands of digits
        given = f"an integer of {number.bit_length()} bits" if large else repr(value)  # type: ignore[union-attr]
        raise UsageError(f"{name}={given}: expected an integer {allowed}")
    return number


def check_integers(owner: object, *names: str, least: int = 1, most: int | None = None) -> None:
    """Check fields of a frozen dataclass as `check_integer` does, and keep them as Python's integers."""
    for name in names:
        value = check_integer(f"{type(owner).__name__}: {name}", getattr(owner, name), least, most)
        object.__setattr__(owner, name, value)


def check_rising(name: str, values: Sequence[float], least: float = 1, count: int = 2) -> None:
    """Check the values along an axis: at least `count`, in rising order, from `least` on."""
    if len(values) < count or list(values) != sorted(set(values)) or any(value < least for value in values):
        raise UsageError(f"{name}={tuple(values)}: expected at least {count}, in rising order, from {least} on")


class ExtraMissing(ManyheadsError, ImportError):
    """An optional dependency is needed and not installed; the message names the extra."""


class FileRefused(ManyheadsError, ValueError):
    """A file from outside that cannot be read safely; the message says which rule it breaks."""


class CertificateError(ManyheadsError, ArithmeticError):
    """A solver ended without a valid certificate: it reached `measured` and had to reach `threshold`.

    `partial` is what was solved before, where a solver keeps it: of the type that it returns.
    """

    def __init__(self, message: str, *, measured: float, threshold: float, partial: object = None):
        super().__init__(f"{message} (measured {measured:.3g}, threshold {threshold:.3g})")
        self.message, self.measured, self.threshold, self.partial = message, measured, threshold, partial

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the figures when the error travels back from another process."""
        build = functools.partial(type(self), measured=self.measured, threshold=self.threshold, partial=self.partial)
        return build, (self.message,)
