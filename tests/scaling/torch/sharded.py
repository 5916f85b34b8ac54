"""Work of one of two processes: a model sharded by FSDP2 or cut by tensor parallelism, beside the plain one."""

import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from manyheads.errors import UsageError
from manyheads.scaling import (
    BaseHyperparameters,
    Parametrization,
    audit_model,
    infer_roles,
    initialize_model,
    torch_groups,
)
from manyheads.transformer import Shape

SIZES = {"vocab_size": 32, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 1}
P = Parametrization(base=(8, 2, 2))
TUNED = BaseHyperparameters(3e-3, weight_decay=0.1, no_decay=("norm",))
SHAPE = Shape(8, 4, 3)
PARTS = {
    "*embed_tokens*": "embedding", "*q_proj*": "query", "*k_proj*": "key", "*v_proj*": "value", "*o_proj*": "output",
    "*gate_proj*": "mlp_gate", "*up_proj*": "mlp_in", "*down_proj*": "mlp_out", "*input_layernorm*": "attention_gain",
    "*post_attention_layernorm*": "mlp_gain", "*norm*": "final_gain", "*lm_head*": "unembedding",
}  # fmt: skip


class Shifted(nn.Module):
    """A norm with gains 1 + w, as Gemma's."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


def build(shape=SHAPE, shifted=False):
    torch.manual_seed(0)
    sizes = {"num_attention_heads": shape.heads, "num_hidden_layers": shape.depth, "tie_word_embeddings": False}
    config = LlamaConfig(hidden_size=shape.width, intermediate_size=2 * shape.width, **sizes, **SIZES)
    model = LlamaForCausalLM(config)
    for block in model.model.layers if shifted else ():
        block.input_layernorm = Shifted(shape.width)
    return model


def cut(model, kind, mesh):
    if kind == "fsdp":
        for block in (*model.model.layers, model):
            fully_shard(block, mesh=mesh)
        return model
    plan = {}
    for place in range(len(model.model.layers)):
        at = f"model.layers.{place}"
        columns = [f"{at}.self_attn.{each}_proj" for each in "qkv"] + [
            f"{at}.mlp.{each}_proj" for each in ("gate", "up")
        ]
        plan |= {name: ColwiseParallel() for name in columns}
        plan |= {f"{at}.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    return parallelize_module(model, mesh, plan)


def numbers(groups):
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def main(kind, rank, path):
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    plain, sharded = build(), build()
    initialize_model(P, plain, TUNED, generator=torch.Generator().manual_seed(1))
    cut(sharded, kind, mesh)
    # Drawn behind the cut, as after to_empty: the numbers of the plain model; what is sharded comes from the first rank
    seed = 1 + 10 * rank * (kind == "fsdp")
    initialize_model(P, sharded, TUNED, generator=torch.Generator().manual_seed(seed))
    for (name, one), other in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        whole = other.full_tensor() if hasattr(other, "full_tensor") else other
        torch.testing.assert_close(one, whole, rtol=0, atol=0, msg=name)
    groups, expected = torch_groups(P, sharded, TUNED), numbers(torch_groups(P, plain, TUNED))
    assert numbers(groups) == expected
    optimizer = torch.optim.AdamW(groups)

    def found(model, **more):
        own = optimizer if model is not plain else torch.optim.AdamW(torch_groups(P, plain, TUNED))
        return audit_model(P, model, own, TUNED, **more)

    assert found(sharded).passed
    stds = [[each.actual for each in found(model).findings if each.quantity == "initial"] for model in (plain, sharded)]
    assert stds[0] == stds[1]
    compiled = torch.compile(sharded, backend="eager")
    assert found(compiled).passed
    assert numbers(torch_groups(P, compiled, TUNED)) == expected
    weight = sharded.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        weight.mul_(2.0)
    (fault,) = found(sharded).sentences()
    assert "self_attn.q_proj.weight" in fault
    with torch.no_grad():
        weight.div_(2.0)

    # A forward pass is traced for a role map, and for roles that were inferred on one device
    given = {"roles": PARTS, "fresh": False}
    inferred = infer_roles(build, P.base)
    if kind == "fsdp":
        assert found(sharded, **given).passed
        assert found(sharded, roles=inferred).passed
        assert numbers(torch_groups(P, sharded, TUNED, inferred)) == numbers(torch_groups(P, plain, TUNED, inferred))
        shifted = cut(build(shifted=True), kind, mesh)
        gains = [group for group in torch_groups(P, shifted, TUNED, PARTS, folded=True) if group["role"] == "norm"]
        assert gains
        stated = BaseHyperparameters(3e-3, weight_decay=0.1, no_decay=("norm",), stds={"norm": 1.0})
        initialize_model(P, shifted, stated_of(stated), PARTS)
        norm = shifted.model.layers[0].input_layernorm.weight.full_tensor()
        assert not norm.any()  # 1 + w starts at one
    else:
        for asked in (given, {"roles": inferred}):
            with pytest.raises(
                UsageError, match=r"products are sharded \(tensor parallel\): measure the model before it is"
            ):
                found(sharded, **asked)
    # Training goes on behind the audits
    tokens = torch.arange(16).reshape(2, 8)
    sharded(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    assert any("trained" in note for note in found(sharded).notes)
    dist.barrier()
    dist.destroy_process_group()


def stated_of(base):
    from dataclasses import replace

    parts = ("query", "key", "value", "output", "mlp_in", "mlp_out", "unembedding", "embedding")
    return replace(base, stds={**dict.fromkeys(parts, 0.02), **base.stds})


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
