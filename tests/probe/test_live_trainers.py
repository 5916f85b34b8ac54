"""Recorders in the Hugging Face Trainer, in Lightning and with sharded parameters: losses are the same to the bit."""

import pytest
from tests.probe.trainings import (
    STEPS,
    all_recorders,
    check_store,
    train_by_lightning,
    train_by_trainer,
    train_in_two_processes,
    train_plainly,
    train_sharded,
)

from manyheads.probe import AttentionRecorder
from manyheads.probe.live.reading import open_recording
from manyheads.probe.live.trackers import tensorboard_tracker

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.training
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_trainer_of_transformers(tmp_path, accumulate):
    plain = train_by_trainer(tmp_path / "plain", accumulate=accumulate)
    assert plain == train_by_trainer(tmp_path / "run", all_recorders(tmp_path / "store"), accumulate)
    assert len(plain) == STEPS
    check_store(tmp_path / "store")


@pytest.mark.training
@pytest.mark.filterwarnings("ignore")  # of Lightning, about loaders and devices
@pytest.mark.parametrize("accumulate", [1, 2])
def test_lightning(tmp_path, accumulate):
    plain = train_by_lightning(accumulate=accumulate)
    assert plain == train_by_lightning(all_recorders(tmp_path), accumulate)
    assert len(plain) == STEPS * accumulate
    check_store(tmp_path)


@pytest.mark.training
@pytest.mark.filterwarnings("ignore")
def test_an_exception_under_lightning_leaves_nothing_behind():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with pytest.raises(KeyError):
        train_by_lightning(lambda model: [AttentionRecorder(model, share=None)], fail_at=1)
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping


@pytest.mark.training
@pytest.mark.filterwarnings("ignore")
def test_an_exception_under_the_trainer_leaves_a_store_and_nothing_else_behind(tmp_path):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def make(model):
        return [AttentionRecorder(model, share=None, store=tmp_path / "store")]

    with pytest.raises(KeyError):
        train_by_trainer(tmp_path / "run", make, fail_at=2)
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping
    assert open_recording(tmp_path / "store")["attention"].step.values.tolist() == [0, 1]


@pytest.mark.training
def test_scalars_arrive_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
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


@pytest.mark.filterwarnings("ignore")  # of the process group
def test_sharded_parameters(tmp_path):
    """With DTensors everything is as without, the figures too."""
    (tmp_path / "group").mkdir()
    (tmp_path / "plain_group").mkdir()
    plain = train_plainly(all_recorders(tmp_path / "plain"))
    assert plain == train_sharded(tmp_path / "plain_group")
    assert plain == train_sharded(tmp_path / "group", all_recorders(tmp_path / "sharded"))
    trees = [check_store(tmp_path / name).to_dict() for name in ("plain", "sharded")]
    timed = ["cost_seconds", "elapsed_seconds"]
    for kind in ("/attention", "/attention_fixed", "/updates"):
        first, second = (tree[kind].drop_vars(timed) for tree in trees)
        by_head = [name for name in first.variables if str(name).startswith("head_")]  # of whole matrices alone
        first = first.drop_vars(by_head) if kind == "/updates" else first
        assert first.drop_attrs().equals(second.drop_attrs())


def test_two_processes_train_as_without_and_the_first_one_records(tmp_path):
    first, second = train_in_two_processes(tmp_path)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first != second  # each on its own batches
    check_store(tmp_path / "store")
