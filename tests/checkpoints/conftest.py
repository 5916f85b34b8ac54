"""Safetensors files made by hand, byte by byte, so that they can break any rule."""

import json

import pytest


def make_bytes(table, data=b"", *, length=None):
    """A file from a header (a table, or raw bytes) and data; `length` overrides the eight bytes of length."""
    raw = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


@pytest.fixture
def craft(tmp_path):
    """Write a hand-made file and return its path."""

    def write(table, data=b"", *, length=None, name="model.safetensors"):
        path = tmp_path / name
        path.write_bytes(make_bytes(table, data, length=length))
        return path

    return write
