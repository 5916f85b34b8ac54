"""Whitelist of what a stored unit may hold: plain numbers in Zarr v3, checked before Zarr opens anything.

Zarr runs code that a store names (codecs, filters, data types, pickled objects) and allocates what a shape states.
So every file of a unit is compared with the one form that format 1 had, and everything else is refused.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from manyheads._json import parse_bounded
from manyheads.study.store.disk import StoreDamaged, list_files, read_bounded
from manyheads.study.store.records.schema import CODED, is_plain_name

ITEM_SIZES = {
    "bool": 1,
    **{f"{sign}int{8 * size}": size for sign in ("", "u") for size in (1, 2, 4, 8)},
    **{f"float{8 * size}": size for size in (2, 4, 8)},
    **{f"complex{8 * size}": size for size in (8, 16)},
}
CODECS = (["bytes"], ["bytes", "zstd"])
ARRAY_KEYS = frozenset(
    {
        "zarr_format",
        "node_type",
        "shape",
        "data_type",
        "chunk_grid",
        "chunk_key_encoding",
        "fill_value",
        "codecs",
        "attributes",
        "dimension_names",
        "storage_transformers",
    }
)
GROUP_KEYS = frozenset({"zarr_format", "node_type", "attributes", "consolidated_metadata"})
LARGEST_METADATA = 1 << 24  # bytes of one JSON file
LARGEST_EMPTY = 1 << 26  # bytes that a unit may state without a proportion to what is on disk
LARGEST_RATIO = 1000  # of stated bytes to bytes on disk, beyond that


def check_arrays(group: Path) -> None:
    """Check that a Zarr group holds plain arrays and nothing else, without opening it by Zarr."""
    sizes = list_files(group)
    names = sorted({name.split("/")[0] for name in sizes if "/" in name})
    _check_group(group, _metadata(group / "zarr.json"))
    known = {"zarr.json"}
    stated = 0
    for name in names:
        _require(is_plain_name(name), group / name, "a name that is no variable's")
        array = group / name
        metadata = _metadata(array / "zarr.json")
        chunks, largest = _check_array(array, metadata)
        stated += _stated_bytes(metadata)
        known.add(f"{name}/zarr.json")
        for key, size in ((key, sizes[key]) for key in sizes if key.startswith(f"{name}/c")):
            _require(key.removeprefix(f"{name}/") in chunks, group / key, "a chunk outside the array")
            _require(size <= largest + largest // 64 + 1024, group / key, f"{size:,} bytes for a chunk of {largest:,}")
            _check_compressed(group / key, metadata, largest)
            known.add(key)
    if strangers := sorted(set(sizes) - known):
        raise StoreDamaged(f"{group / strangers[0]} is no part of a stored unit")
    allowed = LARGEST_EMPTY + LARGEST_RATIO * sum(sizes.values())
    _require(stated <= allowed, group, f"arrays of {stated:,} bytes in files of {sum(sizes.values()):,}")


class _Chunks:
    """The keys of an array's chunks, without listing them: a forged shape may have 1e12."""

    def __init__(self, counts: list[int]):
        self.counts = counts

    def __contains__(self, key: str) -> bool:
        parts = key.split("/")
        if parts[0] != "c" or len(parts) != len(self.counts) + 1:
            return False
        places = zip(parts[1:], self.counts, strict=True)
        return all(re.fullmatch(r"0|[1-9]\d{0,17}", part) and int(part) < count for part, count in places)


def _check_group(path: Path, metadata: dict[str, Any]) -> None:
    _require(metadata.get("zarr_format") == 3, path, f"Zarr format {metadata.get('zarr_format')!r}; expected 3")
    _require(metadata.get("node_type") == "group", path, f"node type {metadata.get('node_type')!r}; expected a group")
    _require(set(metadata) <= GROUP_KEYS, path, f"metadata {sorted(set(metadata) - GROUP_KEYS)}")
    _require(metadata.get("consolidated_metadata") is None, path, "consolidated metadata")
    _check_attributes(path, metadata.get("attributes", {}))


def _check_array(path: Path, metadata: dict[str, Any]) -> tuple[_Chunks, int]:
    """Check an array's metadata; return the keys of its chunks and the bytes of one."""
    _require(metadata.get("zarr_format") == 3, path, f"Zarr format {metadata.get('zarr_format')!r}; expected 3")
    _require(metadata.get("node_type") == "array", path, f"node type {metadata.get('node_type')!r}; expected an array")
    _require(set(metadata) <= ARRAY_KEYS, path, f"metadata {sorted(set(metadata) - ARRAY_KEYS)}")
    kind: Any = metadata.get("data_type")
    _require(isinstance(kind, str) and kind in ITEM_SIZES, path, f"data type {kind!r}; expected numbers or booleans")
    shape: Any = metadata.get("shape")
    grid: Any = metadata.get("chunk_grid")
    _require(_are_sizes(shape, 0), path, f"shape {shape!r}")
    _require(
        isinstance(grid, dict) and grid.get("name") == "regular", path, f"chunk grid {grid!r}; expected a regular one"
    )
    options = grid.get("configuration")
    chunk: Any = options.get("chunk_shape") if isinstance(options, dict) else None
    _require(_are_sizes(chunk, 1) and len(chunk) == len(shape), path, f"chunks of {chunk!r} for shape {shape!r}")
    # One chunk that reaches past the array takes memory for all of itself.
    _require(all(a <= max(b, 1) for a, b in zip(chunk, shape, strict=True)), path, f"chunks of {chunk!r} for {shape!r}")
    encoding = {"name": "default", "configuration": {"separator": "/"}}
    _require(
        metadata.get("chunk_key_encoding") in (encoding, {"name": "default"}), path, "another encoding of chunk keys"
    )
    _require(metadata.get("storage_transformers", []) == [], path, "storage transformers")
    names = metadata.get("dimension_names")
    named = names is None or (isinstance(names, list) and all(isinstance(n, str) and is_plain_name(n) for n in names))
    _require(named, path, f"dimension names {names!r}")
    _check_codecs(path, metadata.get("codecs"))
    _check_fill_value(path, metadata.get("fill_value"))
    attributes = metadata.get("attributes", {})
    if kind == "int8" and isinstance(attributes, dict) and attributes.get("dtype") == "bool":
        # Booleans as xarray before 2026.7 writes them, and as every version reads them.
        attributes = {name: value for name, value in attributes.items() if name != "dtype"}
    _check_attributes(path, attributes)
    return _Chunks([-(-a // b) for a, b in zip(shape, chunk, strict=True)]), ITEM_SIZES[kind] * math.prod(chunk)


def _check_codecs(path: Path, codecs: Any) -> None:
    listed = isinstance(codecs, list) and all(isinstance(codec, dict) for codec in codecs)
    found = [codec.get("name") for codec in codecs] if listed else codecs
    _require(listed and found in CODECS, path, f"codecs {found!r}; expected bytes and zstd")
    options = {name: value for codec in codecs for name, value in (codec.get("configuration") or {}).items()}
    plain = all(isinstance(value, bool | int) for name, value in options.items() if name != "endian")
    _require(
        set(options) <= {"endian", "level", "checksum"} and plain and options.get("endian", "little") == "little",
        path,
        f"codec options {options!r}",
    )


def _check_fill_value(path: Path, value: Any) -> None:
    parts = value if isinstance(value, list) and len(value) == 2 else [value]
    plain = all(isinstance(part, bool | int | float) or part in ("NaN", "Infinity", "-Infinity") for part in parts)
    _require(plain, path, f"fill value {value!r}")


def _check_attributes(path: Path, attributes: Any) -> None:
    _require(isinstance(attributes, dict), path, "attributes that are no table")
    for name, value in attributes.items():
        _require(name not in CODED and name.isprintable(), path, f"the attribute {name!r}")
        texts = name == "labels" and isinstance(value, list) and all(isinstance(text, str) for text in value)
        _require(texts or isinstance(value, str | int | float | bool), path, f"the attribute {name!r} of another type")


def _check_compressed(path: Path, metadata: dict[str, Any], expected: int) -> None:
    """Check the size that a compressed chunk states: it is taken from memory before anything is decompressed."""
    if len(metadata["codecs"]) == 1:
        return
    with path.open("rb") as file:
        head = file.read(18)
    _require(_zstd_content_size(head) == expected, path, f"no zstd frame of {expected:,} bytes")


def _zstd_content_size(head: bytes) -> int | None:
    """Return the content size in the header of a zstd frame (RFC 8878, section 3.1.1.1); None if it states none."""
    if len(head) < 6 or head[:4] != b"\x28\xb5\x2f\xfd":
        return None
    descriptor = head[4]
    single = bool(descriptor & 0x20)
    width = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    begin = 5 + (0 if single else 1) + (0, 1, 2, 4)[descriptor & 3]
    size = int.from_bytes(head[begin : begin + width], "little")
    return None if width == 0 else size + (256 if width == 2 else 0)


def _stated_bytes(metadata: dict[str, Any]) -> int:
    """Return the memory that an array takes when it is read, its texts decoded."""
    labels = metadata["attributes"].get("labels") if isinstance(metadata.get("attributes"), dict) else None
    widest = 4 * max(map(len, labels), default=0) if isinstance(labels, list) else 0
    return (ITEM_SIZES[metadata["data_type"]] + widest) * math.prod(metadata["shape"])


def _are_sizes(shape: Any, least: int) -> bool:
    return (
        isinstance(shape, list)
        and len(shape) <= 32
        and all(isinstance(size, int) and not isinstance(size, bool) and least <= size < 1 << 48 for size in shape)
    )


def _metadata(path: Path) -> dict[str, Any]:
    try:
        data = parse_bounded(read_bounded(path, LARGEST_METADATA))
    except (OSError, ValueError, RecursionError) as error:
        raise StoreDamaged(f"{path} is no metadata of Zarr v3 ({type(error).__name__})") from error
    _require(isinstance(data, dict), path, "metadata that are no table")
    return data


def _require(holds: bool, path: Path, found: str) -> None:
    if not holds:
        raise StoreDamaged(f"{path} is refused before it is opened: it holds {found}")
