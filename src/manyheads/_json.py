"""JSON: values as it can hold them, and parsing of untrusted text, bounded in memory beforehand."""

import json
import math
from typing import Any, TypeAlias

Json: TypeAlias = Any  # null, a boolean, a number, a text, or lists and dictionaries of them

MOST_PARTS = 1_000_000  # a value takes up to 200 bytes of memory, and three in the file


def check_parts(data: bytes | bytearray) -> None:
    """Raise a ValueError if a text holds more values than any file of this library or of a model."""
    parts = data.count(b",") + data.count(b"[") + data.count(b"{")
    if parts > MOST_PARTS:
        raise ValueError(f"{parts:,} commas and brackets, at most {MOST_PARTS:,}")


def parse_bounded(data: bytes | bytearray) -> Json:
    """Parse JSON of a bounded number of values; ValueError or RecursionError if it is none."""
    check_parts(data)
    return json.loads(data)


def json_ready(value: Any) -> Json:
    """Return tables and rows of values as JSON can hold them: NumPy's as Python's, null for what is not finite."""
    if isinstance(value, dict):
        return {name: json_ready(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return [json_ready(item) for item in value]
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
