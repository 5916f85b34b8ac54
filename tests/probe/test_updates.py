"""Update sizes beside those computed by hand, with weight decay, several optimizers and Muon."""

import numpy as np
import pytest
from tests.probe.trainings import small_model, train_plainly, windows

from manyheads.errors import UsageError
from manyheads.probe.live.updates import UpdateRecorder

pytestmark = pytest.mark.torch


def one_step(model, optimizer, recorder):
    """Take a step; return the weights before and after it, as NumPy arrays of float64."""
    recorder.watch(optimizer)
    before = {name: value.detach().double().numpy().copy() for name, value in model.named_parameters()}
    model(windows(), labels=windows()).loss.backward()
    optimizer.step()
    return before, {name: value.detach().double().numpy() for name, value in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "removed"), [("AdamW", "removed"), ("SGD", "included"), ("Muon", "removed"), ("Adam", "included")]
)
def test_ratios_and_spectra_are_those_of_the_step_without_decay(kind, removed):
    import torch

    model = small_model()
    matrices = [each for name, each in model.named_parameters() if each.dim() == 2 and ".h." in name]
    optimizer = getattr(torch.optim, kind)(matrices, lr=1e-2, weight_decay=0.5)
    recorder = UpdateRecorder(model, len(matrices), share=None, spectra=True)
    before, after = one_step(model, optimizer, recorder)
    found = recorder.dataset().isel(step=0)
    assert set(found.weight_decay.values) == {removed}
    assert set(found.role.values) == {"query_key_value", "output", "mlp_in", "mlp_out"}
    assert found.layer.values.tolist() == [0] * 4 + [1] * 4
    for name in found.matrix.values:
        update = after[name] - before[name] + (1e-2 * 0.5 * before[name] if removed == "removed" else 0)
        values = np.linalg.svd(update, compute_uv=False)
        figures = found.sel(matrix=name)
        norm = np.linalg.norm(update)
        assert figures.update_ratio.item() == pytest.approx(norm / np.linalg.norm(before[name]), rel=1e-5)
        assert figures.weight_rms.item() == pytest.approx(np.sqrt(np.mean(before[name] ** 2)), rel=1e-6)
        assert figures.orthogonality.item() == pytest.approx(values.sum() / np.sqrt(len(values)) / norm, rel=1e-4)
        assert figures.stable_rank.item() == pytest.approx((norm / values[0]) ** 2, rel=1e-4)
    if kind == "Muon":
        assert (found.orthogonality > found.orthogonality_random).all()


def test_muon_beside_adamw_is_measured_in_turn_and_with_spectra():
    import torch

    recorders = []

    def make(model, optimizer):
        hidden = [each for name, each in model.named_parameters() if each.dim() == 2 and ".h." in name]
        chosen = {id(each) for each in hidden}
        rest = [each for each in model.parameters() if id(each) not in chosen]
        for recorder in recorders:
            recorder.finish(0)
        recorders[:] = [UpdateRecorder(model, 4, share=None)]
        muon, adam = torch.optim.Muon(hidden, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)
        for each in (adam, muon):
            recorders[0].watch(each)
        optimizer.step = lambda: (adam.step(), muon.step())
        return recorders

    train_plainly(make)
    found = recorders[0].dataset()
    assert found.step.values.tolist() == [0, 1, 2, 3]
    assert [sorted(set(found.optimizer.values[~np.isnan(row)])) for row in found.update_ratio.values] == [
        ["AdamW"],
        ["Muon"],
        ["Muon"],
        ["AdamW"],
    ]
    hidden = found.isel(matrix=found.optimizer.values == "Muon")
    assert hidden.orthogonality.count() == hidden.update_ratio.count() == 8
    assert np.isnan(found.stable_rank_random.values[found.optimizer.values == "AdamW"]).all()


def test_the_training_is_untouched():
    def make(model, optimizer):
        recorder = UpdateRecorder(model, 3, share=None)
        recorder.watch(optimizer)
        return [recorder]

    assert train_plainly(make) == train_plainly()


def test_random_orthogonality_is_that_of_drawn_matrices(rng):
    from manyheads.probe.live.updates import random_orthogonality

    for rows, columns in ((60, 60), (200, 50), (40, 160)):
        values = np.linalg.svd(rng.standard_normal((8, rows, columns)), compute_uv=False)
        drawn = values.sum(-1) / np.sqrt(values.shape[-1] * np.square(values).sum(-1))
        assert random_orthogonality(rows, columns) == pytest.approx(drawn.mean(), rel=0.01)


def test_what_is_no_optimizer_of_the_model_is_refused():
    import torch

    model = small_model()
    recorder = UpdateRecorder(model)
    with pytest.raises(UsageError, match=r"is no torch\.optim"):
        recorder.watch(model)
    with pytest.raises(UsageError, match="trains no matrix"):
        recorder.watch(torch.optim.SGD(small_model().parameters()))
