"""`manyheads probe`: what its commands print, find and refuse."""

import json

import numpy as np
import pytest
from tests.probe.test_verification import save, walk

from manyheads.cli import main
from manyheads.probe.reports import pictures

STEPS = (0, 2, 10, 100)


@pytest.fixture
def call(capsys):
    """Run `manyheads probe` in this process; return its exit status, output and complaints."""

    def command(*words):
        status = main(["probe", *map(str, words)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


@pytest.fixture
def series(folder, rng):
    """Write four checkpoints of a GPT-2 of two layers; return their folders in the order of the alphabet."""
    config, found = walk(rng, steps=STEPS)
    for step, arrays in zip(STEPS, found, strict=True):
        save(folder / f"step{step}", arrays, config)
    return sorted(folder.glob("step*"))


def test_weights_of_one_checkpoint(call, series):
    status, out, _ = call("weights", series[0])
    assert status == 0
    lines = {line.split("  ")[0]: line.split() for line in out.splitlines() if line}
    matrix = lines["transformer.h.1.mlp.c_fc.weight"]
    assert matrix[1:4] == ["12", "x", "20"]
    assert [len(values) for name, values in lines.items() if name in "01"] == [11, 11]  # circuits of two layers
    status, out, _ = call("weights", series[0], "--json")
    found = json.loads(out)
    place = found["coordinates"]["matrix"].index("transformer.h.1.mlp.c_fc.weight")
    rank = found["figures"]["stable_rank"]
    assert rank["dims"] == ["checkpoint", "matrix"]
    assert f"{rank['values'][0][place]:.4g}" == matrix[8]
    assert found["figures"]["coherence"]["values"][0][place] is None


def test_weights_of_a_series_by_step(call, series):
    status, out, _ = call("weights", *series)
    assert status == 0
    heads = [line.split() for line in out.splitlines() if line.startswith("matrix")]
    assert heads == [["matrix", "step0", "step2", "step10", "step100", "(random)"]] * 3


def test_a_folder_of_checkpoints_stands_for_all_of_them(call, series, folder):
    one_by_one = call("verify", *series, "--json")
    (folder / "logs").mkdir()
    assert call("verify", folder, "--json") == one_by_one


def test_verify_finds_and_is_strict_on_request(call, series):
    status, out, _ = call("verify", *series, "--strict")
    lines = out.splitlines()
    assert (status, lines[0]) == (0, "4 checkpoints, 4 readable, 112 tensors read: 0 findings")
    assert lines[1] == "  not checked: the tokenizer: there is none beside the weights"
    file = series[2] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    status, out, _ = call("verify", *series)
    assert status == 0
    assert "[file]" in out
    status, out, _ = call("verify", *series, "--strict", "--json")
    assert status == 1
    (finding,) = json.loads(out)["findings"]
    assert (finding["kind"], finding["where"]) == ("file", "step100")


def test_wrong_use(call, series, folder):
    assert call("weights")[0] == call("verify")[0] == 2
    status, _, err = call("wieghts", series[0])
    assert status == 2
    assert "did you mean 'weights'?" in err
    assert call("verify", folder / "none")[0] == 3
    status, _, err = call("weights", folder / "none")
    assert status == 3
    assert "no such file" in err
    save(folder / "other", {"w": np.ones((3, 4))})
    status, _, err = call("weights", series[0], folder / "other")
    assert status == 2
    assert "different matrices" in err
    assert call("verify", series[0], "--rows", 3)[0] == 2


@pytest.mark.torch
def test_health_names_the_head(call, folder):
    """Queries of one head are multiplied between two probes of a fixed batch; weights do not move otherwise."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from manyheads.probe import AttentionRecorder

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=9, n_positions=12))
    tokens = torch.arange(12)[None] % 9
    whole = AttentionRecorder(model, rows=12, share=None, batch={"input_ids": tokens}, store=folder / "fixed")
    own = AttentionRecorder(model, rows=12, share=None, store=folder / "own")
    for step in range(60):
        if step == 55:
            with torch.no_grad():
                model.transformer.h[1].attn.c_attn.weight[:, 8:16] *= 2000
        with whole.step(step):
            pass
    with own.step(0):
        model(tokens)
    status, out, _ = call("health", folder / "fixed", "--max-logit", "1e9", "--strict")
    assert status == 1
    head, alarm = out.splitlines()
    assert head == "60 probes, 2 layers: 1 alarm"
    assert alarm.startswith("step 55, layer 1 head 1")
    assert alarm.endswith("(change, false-alarm rate 0.05 a run)")
    status, out, _ = call("health", folder / "fixed", "--json", "--max-logit", "1e9", "--silent", "58")
    assert (status, json.loads(out)) == (0, {"alarms": [], "dormant": []})
    status, _, err = call("health", folder / "own")
    assert status == 2
    assert "no figures of a fixed batch" in err
    status, _, err = call("health", folder)
    assert status == 3
    assert "holds no recording" in err


@pytest.mark.torch
def test_health_reads_the_updates_in_the_same_folder(call, folder):
    import torch
    from tests.probe.trainings import small_model, windows

    from manyheads.probe import AttentionRecorder
    from manyheads.probe.live.updates import UpdateRecorder

    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    fixed = AttentionRecorder(model, share=None, batch={"input_ids": windows(2)}, store=folder)
    updates = UpdateRecorder(model, 50, share=None, store=folder)
    updates.watch(optimizer)
    for step in range(16):
        with fixed.step(step):
            model(windows(4, seed=step), labels=windows(4, seed=step)).loss.backward()
        if step >= 12:
            model.transformer.h[1].attn.c_attn.weight.grad[:, 8:16] = 0
        optimizer.step()
        optimizer.zero_grad()
    status, out, _ = call("health", folder, "--strict")
    assert status == 1
    assert out.splitlines()[1].startswith("step 14, layer 1 head 1: gradient of its query weights vanishes")


@pytest.fixture
def undrawn(monkeypatch):
    """Leave the report out, whose pictures cost more than everything else."""
    monkeypatch.setattr(pictures, "write_recording_report", lambda tree, out, command: out)


@pytest.mark.torch
def test_attention_over_a_series_and_its_health(call, folder, undrawn):
    """Queries and keys of one head of layer 1 grow after the first checkpoint."""
    import torch
    from tests.probe.trainings import save_quietly, small_model, windows

    model = small_model()
    for step in (0, 5, 10):
        save_quietly(model, folder / f"step{step}")
        with torch.no_grad():
            model.transformer.h[1].attn.c_attn.weight[:, :8] *= 400
    np.save(folder / "tokens.npy", windows(2).numpy())
    series, store = sorted(folder.glob("step*")), folder / "store"
    words = ("attention", *series, "--tokens", folder / "tokens.npy", "--store", store)
    status, _, err = call(*words)
    assert status == 3
    assert "step10: 1 tensors with changes atypical of training" in err
    status, out, _ = call(*words, "--findings", "warn")
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "3 checkpoints, steps 0 to 10; 2 layers of 4 heads; 2 x 16 tokens"
    assert [line.split()[0] for line in lines[4:6]] == ["0", "1"]
    assert float(lines[5].split()[-5]) > 100  # the largest logit of layer 1
    assert "takes 20 checkpoints" in out
    status, out, _ = call("health", store)
    assert out.splitlines()[1].startswith("step 10, layer 1 head 0: largest logit is")
    short = [folder / "step0", "--tokens", folder / "tokens.npy", "--store", folder / "short", "--json"]
    status, out, _ = call(*short)  # without the word attention
    assert status == 0
    assert json.loads(out)["attention_fixed"]["figures"]["entropy"]["dims"] == ["step", "layer", "head"]


@pytest.mark.torch
def test_attention_that_cannot_be_measured(call, folder, undrawn):
    from tests.probe.trainings import save_quietly, small_model, windows

    for step in (1, 2):
        save_quietly(small_model(), folder / f"step{step}")
    np.save(folder / "tokens.npy", windows(2).numpy())
    (folder / "text.txt").write_text("some text")
    first, tokens = folder / "step1", ("--tokens", folder / "tokens.npy")
    for words, status, match in (
        ((first,), 2, "--tokens is missing"),
        (("attention", *tokens), 2, "CHECKPOINT is missing"),
        ((folder / "step3", *tokens), 3, "no such file"),
        ((first, "--tokens", folder / "none.txt"), 2, "none.txt"),
        ((first, "--tokens", folder / "text.txt"), 2, "holds no tokenizer"),
        ((first, *tokens, "--length", "1"), 2, "length=1"),
        ((first, folder / "step2", *tokens), 3, "holds the weights of step1"),
        ((first, *tokens, "--findings", "ask"), 2, "choose one of refuse, warn"),
        (("atention", first, *tokens), 2, "did you mean 'attention'?"),
    ):
        found, _, err = call(*words, *(("--store", folder / "store") if "atention" not in words else ()))
        assert (found, match in err) == (status, True), (words, err)
        assert len(err.splitlines()) == 1
    assert not (folder / "store").exists()
    status, _, err = call(first, folder / "step2", *tokens, "--findings", "warn", "--store", folder / "store")
    assert status == 0
    assert err.startswith("manyheads: warning: step2: holds the weights of step1")
    status, _, err = call(first, *tokens, "--rows", "4", "--store", folder / "store")
    assert status == 2
    assert "another recording (rows differ)" in err
