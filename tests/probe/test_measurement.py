"""Checkpoint series on the same tokens: what a live recording of a fixed batch holds, resumed, refused, reported."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from tests.probe.trainings import save_quietly, small_model, windows
from tests.study.reporting.html_links import parsed
from tests.study.reporting.test_browser import browser, lay_out  # noqa: F401

from manyheads.errors import FileRefused, UsageError
from manyheads.models.refusals import CheckpointRefused, WeightsMismatch
from manyheads.probe import AttentionRecorder, find_alarms, measure_checkpoints, record_attention, weight_spectra
from manyheads.probe.checkpoints import measurement
from manyheads.probe.checkpoints.measurement import SeriesRefused
from manyheads.probe.checkpoints.tokens import read_tokens
from manyheads.probe.live.reading import open_recording
from manyheads.probe.reports.pictures import write_recording_report

pytestmark = pytest.mark.torch
LOGS = ("attention_fixed.jsonl", "weights.jsonl")
STEPS = (0, 2, 10)
CHILD = """
import sys
from pathlib import Path
from manyheads.probe import measure_checkpoints
measure_checkpoints(list(Path(sys.argv[1]).glob("step*")), list(range(16)), store=sys.argv[2])
"""


def tokens():
    return windows(2).numpy()


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """Train for a few steps; save checkpoints, and record the same tokens live."""
    import torch

    root = tmp_path_factory.mktemp("series")
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    batch = {"input_ids": torch.tensor(tokens())}
    recorder = AttentionRecorder(model, rows=None, share=None, batch=batch, store=root / "live")
    for step in range(STEPS[-1] + 1):
        if step in STEPS:
            save_quietly(model, root / f"step{step}")
        with recorder.step(step):
            optimizer.zero_grad()
            model(windows(4, seed=step), labels=windows(4, seed=step)).loss.backward()
        optimizer.step()
    return root


def folders(series):
    return sorted(series.glob("step*"))


def contents(store):
    return [(store / name).read_bytes() for name in LOGS]


def test_figures_are_those_of_the_training_to_the_bit(series):
    tree = measure_checkpoints(folders(series), tokens())
    found, live = tree["attention_fixed"].to_dataset(), open_recording(series / "live")["attention_fixed"].to_dataset()
    assert found.step.values.tolist() == list(STEPS)
    assert found.checkpoint.values.tolist() == [f"step{step}" for step in STEPS]
    assert found.drop_vars("checkpoint").identical(
        live.sel(step=list(STEPS)).drop_vars(("cost_seconds", "elapsed_seconds"))
    )
    weights = weight_spectra(series / "step2")
    there = tree["weights"].to_dataset().sel(step=2)
    for name in weights.data_vars:
        np.testing.assert_array_equal(there[name], weights[name])
    assert {"stable_rank_random", "head_stable_rank"} <= set(there.data_vars)
    assert "0 findings" in tree.attrs["verification"]
    assert find_alarms(found.isel(step=[0, 1])) == []


def test_sampled_rows_are_those_of_a_record(series):
    import torch
    from transformers import GPT2LMHeadModel

    found = measure_checkpoints([series / "step2"], tokens(), rows=5)["attention_fixed"]
    model = GPT2LMHeadModel.from_pretrained(series / "step2").eval()
    with record_attention(model, rows=5, seed=2) as record, torch.no_grad():
        model(torch.tensor(tokens()))
    np.testing.assert_array_equal(found.entropy[0], record.dataset().entropy)


def test_a_run_that_stopped_goes_on_to_the_bit(series, tmp_path, monkeypatch):
    measure_checkpoints(folders(series), tokens(), store=tmp_path / "whole")
    load, loaded = measurement.load_model, []

    def failing(folder, dtype):
        loaded.append(folder.name)
        if len(loaded) == 2:
            raise MemoryError
        return load(folder, dtype)

    monkeypatch.setattr(measurement, "load_model", failing)
    with pytest.raises(MemoryError):
        measure_checkpoints(folders(series), tokens(), store=tmp_path / "torn")
    with (tmp_path / "torn" / LOGS[1]).open("ab") as file:
        file.write(b'{"step": 2, "che')  # torn by a kill
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / LOGS[0]).write_bytes(b'{"manyheads": "st')  # killed before the header was written
    assert measure_checkpoints([series / "step0"], tokens(), store=tmp_path / "empty")["weights"].sizes["step"] == 1
    tree = measure_checkpoints(folders(series), tokens(), store=tmp_path / "torn")
    assert loaded == ["step0", "step2", "step0", "step2", "step10"]
    assert contents(tmp_path / "torn") == contents(tmp_path / "whole")
    assert tree["attention_fixed"].identical(open_recording(tmp_path / "whole")["attention_fixed"])


def test_a_checkpoint_is_added(series, tmp_path):
    whole = measure_checkpoints(folders(series), tokens())
    measure_checkpoints([series / "step2"], tokens(), store=tmp_path)
    with pytest.raises(UsageError, match="holds step 2, which is not among"):
        measure_checkpoints([series / "step0"], tokens(), store=tmp_path)
    found = measure_checkpoints([series / "step10"], tokens(), store=tmp_path)
    assert found["weights"].step.values.tolist() == [2, 10]
    found = measure_checkpoints(folders(series), tokens(), store=tmp_path)
    for name in ("attention_fixed", "weights"):
        assert found[name].to_dataset().equals(whole[name].to_dataset())


def test_stores_of_something_else_are_refused(series, tmp_path):
    measure_checkpoints([series / "step2"], tokens(), store=tmp_path)
    for options in ({"rows": 4}, {"dtype": "float64"}):
        with pytest.raises(UsageError, match=f"another recording .{next(iter(options))} differ"):
            measure_checkpoints([series / "step2"], tokens(), store=tmp_path, **options)
    with pytest.raises(UsageError, match=r"another recording .tokens differ"):
        measure_checkpoints([series / "step2"], tokens()[::-1].copy(), store=tmp_path)
    other = tmp_path / "other" / "step2"
    save_quietly(small_model(), other)
    with pytest.raises(UsageError, match="other weights of step 2"):
        measure_checkpoints([other], tokens(), store=tmp_path)


def test_series_that_are_not_what_they_say(series, tmp_path):
    save_quietly(small_model(), tmp_path / "step0")
    save_quietly(small_model(), tmp_path / "step5")
    with pytest.raises(SeriesRefused, match=r"step5: holds the weights of step0 .*verify"):
        measure_checkpoints(sorted(tmp_path.iterdir()), tokens())
    with pytest.warns(UserWarning, match="holds the weights of step0"):
        tree = measure_checkpoints(sorted(tmp_path.iterdir()), tokens(), findings="warn")
    assert "[duplicate]" in tree.attrs["verification"]
    assert float(abs(tree["attention_fixed"].entropy.diff("step")).max()) == 0
    file = tmp_path / "step5" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(SeriesRefused, match="FileDamaged"):
        measure_checkpoints(sorted(tmp_path.iterdir()), tokens(), findings="warn")


def test_absent_weights_are_not_made_up(tmp_path):
    import safetensors.numpy

    save_quietly(small_model(), tmp_path / "step1")
    file = tmp_path / "step1" / "model.safetensors"
    weights = safetensors.numpy.load_file(file)
    del weights["transformer.h.1.attn.c_attn.weight"]
    safetensors.numpy.save_file(weights, file)
    with pytest.warns(UserWarning, match="contradict"), pytest.raises(WeightsMismatch, match="would be random"):
        measure_checkpoints([tmp_path / "step1"], tokens(), findings="warn")


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([[0.5, 1.0]], "expected integers"),
        ([[3]], "two or more ids"),
        ([[-1, 2]], "negative"),
        ([[1, 29]], "token id 29 is outside the model's vocabulary of 29"),
        (np.ones((1, 65), int), "the model has 64 positions"),
    ],
)
def test_tokens_that_do_not_fit(series, ids, match):
    with pytest.raises(UsageError, match=match):
        measure_checkpoints([series / "step2"], ids)


def test_wrong_checkpoints(series, tmp_path):
    with pytest.raises(UsageError, match="expected a list"):
        measure_checkpoints([], tokens())
    with pytest.raises(SeriesRefused, match="no such file"):
        measure_checkpoints([tmp_path / "none"], tokens(), findings="warn")
    with pytest.raises(UsageError, match="give the folder"):
        measure_checkpoints([series / "step2" / "model.safetensors"], tokens())
    with pytest.raises(UsageError, match="findings='ask'"):
        measure_checkpoints([series / "step2"], tokens(), findings="ask")
    for options, words in (({"dtype": "float17"}, "dtype='float17'"), ({"device": "xpu:7"}, "device='xpu:7' cannot")):
        with pytest.raises(UsageError, match=words):
            measure_checkpoints([series / "step2"], tokens(), **options)
    assert issubclass(SeriesRefused, CheckpointRefused)


def test_tokens_from_files(series, tmp_path):
    stream = np.arange(100, dtype=np.int32) % 29
    np.save(tmp_path / "block.npy", stream[:60].reshape(3, 20))
    np.savez(tmp_path / "stream.npz", ids=stream)
    checkpoint = series / "step2"
    assert read_tokens(tmp_path / "block.npy", checkpoint).shape == (3, 20)
    assert read_tokens(tmp_path / "block.npy", checkpoint, length=7, sequences=2).tolist() == [
        list(range(7)),
        list(range(20, 27)),
    ]
    assert read_tokens(tmp_path / "stream.npz", checkpoint).shape == (1, 64)  # the positions of the model
    assert read_tokens(tmp_path / "stream.npz", checkpoint, length=30).tolist() == stream[:90].reshape(3, 30).tolist()
    (tmp_path / "ids.pt").write_bytes(b"")
    np.savez(tmp_path / "two.npz", a=stream, b=stream)
    np.save(tmp_path / "float.npy", stream / 2)
    np.save(tmp_path / "objects.npy", np.array([None]), allow_pickle=True)
    for name, match in (
        ("ids.pt", "numpy.save"),
        ("two.npz", "several arrays"),
        ("float.npy", "integers"),
        ("objects.npy", "no array of numbers"),
    ):
        with pytest.raises(FileRefused, match=match):
            read_tokens(tmp_path / name, checkpoint)
    with pytest.raises(UsageError, match="no such file"):
        read_tokens(tmp_path / "none.npy", checkpoint)
    with pytest.raises(UsageError, match="too few for one sequence of 128"):
        read_tokens(tmp_path / "stream.npz", checkpoint, length=128)


def test_text_by_the_tokenizer_beside_the_checkpoint(series, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    text = tmp_path / "text.txt"
    text.write_text("a b c d e f g a b c d e f g")
    with pytest.raises(UsageError, match=r"holds no tokenizer .* --tokenizer"):
        read_tokens(text, series / "step2", length=4)
    words = {word: number for number, word in enumerate(["<s>", "a", "b", "c", "d", "e", "f", "g"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(tmp_path / "tokenizer")
    ids = read_tokens(text, series / "step2", length=5, tokenizer=tmp_path / "tokenizer")
    assert ids.tolist() == [[0, 1, 2, 3, 4], [0, 5, 6, 7, 1], [0, 2, 3, 4, 5]]
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be loaded"):
        read_tokens(text, series / "step2", tokenizer=tmp_path / "tokenizer")


@pytest.mark.slow
def test_a_report_shows_every_figure(series, tmp_path):
    tree = measure_checkpoints(folders(series), tokens())
    out = write_recording_report(tree, tmp_path / "report.html", "manyheads probe attention")
    links, text = parsed(out), out.read_text()
    assert len(links.ids) == len(set(links.ids))
    assert all(link.startswith("data:image/png") for link in links.fetched)
    for title in ("Attention entropy", "over steps and layers", "query-key circuits", "Drop and rebound"):
        assert title in text
    assert "does not predict the final loss" in text
    assert text.count("<svg") >= 12
    assert write_recording_report(tree, tmp_path / "again.html", "manyheads probe attention").read_text() == text
    with pytest.raises(UsageError, match="no figures of a fixed batch"):
        write_recording_report(open_recording(series / "live").drop_nodes("attention_fixed"), out)


@pytest.mark.slow
def test_the_report_can_be_read_in_a_browser(series, tmp_path, browser):  # noqa: F811
    page = write_recording_report(measure_checkpoints(folders(series), tokens()), tmp_path / "report.html", "manyheads")
    results = lay_out(page, browser, tmp_path)
    assert {name: result["found"] for name, result in results.items() if result["found"]} == {}


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_to_the_bit(series, tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["src", ".", *filter(None, sys.path)])}
    command = [sys.executable, "-c", CHILD, str(series), str(tmp_path / "torn")]
    with subprocess.Popen(command, env=environment) as child:
        while child.poll() is None and not (tmp_path / "torn" / LOGS[0]).exists():
            time.sleep(0.0005)
        os.kill(child.pid, signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    for store in ("torn", "whole"):
        measure_checkpoints(folders(series), list(range(16)), store=tmp_path / store)
    assert contents(tmp_path / "torn") == contents(tmp_path / "whole")
