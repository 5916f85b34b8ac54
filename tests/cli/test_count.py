"""`manyheads count`: what it prints, and what it refuses."""

import json
import subprocess
import sys

import pytest
import tyro

from manyheads.cli.count import Count
from manyheads.costs import ModelShape, generation_cost, transformer_cost
from manyheads.costs.formulas.decoding import token_cost
from manyheads.errors import FileRefused, UsageError
from manyheads.models.counts import count_parameters


def run(capsys, *arguments):
    command = tyro.cli(Count, args=list(arguments))
    assert command.run() == 0
    return capsys.readouterr().out


def run_json(capsys, *arguments):
    return json.loads(run(capsys, *arguments, "--json"))


def test_a_shape_by_flags(capsys):
    flags = ("--layers", "2", "--width", "48", "--heads", "4", "--vocabulary", "100", "--length", "32", "--batch", "3")
    shape = ModelShape(2, 48, 4, vocabulary=100)
    assert run_json(capsys, *flags)["flops"] == transformer_cost(shape, 32, 3).flops
    training = run_json(capsys, *flags, "--training", "--convention", "megatron")
    assert training["flops"] == transformer_cost(shape, 32, 3, training=True, convention="megatron").flops
    assert training["activation_bytes_at_least"] == 2 * 3 * 32 * 48 * 4
    decode = run_json(capsys, *flags, "--decode")
    assert decode["flops"] == token_cost(shape, 32, 3).flops
    assert decode["kv_cache_bytes"] == 2 * 3 * 32 * 2 * 48 * 4
    book = run_json(capsys, *flags, "--generate", "1000000000")
    assert book["flops"] == generation_cost(shape, 32, 10**9, 3).flops
    assert book["kv_cache_bytes"] == 2 * 3 * (32 + 10**9) * 2 * 48 * 4
    text = run(capsys, *flags, "--compare")
    assert f"{transformer_cost(shape, 32, 3).flops:,}" in text
    assert "chinchilla" in text
    again = run_json(capsys, *flags, "--training", "--recompute", "scores", "--compare")
    assert again["conventions"]["dense"] == transformer_cost(shape, 32, 3, training=True, convention="dense").flops


def test_a_config_or_its_folder(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    by_folder = run_json(capsys, str(tmp_path))
    assert by_folder == run_json(capsys, str(tmp_path / "config.json"))
    assert by_folder["length"] == 197
    assert "attention core" in run(capsys, str(tmp_path))


def test_a_function(capsys):
    assert run_json(capsys, "jax.numpy:dot", "--shapes", "4x8", "8x3:float32")["flops"] == 2 * 4 * 8 * 3
    mac = run_json(
        capsys, "jax.numpy:linalg.matmul", "--shapes", "4x8:bfloat16", "8x3:bfloat16", "--convention", "executed-mac"
    )
    assert (mac["flops"], mac["bytes"]) == (4 * 8 * 3, 2 * (32 + 24 + 12))
    assert run_json(capsys, "jax.numpy:exp", "--shapes", "scalar")["transcendental"] == 1


def test_a_function_of_the_current_folder(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine_for_count.py").write_text(
        "import jax\ndef f(x): return jax.lax.while_loop(lambda y: y.sum() < 1, lambda y: y @ y, x)\n"
    )
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    unknown = run_json(capsys, "mine_for_count:f", "--shapes", "4x4")
    assert "flops" not in unknown
    assert "while loop" in unknown["unknown"][0]
    assert run_json(capsys, "mine_for_count:f", "--shapes", "4x4", "--trips", "3")["flops"] == 3 * 128
    assert "at least" in run(capsys, "mine_for_count:f", "--shapes", "4x4")
    assert sys.path == path


def test_what_was_assumed_is_said(capsys, tmp_path):
    """Dtype, length and defaults of a family, in text and JSON; nothing is said of what was given."""
    flags = ("--layers", "2", "--width", "48", "--heads", "4")
    full = ("--kv-heads", "2", "--head-dim", "12", "--mlp-hidden", "96", "--gated", "True", "--vocabulary", "100")
    full += ("--causal", "True", "--length", "32", "--dtype", "bfloat16")
    found = run_json(capsys, *flags, "--decode")
    assert (found["dtype"], found["length"], found["batch"]) == ("float32", 1024, 1)
    said = " ".join(found["notes"])
    for assumed in ("kv_heads=4", "mlp_hidden=192", "causal=true", "float32 is taken", "1024 is taken", "4 bytes"):
        assert assumed in said
        assert assumed in run(capsys, *flags, "--decode")
    told = run_json(capsys, *flags, *full, "--decode")
    assert told["kv_cache_bytes"] == 2 * 32 * 2 * 2 * 12 * 2
    assert (told["dtype"], told["notes"]) == ("bfloat16", ["bytes are those of numbers of 2 bytes"])
    file = tmp_path / "config.json"
    file.write_text('{"layers": 2, "width": 48, "heads": 4, "itemsize": 2, "gated": true}')
    own = run_json(capsys, str(file))
    assert own["dtype"] == "2 bytes"
    assert "kv_heads=4" in own["notes"][0]
    assert "gated" not in own["notes"][0]
    for family in ("llama", "mixtral"):  # with a closed form, and without
        file.write_text(json.dumps({"model_type": family, "hidden_size": 64, "torch_dtype": "float16"}))
        found = run_json(capsys, str(file))
        assert found["length"] == 1024
        assert "num_hidden_layers=32" in found["notes"][0]
        assert "hidden_size" not in found["notes"][0]
        assert "float32" not in " ".join(found["notes"])
        assert "num_hidden_layers=32" in run(capsys, str(file))
    file.write_text(json.dumps({"model_type": "gpt2", "n_embd": None, "n_inner": None}))
    nulls = run_json(capsys, str(file))["notes"][0]  # null is the default here, and four times the width there
    assert "n_embd=768" in nulls
    assert "n_inner" not in nulls
    shapes = run_json(capsys, "jax.numpy:dot", "--shapes", "4x8:float32", "8x3")
    assert shapes["notes"] == ["no dtype is given: float32 is taken for 8x3"]


def test_one_word_is_one_quantity(capsys, tmp_path):
    file = tmp_path / "config.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 50}
    for tied in (True, False):
        file.write_text(json.dumps({"model_type": "llama", **sizes, "tie_word_embeddings": tied}))
        found = run_json(capsys, str(file))
        assert found["matrix_parameters"] == count_parameters(file).matrix
        assert 2 * 1024 * found["matrix_parameters"] + found["items"]["attention core"]["flops"] == found["flops"]
        assert not [name for name in found if "weights" in name]


def test_an_image_has_one_length(capsys, tmp_path):
    for family in ("vit", "vit_mae"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
        assert run_json(capsys, str(tmp_path), "--length", "197")["length"] == 197
        with pytest.raises(UsageError, match="197 positions"):
            Count(str(tmp_path), length=100).run()


REFUSED = [
    (Count(), "layers"),
    (Count(layers=2, width=8), "--heads missing"),
    (Count(layers=2, width=8, heads=3), "head_dim"),
    (Count(layers=2, width=8, heads=2, convention="flops"), "unknown convention"),
    (Count(layers=2, width=8, heads=2, convention="executed"), "a formula"),
    (Count(layers=2, width=8, heads=2, training=True, decode=True), "exclude"),
    (Count(layers=2, width=8, heads=2, causal=False, decode=True), "causal"),
    (Count(layers=2, width=8, heads=2, length=0), "--length=0: expected an integer of at least 1"),
    (Count(layers=2, width=8, heads=2, shapes=("3",)), "--shapes"),
    (Count(layers=2, width=8, heads=2, meta=True), "--meta are for a function"),
    (Count("jax.numpy:nonsense"), "cannot be imported"),
    (Count("no_such_module:f"), "cannot be imported"),
    (Count("jax.numpy:pi"), "cannot be called"),
    (Count("jax.numpy:dot", shapes=("4*4",)), "expected extents"),
    (Count("jax.numpy:dot", shapes=("4x4:float31",)), "no dtype"),
    (Count("jax.numpy:dot", shapes=("4x4", "5x4")), "cannot be traced"),
    (Count("jax.numpy:dot", shapes=("4x4", "4x4"), convention="exact"), "cannot be read"),
    (Count("jax.numpy:dot", layers=3), "--layers"),
    (Count("jax.numpy:dot", batch=3), "--batch"),
]


@pytest.mark.parametrize(("command", "says"), REFUSED)
def test_wrong_use(command, says):
    with pytest.raises(UsageError, match=says):
        command.run()


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])  # the latter has no closed form
def test_no_number_of_sequences_is_below_one(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(UsageError, match="--batch=-2: expected an integer of at least 1"):
        Count(str(tmp_path), batch=-2).run()


def test_refused_files(tmp_path):
    with pytest.raises(FileRefused, match="there is no such file"):
        Count(str(tmp_path)).run()
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UsageError, match="leave out --layers"):
        Count(str(tmp_path), layers=3).run()


def test_the_command_and_closed_forms_need_no_jax():
    """`--help` stays fast, and counting a model stays fast too."""
    code = (
        "import sys; from manyheads.cli.count import Count; assert not {'jax', 'numpy'} & set(sys.modules);"
        "Count(layers=1, width=8, heads=2).run(); assert 'jax' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


MAKE = """
import torch
def make():
    return torch.nn.Linear(3, 4), torch.zeros(2, 3)
def pair():
    return 1, 2
def alone():
    return torch.nn.Linear(3, 4)
module = alone()
def two():
    return torch.nn.Bilinear(3, 3, 4), torch.zeros(2, 3), torch.zeros(2, 3)
"""


@pytest.mark.torch
def test_a_function_that_makes_a_module_and_a_batch(capsys, tmp_path, monkeypatch):
    (tmp_path / "mine_of_torch.py").write_text(MAKE)
    monkeypatch.chdir(tmp_path)
    assert run_json(capsys, "mine_of_torch:make")["flops"] == 2 * 2 * 12
    found = run_json(capsys, "mine_of_torch:make", "--training", "--meta", "--convention", "mac", "--compare")
    assert found["flops"] == 2 * 2 * 12
    assert found["conventions"] == {
        "exact": 96, "halved": 96, "dense": 96, "mac": 48, "palm": 96, "executed": 96, "executed-mac": 48,
    }  # fmt: skip
    table = run(capsys, "mine_of_torch:make")
    assert "mm" in table
    assert "bytes are not counted" in table
    assert not {"bytes", "elementwise", "transcendental", "bytes_convention"} & set(found)
    with pytest.raises(UsageError, match="--training: for a function that returns a PyTorch module"):
        Count("mine_of_torch:pair", training=True).run()
    with pytest.raises(UsageError, match="Linear without a batch; give a function"):
        Count("mine_of_torch:alone").run()
    with pytest.raises(UsageError, match="Linear without a batch; give a function"):
        Count("mine_of_torch:module").run()
    assert "_trilinear is opaque" in run(capsys, "mine_of_torch:two")
    with pytest.raises(UsageError, match="--meta: for a function that returns a PyTorch module and a batch, without"):
        Count("mine_of_torch:make", meta=True, shapes=("3",)).run()


@pytest.mark.torch
def test_a_traced_model_beside_its_closed_form(capsys, tmp_path):
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 11,
        "intermediate_size": 24,
    }
    file = tmp_path / "config.json"
    for family, training, equal in (("gpt2", True, (1, 1)), ("bert", False, (0, 0)), ("gptj", False, (None, 1))):
        gpt = {"n_embd": 16, "n_layer": 2, "n_head": 2} | ({"rotary_dim": 4} if family == "gptj" else {})
        more = sizes if family == "bert" else gpt
        file.write_text(json.dumps({"model_type": family, **more}))
        flags = [str(file), "--traced", "--length", "12", *(["--training"] if training else [])]
        found = run_json(capsys, *flags)
        for name, same in zip(("exact", "dense"), equal, strict=True):
            if same is None:  # attention of its own, which computes all pairs, before transformers 5.24
                either = found["forward_exact_closed_form"], found["forward_dense_closed_form"]
                assert found[f"forward_{name}_traced"] in either
                continue
            assert (found[f"forward_{name}_traced"] == found[f"forward_{name}_closed_form"]) == bool(same)
        assert found["flops"] == found["forward_exact_traced"] * (3 if training else 1)
        assert "forward dense closed form: " in run(capsys, *flags)
        dense = run_json(capsys, *flags, "--convention", "dense")
        assert dense["flops"] == found["forward_dense_traced"] * (3 if training else 1)
    file.write_text(json.dumps({"model_type": "vit_mae", **sizes}))
    assert run_json(capsys, str(file), "--traced")["length"] == 197
    file.write_text(json.dumps({"model_type": "bert", **sizes}))
    with pytest.raises(UsageError, match="give another --length"):
        Count(str(file), traced=True, length=600).run()
    with pytest.raises(UsageError, match="--decode: does not fit --traced"):
        Count(str(file), traced=True, decode=True).run()
    with pytest.raises(UsageError, match="no target"):
        Count(traced=True).run()
