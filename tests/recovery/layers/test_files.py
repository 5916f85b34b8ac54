"""A layer on the disk: what is written comes back, and nothing else is taken for one."""

import json
import os

import numpy as np
import pytest
import safetensors.numpy
from tests.recovery.rotary_layers import planted_rotary_layer

from manyheads.errors import FileRefused, UsageError
from manyheads.models.checkpoints.tensor_file import TensorFile
from manyheads.recovery import gpt_layer, load_layer, planted_layer, save_layer
from manyheads.recovery.layers.files import PLAIN, TURNED, LayerFileRefused, is_layer_file
from manyheads.recovery.layers.rotary import RotaryLayer


@pytest.mark.parametrize("full", [False, True])
def test_what_is_written_comes_back_to_the_bit(full, rng, tmp_path):
    layer = gpt_layer(rng, 6, 2) if full else planted_layer(rng, 5, 3)
    path = save_layer(tmp_path / "layer.safetensors", layer, {"from": "a test"})
    found = load_layer(path)
    for name in ("theta", "projection", "key_bias", "bias"):
        given, read = getattr(layer, name), getattr(found, name)
        assert (given is None) == (read is None)
        assert given is None or np.array_equal(given, read)
    assert found.causal == layer.causal
    assert is_layer_file(path)
    file = TensorFile(path)
    assert file.metadata["from"] == "a test"
    assert set(safetensors.numpy.load_file(path)) == {"theta", "projection", *(("key_bias", "bias") if full else ())}
    assert sorted(os.listdir(tmp_path)) == ["layer.safetensors"]  # no temporary file is left


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_layer_with_positions_comes_back_with_all_its_offsets(goes_on, rng, tmp_path):
    layer = planted_rotary_layer(rng, 6, 3)
    if not goes_on:
        layer = RotaryLayer(layer.forms[:4], layer.projection)
    found = load_layer(save_layer(tmp_path / "layer.safetensors", layer))
    assert isinstance(found, RotaryLayer)
    assert np.array_equal(found.forms, layer.forms)
    assert (found.turns is None) == (not goes_on)
    x = rng.normal(size=(2, 20 if goes_on else 4, 6))  # 16 offsets are listed
    assert np.array_equal(found(x), layer(x))


def test_a_head_without_its_turn_is_refused(rng, tmp_path):
    path = save_layer(tmp_path / "layer.safetensors", planted_rotary_layer(rng, 4, 2))
    arrays = safetensors.numpy.load_file(path)
    for spoilt in (
        {name: array for name, array in arrays.items() if name != "turn.1"},
        arrays | {"first.0": arrays["first.0"][:, :-1].copy()},
        arrays | {"forms": arrays["forms"][0]},
    ):
        safetensors.numpy.save_file(spoilt, path, {"format": TURNED, "causal": "yes"})
        with pytest.raises(LayerFileRefused):
            load_layer(path)


def test_a_layer_that_cannot_be_kept_leaves_the_old_file(rng, tmp_path):
    path = save_layer(tmp_path / "layer.safetensors", planted_layer(rng, 3, 1))
    before = path.read_bytes()
    broken = planted_layer(rng, 3, 1)
    broken.theta[0, 0, 0] = np.nan
    with pytest.raises(UsageError, match="theta of this layer holds NaN"):
        save_layer(path, broken)
    with pytest.raises(UsageError, match="folder that exists"):
        save_layer(tmp_path / "nowhere" / "layer.safetensors", planted_layer(rng, 3, 1))
    with pytest.raises(UsageError, match="name a file"):
        save_layer(tmp_path, planted_layer(rng, 3, 1))
    assert path.read_bytes() == before


def rewrite(path, change, **metadata):
    """Write a good layer of 2 heads in 3 dimensions again, changed."""
    rng = np.random.default_rng(0)
    layer = gpt_layer(rng, 3, 2, rank=1)
    arrays = {name: getattr(layer, name) for name in ("theta", "projection", "key_bias", "bias")}
    change(arrays)
    safetensors.numpy.save_file(arrays, path, {"format": PLAIN, "causal": "yes"} | metadata)
    return path


CHANGES = {
    "theta has shape": lambda arrays: arrays.update(theta=arrays["theta"][:, :2]),
    "projection has shape": lambda arrays: arrays.update(projection=arrays["projection"][:, :1]),
    "key_bias has shape": lambda arrays: arrays.update(key_bias=arrays["key_bias"][:, :2]),
    "bias has shape": lambda arrays: arrays.update(bias=arrays["bias"][None]),
    "bias is F32": lambda arrays: arrays.update(bias=arrays["bias"].astype(np.float32)),
    "holds the tensors": lambda arrays: arrays.pop("theta"),
    "holds the tensors ": lambda arrays: arrays.update(other=arrays["bias"]),
    "bias holds NaN": lambda arrays: arrays["bias"].__setitem__(0, np.inf),
}


@pytest.mark.parametrize("said", CHANGES)
def test_other_files_are_refused_with_what_they_hold(said, tmp_path):
    with pytest.raises(LayerFileRefused, match=said.strip()):
        load_layer(rewrite(tmp_path / "layer.safetensors", CHANGES[said]))


def test_metadata_say_what_a_file_is(tmp_path):
    path = rewrite(tmp_path / "layer.safetensors", lambda arrays: None, format="another")
    with pytest.raises(LayerFileRefused, match="format 'another'"):
        load_layer(path)
    assert not is_layer_file(path)
    with pytest.raises(LayerFileRefused, match="causal 'perhaps'"):
        load_layer(rewrite(path, lambda arrays: None, causal="perhaps"))
    (tmp_path / "no.safetensors").write_text(json.dumps({"theta": 1}))
    with pytest.raises(FileRefused):
        load_layer(tmp_path / "no.safetensors")
    assert not is_layer_file(tmp_path / "no.safetensors")
