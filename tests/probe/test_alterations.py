"""Alterations of checkpoints of real trainings: named at every place where the others show them, else listed."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from manyheads.errors import UsageError
from manyheads.models.checkpoints.tensor_file import DTYPES
from manyheads.probe import verify_checkpoints as verify
from manyheads.probe.checkpoints.alterations.changes import measure_changes
from manyheads.probe.checkpoints.contents import PRECISION, Extremes, GridTest

pytestmark = pytest.mark.torch
LAYER = "model.layers.1."
HEADS, STEPS = 4, (0, 4, 8, 12, 16)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """Five checkpoints of a LLaMA that is trained by AdamW, the first of them as initialized; layer 0 is frozen."""
    import torch
    from tests.probe.trainings import save_quietly
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("series")
    torch.manual_seed(0)
    sizes = {"vocab_size": 29, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=HEADS, tie_word_embeddings=True))
    model.model.layers[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            save_quietly(model, folder / f"step{step}")
        ids = torch.randint(0, 29, (4, 16))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return folder


@pytest.fixture
def series(clean, tmp_path):
    shutil.copytree(clean, tmp_path / "run")
    return [tmp_path / "run" / f"step{step}" for step in STEPS]


def alter(folder, change):
    """Change the arrays of a checkpoint."""
    file = folder / "model.safetensors"
    arrays = {name: array.copy() for name, array in safetensors.numpy.load_file(file).items()}
    change(arrays)
    safetensors.numpy.save_file(arrays, file, {"format": "pt"})


def on(name, function):
    """Return a change of one tensor."""

    def change(arrays):
        arrays[name] = np.ascontiguousarray(function(arrays[name]), arrays[name].dtype)

    return change


def flip(array):
    array.reshape(-1).view(np.uint32)[np.argmax(abs(array))] ^= 1 << 28
    return array


def explode(array):
    array[2, 13] *= 2.0**20
    return array


def heads(array):
    return array.reshape(HEADS, -1, array.shape[1])[[1, 0, 2, 3]].reshape(array.shape)


def interleave(array):
    return array.reshape(HEADS, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def clear(*where):
    """Return a change that sets some entries to zero."""

    def change(array):
        array[where] = 0
        return array

    return change


def copied(array):
    array[8:16] = array[24:32]
    return array


def half_negated(array):
    array[16:24] *= -1
    return array


def round_all(arrays):
    arrays.update({name: array.astype(ml_dtypes.bfloat16).astype(array.dtype) for name, array in arrays.items()})


def eight_bits(array, step=None):
    """Round rows to 255 levels."""
    step = np.abs(array).max(axis=1, keepdims=True) / 127 if step is None else step
    return np.rint(array / step) * step


QUERY, UP, GAIN = LAYER + "self_attn.q_proj.weight", LAYER + "mlp.up_proj.weight", LAYER + "input_layernorm.weight"
EMBED = "model.embed_tokens.weight"
FROZEN = UP.replace("1", "0")
KINDS = {
    "a large exponent": (on(UP, explode), "altered entries", f"{UP}[2, 13]: "),
    "heads in another order": (on(QUERY, heads), "altered tensors", f"{QUERY} has its rows in another order"),
    "columns in another order": (on(UP, lambda array: array[:, ::-1]), "altered tensors", f"{UP} has its columns"),
    "rotary order": (on(QUERY, interleave), "altered tensors", f"{QUERY} has its rows"),
    "negated": (on(UP, np.negative), "altered tensors", f"{UP} changes sign"),
    "zeroed": (on(UP, np.zeros_like), "altered tensors", f"{UP} is zero"),
    "transposed": (on(UP, np.transpose), "altered tensors", f"{UP} is transposed"),
    "gain shifted": (on(GAIN, lambda array: array - 1), "altered tensors", f"{GAIN} is "),
    "doubled": (on(UP, lambda array: 2 * array), "altered tensors", f"{UP} is multiplied by"),
    "frozen and negated": (on(FROZEN, np.negative), "altered tensors", f"{FROZEN} changes sign"),
    "rows cleared": (on(UP, clear(slice(5, 12))), "altered entries", f"{UP}: rows 5 to 11 are zero"),
    "a column cleared": (on(UP, clear(slice(None), 9)), "altered entries", f"{UP}: column 9 is zero"),
    "an embedding cleared": (on(EMBED, clear(17)), "altered entries", f"{EMBED}: row 17 is zero"),
    "frozen and cleared": (on(FROZEN, clear(slice(None), slice(3, 5))), "altered entries", "columns 3 to 4 are zero"),
    "a head copied": (on(QUERY, copied), "altered tensors", f"{QUERY} rows 8 to 15 are copies of rows 24 to 31"),
    "a head negated": (on(QUERY, half_negated), "altered tensors", f"{QUERY} rows 16 to 23 change sign"),
    "rounded": (round_all, "rounded", FROZEN),
    "rounded to int8": (on(UP, eight_bits), "rounded", UP),
}  # fmt: skip


def test_the_clean_series_has_no_finding(series):
    assert verify(series).findings == ()
    assert verify(series[1:3]).findings == ()


@pytest.mark.parametrize("kind", KINDS)
def test_an_alteration_is_named_at_every_place(series, kind):
    change, expected, evidence = KINDS[kind]
    for place in (0, 2, 4):
        stored = (series[place] / "model.safetensors").read_bytes()
        alter(series[place], change)
        found = verify(series).findings
        assert [(each.kind, each.where) for each in found] == [(expected, series[place].name)]
        assert evidence in found[0].evidence
        pair = verify([series[place], series[1]]).findings  # one neighbour shows it too, but not which of them it is
        assert [each.kind for each in pair] == [expected]
        assert series[place].name in pair[0].where
        (series[place] / "model.safetensors").write_bytes(stored)


def test_zeros_that_training_leaves_are_no_finding(series):
    """Padding stays zero, or starts at zero and learns by the tied output; a block of rows starts at zero."""
    for folder in series:
        alter(folder, on(FROZEN, clear(slice(4, 7))))
    second = safetensors.numpy.load_file(series[1] / "model.safetensors")
    start = safetensors.numpy.load_file(series[0] / "model.safetensors")
    for number, folder in enumerate(series):
        arrays = safetensors.numpy.load_file(folder / "model.safetensors")
        for name, rows in ((EMBED, slice(0, 1)), (QUERY, slice(8, 16))):
            arrays[name][rows] = arrays[name][rows] - start[name][rows]
        safetensors.numpy.save_file(arrays, folder / "model.safetensors", {"format": "pt"})
        assert number or not arrays[QUERY][8:16].any()
    assert second[QUERY][8:16].any()
    assert verify(series).findings == ()
    assert verify(series[:2]).findings == ()


def test_stacked_biases_of_experts_may_grow_from_zero_as_biases_do(tmp_path, rng):
    grown, weight = rng.standard_normal((4, 16)), rng.standard_normal((4, 16, 8))
    for step, factor in ((0, 0.0), (4, 1.0), (8, 2.8)):
        arrays = {
            "experts.down_proj_bias": factor * 0.003 * grown,
            "experts.down_proj": weight + 0.003 * factor * rng.standard_normal(weight.shape),
        }
        arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
        safetensors.numpy.save_file(arrays, tmp_path / f"step{step}.safetensors")
    assert verify(sorted(tmp_path.iterdir())).findings == ()


@pytest.mark.parametrize("seed", range(6))
def test_only_orders_are_called_orders(tmp_path, seed):
    """Blocks of rows or columns that are zero, negated, copied or exchanged, against the source."""
    rng = np.random.default_rng(seed)
    size, count = int(rng.integers(4, 12)), int(rng.integers(4, 9))
    first, then = (int(each) for each in rng.permutation(count)[:2])
    one, two = (slice(each * size, (each + 1) * size) for each in (first, then))
    words = {
        "zero": f"{one.start} to {one.stop - 1} are zero",
        "negated": f"{one.start} to {one.stop - 1} change sign",
        "copied": f"{one.start} to {one.stop - 1} are copies of",
        "exchanged": "in another order",
    }
    source = rng.standard_normal((count * size, 48)).astype(np.float32)
    for kind, expected in words.items():
        for turned in (False, True):
            array = source + 0.05 * rng.standard_normal(source.shape).astype(np.float32)
            old = array.copy()
            new = {"zero": 0 * old[one], "negated": -old[one]}.get(kind, old[two])
            array[one] = new
            if kind == "exchanged":
                array[two] = old[one]
            for name, each in (("ours", array), ("theirs", source)):
                path = tmp_path / f"{kind}{turned}{name}.safetensors"
                safetensors.numpy.save_file({"w": np.ascontiguousarray(each.T if turned else each)}, path)
            found = verify([tmp_path / f"{kind}{turned}ours.safetensors"], against=path).findings
            (evidence,) = [each.evidence for each in found if each.kind == "against"]
            assert expected in evidence
            assert ("columns" if turned else "rows") in evidence


def test_a_single_checkpoint_says_what_it_does_not_show(series):
    alter(series[2], KINDS["negated"][0])
    found = verify(series[2:3])
    assert found.findings == ()
    assert any("sign, order of rows and heads" in text and "--against" in text for text in found.unchecked)
    for kind in ("a large exponent", "zeroed", "rounded"):
        alter(series[1], KINDS[kind][0])
        (finding,) = verify(series[1:2]).findings
        assert finding.kind == KINDS[kind][1]
        alter(series[1], lambda arrays: arrays.update(safetensors.numpy.load_file(series[0] / "model.safetensors")))


def test_a_bit_of_the_exponent(series):
    alter(series[2], on(UP, flip))  # the entry becomes nothing
    (finding,) = verify(series).findings
    assert (finding.kind, finding.where) == ("altered entries", "step8")
    assert f"{UP}[" in finding.evidence


@pytest.mark.parametrize("place", [0, 4])
def test_an_entry_that_shrinks_at_an_end_is_found_beyond_training_and_listed_otherwise(tmp_path, rng, place):
    """By one bit of the exponent, 2^-32; its neighbours move by 1/20 or 1/2 of its size between checkpoints."""
    note = "entries that shrink, as by one bit of the exponent, in the first or last checkpoint"
    for step, found_there in ((0.05, True), (0.5, False)):
        states = np.cumsum([np.zeros((64, 64)), *(step * rng.standard_normal((4, 64, 64)))], axis=0)
        start = rng.choice([-1.0, 1.0], (64, 64)) if found_there else rng.standard_normal((64, 64))
        states = (states + start).astype(np.float32)
        for altered in (False, True):
            if altered:
                states[:, 3, 5] = 1 + 1e-4 * np.arange(5)
                states[place, 3, 5] *= 2.0**-32
            series = [write(tmp_path / f"step{number}.safetensors", w=state) for number, state in enumerate(states)]
            found = verify(series)
            places = [each.where for each in found.findings if each.kind == "altered entries"]
            assert places == [f"step{place}.safetensors"] * (altered and found_there)
            assert any(text.startswith(note) for text in found.unchecked) != found_there


def test_a_rounded_copy_of_another_step(series):
    shutil.copy(series[3] / "model.safetensors", series[4] / "model.safetensors")
    alter(series[4], lambda arrays: arrays.update({k: v.astype(np.float16).astype(v.dtype) for k, v in arrays.items()}))
    found = verify(series).findings
    assert ("duplicate", "step16", "holds the weights of step12") in [each[:3] for each in map(vars_of, found)]


def vars_of(finding):
    return finding.kind, finding.where, finding.what


def test_configuration_against_weights(series):
    config = json.loads((series[0] / "config.json").read_text())
    alter(series[1], lambda arrays: arrays.update({"lm_head.weight": arrays["model.embed_tokens.weight"] + 0.1}))
    alter(series[2], lambda arrays: arrays.update({k: v.astype(ml_dtypes.bfloat16) for k, v in arrays.items()}))
    tied, narrow = verify(series[1:2]).findings, verify(series[2:3]).findings
    assert [each.kind for each in tied] == ["configuration"]
    assert "tied by the configuration and differ" in tied[0].evidence
    assert [(each.kind, each.what) for each in narrow] == [
        ("dtype", "the configuration says F32, most entries are BF16")
    ]
    (series[0] / "config.json").write_text(json.dumps({**config, "model_type": "wrapper"}))
    found = verify(series[:1])
    assert found.findings == ()
    assert any(text.startswith("whether configuration and weights belong together: ") for text in found.unchecked)


def test_another_tokenizer(series):
    for number, folder in enumerate(series):
        vocabulary = {f"t{place}": place for place in range(29)}
        if number == 4:
            vocabulary |= {"t1": 2, "t2": 1}
        table = {"version": "1.0", "model": {"type": "BPE", "vocab": vocabulary, "merges": [["t", "1"]]}}
        (folder / "tokenizer.json").write_text(json.dumps(table, indent=number))  # written by other versions
    (finding,) = verify(series).findings
    assert (finding.kind, finding.where) == ("tokenizer", "step16")
    (series[0] / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 29}, "merges": []}}))
    (finding,) = verify(series[:1]).findings
    assert finding.what == "the tokenizer gives ids up to 29, the model has 29 embeddings"


def test_against_a_named_source(series, clean):
    sources = [clean / folder.name for folder in series]
    assert verify(series, against=sources).passed
    assert verify(series[:1], against=sources[0]).passed
    for kind in ("negated", "heads in another order", "gain shifted"):
        alter(series[4], KINDS[kind][0])
    (finding,) = verify(series[4:], against=sources[4]).findings
    assert (finding.kind, finding.where, finding.what[:13]) == ("against", "step16", "3 differences")
    for words in (f"{UP} changes sign", f"{QUERY} has its rows in another order", f"{GAIN} is shifted by -1"):
        assert words in finding.evidence
    (finding,) = verify(series[4:], against=clean / "none").findings
    assert (finding.kind, finding.what) == ("file", "FileMissing")
    assert any("none of its step" in text for text in verify(series[:2], against=sources[0]).unchecked)


def test_tensors_that_are_copied_from_another_step_are_no_frozen_ones(series):
    """Layer 0 stands still throughout; a tensor that comes back between changes is a copy."""
    stored = safetensors.numpy.load_file(series[1] / "model.safetensors")
    alter(series[3], lambda arrays: arrays.update({UP: stored[UP]}))
    assert ("copied tensors", "step12") in [(each.kind, each.where) for each in verify(series).findings]


def test_changes_are_those_of_the_tensors(tmp_path, rng, monkeypatch):
    """By blocks as at once, against NumPy; one entry jumps."""
    from manyheads.models import open_checkpoint
    from manyheads.probe.checkpoints import contents

    arrays = rng.standard_normal((3, 40, 7))
    arrays[1:] = arrays[0] + 0.01 * arrays[1:]
    arrays[1, 30, 2] += 5
    for step, array in enumerate(arrays):
        safetensors.numpy.save_file({"w": array}, tmp_path / f"step{step}.safetensors")
    monkeypatch.setattr(contents, "BLOCK", 60)
    opened = [open_checkpoint(tmp_path / f"step{step}.safetensors") for step in range(3)]
    changes, past = measure_changes(opened, "w", [2**-52] * 3)
    for one, other, change in zip(arrays, arrays[1:], changes, strict=False):
        assert np.isclose(change.moved, np.sum((other - one) ** 2))
        assert np.isclose(change.product, np.sum(one * other))
        assert np.isclose(change.shift, np.sum(other - one))
        jump = max(change.jumps, key=lambda each: each.times)
        difference = other - one
        squares = np.delete(difference[30] ** 2, 2).mean(), np.delete(difference[:, 2] ** 2, 30).mean()
        assert jump.place == (30, 2)
        assert np.isclose(jump.times, abs(difference[30, 2]) / np.sqrt(max(squares)))
    assert np.isclose(past[0], np.linalg.norm(arrays[2] - arrays[0]))


def write(path, **arrays):
    safetensors.numpy.save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    return path


def test_differences_from_a_source_are_quantified(tmp_path, rng):
    """Relative distance, factor, shift and single entries, against their definitions."""
    w = rng.standard_normal((16, 12)).astype(np.float32)
    entry, far = w.copy(), w + 0.05 * rng.standard_normal(w.shape).astype(np.float32)
    entry[3, 5] = 7.5
    eps = float(np.finfo(np.float32).eps)
    share = np.linalg.norm(far - w) / max(np.linalg.norm(far), np.linalg.norm(w))
    cases = {
        "distant": (far, w, f"distant differs by {share:.2g} of its norm"),
        "entry": (entry, w, f"entry is 7.5 at [3, 5], in the source {w[3, 5]:.4g}"),
        "factor": (2 * w, w, "factor is multiplied by 2"),
        "shifted": (w + np.float32(0.5), w, "shifted is shifted by 0.5"),
        "bfloat16": (w.astype(ml_dtypes.bfloat16).astype(np.float32), w, "bfloat16 is rounded"),
        "near": ((w * (1 + 1.4 * eps)).astype(np.float32), w, "near is rounded"),
        "beyond": ((w * (1 + 3 * eps)).astype(np.float32), w, "beyond differs by 3."),
        "type": (np.round(w).astype(np.float16), np.round(w), "type is F16, in the source F32"),
        "shape": (w[:8], w, "shape has shape (8, 12), in the source (16, 12)"),
        "nan": (np.nan * w, w, "nan has different values"),
        "new": (w, None, "also holds new"),
        "old": (None, w, "lacks old"),
    }
    paths = [
        write(
            tmp_path / f"{side}.safetensors", **{name: case[at] for name, case in cases.items() if case[at] is not None}
        )
        for at, side in enumerate(("ours", "theirs"))
    ]
    (finding,) = [each for each in verify(paths[:1], against=paths[1]).findings if each.kind == "against"]
    assert finding.what.startswith(f"{len(cases)} differences")
    for _, _, words in cases.values():
        assert words in finding.evidence


@pytest.mark.parametrize(("shape", "least"), [((24, 16), 2.0), ((384,), 3.0)])
def test_an_inner_checkpoint_is_altered_beyond_the_stated_ratio_of_distances(tmp_path, rng, shape, least):
    """Smaller distance to a neighbour over the distance between the neighbours; displaced across the path."""
    w, path, aside = (rng.standard_normal(shape) for _ in range(3))
    aside -= path * np.sum(aside * path) / np.sum(path**2)
    aside *= np.linalg.norm(path) / np.linalg.norm(aside)
    for ratio, expected in ((0.95 * least, False), (1.05 * least, True)):
        offset = np.sqrt((2 * ratio) ** 2 - 1)
        states = [w, w + 1e-3 * (path + offset * aside), w + 2e-3 * path]
        series = [write(tmp_path / f"step{step}.safetensors", w=state) for step, state in enumerate(states)]
        found = [each.where for each in verify(series).findings if each.kind == "altered tensors"]
        assert found == ["step1.safetensors"] * expected


def test_a_change_at_an_end_is_altered_beyond_eight_times_the_extrapolated_one(tmp_path, rng):
    w, *deltas = rng.standard_normal((4, 24, 16))
    for factor, expected in ((7.0, False), (9.0, True)):
        states = {"w": [w], "v": [w + 1], "u": [w + 2]}
        for number, delta in enumerate(deltas):
            delta = 1e-3 * delta / np.sqrt(np.mean(delta**2))
            states["w"].append(states["w"][-1] + delta * (factor if number == 2 else 1))
            states["v"].append(states["v"][-1] + delta[::-1])
            states["u"].append(states["u"][-1] + delta[:, ::-1])
        series = [
            write(tmp_path / f"step{step}.safetensors", **{name: each[step] for name, each in states.items()})
            for step in range(4)
        ]
        found = [each for each in verify(series).findings if each.kind == "altered tensors"]
        assert [each.where for each in found] == ["step3.safetensors"] * expected
        if expected:
            share = np.linalg.norm(states["w"][3] - states["w"][2]) / np.linalg.norm(states["w"][3])
            assert f"w changes by {share:.2g} of its norm, step2" in found[0].evidence


@pytest.mark.parametrize("scaled", ["", "w", "wv"])
@pytest.mark.parametrize(("place", "factor"), [(0, 0.5), (4, 2.0)])
def test_a_jump_of_the_norm_at_an_end_is_a_factor_although_training_moves_the_matrix_far(
    tmp_path, rng, place, factor, scaled
):
    """A change of .4 of the norm a step hides it from distances; not one that another matrix has as well."""
    states, series = dict(zip("wvu", rng.standard_normal((3, 24, 16)), strict=True)), []
    for step in range(5):
        stored = {name: factor * w if step == place and name in scaled else w for name, w in states.items()}
        series.append(write(tmp_path / f"step{step}.safetensors", **stored))
        states = {name: 0.917 * w + 0.4 * rng.standard_normal((24, 16)) for name, w in states.items()}
    found = [each for each in verify(series).findings if each.kind == "altered tensors"]
    assert [each.where for each in found] == [f"step{place}.safetensors"] * (scaled == "w")
    assert all("w is multiplied by" in each.evidence for each in found)


SCALES = {
    "tensor": lambda w: np.abs(w).max(),
    "row": lambda w: np.abs(w).max(axis=1, keepdims=True),
    "column": lambda w: np.abs(w).max(axis=0, keepdims=True),
    "groups": lambda w: np.abs(w.reshape(len(w), -1, 32)).max(axis=2).repeat(32, axis=1),
}


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_matrices_of_256_equidistant_values_are_told_from_all_others(rng, dtype):
    def on_grid(values):
        test = GridTest(PRECISION[dtype])
        for block in np.array_split(values.astype(DTYPES[dtype]), 3):
            test.add(block)
        return test.passed

    for draw in (rng.standard_normal, rng.laplace, rng.random):
        for _ in range(20):
            w = draw(size=(96, 128)) - (draw == rng.random) / 2
            assert not on_grid(w)
            if draw == rng.random and dtype == "BF16":  # as earlier versions of torch drew in this type
                assert not on_grid(np.floor(256 * w) / 256)
                continue
            for scale in SCALES.values():
                assert on_grid(eight_bits(w, scale(w) / 127))
            assert on_grid(np.rint((w - w.min()) / np.ptp(w) * 255) / 255 * np.ptp(w) + w.min())  # any zero point
            assert not on_grid(eight_bits(w, SCALES["row"](w) / 600))
    assert not on_grid(np.eye(96, 128))


def test_a_single_rounded_checkpoint_is_a_finding_and_a_rounded_series_a_note(tmp_path, rng):
    weights = [eight_bits(w) for w in rng.standard_normal((2, 64, 64))]
    series = [write(tmp_path / f"step{step}.safetensors", w=w) for step, w in enumerate(weights)]
    assert [each.kind for each in verify(series[:1]).findings] == ["rounded"]
    found = verify(series)
    assert found.findings == ()
    note = "rounding to integers: 1 matrices hold at most 256 equidistant values at most steps, as of int8"
    assert note in found.unchecked


@pytest.mark.parametrize("against", [5, [5], []])
def test_what_is_no_source_is_refused(tmp_path, rng, against):
    checkpoint = write(tmp_path / "step1.safetensors", w=rng.standard_normal((4, 4)))
    with pytest.raises(UsageError, match="against is an empty list" if against == [] else "a checkpoint of type int"):
        verify([checkpoint], against=against)


def test_extremes_of_blocks_are_those_of_the_whole(rng):
    values = np.abs(rng.standard_normal(97)) * (rng.random(97) < 0.7)
    extremes = Extremes()
    for start, stop in ((0, 1), (1, 40), (40, 97)):
        extremes = extremes.merge(values[start:stop], start)
    nonzero = np.sort(values[values > 0])
    assert extremes == Extremes(
        nonzero[-1], nonzero[-2], np.argmax(values), *nonzero[:2], np.argmin(np.where(values > 0, values, np.inf))
    )
