"""Recorders in the Hugging Face Trainer and in Lightning: losses are the same to the bit."""

import pytest
from tests.probe.trainings import LENGTH, STEPS, train_by_lightning, train_by_trainer, windows

from manyheads.probe import AttentionRecorder, UpdateRecorder, open_recording, tensorboard_tracker

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def make_all(folder):
    def make(model):
        fixed = {"input_ids": windows(2, seed=5, length=30)}
        return [
            AttentionRecorder(model, share=None, store=folder),
            AttentionRecorder(model, rows=None, share=None, every=2, batch=fixed, store=folder),
            UpdateRecorder(model, 3, share=None, store=folder),
        ]

    return make


def check(folder):
    tree = open_recording(folder)
    assert tree["attention"].step.values.tolist() == list(range(STEPS))
    assert (tree["attention"].measured_rows == 4 * LENGTH).all()  # one micro-batch
    assert tree["attention_fixed"].step.values.tolist() == [0, 2, 4]
    assert (tree["attention_fixed"].measured_rows == 2 * 30).all()
    assert tree["updates"].step.values.tolist() == list(range(STEPS))
    assert int(tree["updates"].update_ratio.count()) == 3 * STEPS


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_of_transformers(tmp_path, accumulate):
    pytest.importorskip("accelerate")
    plain = train_by_trainer(tmp_path / "plain", accumulate=accumulate)
    assert plain == train_by_trainer(tmp_path / "run", make_all(tmp_path / "store"), accumulate)
    assert len(plain) == STEPS
    check(tmp_path / "store")


@pytest.mark.filterwarnings("ignore")  # of Lightning, about loaders and devices
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning(tmp_path, accumulate):
    pytest.importorskip("lightning")
    plain = train_by_lightning(accumulate=accumulate)
    assert plain == train_by_lightning(make_all(tmp_path), accumulate)
    assert len(plain) == STEPS * accumulate
    check(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_an_exception_under_lightning_leaves_nothing_behind():
    pytest.importorskip("lightning")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with pytest.raises(KeyError):
        train_by_lightning(lambda model: [AttentionRecorder(model, share=None)], fail_at=1)
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping


def test_scalars_arrive_in_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tests.probe.trainings import train_plainly
    from torch.utils.tensorboard import SummaryWriter

    recorders = []
    with SummaryWriter(str(tmp_path)) as writer:

        def make(model, _):
            recorders.append(AttentionRecorder(model, share=None, tracker=tensorboard_tracker(writer)))
            return recorders

        train_plainly(make)
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("probe/entropy/layer_0")
    expected = recorders[0].dataset().entropy.sel(layer=0).mean("head")
    assert [event.step for event in events] == list(range(STEPS))
    assert [event.value for event in events] == pytest.approx(expected.values.tolist(), rel=1e-6)
