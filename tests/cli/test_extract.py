"""`manyheads extract`: what it asks, writes, prints and refuses; the methods are tested in their own room."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.scaling.torch_models import build

from manyheads.cli import main
from manyheads.recovery import compare_layers, evaluate_layer, gpt_layer, load_layer, save_layer
from manyheads.transformer import Shape

DIM, HEADS = 12, 2


@pytest.fixture(scope="module")
def layer(seed):
    return gpt_layer(np.random.default_rng([seed, 5]), DIM, HEADS)


@pytest.fixture
def oracle(layer):
    """A module of functions that answer."""
    asked = []

    def answer(x):
        asked.append(len(x))
        return evaluate_layer(layer, x)

    def broken(x):
        return np.full(x.shape, np.nan)

    def nameless(x):
        return evaluate_layer(layer, x)

    def interrupted(x):
        if sum(asked) > 40:
            raise KeyboardInterrupt
        return answer(x)

    for function in (answer, broken, interrupted):
        function.dim = DIM
    module = type(sys)("oracle_of_this_test")
    module.answer, module.broken, module.nameless, module.interrupted = answer, broken, nameless, interrupted
    module.asked, module.mlp = asked, lambda x: np.tanh(x)
    module.mlp.dim = DIM
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


@pytest.fixture
def call(capsys):
    def command(*words):
        status = main(["extract", *map(str, words)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


def test_a_function_is_extracted_and_three_files_are_written(call, oracle, layer, folder):
    status, out, _ = call("oracle_of_this_test:answer", "--verify", 60, "--json")
    assert status == 0
    said = json.loads(out)
    assert (said["heads"], said["dim"], said["theta_ranks"]) == (HEADS, DIM, [DIM // HEADS] * HEADS)
    assert said["asked"]["calls"] == sum(oracle.asked)
    assert said["certificate"]["accepted"]
    assert said["certificate"]["sequences"] == 60
    assert said["against_weights"] == {}  # nobody knows them
    errors = compare_layers(layer, load_layer("extracted.safetensors"))
    assert max(errors.theta, errors.projection) < 1e-5  # of squared function error 1e-6 at most, mostly far below
    assert json.loads(Path("extracted.json").read_text()) == said
    page = Path("extracted.html").read_text()
    for words in ("The recovered heads", "Singular values of W", "With confidence 1 -", "</svg>", "Stage by stage"):
        assert words in page
    assert not re.search(r"\bsrc=|@import|url\((?!data:|#)|<link", page)  # the page fetches nothing
    assert all(
        address.startswith(("https://arxiv", "https://doi", "#")) for address in re.findall(r'href="(.*?)"', page)
    )


def test_the_leak_meter_states_stages_bounds_and_attacks(call, oracle, folder, monkeypatch):
    monkeypatch.setattr("manyheads.recovery.queries.leak_meter.MOST", 0)  # the bound of a larger layer needs no time
    status, out, _ = call("oracle_of_this_test:answer", "--verify", 60, "--report")
    assert status == 0
    for words in (
        "stages   noise",
        "counting ",
        "of norm ",
        "rounding to 8 bits: cheapest attack known",
        "a better attack may exist",
    ):
        assert words in out
    leak = json.loads(Path("extracted.json").read_text())["leak"]
    assert leak["asked"] == sum(oracle.asked) - 60
    assert "What attacks behind noise and rounding have cost" in Path("extracted.html").read_text()


@pytest.mark.slow
def test_a_saved_layer_is_scored_against_its_own_weights(call, layer):
    save_layer("mine.safetensors", layer)
    status, out, err = call("mine.safetensors", "--output", "found.safetensors", "--store", "asked", "--verify", 60)
    assert status == 0
    assert f"heads    {HEADS}; rank of Theta {DIM // HEADS}, of W {DIM // HEADS}" in out
    assert f"truth    heads {HEADS}, theta" in out
    assert err == ""  # no terminal, no progress
    first = json.loads(Path("found.json").read_text())
    assert max(first["against_weights"][name] for name in ("theta", "projection")) < 1e-5
    # Again with the same store: the same bits, and everything but the probes is answered from it.
    before = load_layer("found.safetensors")
    assert call("mine.safetensors", "--output", "found.safetensors", "--store", "asked", "--verify", 60)[0] == 0
    after = load_layer("found.safetensors")
    assert all(np.array_equal(getattr(after, name), getattr(before, name)) for name in ("theta", "projection"))
    again = json.loads(Path("found.json").read_text())["asked"]
    assert again["stored"] >= again["calls"] - 6


@pytest.mark.slow
def test_limits_of_a_server_are_flags(call, oracle, folder):
    name = f"{oracle.__name__}:answer"
    status, said, _ = call(name, "--max-length", 3, "--last-row", "--max-batch", 1, "--max-norm", 20, "--json")
    assert status == 0
    assert "last rows" in json.loads(said)["certificate"]["distribution"]
    status, _, complaint = call(name, "--max-length", 2)
    assert status == 3
    assert "three tokens" in complaint
    status, _, complaint = call(name, "--bits", 60)
    assert status == 2
    assert "bits" in complaint


def test_a_vocabulary_is_a_file(call, oracle, folder):
    table = Path("table.npy")
    np.save(table, 0.7 * np.random.default_rng(4).normal(size=(60, DIM)))
    status, said, _ = call(f"{oracle.__name__}:answer", "--vocabulary", table, "--verify", 60, "--json")
    assert status == 0
    assert json.loads(said)["method"] == "vocabulary"
    np.save(table, np.array([{}], object), allow_pickle=True)
    status, _, complaint = call(f"{oracle.__name__}:answer", "--vocabulary", table)
    assert status == 2
    assert "no array could be read" in complaint


def test_an_interrupted_extraction_leaves_its_answers_and_no_files(call, oracle):
    words = ("--store", "asked", "--verify", 30)
    status, _, err = call("oracle_of_this_test:interrupted", *words)
    assert status == 130
    assert "answers are kept in asked; run the same command again" in err
    status, _, err = call("oracle_of_this_test:interrupted", *words[2:])
    assert status == 130
    assert "no answer is kept without --store" in err
    assert not Path("extracted.safetensors").exists()
    oracle.asked.clear()
    status, out, _ = call("oracle_of_this_test:answer", *words, "--json")
    assert status == 0
    assert json.loads(out)["asked"]["stored"] > 0
    assert sum(oracle.asked) < json.loads(out)["asked"]["calls"]


def test_refusals_have_status_3_say_why_and_write_nothing(call, oracle):
    for name, words, said in (
        ("mlp", (), "measured"),
        ("broken", (), "NaN"),
        ("answer", ("--budget", 30), "30 calls are allowed"),
    ):
        status, out, err = call(f"oracle_of_this_test:{name}", *words)
        assert (status, out) == (3, "")
        assert said in err
        assert not list(Path().glob("extracted*"))


def test_wrong_use_has_status_2_and_says_what_to_do(call, oracle, layer):
    save_layer("mine.safetensors", layer)
    Path("checkpoint").mkdir()
    Path("folder.safetensors").mkdir()
    Path("model.safetensors").write_bytes(b"somebody else's")
    Path("config.json").write_text("{}")
    for words, said in (
        (("oracle_of_this_test:nameless",), "give the token dimension with --dim"),
        (("oracle_of_this_test:answer", "--dim", 0), "--dim=0"),
        (("oracle_of_this_test:answer", "--layer", 1), "--layer: for checkpoint folders only"),
        (("oracle_of_this_test:answer", "--output", "found.bin"), "ends in .safetensors"),
        (("oracle_of_this_test:answer", "--output", "no/found.safetensors"), "no folder no"),
        (("oracle_of_this_test:answer", "--verify", 0), "at least 1"),
        (("oracle_of_this_test:answer", "--seed", -1), "--seed=-1"),
        (("oracle_of_this_test:answer", "--output", "model.safetensors"), "not written by this command"),
        (("oracle_of_this_test:answer", "--output", "config.safetensors"), "config.json exists"),
        (("oracle_of_this_test:answer", "--output", "folder.safetensors"), "a folder of that name"),
        (("mine.safetensors", "--output", "mine.safetensors"), "the layer that is queried"),
        (("nowhere", "--layer", 0), "no such file or folder"),
        (("", "--layer", 0), "ORACLE '': expected package.module:function, a saved layer, or a checkpoint folder"),
        (("oracle_of_this_test:nothing",), "cannot be imported"),
        (("nowhere",), "no such file or folder"),
        (("mine.safetensors", "--dim", 3), "--dim: for functions only"),
        (("checkpoint",), "--layer is missing"),
        ((), "ORACLE"),
    ):
        status, out, err = call(*words)
        assert (status, out) == (2, ""), (words, err)
        assert said in err
    assert Path("model.safetensors").read_bytes() == b"somebody else's"
    assert call("checkpoint", "--layer", 0)[0] == 3
    Path("other.safetensors").write_bytes(b"no tensors")
    assert "holds no saved layer" in call("other.safetensors")[2]


@pytest.mark.slow
@pytest.mark.torch
def test_a_layer_of_a_checkpoint_is_extracted_and_what_cannot_be_is_refused(call, seed):
    import torch
    import transformers

    torch.manual_seed(seed)
    transformers.utils.logging.disable_progress_bar()
    model = build("gpt2", Shape(8, 2, 2))
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0.0, 0.4)
    model.save_pretrained("gpt2")
    status, out, err = call("gpt2", "--layer", 1, "--verify", 60, "--json")
    assert status == 0, err
    said = json.loads(out)
    assert said["oracle"] == "the attention sub-module of layer 1 of gpt2 (gpt2), in float64"
    assert said["against_weights"]["theta"] < 1e-5
    status, _, err = call("gpt2", "--layer", 2)
    assert status == 2
    assert "layers 0 to 1" in err
    build("bert", Shape(8, 2, 1)).save_pretrained("bert")
    status, _, err = call("bert", "--layer", 0, "--through", "block")
    assert status == 3
    assert "after the residual sum" in err
