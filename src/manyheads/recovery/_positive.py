"""Settings that are positive, and may be infinite."""

from numbers import Real

from manyheads.errors import UsageError


def check_positive(owner: object, *names: str, none: str = "") -> None:
    """Refuse fields that are no positive numbers; with `none`, what None means, that is one too."""
    for name in names:
        value = getattr(owner, name)
        if not ((value is None and none) or (isinstance(value, Real) and value > 0)):
            raise UsageError(f"{name}={value!r}: expected a positive number{none and f', or None for {none}'}")
