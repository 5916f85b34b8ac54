"""The small JSON files beside the weights: the index of shards and the configuration."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manyheads.models import refusals
from manyheads.models.descriptors import open_regular
from manyheads.models.strictjson import parse_json

JSON_LIMIT = 50_000_000
"""The longest index or configuration in bytes; the largest published indexes take about a tenth."""


def read_json(path: Path, follow_links: bool = False) -> dict[str, Any]:
    """Read a JSON file whose top is an object.

    Raises
    ------
    CheckpointRefused
        The file cannot be opened safely, is longer than `JSON_LIMIT`, or is no strict JSON object.
    """
    descriptor, _ = open_regular(path, follow_links)
    try:
        with os.fdopen(descriptor, "rb") as file:
            data = file.read(JSON_LIMIT + 1)
    except OSError as error:
        raise refusals.FileUnreadable(path, f"cannot be read: {error.strerror}", error.errno) from error
    if len(data) > JSON_LIMIT:
        raise refusals.JSONTooLarge(path, f"more than {JSON_LIMIT:,} bytes", len(data))
    # Python writes NaN and Infinity into configurations, and published ones hold them.
    parsed = parse_json(data, path, constants=True)
    if not isinstance(parsed, dict):
        raise refusals.JSONNotObject(path, f"the top of the file is a {type(parsed).__name__}, not an object")
    return parsed


def read_index(path: Path, follow_links: bool = False) -> Mapping[str, str]:
    """Read which shard holds which tensor.

    Returns
    -------
    Mapping[str, str]
        Tensor → plain file name in the folder of the index.

    Raises
    ------
    IndexInvalid
        No `weight_map` of strings, or an empty one.
    ShardOutsideFolder
        An entry with a folder, a drive or `..` in it.

    Notes
    -----
    `metadata.total_size` is not believed: published indexes disagree on whether tied weights count twice. The sum of
    the tensors is what `Checkpoint.nbytes` reports.
    """
    table = read_json(path, follow_links).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(shard, str) for shard in table.values()):
        raise refusals.IndexInvalid(path, "weight_map is not a table from tensors to file names")
    for shard in set(table.values()):
        if shard in ("", ".", "..") or any(mark in shard for mark in "/\\:\0"):
            raise refusals.ShardOutsideFolder(path, f"the shard {shard[:200]!r} is no plain file name", shard)
        if not shard.endswith(".safetensors"):
            raise refusals.PickleRefused(path, f"the shard {shard[:200]!r} is no .safetensors file", shard)
    return MappingProxyType(table)
