"""`manyheads scale`, `scale audit` and `scale check`: what they print, run, find and refuse."""

import json
import os
import re
from typing import get_args

import jax
import numpy as np
import pytest

from manyheads.cli import main
from manyheads.cli.scale.scaling_table import Scale
from manyheads.scaling import Parametrization, audit_model
from manyheads.scaling.checks.growth_powers import QUANTITIES
from manyheads.scaling.parametrization.parametrization import FORMS
from manyheads.scaling.parametrization.scaling_exponents import OPTIMIZERS, SCHEMES
from manyheads.transformer import Shape

FROM_TO = ("--base", "8,4,2", "--to", "8,8,6")
GPT2 = {"model_type": "gpt2", "n_embd": 24, "n_head": 3, "n_layer": 4, "vocab_size": 20, "n_positions": 8}


@pytest.fixture
def call(capsys):
    """Run `manyheads scale` in this process; return its exit status, output and complaints."""

    def command(*words):
        status = main(["scale", *map(str, words)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


def test_the_choices_are_those_of_the_theory():
    fields = Scale.__dataclass_fields__
    assert get_args(fields["optimizer"].type) == OPTIMIZERS
    assert get_args(fields["scheme"].type) == SCHEMES
    assert get_args(fields["form"].type) == FORMS


def test_numbers_follow_from_what_was_tuned(call):
    status, out, _ = call(*FROM_TO, "--learning-rate", 0.01, "--epsilon", 1e-6, "--weight-decay", 0.3, "--json")
    assert status == 0
    found = json.loads(out)
    rows = {row["role"]: row for row in found["rows"]}
    # Twice the width and three times the depth, both exponents one: rate 1/2 in the blocks, epsilon 1/2 and 1/6.
    assert rows["value"]["absolute"] == pytest.approx(
        {"learning_rate": 0.005, "epsilon": 1e-6 / 6, "weight_decay": 0.6}
    )
    assert rows["embedding"]["absolute"] == pytest.approx(
        {"learning_rate": 0.01, "epsilon": 1e-6 / 2, "weight_decay": 0.3}
    )
    assert rows["value"]["initial"] == pytest.approx(2**-0.5)
    assert found["branch"] == pytest.approx(1 / 3)
    assert found["logit_scale"] == pytest.approx(8**-0.5)


def test_the_base_itself_changes_nothing(call):
    for scheme in SCHEMES:
        _, out, _ = call("--base", "8,4,2", "--to", "8,4,2", "--scheme", scheme, "--json")
        found = json.loads(out)
        assert found["branch"] == 1
        for row in found["rows"]:
            assert [row[name] for name in ("initial", "multiplier", "learning_rate", "epsilon", "weight_decay")] == [
                1
            ] * 5


def test_the_table_for_people_says_where_from_what_and_what_not(call):
    status, out, _ = call(*FROM_TO, "--learning-rate", 0.01)
    assert status == 0
    for words in (
        "N = 8, H = 8, L = 6",
        "query, key",
        "0.005  N^-1 H^-1",
        "outside the theory",
        "batch size",
        "× 0.3333",
    ):
        assert words in out
    assert "γ" not in out
    _, out, _ = call(*FROM_TO, "--form", "multiplier", "--richness", 2, "--optimizer", "sgd")
    assert "multiplier" in out
    assert "γ" in out
    assert "epsilon" not in out


def test_a_config_or_its_folder_as_base_and_target(call, folder):
    (folder / "config.json").write_text(json.dumps(GPT2))
    _, by_file, _ = call("--base", "8,4,2", "--to", "config.json", "--json")
    _, by_folder, _ = call("--base", "8,4,2", "--to", folder, "--json")
    assert json.loads(by_file) == json.loads(by_folder)
    assert json.loads(by_file)["shape"] == {"key_dim": 8, "heads": 3, "depth": 4, "key_heads": 3, "hidden": 96}
    assert any("tied" in remark for remark in json.loads(by_file)["outside"])
    (folder / "bare.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 24, "n_head": 3}))
    _, out, _ = call("--base", "8,4,2", "--to", "bare.json")
    assert "target: not in the configuration, taken from gpt2: n_layer=12, n_inner=96" in out
    (folder / "small.json").write_text(json.dumps(GPT2 | {"n_layer": 2, "n_inner": 48}))
    _, out, _ = call("--base-config", "small.json", "--to", "config.json")
    assert "hidden width of the MLP: 2 d at the base and 4 d here" in out


def test_a_config_is_opened_once(call, folder, monkeypatch):
    """Read twice, it could be another file the second time."""
    (folder / "config.json").write_text(json.dumps(GPT2))
    opened, plainly = [], os.open

    def watched(path, *words, **flags):
        opened.append(str(path))
        return plainly(path, *words, **flags)

    monkeypatch.setattr(os, "open", watched)
    assert call("--base", "8,4,2", "--to", "config.json")[0] == 0
    assert [name for name in opened if name.endswith("config.json")] == ["config.json"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "multiply the outputs by 1.333"),  # a stream of 32 at the base, and of 24 here
        (("--form", "multiplier"), "give the outputs the unembedding's multiplier"),
        (("--scheme", "standard"), "leave the outputs as they are"),
    ],
)
def test_a_tied_matrix_is_told_its_factor_on_the_outputs(call, folder, flags, said):
    """In multiplier form it is not the factor on the unembedding's init, and by the standard scheme there is none."""
    (folder / "config.json").write_text(json.dumps(GPT2))
    _, out, _ = call("--base", "8,4,2", "--to", "config.json", "--json", *flags)
    (remark,) = [each for each in json.loads(out)["outside"] if "tied" in each]
    assert remark.endswith(said)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--optimizer", "sgd", "--weight-decay", 0.1), ("--weight-decay", 0.1)])
def test_the_optax_program_runs_and_gives_each_weight_its_rate(call, flags):
    _, program, _ = call("--base", "4,2,1", "--to", "4,4,2", "--learning-rate", 0.01, "--snippet", "optax", *flags)
    namespace = {}
    exec(program, namespace)
    model = namespace["model"]
    gradients = jax.tree.map(lambda leaf: 1.0 + 0 * leaf, model.weights)
    updates, _ = namespace["optimizer"].update(gradients, namespace["state"], model.weights)
    optimizer = "sgd" if "sgd" in flags else "adam"
    table = Parametrization(base=Shape(4, 2, 1), optimizer=optimizer).table(Shape(4, 4, 2))
    decay = 0.1 if flags else 0.0
    # The first step of Adam moves every entry by its rate, as gradient descent does for a gradient of one; the decay's
    # share of a weight does not depend on its class.
    moved = np.asarray(updates.blocks.value) + decay * 0.01 * np.asarray(model.weights.blocks.value)
    np.testing.assert_allclose(moved, -0.01 * table["value"].learning_rate, rtol=1e-4)


@pytest.mark.torch
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--logit-exponent", 0.5, "--depth-exponent", 0.75, "--richness", 2),
        ("--scheme", "mup"),
        ("--scheme", "standard"),
    ],
)
def test_the_torch_program_runs_and_passes_the_audit(call, folder, optimizer, flags):
    name = "".join(word for word in f"{optimizer}{flags}" if word.isalnum())
    theory = (
        "--base",
        "4,2,1",
        "--to",
        "8,4,2",
        "--learning-rate",
        0.01,
        "--weight-decay",
        0.1,
        "--optimizer",
        optimizer,
        *(("--muon-learning-rate", 0.02) if optimizer == "muon" else ()),
        *flags,
    )
    made, first = ("optimizers", "[0]") if optimizer == "muon" else ("optimizer", "")
    _, program, _ = call(*theory, "--snippet", "torch")
    (folder / f"written_{name}.py").write_text(program)
    (folder / f"given_{name}.py").write_text(
        f"from written_{name} import ROLES, model, {made} as optimizer\n"
        "norms = {'*attention_norm.weight': 'attention_gain', '*mlp_norm.weight': 'mlp_gain'}\n"
        "roles = {'*' + end: role for end, role in ROLES.items() if 'norm' not in end}\n"
        "def made():\n    return model, optimizer, {**norms, 'final_norm.weight': 'final_gain', **roles}\n"
        "def forgotten():\n"
        f"    optimizer{first}.param_groups[1]['lr'] *= 4\n"
        "    return made()\n"
    )
    spread = dict.fromkeys(("query", "key", "value", "output", "mlp_in", "unembedding"), 8**-0.5)
    spread |= {"embedding": 1, "positional": 1, "mlp_out": 32**-0.5, "norm": 1, "final_norm": 1}
    (folder / "spreads.json").write_text(json.dumps(spread))
    asked = (*theory, "--stds", "spreads.json", "--applied", "--strict")
    import sys

    sys.path.insert(0, str(folder))
    status, out, err = call("audit", f"given_{name}:made", *asked)
    assert status == 0, out + err
    assert ", 0 wrong" in out
    status, out, _ = call("audit", f"given_{name}:forgotten", *asked, "--json")
    assert status == 1
    faults = [each for each in json.loads(out)["findings"] if not each["right"]]
    assert {each["quantity"] for each in faults} == {"learning_rate"}
    assert [each["factor"] for each in faults] == pytest.approx([4] * len(faults))


MUON = ("--learning-rate", 3e-3, "--optimizer", "muon", "--muon-learning-rate", 0.02)


@pytest.mark.torch
@pytest.mark.parametrize("shape", ["4,4,2", "4,4,1,24"])
def test_the_torch_program_of_muon_trains(call, shape):
    import torch

    _, program, _ = call("--base", "4,2,1", "--to", shape, *MUON, "--snippet", "torch")
    namespace = {}
    exec(program, namespace)
    tokens, losses = torch.arange(40).reshape(2, 20) % 7, []
    for _ in range(4):
        outputs = namespace["model"](tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for optimizer in namespace["optimizers"]:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.torch
def test_the_program_of_muon_for_transformers_steps_both_optimizers(call, folder):
    import torch

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 9}
    sizes |= {"num_hidden_layers": 1, "intermediate_size": 32}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | sizes))
    _, program, _ = call("--base", "8,2,1,8", "--to", "config.json", *MUON, "--snippet", "torch")
    namespace = {}
    exec(program, namespace)
    before = {name: tensor.detach().clone() for name, tensor in namespace["model"].named_parameters()}
    (namespace["model"](torch.arange(6)[None]).last_hidden_state * torch.arange(16.0)).sum().backward()
    for optimizer in namespace["optimizers"]:
        optimizer.step()
    moved = {name for name, tensor in namespace["model"].named_parameters() if not torch.equal(tensor, before[name])}
    assert moved == set(before)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "factor"), [("4,4,2", "original"), ("4,4,1,24", "optax:consistent_rms=1")])
def test_the_optax_program_of_muon_trains(call, shape, factor):
    from manyheads.transformer.losses import cross_entropy
    from manyheads.transformer.training import fit

    theory = ("--base", "4,2,1", "--to", shape, *MUON, "--shape-factor", factor)
    _, program, _ = call(*theory, "--snippet", "optax")
    assert ("consistent_rms=1.0" in program) == (factor != "original")
    namespace = {}
    exec(program, namespace)
    tokens = jax.numpy.arange(40).reshape(2, 20) % 7
    _, losses = fit(namespace["model"], cross_entropy, lambda key: tokens, namespace["optimizer"], 4, jax.random.key(0))
    assert float(losses[-1]) < float(losses[0])


def test_rates_tuned_apart_are_scaled_in_the_table_and_beside_it(call):
    given = ("--base", "8,4,2", "--to", "8,8,2", "--learning-rate", 3e-3, "--rates", "value=.1", "query_gain=.05")
    _, out, _ = call(*given, "--json")
    found = json.loads(out)
    rates = {row["role"]: row["absolute"]["learning_rate"] for row in found["rows"]}
    assert (rates["value"], rates["output"]) == pytest.approx((0.05, 1.5e-3))  # H^-1 of Adam
    assert rates["norm"] == pytest.approx(3e-3)
    assert "query_gain: learning rate 0.05, tuned apart" in found["outside"]
    assert found["base_hyperparameters"]["learning_rates"] == {"value": 0.1, "query_gain": 0.05}
    _, out, _ = call(*given)
    assert any(line.split()[0] == "value" and "0.05  N^-1 H^-1" in line for line in out.splitlines() if line.split())


def test_muon_has_its_own_column_rate_and_notes(call):
    status, out, _ = call("--base", "8,4,2", "--to", "8,16,2", *MUON, "--split", "heads-in")
    assert status == 0
    for words in (
        "muon (heads-in, shape factor √max(1, r/c))",
        "AdamW",
        "0.01  H^-1/2",
        "by a power between 0 and 1/2",
    ):
        assert words in out
    _, out, _ = call("--base", "8,4,2", "--to", "8,4,2,128", *MUON, "--json")
    rows = {row["role"]: row for row in json.loads(out)["rows"]}
    # 32 rows and 128 columns: a quarter as wide as tall; torch applies the factor (D/M)^(1/2) to W_O itself.
    assert rows["value"]["absolute"]["learning_rate"] == pytest.approx(0.02 / 2)
    assert rows["output"]["absolute"] == pytest.approx({"learning_rate": 0.02, "epsilon": 5e-8, "weight_decay": 0.1})
    status, _, err = call("--base", "8,4,2", "--to", "8,8,2", *MUON, "--shape-factor", "none", "--snippet", "torch")
    assert status == 2
    assert "has the shape factors original and match_rms_adamw" in err
    status, _, err = call("--base", "8,4,2", "--to", "8,8,2", "--muon-learning-rate", 0.1)
    assert status == 2
    assert "without --optimizer muon" in err


@pytest.mark.torch
def test_the_program_for_a_model_of_transformers_runs_and_passes_the_audit(call, folder):
    (folder / "config.json").write_text(json.dumps(GPT2))
    _, program, _ = call("--base", "8,2,2", "--to", "config.json", "--learning-rate", 0.01, "--snippet", "torch")
    (folder / "written_hf.py").write_text(program + "\n\ndef made():\n    return model, optimizer\n")
    status, out, err = call(
        "audit", "written_hf:made", "--base", "8,2,2", "--learning-rate", 0.01, "--weight-decay", 0.0, "--strict"
    )
    assert status == 0, out + err
    assert ", 0 wrong" in out


@pytest.fixture
def planted(monkeypatch, rng):
    """Let everything move alike at every size, or the stream grow; let the best rate stay, or fall with the size."""
    growth = {"residual": 0.0, "learning_rate": 0.0}

    def measure_task(task, parametrization, recipe, rate, checkpoints):
        def measure(shape, seed):
            size = shape.heads
            noise = 0.01 * rng.normal(size=(len(QUANTITIES), len(checkpoints)))
            return {
                name: size ** growth.get(name, 0.0) * np.exp(each) for name, each in zip(QUANTITIES, noise, strict=True)
            }

        return measure

    def task_losses(task, parametrization, recipe):
        def losses(shape, rates, seed):
            best = (
                np.log10(rates[len(rates) // 2])
                + growth["learning_rate"] * np.log10(shape.heads / 4)
                + 0.01 * rng.normal()
            )
            return (np.log10(rates) - best) ** 2

        return losses

    monkeypatch.setattr("manyheads.scaling.checks.coordinate_check.measure_task", measure_task)
    monkeypatch.setattr("manyheads.scaling.checks.transfer_check.task_losses", task_losses)
    return growth


def test_a_check_that_holds(call, planted):
    status, out, err = call("check", "--transfer", "--strict")
    assert status == 0
    assert "consistent along heads" in out
    assert "transfers" in out
    # Announced before the work, and on standard error.
    assert "(8, 2, 2), (8, 4, 2), (8, 16, 2), 8 seeds, 24 trainings of 25 steps" in err
    assert "168 trainings of 60 steps" in err


def test_one_step_is_said_as_one(call, planted):
    status, out, err = call("check", "--steps", 1, "--transfer", "--train", 1)
    assert status == 0
    assert "along heads, after 1 step:" in out
    assert "after 1 step," in out
    assert "24 trainings of 1 step\n" in err
    assert "168 trainings of 1 step\n" in err
    assert "1 steps" not in out + err


def test_memory_is_judged_by_that_of_the_machine(call, planted, monkeypatch):
    """What a batch of the usual size takes is far below a gigabyte; a system may not say what it has."""
    monkeypatch.setattr("manyheads._machine.machine_memory", lambda: 2 * 10**9)
    assert call("check")[0] == 0
    status, _, err = call("check", "--batch", 10_000)
    assert status == 2
    assert "to train (N, H, L) = (8, 16, 2) takes about 8 GB, and this machine has 2 GB" in err
    monkeypatch.setattr("manyheads._machine.machine_memory", lambda: None)
    assert call("check", "--batch", 10_000)[0] == 0


def test_a_check_that_breaks_names_the_module_and_is_strict_when_asked(call, planted):
    planted |= {"residual": 0.7, "learning_rate": -1.0}
    status, out, _ = call("check", "--transfer", "--json", "--learning-rates", 1e-5, 1, 11)
    assert status == 0
    found = json.loads(out)
    broken = [each for each in found["coordinate_check"]["growths"] if each["outcome"] == "refuted"]
    assert {each["quantity"] for each in broken} == {"residual"}
    assert broken[0]["exponent"] == pytest.approx(0.7, abs=0.1)
    assert found["transfer_check"]["outcome"] == "refuted"
    status, out, _ = call("check", "--strict", "--seeds", 3)
    assert status == 1
    assert "BREAKS along heads" in out
    assert "residual stream after the last block: H^0.7" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--base", "8,4", "--to", "8,4,2"), "expected N,H,L, three integers"),
        (("--base", "8,x,2", "--to", "8,4,2"), "'8,x,2'"),
        (("--base", "8,0,2", "--to", "8,4,2"), "heads=0: expected an integer of at least 1"),
        (("--to", "8,4,2"), "--base or --base-config is missing"),
        (("--base", "8,4,2"), "--to is missing"),
        (("--base", "8,4,2", "--to", "absent.json"), "a config.json that exists"),
        (("--base", "8,4,2", "--to", "/"), "no config.json in this folder"),
        (("--base", "8,4,2", "--base-config", "x", "--to", "8,4,2"), "exclude each other"),
        ((*FROM_TO, "--logit-exponent", "0.7"), "choose from 0.5, 1.0"),
        ((*FROM_TO, "--snippet", "optax"), "needs --learning-rate"),
        ((*FROM_TO, "--learning-rate", "1", "--snippet", "torch", "--form", "multiplier"), "effective form"),
        (
            (*FROM_TO, "--learning-rate", "1", "--snippet", "torch", "--rates", "query_gain=.1"),
            "no group of query_gain",
        ),
        ((*FROM_TO, "--learning-rate", "1", "--rates", "hidden=.1"), "--rates hidden: the table has no row of it"),
        ((*FROM_TO, "--learning-rate", "1", "--rates", "value=.1", "value=.2"), "--rates names value twice"),
        ((*FROM_TO, "--learning-rate", "1", "--rates", "=.1"), "expected ROLE=RATE"),
        ((*FROM_TO, "--learning-rate", "-1"), "positive"),
        ((*FROM_TO, "--richness", "inf"), "positive"),
        (("check", "--sizes", "4"), "at least two"),
        (("check", "--seeds", "1"), "--seeds=1: expected an integer of at least 2"),
        (("check", "--steps", "5", "4"), "in rising order"),
        (("check", "--train", "0"), "--train=0: expected an integer of at least 1"),
        (("check", "--steps", "1", f"{2**31}"), "and at most 2,147,483,647"),
        (("check", "--steps", f"{10**9}"), "--steps 1000000000: 24 trainings take about"),
        (("check", "--steps", "1", f"{10**9}", "--sizes", "1", "2"), "give fewer steps or seeds"),
        (("check", "--transfer", "--train", f"{10**7}"), "--train 10000000: 168 trainings take about"),
        (("check", "--batch", "0"), "--batch=0: expected an integer of at least 1"),
        (("check", "--batch", f"{10**8}"), "--batch 100000000: to train (N, H, L) = (8, 16, 2) takes about 83,"),
        (("check", "--task", "text", "--batch", f"{10**12}"), "give a smaller --batch, or smaller --sizes"),
        (("check", "--seeds", f"{2**31}"), "--seeds=2147483648: expected an integer of at least 2 and at most 10000"),
        (("check", "--transfer", "--train", f"{10**9}", "--learning-rates", "1e-3", "1", f"{10**6}"), "12,000,000 GB"),
        (
            ("--snippet", "none", *FROM_TO),
            "invalid choice 'none' for argument '--snippet'; choose one of optax, torch;",
        ),
        (("check", "--axis", "x"), "argument '--axis'; choose one of key_dim, heads, depth;"),
        (("check", "--seed", "-1"), "--seed=-1: expected an integer of at least 0"),
        (("check", "--seed", f"{10**30}"), "give a whole number up to"),
        (("check", "--sizes", "8", f"{10**400}"), "more than 1,000,000,000 weights"),
        (("check", "--learning-rate", "inf"), "--learning-rate=inf: expected a positive number"),
        (("check", "--learning-rate", "nan"), "--learning-rate=nan: expected a positive number"),
        (("check", "--epsilon", "nan"), "--epsilon=nan: expected a positive number"),
        (("check", "--transfer", "--learning-rates", "1", "inf", "3"), "give two rates, the lower first"),
        (("check", "--text", "x.txt"), "--text is for --task text"),
        (("check", "--learning-rates", "1", "2", "3"), "--learning-rates is for --transfer"),
        (("check", "--base", "config.json"), "expected N,H,L"),
        (("--base", __file__, "--to", "8,4,2"), "a config.json goes to --base-config"),
        (("check", "--base", __file__), "such as 64,12,12, not a file"),
        (("--base", "8,4,2", "--to", f"8,4,{10**400}"), "beyond what a float holds"),
        (("audit", "nothing", "--base", "8,4,2"), "package.module:function"),
        (("audit", "os:getcwd", "--base", "8,4,2", "--base-config", "x", "--learning-rate", "1"), "exclude each other"),
        (("audit", "os:getcwd", "--base", "8,4,2", "--learning-rate", "1"), "expected (model, optimizer)"),
        (
            ("audit", "os.path:isdir", "--base", "8,4,2", "--learning-rate", "1"),
            "os.path:isdir(s) takes other arguments: expected a function without arguments that returns (model, opt",
        ),
        (("audti",), "did you mean 'audit'?"),
    ],
)
def test_wrong_use_is_said_in_one_line(call, words, said):
    status, out, err = call(*words)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("config", "said", "status"),
    [
        ({"model_type": "mamba"}, "'mamba' is not described: its layers keep a state", 3),
        (GPT2 | {"n_head": 5}, "no multiple of the 5 heads", 3),
    ],
)
def test_a_config_that_the_theory_does_not_describe_is_refused(call, folder, config, said, status):
    (folder / "config.json").write_text(json.dumps(config))
    found, _, err = call("--base", "8,4,2", "--to", "config.json")
    assert found == status
    assert said in err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"scale_attn_weights": False},
            r"--to config\.json: attention without the factor N\^-1/2.*scale_attn_weights=True",
        ),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=False"),
        ({"add_cross_attention": True}, "cross-attention is not described here"),
        ({"model_type": "bert"}, "post-norm blocks, L=4 and 2 at the base: outside the theory, keep the depth"),
        ({"model_type": "opt", "word_embed_proj_dim": 12}, "word_embed_proj_dim.*narrower than the stream.*make it 24"),
    ],
)
def test_attention_that_the_theory_does_not_describe_is_refused_before_a_table(call, folder, changes, said):
    """What the adapters refuse is refused here, too: a table for it would be wrong."""
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(GPT2 | sizes | changes))
    status, out, err = call("--base", "8,4,2", "--to", "config.json")
    assert (status, out) == (2, "")
    assert re.search(said, err)
    if changes.get("model_type") == "bert":  # width alone is described
        status, out, _ = call("--base", "8,4,4", "--to", "config.json")
        assert status == 0
        assert "post-norm: width and key dimension are scaled" in " ".join(out.split())


def test_a_config_says_the_width_of_its_stream_and_its_groups(call, folder):
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 9}
    (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2, "intermediate_size": 128}))
    _, out, _ = call("--base", "8,4,2", "--to", "config.json", "--json")
    found = json.loads(out)
    assert found["shape"] | {"depth": 0} == {
        "key_dim": 32,
        "heads": 4,
        "depth": 0,
        "stream": 64,
        "key_heads": 2,
        "hidden": 128,
    }
    rows = {row["role"]: row["powers"] for row in found["rows"]}
    assert (rows["value"]["initial"], rows["output"]["learning_rate"]) == ("D^-1/2", "N^-1 H^-1")


def test_a_config_may_leave_sizes_to_its_family(call, folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "vit", "num_hidden_layers": 3}))
    status, out, err = call("--base", "64,4,3", "--to", "config.json", "--json")
    assert status == 0, err
    assert json.loads(out)["shape"] == {"key_dim": 64, "heads": 12, "depth": 3, "key_heads": 12, "hidden": 3072}


@pytest.mark.torch
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_the_program_for_fused_queries_scales_the_logits(call, folder, family):
    """One matrix cannot carry a factor for the queries alone: the printed program has to run all the same."""
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "intermediate_size": 48}
    given = {"model_type": family, "n_embd": 24, "n_head": 3, "n_layer": 2, "vocab_size": 20, "n_positions": 8} | sizes
    (folder / "config.json").write_text(json.dumps(given))
    asked = ("--base", "4,3,2", "--to", "config.json", "--learning-rate", 0.01, "--snippet", "torch")
    _, program, _ = call(*asked)
    namespace = {}
    exec(program, namespace)
    made = (namespace[name] for name in ("model", "optimizer", "hyperparameters"))
    assert audit_model(namespace["parametrization"], *made).passed
    status, out, err = call(*asked, "--logit-exponent", 0.5)  # no program can
    assert (status, out) == (2, "")
    assert "query, key, value in one parameter" in err


def test_a_program_for_every_family_and_for_fields_of_our_own(call, folder):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral", **sizes}))
    asked = ("--base", "8,4,2", "--to", "config.json", "--learning-rate", 0.01)
    assert call(*asked)[0] == 0
    status, out, _ = call(*asked, "--snippet", "torch")
    assert status == 0
    assert "transformers" in out
    (folder / "config.json").write_text(json.dumps({"layers": 2, "width": 32, "heads": 4}))
    status, out, _ = call(*asked, "--snippet", "torch")  # fields of our own: no model of transformers
    assert status == 0
    assert "class Block(nn.Module)" in out


@pytest.mark.parametrize("as_json", [False, True])
def test_a_coordinate_check_is_not_lost_with_a_transfer_that_fails(call, planted, monkeypatch, as_json):
    def task_losses(task, parametrization, recipe):
        return lambda shape, rates, seed: -np.asarray(rates)

    monkeypatch.setattr("manyheads.scaling.checks.transfer_check.task_losses", task_losses)
    status, out, err = call("check", "--transfer", *(["--json"] if as_json else []))
    assert status == 3
    assert "an end of the grid" in err
    if as_json:
        found = json.loads(out)
        assert found["coordinate_check"]["outcome"] == "holds"
        assert found["transfer_check"]["outcome"] == "failed"
    else:
        assert "consistent along heads" in out


def test_an_interval_without_ends_is_still_json(call, planted, monkeypatch):
    """Best rates that agree to the last bit stand on the grid, and decide nothing."""

    def task_losses(task, parametrization, recipe):
        return lambda shape, rates, seed: np.log(np.asarray(rates) / np.median(rates)) ** 2

    monkeypatch.setattr("manyheads.scaling.checks.transfer_check.task_losses", task_losses)
    _, out, _ = call("check", "--transfer", "--json")
    found = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))["transfer_check"]
    assert found["outcome"] == "inconclusive"
    assert found["decades_over_factor_8"]["interval"] == [None, None]


@pytest.mark.parametrize(
    "text", ["1" * 5000, "[" * 100_000, '{"query": true}', "[1]", '{"query": 1, "query": 2}', None]
)
def test_spreads_that_are_none_are_refused(call, folder, text):
    os.mkfifo(folder / "spreads.json") if text is None else (folder / "spreads.json").write_text(text)
    status, _, err = call("audit", "os:getcwd", "--base", "8,4,2", "--learning-rate", 1, "--stds", "spreads.json")
    assert status == 2
    assert "--stds spreads.json: " in err


@pytest.mark.torch
def test_audits_of_loaded_weights_and_of_roles_without_a_shape(call, folder):
    (folder / "loaded_plain.py").write_text(
        "import torch\n"
        "def made():\n"
        "    model = torch.nn.Linear(32, 32, bias=False)\n"
        "    return model, torch.optim.AdamW(model.parameters(), lr=0.1), {'weight': 'value'}\n"
    )
    (folder / "spreads.json").write_text('{"value": 9}')
    asked = ("audit", "loaded_plain:made", "--base", "8,4,2", "--learning-rate", 0.1, "--weight-decay", 0.01)
    status, _, err = call(*asked)
    assert status == 2
    assert "shape=Shape(N, H, L) (--to)" in " ".join(err.split())
    asked += ("--to", "8,4,2", "--stds", "spreads.json", "--strict")
    status, out, _ = call(*asked)
    assert status == 1
    assert "--trained" in " ".join(out.split())
    assert call(*asked, "--trained")[0] == 0


@pytest.mark.torch
def test_audit_of_a_model_of_ones_own_proposes_a_role_map_that_a_file_may_hold(call, folder):
    (folder / "own_model.py").write_text(
        "import torch\n"
        "from tests.scaling.own_models import LLAMA, build\n"
        "def made():\n"
        "    model = build(LLAMA | {'output': 'layers.*.self_attn.out_proj'}, stated='')\n"
        "    return model, torch.optim.AdamW(model.parameters(), lr=0.1)\n"
    )
    asked = ("audit", "own_model:made", "--base", "8,4,3", "--learning-rate", 0.1, "--weight-decay", 0.01)
    status, _, err = call(*asked)
    assert status == 2
    assert '\n    "layers.*.self_attn.out_proj.weight": "output",  # guessed\n' in err
    (folder / "roles.toml").write_text(err[err.index("roles = {") : err.rindex("}") + 1])
    status, _, err = call(*asked, "--roles", "roles.toml")
    assert status == 2
    assert "give heads= (--heads)" in " ".join(err.split())
    status, out, _ = call(*asked, "--roles", "roles.toml", "--heads", 4, "--strict")
    assert (status, "0 wrong" in out) == (0, True)


@pytest.mark.parametrize(("row", "words"), [("value", "fan-in grows 3 times"), ("norm", "it follows no size")])
def test_the_table_explains_its_learning_rates(call, row, words):
    asked = ("--base", "8,4,2", "--to", "8,12,2", "--learning-rate", 3e-3)
    status, out, _ = call(*asked, "--explain")
    assert status == 0
    told = next(line for line in out.splitlines() if line.startswith(f"{row}: "))
    assert words in told
    rows = json.loads(call(*asked, "--json")[1])["rows"]
    assert told == next(each["explanation"] for each in rows if each["role"] == row)


BUILD = """
import torch
from tests.models.strange import OwnMultipliers, Prefixes
from manyheads.transformer import Shape

def build(shape):
    return OwnMultipliers(shape.key_dim, shape.heads, shape.depth)

def other(shape):
    return Prefixes(shape.key_dim, shape.heads, shape.depth)

def made():
    model = build(Shape(16, 4, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0)
"""


@pytest.mark.torch
def test_roles_come_from_a_builder_in_the_place_of_a_map(call, folder):
    (folder / "own_builder.py").write_text(BUILD)
    base = ("--base", "8,4,2")
    status, out, _ = call("roles", "own_builder:build", *base, "--write", "roles.json")
    assert status == 0
    assert ["blocks.*.wq.weight", "query", "N", "H", "×", "N", "H", "2"] in [line.split() for line in out.split("\n")]
    assert json.loads((folder / "roles.json").read_text())["blocks.1.wk.weight"] == "key"
    assert json.loads(call("roles", "own_builder:build", *base, "--json")[1])["multipliers"]["logit"] == "0.375 N^-1"
    status, out, _ = call(*base, "--to", "16,4,4", "--model", "own_builder:build", "--learning-rate", 0.003, "--json")
    rows = {row["parameter"]: row for row in json.loads(out)["parameters"]}
    assert rows["blocks.*.down.weight"]["learning_rate"] == pytest.approx(0.0015)
    assert rows["table"]["init"] == pytest.approx(2**-0.5)
    assert json.loads(out)["forward"] == pytest.approx(
        {"branch": 0.5, "logit": 0.5, "output": 0.5, "embedding": 2**0.5}
    )
    assert "mlp_out" in call(*base, "--to", "16,4,4", "--model", "own_builder:build")[1]
    out = call(*base, "--to", "16,4,4", "--model", "own_builder:build", "--batch", 1, 4)[1]
    assert "note: rule none: learning rate unchanged by batch, an assumption" in out
    asked = ("audit", "own_builder:made", *base, "--model", "own_builder:build", "--learning-rate", 0.003, "--strict")
    status, out, _ = call(*asked)
    assert status == 1
    assert "wrong in 1 finding" in out  # a group that was forgotten
    assert "--applied is given as well: leave one of them out" in call(*asked, "--applied")[2]
    status, _, err = call("roles", "own_builder:other", *base)
    assert status == 2
    assert "blocks.0.keys: it is added to something that is neither stream, product, norm nor logits" in err
    assert "expected package.module:build" in call("roles", "own_builder", *base)[2]


TIED = BUILD.replace("OwnMultipliers", "OneMatrix")


@pytest.mark.torch
@pytest.mark.parametrize("path", ["roles.json", "roles.toml"])
def test_inferred_roles_that_were_written_are_read_as_a_map(call, folder, path):
    from tests.models.strange import OneMatrix

    from manyheads.models.architecture import read_roles
    from manyheads.scaling import BaseHyperparameters, Parametrization, infer_roles, torch_groups
    from manyheads.transformer import Shape

    (folder / "tied_builder.py").write_text(TIED)
    base = ("--base", "8,4,2")
    assert call("roles", "tied_builder:build", *base, "--write", path)[0] == 0
    assert read_roles(folder / path)["table"] == "embedding+unembedding"
    found = infer_roles(lambda shape: OneMatrix(shape.key_dim, shape.heads, shape.depth), (8, 4, 2))
    p, model = Parametrization(base=found.shape), OneMatrix(8, 4, 2)
    shape = Shape(8, 4, 2, key_heads=1, hidden=128)
    given = {"roles": str(folder / path), "shape": shape}, {"roles": found}
    first, second = (
        {name: row["lr"] for row in torch_groups(p, model, BaseHyperparameters(1.0), **each) for name in row["names"]}
        for each in given
    )
    assert first == pytest.approx(second)
    assert len(first) == 10
    for more in ("--explain", "--snippet"):
        said = call(*base, "--to", "16,4,4", "--model", "tied_builder:build", more, *["torch"] * (more == "--snippet"))
        assert said[0] == 2
        assert "leave out --snippet and --explain" in said[2]


MAKE = """
import torch

def make(shape, seed):
    model = torch.nn.Sequential(torch.nn.Linear(3, shape.width), torch.nn.Linear(shape.width, 1))
    optimizer = torch.optim.SGD(model[:1].parameters() if seed == 7 else model.parameters(), lr=0.01)
    return model, optimizer, [torch.randn(4, 3)], lambda model, x: model(x).square().mean()
"""


@pytest.mark.torch
def test_a_preflight_measures_a_function_of_shape_and_seed(call, folder):
    (folder / "own_training.py").write_text(MAKE)
    asked = ("preflight", "own_training:make", "--base", "4,2,1", "--axes", "heads", "--sizes", 2, 4, 8, "--seeds", 2)
    status, out, err = call(*asked, "--steps", 2, "--out", "found", "--strict")
    assert status == 0
    assert "about 0 CPU s for 6 trainings at 3 shapes" in err
    assert "beside a flat one" in out
    assert "not judged" in out
    assert json.loads((folder / "found" / "preflight.json").read_text())["judged"] is False
    assert (folder / "found" / "preflight.svg").exists()
    status, out, _ = call(*asked, "--json", "--strict", "--seed", 7, "--transfer", "--train", 8)
    assert status == 1
    assert json.loads(out)["faults"][0].startswith("1.weight is in no optimizer")


@pytest.mark.torch
def test_a_preflight_measures_the_best_rate_over_batch_sizes(call, folder):
    (folder / "own_steps.py").write_text(
        "import torch\n"
        "def make(shape, seed, steps=None):\n"
        "    model = torch.nn.Linear(8, 1, bias=False)\n"
        "    batches = [(x, x.sum(-1, keepdim=True) + 2 * torch.randn(16, 1)) for x in torch.randn(64, 16, 8)]\n"
        "    loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()\n"
        "    return model, torch.optim.SGD(model.parameters(), 0.05), batches, loss\n"
    )
    asked = ("preflight", "own_steps:make", "--base", "4,2,1", "--axes", "batch", "--sizes", 1, 2, "--train", 16)
    status, out, _ = call(*asked, "--seeds", 2, "--out", "found")
    assert status == 0
    assert out.startswith("exponents of the best learning rate: 1 measured")
    assert "learning rate along batch: measured: it goes as batch^" in out
    assert (folder / "found" / "preflight.svg").exists()
    status, out, _ = call(*asked, "--seeds", 2, "--rate-factors", 0.001, 0.002, 3, "--out", "undecided")
    assert status == 0
    assert "not decided" in out
    assert [path.name for path in (folder / "undecided").iterdir()] == ["preflight.json"]


CHANGED = ("--base", "64,4,4", "--to", "64,12,12", "--learning-rate", 3e-3, "--weight-decay", 0.1)


def test_batch_and_tokens_change_the_numbers_by_rules_that_are_named(call):
    _, out, _ = call(
        *CHANGED, "--batch", 256, 1024, "--tokens", 1e10, 4e10, "--rules", "sqrt", "tokens=-0.5", "timescale"
    )
    assert "where the numbers come from:" in out
    for said in (
        "derived: all factors",
        "rule sqrt (Malladi",
        "betas 0.9, 0.95 become 0.6, 0.8",
        "measured tokens=-0.5",
    ):
        assert said in out
    assert "a longer run may want another rate" not in out
    given = (*CHANGED, "--batch", 256, 1024, "--rules", "sqrt", "timescale", "--json")
    plain, changed = (json.loads(call(*each)[1]) for each in ((*CHANGED, "--json"), given))
    for before, after in zip(plain["rows"], changed["rows"], strict=True):
        assert after["learning_rate"] == before["learning_rate"]  # the factors of sizes stay
        ratios = [
            after["absolute"][name] / before["absolute"][name] for name in ("learning_rate", "epsilon", "weight_decay")
        ]
        assert ratios == pytest.approx([2, 0.5, 2])
    assert "origins" in changed
    assert "origins" not in plain
    _, out, _ = call(*CHANGED, "--batch", 256, 1024)
    assert "rule none: learning rate unchanged by batch, an assumption" in out
    _, out, _ = call(*CHANGED, "--batch", 256, 1024, "--rules", "sqrt", "--snippet", "torch")
    assert "# rule sqrt: epsilon × 0.5; betas" in out
    compile(out, "snippet", "exec")
    for alone in (("--rules", "sqrt"), ("--weights", 1e8, 1e9)):
        assert "give --batch or --tokens" in call(*CHANGED, *alone)[2]
    assert "rule sqrt: it is for adam" in call(*CHANGED, "--optimizer", "sgd", "--batch", 1, 2, "--rules", "sqrt")[2]


@pytest.mark.torch
def test_a_preflight_takes_its_roles_from_a_file(call, folder):
    (folder / "renamed_training.py").write_text(
        "import torch\n"
        "from tests.scaling.own_models import LLAMA, build\n"
        "def make(shape, seed):\n"
        "    sizes = {'key_dim': shape.key_dim, 'heads': shape.heads, 'groups': shape.heads, 'width': shape.width}\n"
        "    model = build(LLAMA | {'output': 'layers.*.self_attn.out'}, depth=shape.depth, **sizes)\n"
        "    batches = [(each[:, :-1], each[:, 1:].contiguous()) for each in torch.randint(31, (3, 4, 9))]\n"
        "    return model, torch.optim.AdamW(model.parameters(), lr=0.01), batches\n"
        "def with_roles(shape, seed):\n"
        "    return *make(shape, seed), None, {'*': 'value'}\n"
    )
    names = {"embed_tokens": "embedding", "lm_head": "unembedding", "norm": "final_gain", "*.out": "output"}
    names |= {f"*.self_attn.{letter}_proj": part for letter, part in zip("qkv", ("query", "key", "value"), strict=True)}
    names |= {"*.gate_proj": "mlp_gate", "*.up_proj": "mlp_in", "*.down_proj": "mlp_out"}
    names |= {"*.input_layernorm": "attention_gain", "*.post_attention_layernorm": "mlp_gain"}
    (folder / "roles.toml").write_text("".join(f'"{name}.weight" = "{part}"\n' for name, part in names.items()))
    asked = ("--base", "8,2,2", "--axes", "heads", "--sizes", 2, 4, "--steps", 2, "--seeds", 2, "--learning-rate", 0.01)
    status, _, err = call("preflight", "renamed_training:with_roles", *asked, "--roles", "roles.toml")
    assert (status, "TARGET returns roles as well" in " ".join(err.split())) == (2, True)
    asked = ("preflight", "renamed_training:make", *asked, "--json")
    without, found = (json.loads(call(*asked, *more)[1]) for more in ((), ("--roles", "roles.toml")))
    assert (without["judged"], found["judged"]) == (False, True)
    assert any("no family explains all" in note for note in without["notes"])
    assert {"output", "mlp_out"} <= {each["role"] for each in found["audits"]["heads"]["findings"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("preflight", "make", "--base", "4,2,1"), "expected package.module:function"),
        (("preflight", "a:b"), "--base is missing"),
        (("preflight", "a:b", "--base", "4,2,1", "--sizes", 2), "--sizes with 3 axes"),
        (("preflight", "a:b", "--base", "4,2,1", "--rate-factors", 1, 2, 3), "add it"),
        (("preflight", "a:b", "--base", "4,2,1", "--transfer", "--rate-factors", 2, 1, 3), "the lower first"),
    ],
)
def test_wrong_use_of_a_preflight_is_said(call, words, said):
    status, _, err = call(*words)
    assert status == 2
    assert said in err


def test_help_names_the_subcommands(call):
    status, out, _ = call("--help")
    assert "manyheads scale preflight" in out
    assert status == 0
    assert "manyheads scale audit" in out
    assert "manyheads scale check" in out


def test_another_number_of_experts_and_other_latent_dimensions_are_refused(call, folder):
    for name, experts in (("base", 8), ("more", 16)):
        (folder / f"{name}.json").write_text(json.dumps({"model_type": "mixtral", "num_local_experts": experts}))
    found, _, err = call("--base-config", "base.json", "--to", "more.json")
    assert found == 2
    assert "2 of 8 and 2 of 16; how experts scale" in err
    assert call("--base-config", "base.json", "--to", "base.json")[0] == 0
    for name, dims in (("latent", 128), ("wider", 64)):
        (folder / f"{name}.json").write_text(json.dumps({"model_type": "deepseek_v3", "v_head_dim": dims}))
    assert "its low-rank factors are in no row" in call("--base", "192,4,2", "--to", "latent.json")[1]
    assert "differ from the base's" in call("--base-config", "wider.json", "--to", "latent.json")[2]
