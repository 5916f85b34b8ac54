"""Trackers: what they send, and that a failing one does not end a training."""

import logging

import pytest
from tests.probe.trainings import STEPS, small_model, train_plainly, windows

from manyheads.probe import AttentionRecorder
from manyheads.probe.live.reading import open_recording
from manyheads.probe.live.trackers import mlflow_tracker, tensorboard_tracker, wandb_tracker
from manyheads.probe.live.updates import UpdateRecorder

pytestmark = pytest.mark.torch


class Service:
    """The three methods of TensorBoard, W&B and trackio, and MLflow."""

    def __init__(self):
        self.sent = {}

    def add_scalar(self, tag, value, step):
        self.sent.setdefault(step, {})[tag] = value

    def log(self, scalars):
        self.sent[scalars.pop("train/global_step")] = scalars

    def log_metrics(self, scalars, step):
        self.sent[step] = scalars


def test_trackers_send_the_same_scalars():
    services = []

    def make(model, optimizer):
        recorders = []
        for adapter in (tensorboard_tracker, wandb_tracker, mlflow_tracker):
            services.append(Service())
            recorders.append(AttentionRecorder(model, share=None, every=2, tracker=adapter(services[-1], heads=True)))
        return recorders

    recorders = []
    train_plainly(lambda *given: recorders.extend(make(*given)) or recorders)
    first, *others = (service.sent for service in services)
    assert sorted(first) == [0, 2]
    assert all(other == first for other in others)
    found = recorders[0].dataset().sel(step=2, layer=1)
    assert first[2]["probe/entropy/layer_1"] == pytest.approx(float(found.entropy.mean()))
    assert first[2]["probe/entropy/layer_1/head_3"] == float(found.entropy[3])
    assert first[2]["probe/entropy_null/layer_1"] == float(found.entropy_uniform)
    assert first[2]["probe/max_logit/layer_1"] == float(found.max_logit.max())  # sequences are measured whole


def test_updates_are_sent_by_matrix():
    import torch

    service, model = Service(), small_model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    recorder = UpdateRecorder(model, 1, share=None, tracker=wandb_tracker(service))
    recorder.watch(optimizer)
    model(windows(), labels=windows()).loss.backward()
    optimizer.step()
    name = "update_ratio/transformer.wte.weight"
    assert service.sent[0][f"probe/{name}"] == recorder.dataset().update_ratio.item()
    assert service.sent[0]["probe/update_ratio_null/transformer.wte.weight"] == pytest.approx(2.5e-8, rel=0.02)


def test_a_failing_tracker_is_reported_once_and_the_training_goes_on(tmp_path, caplog):
    def fail(rows):
        raise ConnectionError("service is gone")

    def make(model, _):
        return [AttentionRecorder(model, share=None, store=tmp_path, tracker=fail)]

    with caplog.at_level(logging.ERROR, "manyheads.probe"):
        assert train_plainly(make) == train_plainly()
    assert [record.message.partition(" failed")[0] for record in caplog.records] == ["the tracker"]
    assert open_recording(tmp_path)["attention"].sizes["step"] == STEPS
