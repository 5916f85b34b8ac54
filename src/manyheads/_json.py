"""Parsing of untrusted JSON: the number of values, hence the memory, is bounded beforehand."""

from __future__ import annotations

import json
from typing import Any

MOST_PARTS = 1_000_000  # a value takes up to 200 bytes of memory, and three in the file


def check_parts(data: bytes | bytearray) -> None:
    """Raise a ValueError if a text holds more values than any file of this library or of a model."""
    parts = data.count(b",") + data.count(b"[") + data.count(b"{")
    if parts > MOST_PARTS:
        raise ValueError(f"{parts:,} commas and brackets, at most {MOST_PARTS:,}")


def parse_bounded(data: bytes | bytearray) -> Any:
    """Parse JSON of a bounded number of values; ValueError or RecursionError if it is none."""
    check_parts(data)
    return json.loads(data)
