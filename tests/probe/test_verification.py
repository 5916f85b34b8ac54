"""Verification of series: every fault is named where it is, and a clean series has no finding."""

import itertools
import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from tests.models.conftest import FAMILIES

from manyheads.errors import UsageError
from manyheads.models import open_checkpoint
from manyheads.probe import verify_checkpoints as verify
from manyheads.probe.checkpoints import contents, verification
from manyheads.probe.checkpoints.contents import read_contents
from manyheads.probe.checkpoints.copies import find_misplaced

STEPS = (0, 1, 2, 4, 8, 16, 32)
WALKS = ("straight", "random", "decaying")


def save(folder, arrays, config=None, shards=1, kind=np.float32):
    """Write a checkpoint as transformers does, in one file or in shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: array.astype(kind) for name, array in arrays.items()}
    parts = np.array_split(sorted(arrays), shards)
    files = [f"model-{number + 1:05}-of-{shards:05}.safetensors" for number in range(shards)]
    files = ["model.safetensors"] if shards == 1 else files
    for file, part in zip(files, parts, strict=True):
        safetensors.numpy.save_file({name: arrays[name] for name in part}, folder / file)
    if shards > 1:
        index = {"weight_map": {name: file for file, part in zip(files, parts, strict=True) for name in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def walk(rng, kind="random", steps=STEPS, family="gpt2"):
    """Return configuration and weights at every step of a trajectory; norms and biases too."""
    config, shapes = FAMILIES[family]()
    weights = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    drift = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    found = []
    for before, step in zip((0, *steps), steps, strict=False):
        for name, array in weights.items():
            noise = rng.standard_normal(array.shape)
            if kind == "straight":
                weights[name] = array + 0.05 * (step - before) * drift[name]
            elif kind == "random":
                weights[name] = array + 0.1 * np.sqrt(step - before) * noise
            else:  # relaxes to a stationary state
                keep = np.exp(-0.1 * (step - before))
                weights[name] = keep * array + np.sqrt(1 - keep**2) * 0.3 * noise
        found.append(dict(weights))
    return {"model_type": family, **config}, found


@pytest.fixture
def series(tmp_path, rng):
    """A clean series of seven checkpoints in two shards, its weights and its configuration."""
    config, found = walk(rng)
    folders = [save(tmp_path / f"step{step}", arrays, config, 2) for step, arrays in zip(STEPS, found, strict=True)]
    return folders, found, config


def kinds(folders):
    return [(each.kind, each.where) for each in verify(folders).findings]


@pytest.mark.parametrize("kind", WALKS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_clean_series_has_no_finding(tmp_path, rng, kind, family):
    config, found = walk(rng, kind, family=family)
    folders = [save(tmp_path / f"step{step}", arrays, config) for step, arrays in zip(STEPS, found, strict=True)]
    result = verify(folders[::-1])  # names hold the steps
    assert result.findings == ()
    assert result.passed
    assert result.checkpoints == tuple(f"step{step}" for step in STEPS)
    assert (result.compared, result.tensors) == (7, 7 * len(found[0]))
    assert "the tokenizer: there is none beside the weights" in result.unchecked
    far = {  # tensors of the series whose change would hide an alteration; samples of them are compared
        name
        for one, other in itertools.pairwise(found)
        for name in one
        if np.linalg.norm(other[name] - one[name]) > 0.5 * max(map(np.linalg.norm, (one[name], other[name])))
    }
    others = [text for text in result.unchecked if not text.startswith(("the tokenizer", "entries that shrink"))]
    assert len(others) == (len(far) > 0) or len(far) <= 2


def test_missing_truncated_and_damaged_files(series):
    folders, _, _ = series
    (folders[1] / "model-00002-of-00002.safetensors").unlink()
    shard = folders[3] / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9])
    (folders[4] / "model.safetensors.index.json").write_text("{")
    result = verify(folders)
    assert [(each.kind, each.where, each.what) for each in result.findings] == [
        ("file", "step1", "FileMissing"),
        ("file", "step4", "FileDamaged"),
        ("file", "step8", "FileDamaged"),
    ]
    assert "model-00002-of-00002.safetensors" in result.findings[0].evidence
    assert "interrupted" in result.findings[1].evidence
    assert result.compared == 4
    assert "[file]" in str(result)
    assert "3 findings" in repr(result)


def test_duplicates_and_copies_from_another_step(series, tmp_path):
    folders, found, config = series
    save(folders[2], found[6], config, 2)
    assert kinds(folders) == [("duplicate", "step32"), ("apart", "step2")]  # which of the two is the wrong one
    save(folders[2], found[6], config, kind=ml_dtypes.bfloat16, shards=2)  # the same weights, rounded
    assert ("duplicate", "step32") in kinds(folders)
    mixed = {name: found[5 if "h.1" in name else 2][name] for name in found[2]}
    save(folders[2], mixed, config, 2)
    result = verify(folders)
    assert [(each.kind, each.where) for each in result.findings] == [("copied tensors", "step16")]
    assert "6 of 28 tensors are those of step2" in result.findings[0].what


@pytest.mark.parametrize("kind", ["straight", "random"])
def test_steps_out_of_order(tmp_path, rng, kind):
    steps = (0, 10, 20, 30, 40, 50)
    config, found = walk(rng, kind, steps)
    for order, expected in (
        ((0, 1, 3, 2, 4, 5), "step20, step30"),
        ((0, 4, 2, 3, 1, 5), "step10, step40"),
        ((0, 5, 1, 2, 3, 4), "step10"),
    ):
        for step, place in zip(steps, order, strict=True):
            save(tmp_path / f"step{step}", found[place], config)
        result = verify([tmp_path / f"step{step}" for step in steps])
        assert [(each.kind, each.where) for each in result.findings] == [("order", expected)]


@pytest.mark.parametrize("kind", WALKS)
def test_a_shard_that_is_interchanged_with_that_of_another_step(tmp_path, rng, kind):
    start, drift = rng.standard_normal((2, 24, 20, 15))
    noise = rng.standard_normal((6, *start.shape))
    paths = {"straight": np.arange(6)[:, None, None, None] * drift, "random": np.cumsum(noise, 0), "decaying": noise}
    names = [f"w{number:02}" for number in range(24)]
    folders = [
        save(tmp_path / f"step{step}", dict(zip(names, start + 0.1 * each, strict=True)), shards=3)
        for step, each in enumerate(paths[kind])
    ]
    assert not verify(folders).findings
    files = [folders[step] / "model-00003-of-00003.safetensors" for step in (2, 3)]
    stored = [file.read_bytes() for file in files]
    for file, other in zip(files, reversed(stored), strict=True):
        file.write_bytes(other)
    found = verify(folders).findings
    if kind != "decaying":  # all distances are equal: no order is shorter
        assert [(each.kind, each.where) for each in found] == [("order", f"step2, step3, {files[0].name}")]


def test_a_checkpoint_of_another_run_stands_apart(series, rng):
    folders, _, config = series
    save(folders[3], walk(np.random.default_rng(7))[1][3], config, 2)
    assert kinds(folders) == [("apart", "step4")]


def test_steps_twice_and_of_the_trainer(series, tmp_path, rng):
    folders, found, config = series
    (folders[2] / "trainer_state.json").write_text('{"global_step": 2000, "log_history": [{"loss": NaN}]}')
    other = {name: array + 1e-3 for name, array in found[3].items()}
    again = save(tmp_path / "again" / "step4", other, config)
    result = verify([*folders, again])
    assert [each.kind for each in result.findings] == ["step", "step"]
    assert "of step 2000" in result.findings[0].what
    assert "step 4 occurs 2 times" in result.findings[1].what


def test_dtypes_shapes_names_and_configurations(series):
    folders, found, config = series
    save(folders[1], found[1], config, 2, np.float16)
    changed = {name: array for name, array in found[4].items() if "h.1.mlp.c_fc" not in name}
    save(folders[4], {**changed, "transformer.wpe.weight": np.ones((5, 12))}, {**config, "n_positions": 5}, 2)
    result = verify(folders)
    assert {(each.kind, each.where) for each in result.findings} == {
        ("dtype", "step1"),
        ("tensors", "step8"),
        ("shape", "step8"),
        ("configuration", "step8"),
    }
    evidence = {each.kind: each.evidence for each in result.findings if each.kind != "configuration"}
    assert "F16, usually F32" in evidence["dtype"]
    assert "transformer.wpe.weight: (5, 12), usually (6, 12)" in evidence["shape"]
    assert "c_fc" in evidence["tensors"]


def test_entries_that_are_not_finite(series):
    folders, found, config = series
    found[3]["transformer.h.0.mlp.c_fc.weight"][2, 3:5] = np.nan, np.inf
    save(folders[3], found[3], config, 2)
    (finding,) = verify(folders).findings
    assert (finding.kind, finding.where) == ("not finite", "step4")
    assert finding.evidence == "transformer.h.0.mlp.c_fc.weight 2"


def test_matrices_that_are_interchanged(series):
    folders, found, config = series
    names = [f"transformer.h.{layer}.mlp.c_fc.weight" for layer in (0, 1)]
    found[3][names[0]], found[3][names[1]] = found[3][names[1]], found[3][names[0]]
    save(folders[3], found[3], config, 2)
    (finding,) = verify(folders).findings
    assert (finding.kind, finding.where) == ("interchanged tensors", "step2 to step4")
    assert f"{names[0]} holds what {names[1]} held" in finding.evidence


def test_blocks_and_samples_are_those_of_the_tensor(tmp_path, rng, monkeypatch):
    array = rng.standard_normal((700, 3)).astype(np.float32)
    file = save(tmp_path, {"w": array}) / "model.safetensors"
    whole = read_contents("a", open_checkpoint(file), [], {})
    monkeypatch.setattr(contents, "BLOCK", 250)
    parts = read_contents("a", open_checkpoint(file), [], {})
    assert whole.hashes["w"] == parts.hashes["w"] == open_checkpoint(file).fingerprint("w")
    assert np.array_equal(whole.samples["w"], parts.samples["w"])
    assert np.isin(whole.samples["w"], array).all()
    assert whole.samples["w"].size == contents.SAMPLE


def test_distances_without_an_order_have_no_finding(rng):
    """A stationary phase of 40 checkpoints in 20,000 dimensions, and a single dimension of time."""
    points = rng.standard_normal((40, 20_000))
    squares = np.sum(points**2, axis=1)
    assert find_misplaced(np.sqrt(np.maximum(squares[:, None] + squares - 2 * points @ points.T, 0))) == []
    times = np.sort(rng.exponential(size=30)).cumsum()
    assert find_misplaced(abs(times[:, None] - times)) == []


def test_wrong_use(tmp_path):
    with pytest.raises(UsageError, match="list of checkpoints"):
        verify([])
    with pytest.raises(UsageError, match="list of checkpoints"):
        verify("step1")
    (finding,) = verify([tmp_path / "none"]).findings
    assert (finding.kind, finding.what) == ("file", "FileMissing")


def test_distances_weight_matrices_alike_whatever_their_scale(rng):
    """Median over matrices of pairwise distances, each in units of its own median; constant matrices left out."""
    samples = [{"a": rng.standard_normal(8), "b": 1e3 * rng.standard_normal(5), "c": np.ones(4)} for _ in range(5)]
    expected = []
    for name in ("a", "b"):
        distances = np.array([[np.linalg.norm(one[name] - other[name]) for other in samples] for one in samples])
        expected.append(distances / np.median([distances[i, j] for i in range(5) for j in range(i)]))
    found = verification._distances([SimpleNamespace(samples=each) for each in samples], ["a", "b", "c"])
    np.testing.assert_allclose(found, np.median(expected, axis=0), atol=1e-6)
