"""Recorders in a plain training loop: the training is untouched, the budget is kept, a killed run stays readable."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from tests.probe.trainings import LENGTH, STEPS, all_recorders, check_store, small_model, train_plainly, windows

from manyheads.errors import FileRefused, UsageError
from manyheads.probe import AttentionRecorder, record_attention
from manyheads.probe.live.reading import open_recording
from manyheads.study.store.disk import StoreDamaged

pytestmark = pytest.mark.torch


def test_losses_are_the_same_to_the_bit_and_recorders_do_not_see_each_other(tmp_path):
    assert train_plainly() == train_plainly(all_recorders(tmp_path))
    own = check_store(tmp_path)["attention"].to_dataset()
    assert own.attrs["rows"] == 64
    assert (own.entropy_low <= own.entropy_high).all()
    assert own.cost_seconds.values[-1] <= own.elapsed_seconds.values[-1]


def test_figures_are_those_of_a_record_of_the_same_weights(tmp_path):
    """The fixed batch gives what `record_attention` gives on the weights of that step, to the last bit."""
    model, batch = small_model(), {"input_ids": windows(2, seed=5)}
    recorder = AttentionRecorder(model, rows=None, share=None, batch=batch, store=tmp_path)
    model.train()
    recorder.begin(7)
    assert model.training
    assert all(module.training for module in model.modules())
    model.eval()
    with record_attention(model, rows=None) as record:
        model(**batch)
    live, offline = open_recording(tmp_path)["attention_fixed"].to_dataset(), record.dataset()
    for name in offline.data_vars:
        np.testing.assert_array_equal(live[name].sel(step=7), offline[name], err_msg=name)
    recorder.finish(8)
    tree = open_recording(tmp_path)
    tree.to_dict()  # a DataTree, to be written as Zarr or NetCDF
    assert live.attrs["model"] == "GPT2LMHeadModel"


def test_only_the_first_micro_batch_is_measured(tmp_path):
    assert train_plainly(accumulate=2) == train_plainly(all_recorders(tmp_path), accumulate=2)
    check_store(tmp_path, 2 * LENGTH)


def test_a_step_that_fails_is_forgotten_and_nothing_is_left_behind():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = small_model()
    recorder = AttentionRecorder(model, share=None)
    with pytest.raises(KeyError), recorder.step(0):
        raise KeyError
    fixed = AttentionRecorder(model.train(), share=None, batch={"input_ids": "no tensor"})
    with pytest.raises(AttributeError):
        fixed.begin(0)
    assert model.training
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping
    with pytest.raises(UsageError, match="nothing was recorded"):
        recorder.dataset()


def test_a_record_within_a_recorded_step_measures_too():
    """Wrappers that end out of order are put in once, whoever stands before them."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, ids = small_model(), windows(1)
    recorder = AttentionRecorder(model, share=None)
    recorder.begin(0)
    inner = record_attention(model)
    record = inner.__enter__()
    recorder.end()  # nothing was seen: only a warning of the logger
    for step in (1, 2):
        with recorder.step(step):
            model(ids)
    inner.__exit__(None, None, None)
    with recorder.step(3):
        model(ids)
    assert [layer.calls for layer in record.layers.values()] == [2, 2]
    assert recorder.dataset().step.values.tolist() == [1, 2, 3]
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping


@pytest.mark.parametrize("share", [0.01, 0.2])
def test_the_budget_is_kept(share, monkeypatch):
    """On a clock on which a measurement takes 3 seconds and a step 1."""
    from manyheads.probe.live.trackers import TimeBudget

    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    budget, measured = TimeBudget(share, 2, None), []
    for step in range(2000):
        if budget.admits(step):
            measured.append(step)
            with budget.spending():
                clock[0] += 3
        clock[0] += 1
        assert budget.cost <= max(3, share * budget.elapsed + 1e-9)
    assert measured[0] == 0
    assert not np.mod(measured, 2).any()
    assert budget.cost > 0.9 * share * budget.elapsed - 3
    unlimited = TimeBudget(None, 3, None)
    assert [step for step in range(7) if unlimited.admits(step)] == [0, 3, 6]


def test_settings_outside_their_range_are_refused(tmp_path):
    model = small_model()
    for share in (0, 1.5, -0.1):
        with pytest.raises(UsageError, match="share="):
            AttentionRecorder(model, share=share)
    with pytest.raises(UsageError, match="every="):
        AttentionRecorder(model, every=0)
    with pytest.raises(FileRefused, match="holds no recording"):
        open_recording(tmp_path)


def test_a_training_that_starts_again_continues_its_store(tmp_path):
    def record(steps, **options):
        model = small_model()
        recorder = AttentionRecorder(model, share=None, store=tmp_path, **options)
        for step in steps:
            with recorder.step(step):
                model(windows(1, seed=step + len(steps)))
        recorder.finish(steps[-1] + 1)

    record([0, 1, 2, 3])
    first = open_recording(tmp_path)["attention"].to_dataset()
    path = tmp_path / "attention.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 4, "val')  # torn by a kill
    assert open_recording(tmp_path)["attention"].step.values.tolist() == [0, 1, 2, 3]
    record([2, 3, 4])
    found = open_recording(tmp_path)["attention"].to_dataset()
    assert found.step.values.tolist() == [0, 1, 2, 3, 4]
    assert found.entropy.sel(step=1).equals(first.entropy.sel(step=1))
    assert not found.entropy.sel(step=2).equals(first.entropy.sel(step=2))
    with pytest.raises(UsageError, match=r"another recording \(rows differ"):
        record([5], rows=8)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], lines[3][:50], *lines[4:]]) + "\n")
    with pytest.raises(StoreDamaged):
        open_recording(tmp_path)


def test_a_store_has_one_writer(tmp_path):
    pytest.importorskip("fcntl")
    recorders = [AttentionRecorder(small_model(), share=None, store=tmp_path) for _ in range(2)]
    for recorder in recorders:
        with recorder.step(0):
            recorder._model(windows(1))
    assert recorders[0]._output.failed == {}
    assert "another process records" in recorders[1]._output.failed["the store"]


CHILD = """
    import torch
    torch.set_num_threads(1)
    from tests.probe.trainings import small_model, windows
    from manyheads.probe import AttentionRecorder
    model, ids = small_model(), windows(1)
    recorder = AttentionRecorder(model, share=None, store=STORE)
    for step in range(10**6):
        with recorder.step(step):
            model(ids)
        print(step, flush=True)
"""


def kill_a_recording(folder, steps):
    """Record in a process that is killed after so many steps; return the last step that it reported as finished."""
    code = textwrap.dedent(CHILD).replace("STORE", repr(str(folder)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["src", ".", *filter(None, sys.path)])}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as child:
        for line in child.stdout:
            if int(line) >= steps:
                break
        os.kill(child.pid, signal.SIGKILL)
        rest = [line for line in child.stdout if line.endswith("\n")]
        return int(rest[-1] if rest else line)


@pytest.mark.slow
def test_a_killed_run_loses_no_finished_step(tmp_path):
    last = kill_a_recording(tmp_path, 5)
    found = open_recording(tmp_path)["attention"]
    assert found.step.values.tolist() == list(range(found.sizes["step"]))
    assert found.sizes["step"] - 1 >= last


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of PyTorch, while it compiles around a graph break
def test_compiled_models_are_recorded_without_compiling_again():
    import torch

    torch._dynamo.reset()
    forms = []

    def backend(graph, _):
        forms.append(graph)
        return graph.forward

    recorders = []

    def make(model, _):
        recorders.append(AttentionRecorder(model, share=None, every=2))
        return recorders

    model = small_model()
    with_recorder = train_plainly(make, model=model, forward=torch.compile(model, backend=backend))
    once = len(forms)
    assert with_recorder == train_plainly()
    assert recorders[0].dataset().sizes["step"] == STEPS // 2
    for step in range(4, 8):
        with recorders[0].step(step):
            torch.compile(model, backend=backend)(windows(4), labels=windows(4))
    assert len(forms) == once
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_gradients_are_equal_to_the_bit_beside_the_training_and_to_rounding_within():
    """Of a Llama without dropout, by "aot_eager", whose programs are decomposed otherwise around graph breaks."""
    import torch
    from tests.probe.test_updates import llama

    from manyheads.probe.live.updates import UpdateRecorder

    tokens = windows(4)

    def gradients(make=None):
        torch._dynamo.reset()
        model = llama()
        compiled, optimizer = torch.compile(model, backend="aot_eager"), torch.optim.SGD(model.parameters(), 1e-9)
        recorder = None if make is None else make(model)
        if isinstance(recorder, UpdateRecorder):
            recorder.watch(optimizer)
        with recorder.step(0) if isinstance(recorder, AttentionRecorder) else contextlib.nullcontext():
            compiled(tokens, labels=tokens).loss.backward()
        optimizer.step()
        return [parameter.grad.clone() for parameter in model.parameters()]

    plain = gradients()
    for make in (
        lambda model: AttentionRecorder(model, share=None, batch={"input_ids": tokens[:2]}),
        lambda model: UpdateRecorder(model, 9, share=None),
    ):
        assert all(torch.equal(have, want) for have, want in zip(gradients(make), plain, strict=True))
    within = gradients(lambda model: AttentionRecorder(model, share=None))
    apart = max(float((have - want).abs().max() / want.abs().max()) for have, want in zip(within, plain, strict=True))
    assert apart < 2e-6
    torch._dynamo.reset()


def test_the_line_of_a_step_is_strict_json(tmp_path):
    from manyheads.probe.live.step_log import StepLog, read_log

    log = StepLog(tmp_path / "a.jsonl", {"group": "attention"})
    log.append({"step": 0, "x": np.array([[1.5, np.nan], [-np.inf, 1 / 3]])})
    log.close()

    def refuse(name):
        raise AssertionError(name)

    for line in (tmp_path / "a.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    (found,) = read_log(tmp_path / "a.jsonl")[1]
    np.testing.assert_array_equal(np.array(found["x"], dtype=float), [[1.5, np.nan], [-np.inf, 1 / 3]])
