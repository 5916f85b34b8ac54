"""The tools without the extras jax and store: what imports, what runs, and which extra an error names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from manyheads._extras import EXTRA_OF, name_extra, require
from manyheads.errors import ExtraMissing

PACKAGE = Path(__file__).resolve().parents[1] / "src/manyheads"
ABSENT = sorted(module for module, extra in EXTRA_OF.items() if extra in ("jax", "store"))

# Packages and modules that may import JAX when they are imported. Everything else is a tool, or what tools are made of.
NEED_JAX = (
    "attention.traced_entropy",
    "costs.jax",
    "data.windows",
    "demo",
    "recovery.examples.composed_student",
    "scaling.parametrization.optax_scaling",
    "scaling.preflight_checks.jax_trainer",
    "scaling.task",
    "scaling.trained",
    "spectra.traced_ranks",
    "studies",
    "theory.bigram.engines",
    "theory.bigram.searches",
    "theory.bigram.setups",
    "theory.bigram.theorems.stability",
    "theory.bigram.training",
    "theory.dmft.finite",
    "theory.joma.systems",
    "theory.joma.task",
    "theory.joma.text",
    "theory.joma.theorems",
    "theory.meanfield.contrastive",
    "theory.meanfield.incontext",
    "transformer.baselines",
    "transformer.losses",
    "transformer.training",
    "transformer.transformer",
    "transformer.weights",
)

BLOCKED = f"""
import importlib.util, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""

WALK = """
import importlib, json
failed = {}
for name in json.loads(sys.argv[1]):
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = str(error)
print(json.dumps(failed))
"""

EXTRACT = """
import numpy as np, manyheads as mh
from manyheads.attention import AttentionLayer
layer = AttentionLayer(*np.random.default_rng(0).normal(size=(2, 2, 16, 16)) / 4)
found = mh.extract_layer(lambda x: layer(x), 16)
x = np.random.default_rng(1).normal(size=(3, 5, 16))
np.testing.assert_allclose(found.layer(x), layer(x), rtol=0, atol=1e-8)
"""

LAGS = """
import numpy as np
from manyheads.theory.bigram import fit_lags
rng = np.random.default_rng(0)
stream, noise = rng.integers(0, 4, (2, 4000))
copies = np.where(rng.random(4000) < 0.7, np.roll(stream, 5), noise)
assert fit_lags(stream, 8, targets=copies).top(1).ravel().tolist() == [5, 5, 5, 5]
"""

AUDIT = """
import torch, manyheads as mh
from transformers import GPT2Config, GPT2LMHeadModel
from manyheads.scaling import BaseHyperparameters, audit_model, torch_groups
model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, vocab_size=128, n_positions=32))
parametrization, hyperparameters = mh.Parametrization(base=(16, 4, 2)), BaseHyperparameters(learning_rate=3e-3)
groups = torch_groups(parametrization, model, hyperparameters)
assert audit_model(parametrization, model, torch.optim.AdamW(groups), hyperparameters).findings is not None
"""

COUNTED = """
import sys, torch, manyheads as mh
assert mh.count(torch.nn.Linear(3, 4), torch.zeros(2, 3), training=True, device="meta").flops == 96
assert "jax" not in sys.modules
"""

TENSORS = """
import torch
from manyheads.attention import AttentionLayer
theta, projection, x = (torch.randn(*shape, requires_grad=True) for shape in ((2, 8, 8), (2, 8, 8), (5, 6, 8)))
AttentionLayer(theta, projection, causal=True)(x).sum().backward()
assert theta.grad is not None
"""


def run(code, *arguments):
    """Run code in a process in which JAX, its libraries and zarr are not installed."""
    command = [sys.executable, "-c", BLOCKED + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def command(*words):
    return run("from manyheads.cli import main; raise SystemExit(main(sys.argv[1:]))", *words)


def module_name(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_only_theories_and_studies_import_jax():
    names = sorted(module_name(path) for path in PACKAGE.rglob("*.py") if path.stem != "__main__")
    walked = run(WALK, json.dumps(names))
    assert walked.returncode == 0, walked.stderr
    failed = json.loads(walked.stdout)
    allowed = {name: next((p for p in NEED_JAX if f"{name}.".startswith(f"manyheads.{p}.")), None) for name in failed}
    assert {name: failed[name] for name, prefix in allowed.items() if prefix is None} == {}
    assert set(NEED_JAX) - set(allowed.values()) == set(), "these import without JAX now"


@pytest.mark.parametrize("code", [EXTRACT, LAGS], ids=["extract", "lags"])
def test_tools_run(code):
    found = run(code)
    assert found.returncode == 0, found.stderr


@pytest.mark.torch
@pytest.mark.parametrize(
    "code", [TENSORS, COUNTED, pytest.param(AUDIT, marks=pytest.mark.slow)], ids=["tensors", "counted", "audit"]
)
def test_tools_for_pytorch_run(code):
    found = run(code)
    assert found.returncode == 0, found.stderr


SCALE = "scale --base 64,4,4 --to 64,12,12 --learning-rate 3e-3"
COUNT = "count --layers 12 --width 768 --heads 12 --vocabulary 50257 --length 1024"


@pytest.mark.parametrize("words", [SCALE, f"{SCALE} --snippet torch", COUNT, "--version", "study list"])
def test_commands_run(words):
    found = command(*words.split())
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "subject"),
    [
        ("count numpy:dot --shapes 4x4 4x4:float32", ""),
        ("study run attention/costs", "manyheads.studies.attention"),
    ],
)
def test_a_command_names_the_extra_that_it_needs(words, subject):
    found = command(*words.split())
    assert found.returncode == 2
    assert subject in found.stderr
    assert "pip install 'manyheads[jax]'" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_name_of_a_package_names_the_extra_that_it_needs():
    found = run("from manyheads import transformer; transformer.Transformer")
    needs = "transformer.Transformer needs equinox, which is not installed: pip install 'manyheads[jax]' brings it"
    assert needs in found.stderr
    counted = run("import manyheads; manyheads.count(abs, 3)")
    assert "jax is not installed: pip install 'manyheads[jax]' brings it" in counted.stderr


def test_extras_of_modules():
    named = name_extra(ModuleNotFoundError("No module named 'zarr.codecs'", name="zarr.codecs"), "an export")
    assert isinstance(named, ExtraMissing)
    assert str(named) == "an export needs zarr, which is not installed: pip install 'manyheads[store]' brings it"
    for other in (ModuleNotFoundError("No module named 'nothing'", name="nothing"), ValueError("wrong")):
        assert name_extra(other, "this") is other
    with pytest.raises(ModuleNotFoundError, match="nothing_of_this_name"):
        require("nothing_of_this_name")


def test_modules_and_annotations_of_an_absent_extra_can_be_inspected():
    found = run(
        "import inspect, typing; from manyheads._extras import jnp; from manyheads.theory.bigram import BigramTask;"
        "print(inspect.unwrap(jnp) is jnp, typing.get_type_hints(BigramTask, include_extras=True)['transition'])"
    )
    assert found.stdout.startswith("True typing.Annotated["), found.stderr
