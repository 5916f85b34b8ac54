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


def llama():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 29}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8))


@pytest.mark.parametrize("make", [small_model, llama])
def test_figures_of_heads_are_those_of_their_rows_and_columns(make):
    import torch

    model = make()
    recorder = UpdateRecorder(model, 50, share=None)
    before, after = one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), recorder)
    gradients = {name: value.grad.double().numpy() for name, value in model.named_parameters()}
    found = recorder.dataset().isel(step=0)

    def heads(table, part):
        """Weights of layer 1 (heads, size, width)."""
        if make is llama:
            name = f"model.layers.1.self_attn.{part[0]}_proj.weight"
            return (table[name].T if part == "output" else table[name]).reshape(-1, 8, 32)
        if part == "output":
            return table["transformer.h.1.attn.c_proj.weight"].reshape(4, 8, 32)
        joint = table["transformer.h.1.attn.c_attn.weight"].T.reshape(3, 4, 8, 32)
        return joint[["query", "key", "value"].index(part)]

    for part in ("query", "key", "value", "output"):
        weight, gradient = heads(before, part), heads(gradients, part)
        update = heads(after, part) - weight
        of = found.sel(head_matrix=part).isel(attention_layer=1)
        norms = [np.sqrt(np.mean(each**2, axis=(1, 2))) for each in (weight, gradient, update)]
        for name, expected in (
            ("head_weight_rms", norms[0]),
            ("head_gradient_rms", norms[1]),
            ("head_update_ratio", norms[2] / norms[0]),
        ):
            present = of[name].values[: len(expected)]
            np.testing.assert_allclose(present, expected, rtol=1e-4)
            assert np.isnan(of[name].values[len(expected) :]).all()
    for name, gradient in gradients.items():
        if gradient.ndim == 2:
            rms = np.sqrt(np.mean(gradient**2))
            assert found.gradient_rms.sel(matrix=name).item() == pytest.approx(rms, rel=1e-5)


def zero_query(model, step):
    if step >= 30:
        model.transformer.h[1].attn.c_attn.weight.grad[:, 8:16] = 0


def zero_layer(model, step):
    if step >= 30:
        for each in model.transformer.h[0].parameters():
            each.grad.zero_()


def no_gradient(model, step):
    if step >= 30:
        for each in model.transformer.h[0].parameters():
            each.grad = None


def rounded(model, step):
    if step >= 30:
        for each in model.parameters():
            each.data = each.data.bfloat16().float()


def restored(model, step):
    query = model.transformer.h[1].attn.c_attn.weight.data[:, :8]
    if step == 30:
        model.kept = query.clone()
    elif step > 30:
        query[:] = model.kept


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (None, None),
        (zero_query, ("updates", "gradient of its query weights vanishes", 1, 1)),
        (zero_layer, ("updates", "gradient vanishes", 0, -1)),
        (no_gradient, ("updates", "gradient vanishes", 0, -1)),
        (rounded, ("precision", "weights hold 8 of the 24 bits", -1, -1)),
        (restored, ("updates", "its query weights do not change", 1, 0)),
    ],
)
def test_faults_of_gradients_and_weights_are_named(fault, expected, optimizer):
    import torch

    from manyheads.probe.alarms.update_alarms import find_rounding, find_vanishing

    model = small_model()
    optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
    recorder = UpdateRecorder(model, 50, share=None)
    recorder.watch(optimizer)
    for step in range(40):
        tokens = windows(4, seed=step)
        model(tokens, labels=tokens).loss.backward()
        if fault is not None:
            fault(model, step)
        optimizer.step()
        optimizer.zero_grad()
    found = [alarm for find in (find_vanishing, find_rounding) if (alarm := find(recorder.dataset())) is not None]
    if expected is None:
        assert found == []
        return
    alarm = next(each for each in found if each.detector == expected[0])
    assert len(found) == 1 or fault is rounded  # small updates are rounded away: weights do not change, either
    assert (alarm.detector, alarm.layer, alarm.head) == (expected[0], *expected[2:])
    assert alarm.words.startswith(expected[1])
    assert 30 <= alarm.step <= 34


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
