"""Folders, indexes and shards behind one set of names."""

import hashlib
import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from manyheads.errors import UsageError
from manyheads.models import open_checkpoint
from manyheads.models.parameters import parameter_roles
from manyheads.models.refusals import CheckpointRefused

CONFIG = {"model_type": "gpt2", "n_embd": 4}


@pytest.fixture
def arrays(rng):
    names = ("wte.weight", "h.0.mlp.weight", "h.1.mlp.weight", "ln_f.bias", "h.10.mlp.weight")
    shapes = ((7, 4), (4, 4), (4, 4), (4,), (4, 4))
    return {
        name: rng.standard_normal(shape).astype(ml_dtypes.bfloat16 if "mlp" in name else np.float32)
        for name, shape in zip(names, shapes, strict=True)
    }


@pytest.fixture
def sharded(tmp_path, arrays):
    """Three shards with an index and a configuration, as transformers writes them."""
    placed = {}
    for number, part in enumerate(np.array_split(sorted(arrays), 3)):
        shard = f"model-{number + 1:05}-of-00003.safetensors"
        safetensors.numpy.save_file({name: arrays[name] for name in part}, tmp_path / shard)
        placed |= dict.fromkeys(part, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_shards_read_like_one_file(sharded, arrays):
    checkpoint = open_checkpoint(sharded)
    assert len(checkpoint.files) == 3
    assert set(checkpoint.names) == set(arrays)
    assert checkpoint.config == CONFIG
    assert checkpoint.nbytes == sum(array.nbytes for array in arrays.values())
    assert checkpoint.parameters == sum(array.size for array in arrays.values())
    streamed = dict(checkpoint.stream())
    assert tuple(streamed) == checkpoint.names
    for name, array in arrays.items():
        assert streamed[name].dtype == array.dtype
        assert np.array_equal(streamed[name], array)
        assert checkpoint.fingerprint(name) == hashlib.sha256(array.tobytes()).hexdigest()
    assert np.array_equal(checkpoint.tensor("wte.weight", rows=[6, 0]), arrays["wte.weight"][[6, 0]])
    assert [name for name, _ in checkpoint.stream(["ln_f.bias", "wte.weight"])] == ["ln_f.bias", "wte.weight"]


def test_the_index_itself_can_be_opened(sharded, arrays):
    checkpoint = open_checkpoint(sharded / "model.safetensors.index.json")
    assert set(checkpoint.names) == set(arrays)


def test_one_file_with_its_configuration(tmp_path, arrays):
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config is None
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "limit": Infinity}')
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        checkpoint = open_checkpoint(path)
        assert checkpoint.config == {"model_type": "gpt2", "limit": float("inf")}
        assert set(checkpoint.names) == set(arrays)
    checkpoint = open_checkpoint(tmp_path, config=CONFIG)
    assert checkpoint.config == CONFIG


def test_no_file_stays_open(sharded):
    """Reading opens and closes: a checkpoint of a thousand shards takes no descriptors."""
    before = sorted(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else []
    checkpoint = open_checkpoint(sharded)
    assert dict(checkpoint.stream()).keys() == set(checkpoint.names)
    assert not before or sorted(os.listdir("/proc/self/fd")) == before


def test_unknown_names_are_answered_with_near_ones(sharded):
    with pytest.raises(UsageError, match=r"near it: wte\.weight"):
        open_checkpoint(sharded).tensor("transformer.wte.weight")


def test_aliases_of_the_metadata(tmp_path, rng):
    table = rng.standard_normal((5, 3))
    metadata = {"format": "pt", "lm_head.weight": "wte.weight", "stray": "nowhere", "wte.weight": "wte.weight"}
    safetensors.numpy.save_file({"wte.weight": table}, tmp_path / "model.safetensors", metadata)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.aliases == {"lm_head.weight": "wte.weight"}
    assert checkpoint.names == ("wte.weight",)
    assert checkpoint.parameters == 15
    assert np.array_equal(checkpoint.tensor("lm_head.weight"), table)
    assert checkpoint.fingerprint("lm_head.weight") == checkpoint.fingerprint("wte.weight")


def test_long_names_make_short_messages(tmp_path):
    """A name may be as long as a header; neither messages nor the search for near names may follow it there."""
    names = [str(number) * 300_000 for number in range(3)]
    safetensors.numpy.save_file({name: np.zeros(1) for name in names}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path, config={**CONFIG, "n_head": 2, "n_layer": 0})
    with pytest.raises(UsageError) as unknown:
        checkpoint.tensor("1" * 299_999)
    with pytest.raises(CheckpointRefused) as unexplained:
        parameter_roles(checkpoint)
    assert len(str(unknown.value)) < 1000
    assert len(str(unexplained.value)) < 1500
