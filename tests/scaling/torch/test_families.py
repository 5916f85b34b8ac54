"""Families of the table at two shapes: the roles of every parameter, no false alarm before and after some steps."""

from dataclasses import replace

import pytest
from tests.models import tiny

from manyheads.errors import UsageError
from manyheads.models.families import FAMILIES
from manyheads.models.torch.model import read_model
from manyheads.scaling import (
    BaseHyperparameters,
    Muon,
    MuonHyperparameters,
    Parametrization,
    audit_model,
    initialize_model,
    torch_groups,
)
from manyheads.scaling.parametrization.targets import forward_multipliers
from manyheads.transformer import Shape

pytestmark = pytest.mark.torch

TUNED = BaseHyperparameters(
    learning_rate=3e-3, weight_decay=0.01, no_decay=("norm", "final_norm"), muon=MuonHyperparameters(0.01)
)
STEPS = 3
REFUSED = {
    "apertus": "trained numbers of an activation",
    "modernbert": "no std is known",
    "clip_vision_model": "no std is known",
    "nanochat": "no std is known",
    "granite_swa": "no std is known",
    "granitemoe_swa": "no std is known",
    "youtu": "no std is known",
}
"""Family → why it is refused: by its roles, or because its configuration does not say how its weights start."""


def base_and_larger(family, heads=4, factor=2):
    """Return a tiny model with its own init, and one with more heads, and where depth is described more layers."""
    latent = "plain_key_dim" in FAMILIES[family].keys
    groups = heads // 2 if "key_value_heads" in FAMILIES[family].keys and not latent else None
    sizes = {"heads": heads, "key_value_heads": groups, "width": 8 * heads, "hidden": 12 * heads, "layers": 2}
    own = {
        "openai-gpt": {"tie_word_embeddings": False},  # post-norm: no last norm to carry it
        "deepseek_v3": {"first_k_dense_replace": 4},  # dense: its experts come in eight groups
    }
    changes = own.get(family, {})
    base = tiny.build(family, **sizes, **changes)
    deeper = 2 if read_model(base).architecture.post_norm else 2 * factor
    wider = 1 if "multi_query" in FAMILIES[family].keys else factor  # one key head at any number of heads
    larger = {name: size and wider * size for name, size in sizes.items()} | {"layers": deeper}
    return base, tiny.build(family, **larger, **changes)


def batch(model, seed):
    import torch

    generator = torch.Generator().manual_seed(seed)
    if getattr(model.config, "image_size", None):
        return {"pixel_values": torch.randn(4, 3, 8, 8, generator=generator)}
    return {"input_ids": torch.randint(2, 29, (4, 12), generator=generator)}


def train(model, optimizers, seed):
    """Make some steps and return the last loss."""
    import torch

    model.train()
    for step in range(STEPS):
        found = model(**batch(model, 100 * seed + step))
        outputs = found.logits if getattr(found, "logits", None) is not None else found[0]
        loss = outputs.double().square().mean()
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.isfinite(loss)


def alarms(family, seed, optimizer="adam"):
    """Train a family at two shapes with the prescribed groups; return faults and the number of findings."""
    import torch

    torch.manual_seed(seed)
    models = base_and_larger(family)
    p = Parametrization(base=read_model(models[0]).architecture.shape, optimizer=optimizer)
    faults, judged = [], 0
    for number, model in enumerate(models):
        if number or optimizer == "sgd":
            initialize_model(p, model, TUNED, generator=torch.Generator().manual_seed(seed))
        groups = torch_groups(p, model, TUNED)
        muon = [group for group in groups if group.get("algorithm") == "muon"]
        rest = [group for group in groups if group.get("algorithm") != "muon"]
        stepping = [(torch.optim.SGD if optimizer == "sgd" else torch.optim.AdamW)(rest, lr=1.0)]
        stepping += [torch.optim.Muon(muon, adjust_lr_fn=p.muon.factor)] if muon else []
        for trained in (False, True):
            audit = audit_model(p, model, stepping if muon else stepping[0], TUNED)
            faults += [(family, number, trained, each) for each in audit.faults]
            judged += len(audit.findings)
            if not trained:
                train(model, stepping, seed)
    return faults, judged


MUON = ("llama", "qwen3", "gemma2", "gemma3_text", "olmo2", "smollm3", "stablelm", "opt", "gptj", "bert", "roberta",
        "vit", "dinov2", "glm", "deepseek_v3")  # fmt: skip
"""Families whose matrices are all of two axes."""
FEW = ("qwen3", "gemma2", "olmo2", "gpt_oss", "dinov2")


@pytest.mark.parametrize("family", FEW)
def test_no_false_alarm_at_two_shapes(family, seed):
    faults, judged = alarms(family, seed)
    assert not faults
    assert judged > 50


@pytest.mark.slow
@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in FEW])
def test_no_false_alarm_in_other_families(family, seed):
    if reason := REFUSED.get(family):
        with pytest.raises(UsageError, match=reason):
            alarms(family, seed)
        return
    faults, _ = alarms(family, seed)
    assert not faults


@pytest.mark.slow
@pytest.mark.parametrize("family", MUON)
def test_no_false_alarm_under_muon(family, seed):
    faults, judged = alarms(family, seed, "muon")
    assert not faults
    assert judged > 50


def qwen3_map():
    """Return a map of roles of Qwen3, with and without what its norms do."""
    roles = {"*embed_tokens*": "embedding", "lm_head*": "unembedding", "*layernorm*": "attention_gain",
             "model.norm*": "final_gain", "*gate_proj*": "mlp_gate", "*up_proj*": "mlp_in", "*down_proj*": "mlp_out",
             "*o_proj*": "output", "*v_proj*": "value", "*k_proj*": "key", "*q_proj*": "query"}  # fmt: skip
    return roles, roles | {"*q_norm*": "query_gain", "*k_norm*": "key_gain"}


def test_a_logit_factor_without_effect_is_refused_in_a_role_map():
    import torch

    torch.manual_seed(0)
    base, model = Shape(4, 3, 2), tiny.build("qwen3", key_dim=16, width=24)
    shape, p = Shape(16, 3, 2, stream=24), Parametrization(base=Shape(4, 3, 2, stream=24))
    assert base.width != shape.width
    blind, complete = qwen3_map()
    with pytest.raises(UsageError, match=r"no known effect in a weight.*QK-norm"):
        torch_groups(p, model, TUNED, blind | {"*q_norm*": "attention_gain", "*k_norm*": "attention_gain"}, shape)
    # The gain behind the norm carries the factor, by a role map as by the configuration.
    carried = {}
    for roles, known in ((complete, shape), (None, None)):
        initialize_model(p, model, TUNED, roles, known) if roles is None else None
        groups = torch_groups(p, model, TUNED, roles, known)
        rates = {name: group["lr"] for group in groups for name in group["names"]}
        carried[roles is None] = rates["model.layers.0.self_attn.q_norm.weight"] / TUNED.learning_rate
    assert carried == {False: 0.5, True: 0.5}


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_factors_of_latent_attention_follow_what_they_read(optimizer):
    def build(heads, width, query_rank, key_value_rank, key_dim=8):
        return tiny.build(
            "deepseek_v3", heads=heads, width=width, q_lora_rank=query_rank, kv_lora_rank=key_value_rank,
            qk_nope_head_dim=key_dim // 2, qk_rope_head_dim=key_dim // 2, v_head_dim=key_dim, first_k_dense_replace=2,
            attention_bias=True,
        )  # fmt: skip

    def rates(p, model):
        groups = torch_groups(p, model, replace(TUNED, learning_rate=1.0, muon=MuonHyperparameters(1.0)))
        return {name.split(".")[-2]: group["lr"] for group in groups for name in group["names"] if "weight" in name}

    base = read_model(build(4, 32, 8, 12)).architecture.shape
    assert (base.query_rank, base.key_value_rank) == (8, 12)
    p = Parametrization(base=base, optimizer=optimizer, muon=Muon(factor="sqrt(r/c)"))
    # Twice the heads and four times the width, three times the rank of queries, that of keys and values stays.
    found = rates(p, build(8, 128, 24, 12))
    names = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_a_layernorm")
    wanted = (1 / 4, 1 / 3, 1 / 4, 1, 1) if optimizer == "adam" else (1, 1, 1, 1, 1)
    assert [found[name] for name in names] == pytest.approx(wanted)
    # A larger N: the factor of the logits goes behind the norm; at exponent 1/2 the shared latent has no rate.
    assert rates(p, build(4, 32, 8, 12, 32))["q_b_proj"] == pytest.approx(1 / 2)
    with pytest.raises(UsageError, match="shared latent is not derived"):
        rates(replace(p, logit_exponent=0.5), build(4, 32, 8, 12, 16))
    assert rates(replace(p, logit_exponent=0.5), build(8, 64, 8, 12))["kv_b_proj"] == pytest.approx(1)
    with pytest.raises(UsageError, match="keep the ratio"):
        rates(replace(p, optimizer="sgd"), build(8, 64, 8, 12))
    assert rates(replace(p, optimizer="sgd"), build(8, 64, 16, 24))


def test_the_branch_factor_goes_into_the_norm_behind_the_branch():
    model = tiny.build("gemma2", layers=8)
    architecture = read_model(model).architecture
    assert architecture.carries["attention_post_gain"] == "branch"
    assert "output" not in architecture.carries
    p = Parametrization(base=Shape(8, 3, 2, hidden=40))
    initialize_model(p, model, TUNED)
    block = model.model.layers[0]
    assert float(block.post_attention_layernorm.weight.detach().mean()) == pytest.approx(0.25 - 1)  # 1 + w
    assert float(block.input_layernorm.weight.detach().mean()) == 0
    assert forward_multipliers(p, architecture.shape).branch == 0.25
