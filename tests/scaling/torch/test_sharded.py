"""Real sizes and wrappers: 7B parameters on the device meta, FSDP2, tensor parallelism, torch.compile."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyheads.errors import UsageError
from manyheads.scaling import (
    BaseHyperparameters,
    ForwardMultipliers,
    Parametrization,
    audit_model,
    infer_roles,
    torch_groups,
)
from manyheads.transformer import Shape

pytestmark = pytest.mark.torch
ROOT = Path(__file__).parents[3]
TUNED = BaseHyperparameters(3e-3, weight_decay=0.1, no_decay=("norm",))


@pytest.mark.parametrize("kind", ["fsdp", "tensor"])
def test_two_processes_have_the_factors_of_the_plain_model(kind, tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    command = [sys.executable, "-m", "tests.scaling.torch.sharded", kind]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "ranks")], cwd=ROOT, env=environment, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        said = [each.communicate(timeout=180)[1].decode() for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert [each.returncode for each in ranks] == [0, 0], "\n".join(said)


def llama_7b(layers=32):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, tie_word_embeddings=False, **sizes))


def test_a_model_of_7b_parameters_on_the_device_meta():
    import torch

    model = llama_7b()
    assert sum(each.numel() for each in model.parameters()) == 6_738_415_616
    p = Parametrization(base=Shape(128, 8, 8, hidden=2752))
    groups = torch_groups(p, model, TUNED)
    rates = {group["role"]: group["lr"] for group in groups}
    assert (rates["embedding"], rates["query"], rates["unembedding"]) == (3e-3, 3e-3 / 4, 3e-3 / 4)
    audit = audit_model(p, torch.compile(model, backend="eager"), torch.optim.AdamW(groups), TUNED)
    assert audit.passed
    assert not any(each.quantity == "initial" for each in audit.findings)  # it holds no numbers
    usual = audit_model(p, model, torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1), TUNED)
    assert not usual.passed


def test_roles_of_a_small_model_serve_the_one_on_the_device_meta():
    from tests.scaling.torch.sharded import build

    from manyheads.models.names import join_layers

    model, p = llama_7b(), Parametrization(base=Shape(8, 2, 2, hidden=43))
    inferred = infer_roles(build, (8, 2, 2))
    with pytest.raises(UsageError, match=r"on the device meta: .* roles of a small one as patterns of names"):
        torch_groups(p, model, TUNED, roles=inferred)
    patterns = {join_layers(name): part for name, part in inferred.roles.items()}
    numbers = [
        {key: value for key, value in group.items() if key != "params"} for group in torch_groups(p, model, TUNED)
    ]
    usual = ForwardMultipliers(logit=(8 / 128) ** 0.5, branch=1, output=1)  # N^-1/2 at both sizes, and nothing else
    mapped = torch_groups(p, model, TUNED, roles=patterns, shape=Shape(128, 32, 32), folded=usual)
    assert [{key: value for key, value in group.items() if key != "params"} for group in mapped] == numbers
