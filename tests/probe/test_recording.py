"""Recording beside everything else that a model does: training, checkpointing, generation, packing, other models."""

import copy

import numpy as np
import pytest
from tests.probe.families import LENGTH, batch, build, run

from manyheads.errors import UsageError
from manyheads.probe import record_attention
from manyheads.probe.heads.dormant import dormant_heads

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def llama():
    return build("llama", max_position_embeddings=64, attention_dropout=0.1)


def gradients(model, recorded, checkpointed):
    """Train one step; return gradients, the state of PyTorch's generator, and the number of recorded calls."""
    import torch

    model = copy.deepcopy(model).train()
    if checkpointed is not None:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": checkpointed})
    torch.manual_seed(7)
    ids = batch("llama")["input_ids"]

    def step():
        model(input_ids=ids, labels=ids).loss.backward()

    calls = 0
    if recorded:
        with record_attention(model, rows=4) as record:
            step()
        calls = sum(layer.calls for layer in record.layers.values())
    else:
        step()
    return [each.grad for each in model.parameters()], torch.get_rng_state(), calls


@pytest.mark.parametrize("checkpointed", [None, True, False])
def test_gradients_dropout_and_generators_are_untouched(llama, checkpointed):
    import torch

    expected, state, _ = gradients(llama, False, checkpointed)
    found, after, calls = gradients(llama, True, checkpointed)
    assert all(map(torch.equal, expected, found))
    assert torch.equal(state, after)
    assert calls == 2  # one for each layer: the recomputation under checkpointing is none


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static", "disable_compile": True}])
def test_generation_is_untouched_and_decoding_steps_are_rows(llama, options):
    import torch

    ids = batch("llama")["input_ids"]

    def generate():
        return llama.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None, **options)

    expected = generate()
    with record_attention(llama, rows=None) as record:
        assert torch.equal(expected, generate())
    found = record.dataset()
    with record_attention(llama, rows=None) as whole:
        run(llama, {"input_ids": expected[:, :-1]})
    at_once = whole.dataset()
    assert found.measured_rows.values.tolist() == at_once.measured_rows.values.tolist() == [2 * (LENGTH + 3)] * 2
    for name in ("entropy", "first_mass", "distance", "max_logit", "entropy_uniform"):
        np.testing.assert_allclose(found[name], at_once[name], rtol=1e-3, atol=1e-4, err_msg=name)


def test_heads_that_write_nothing_have_no_output(llama):
    import torch

    model = copy.deepcopy(llama)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[8:].zero_()  # the second key head, of heads 2 and 3
    with record_attention(model) as record:
        run(model, batch("llama"))
    relative = record.dataset().relative_output.values[0]
    assert (relative[:2] > 0.1).all()
    assert (relative[2:] == 0).all()


def test_packed_documents_have_first_keys_of_their_own(llama):
    """Positions that start again separate two documents, if the cache is off."""
    import torch

    inputs = {"input_ids": batch("llama")["input_ids"], "use_cache": False}
    inputs["position_ids"] = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)])[None].expand(2, -1)
    with record_attention(llama, rows=None) as record:
        run(llama, inputs)
    found = record.dataset()
    levels = [np.log(np.arange(1, n + 1)).sum() for n in (5, LENGTH - 5)]
    np.testing.assert_allclose(found.entropy_uniform, sum(levels) / LENGTH, rtol=1e-6)
    assert (found.distance <= LENGTH - 6).all()


def test_nothing_is_left_behind_and_other_models_pass_by(llama):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    other = copy.deepcopy(llama)
    with pytest.raises(KeyError), record_attention(llama):
        raise KeyError
    assert not ALL_ATTENTION_FUNCTIONS._local_mapping
    with record_attention(llama) as record:
        run(other, batch("llama"))
    assert not record.layers
    with pytest.raises(UsageError, match="nothing was recorded"):
        record.dataset()
    assert "0 layers, 0 calls" in repr(record)


def test_records_nest_and_end_in_any_order(llama):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    first, second = record_attention(llama), record_attention(llama, layers=[1])
    whole, one = first.__enter__(), second.__enter__()
    run(llama, batch("llama"))
    first.__exit__(None, None, None)
    run(llama, batch("llama"))
    second.__exit__(None, None, None)
    run(llama, batch("llama"))
    assert [layer.calls for layer in whole.layers.values()] == [1, 1]
    assert {name: layer.calls for name, layer in one.layers.items()} == {"model.layers.1.self_attn": 2}
    found = one.dataset()
    assert found.attrs["not_measured"] == "model.layers.0"
    assert set(ALL_ATTENTION_FUNCTIONS._local_mapping) <= {"sdpa"}
    ALL_ATTENTION_FUNCTIONS._local_mapping.clear()


def test_sampled_rows_have_intervals_from_64_rows_on():
    """Sampling moves no figure by more than its interval, up to one in twenty; 16 rows give no interval."""
    import torch

    model = build("gpt2", factor=5.0)
    inputs = {"input_ids": torch.randint(0, 29, (2, 300), generator=torch.Generator().manual_seed(0))}
    with record_attention(model, rows=None) as whole, record_attention(model, rows=64) as sampled:
        run(model, inputs)
    with record_attention(model, rows=16) as few:
        run(model, inputs)
    exact, found = whole.dataset(), sampled.dataset()
    for name in ("entropy", "collision", "first_mass", "idle_mass", "distance"):
        inside = (found[f"{name}_low"] <= exact[name]) & (exact[name] <= found[f"{name}_high"])
        assert inside.mean() >= 0.7, name  # of 8: less than 6 in 1 of 300 draws
        np.testing.assert_allclose(found[f"{name}_uniform"], exact[f"{name}_uniform"], rtol=0.05)
    assert "max_logit" not in found
    assert not [name for name in [*few.dataset(), *exact] if name.endswith(("_low", "_high"))]
    np.testing.assert_allclose(np.square(exact.relative_output).mean("head"), 1)
    np.testing.assert_allclose(exact.entropy_uniform, np.log(np.arange(1, 301)).mean(), rtol=1e-6)


@pytest.mark.parametrize("rows", [None, 8])
def test_figures_are_chosen(llama, rows, monkeypatch):
    """Those that are asked for are the same ones, and the second kernel call is left out where none needs it."""
    from manyheads.probe.attention import fused

    scales = []
    attend = fused._attend
    monkeypatch.setattr(fused, "_attend", lambda *args: (scales.append(args[3]), attend(*args))[1])
    inputs = batch("llama")
    found = {}
    for chosen in (None, ("entropy", "first_mass"), ("collision", "distance"), ("max_logit",)):
        with record_attention(llama, rows=rows, figures=chosen) as record:
            run(llama, inputs)
        found[chosen] = record.dataset()
    for chosen, part in found.items():
        if chosen is not None:
            names = [name for name in part.data_vars if not name.endswith("_uniform") and name != "measured_rows"]
            assert set(names) == set(chosen) - ({"max_logit"} if rows else set())  # sampled rows do not give it
            for name in part.data_vars:
                np.testing.assert_allclose(part[name], found[None][name], rtol=1e-5, atol=1e-6)
    assert len(scales) == (0 if rows else 2 * (2 + 1 + 2 + 2))
    for wrong in ("entropy", ("entropi",), ()):
        with pytest.raises(UsageError, match="expected a collection of names out of entropy, "):
            record_attention(llama, figures=wrong).__enter__()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": [7]}, "layers=.*expected numbers out of 0, 1"),
        ({"layers": 7}, "layers=7"),
        ({"layers": []}, "layers="),
        ({"seed": -1}, "seed=-1"),
        ({"model": "gpt2"}, "str is no PyTorch module"),
    ],
)
def test_what_cannot_be_chosen_is_refused(llama, options, words):
    with pytest.raises(UsageError, match=words), record_attention(**{"model": llama} | options):
        pass


def test_autocast_does_not_round_the_statistics(llama):
    import torch

    inputs = batch("llama")
    with torch.autocast("cpu", torch.bfloat16):
        before = run(llama, inputs)
        with record_attention(llama) as rows, record_attention(llama, rows=None) as fused:
            assert torch.equal(before, run(llama, inputs))
    # The same queries and keys of bfloat16, in float32 twice; logits of bfloat16 would differ by 1e-2.
    np.testing.assert_allclose(rows.dataset().entropy, fused.dataset().entropy, atol=3e-5)


def test_heads_that_write_nothing_are_named():
    import torch

    model = build("llama", max_position_embeddings=64)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[:8] = 0  # the first of two heads of values, for two of queries
    with record_attention(model, rows=None) as record:
        run(model, batch("llama"))
    name = "model.layers.1.self_attn, head"
    assert dormant_heads(record.dataset()) == [f"{name} 0", f"{name} 1"]
    with pytest.raises(UsageError, match="threshold=0"):
        dormant_heads(record.dataset(), 0)
    with pytest.raises(UsageError, match="choose one step"):
        dormant_heads(record.dataset().expand_dims("step"))
