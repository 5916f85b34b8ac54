"""Families of Hugging Face by configuration: works or refused by name, false alarms, and experts and sinks measured."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._limits_gpt import muon
from tests.models import tiny
from tests.scaling.torch.test_families import MUON, REFUSED, alarms

from manyheads.models.families import FAMILIES, UNSUPPORTED
from manyheads.models.torch.model import read_model
from manyheads.scaling import (
    BaseHyperparameters,
    MuonHyperparameters,
    Parametrization,
    initialize_model,
    scale_logits,
    torch_groups,
)

TUNED = BaseHyperparameters(learning_rate=3e-3, epsilon=1e-12, muon=MuonHyperparameters(0.01, weight_decay=0.0))
EXPERTS = {"gate": "router", "router": "router", "sinks": "sink", "gate_up_proj": "expert", "q_proj": "query"}
"""Last word of a name → what it is called here."""
FACTORS = {"q_a_proj": "query_down", "q_b_proj": "query_up", "kv_a_proj_with_mqa": "key_value_down",
           "kv_b_proj": "key_value_up"}  # fmt: skip
BLOCK = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output", "gate_proj": "mlp_gate",
         "down_proj": "mlp_out", "q_norm": "query_gain"}  # fmt: skip
Build = Callable[[float], Any]
Rates = Callable[[str, float], float]  # role, its learning rate by the table -> the one that is taken


def at_base(*roles: str) -> Rates:
    """Take the base's learning rate in some roles."""
    return lambda role, rate: TUNED.learning_rate if role in roles else rate


def only(*roles: str) -> Rates:
    """Train some roles and freeze the rest."""
    return lambda role, rate: rate if role in roles else 0.0


def families(folder: Path, seeds: int, optimizer: str = "adam") -> Measured:
    """Train every family that is not refused at two shapes and audit it before and after; under Muon some."""
    trained = [family for family in FAMILIES if family not in REFUSED] if optimizer == "adam" else MUON
    faults, judged = [], 0
    for family in trained:
        for seed in range(seeds):
            found, number = alarms(family, seed, optimizer)
            faults, judged = faults + found, judged + number
    print(*faults[:10], sep="\n")
    extent = (
        f"{len(trained)} families at two shapes, {judged:,} numbers judged; {len(REFUSED) + len(UNSUPPORTED)} more are "
        "refused by name with the reason"
    )
    return Measured(f"{len(faults)} false alarms in {len(trained)} families", extent, f"0-{seeds - 1}", not faults)


def moved(
    model: Any, p: Parametrization, measured: Mapping[str, str], seed: int, steps: int, rates: Rates
) -> dict[str, float]:
    """Train a tiny model, by other learning rates in some roles; return the root mean square by which changed weights
    move what they compute."""
    import torch

    initialize_model(p, model, TUNED, generator=torch.Generator().manual_seed(seed))
    groups = torch_groups(p, model, TUNED)
    for group in groups:
        group["lr"] = rates(group["role"], group["lr"])
    optimizers, start = stepping(groups), {name: t.detach().clone() for name, t in model.named_parameters()}
    ids = torch.randint(2, 29, (8, 13), generator=torch.Generator().manual_seed(seed))
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
    found: dict[str, list[float]] = {}
    inputs = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, given, name=name: inputs.update({name: given}))
    with torch.no_grad():
        model(input_ids=ids)
    for name, tensor in model.named_parameters():
        *path, last = name.removesuffix(".weight").split(".")
        if last not in measured:
            continue
        change = tensor.detach() - start[name]
        if last == "gate_up_proj":  # aligned inputs of size one
            motion = change.square().mean().sqrt() * model.config.hidden_size
        elif tensor.dim() == 1:
            motion = change.square().mean().sqrt()
        else:
            x = inputs[".".join([*path, last])][0].detach()
            motion = (x.reshape(-1, x.shape[-1]) @ change.T).square().mean().sqrt()
        found.setdefault(measured[last], []).append(float(motion))
    return {role: float(np.mean(values)) for role, values in found.items()}


def stepping(groups: list[dict[str, Any]]) -> list[Any]:
    """Return AdamW, and Muon beside it for the groups that are its own."""
    import torch

    matrices = [group for group in groups if group.get("algorithm") == "muon"]
    adamw = torch.optim.AdamW([group for group in groups if group.get("algorithm") != "muon"])
    return [adamw, *([muon(matrices)] if matrices else [])]


def slopes(
    build: Build,
    factors: list[float],
    measured: Mapping[str, str],
    seeds: int,
    steps: int,
    rates: Rates = lambda role, rate: rate,
    optimizer: str = "adam",
) -> dict[str, float]:
    """Fit the power of the size that the motion of every measured class follows; the base is the model at one."""
    p, rows = Parametrization(optimizer=optimizer, base=read_model(build(1)).architecture.shape), []  # type: ignore[arg-type]
    for factor in factors:
        model = build(factor)
        scale_logits(model, p)
        rows.append([moved(model, p, measured, seed, steps, rates) for seed in range(seeds)])
    means = {role: [np.mean([run[role] for run in row]) for row in rows] for role in rows[0][0]}
    return {role: float(np.polyfit(np.log(factors), np.log(mean), 1)[0]) for role, mean in means.items()}


def shown(found: Mapping[str, Mapping[str, float]]) -> tuple[str, float]:
    """Return slopes by axis for people, and the largest."""
    lines = [f"{axis}: " + ", ".join(f"{role} {each:.2f}" for role, each in row.items()) for axis, row in found.items()]
    return "<br>".join(lines), max(abs(each) for row in found.values() for each in row.values())


def experts(folder: Path, heads: list[int], seeds: int, steps: int) -> Measured:
    """Measure routers, experts and sinks over H, and a router at the base's rate beside them."""

    def build(family: str) -> Build:
        def sized(factor: float) -> Any:
            n = round(4 * factor)
            return tiny.build(family, heads=n, key_value_heads=max(n // 2, 1), width=8 * n, expert_hidden=16 * n,
                              hidden=16 * n)  # fmt: skip

        return sized

    factors = [each / 4 for each in heads]
    right = {family: slopes(build(family), factors, EXPERTS, seeds, steps) for family in ("mixtral", "gpt_oss")}
    wrong = slopes(build("mixtral"), factors, EXPERTS, seeds, steps, at_base("router"))["router"]
    figure, worst = shown(right)
    extent = f"H = {', '.join(map(str, heads))}, {steps} steps of AdamW; a router at the base's rate {wrong:.2f}"
    return Measured(figure, extent, f"0-{seeds - 1}", worst <= 0.25 and wrong >= 0.5)


def latent_model(heads: float = 4, key_dim: float = 16, width: float = 64, rank: float = 32, layers: float = 2) -> Any:
    """Return a tiny model with latent attention (DeepSeek-V3) and no experts."""
    heads, key_dim, width, rank, layers = map(round, (heads, key_dim, width, rank, layers))
    ranks = {"q_lora_rank": rank, "kv_lora_rank": rank}
    dims = {"qk_nope_head_dim": key_dim // 2, "qk_rope_head_dim": key_dim // 2, "v_head_dim": key_dim}
    sizes = {"heads": heads, "width": width, "hidden": 2 * width, "layers": layers}
    return tiny.build("deepseek_v3", first_k_dense_replace=layers, **sizes, **ranks, **dims)


LATENT_AXES: dict[str, Build] = {
    "H, rank fixed": lambda factor: latent_model(heads=4 * factor, width=64 * factor),
    "H, rank as D": lambda factor: latent_model(heads=4 * factor, width=64 * factor, rank=32 * factor),
    "N, rank fixed": lambda factor: latent_model(key_dim=16 * factor, width=64 * factor),
    "N, rank as D": lambda factor: latent_model(key_dim=16 * factor, width=64 * factor, rank=32 * factor),
    "D alone": lambda factor: latent_model(width=64 * factor),
    "rank alone": lambda factor: latent_model(rank=32 * factor),
    "L": lambda factor: latent_model(layers=2 * factor),
}
"""Axis → model at a multiple of the base's size."""


def latent(folder: Path, factors: list[float], seeds: int, steps: int) -> Measured:
    """Measure the low-rank factors of latent attention along every axis, and at the base's rates over H."""
    right = {axis: slopes(build, factors, FACTORS, seeds, steps) for axis, build in LATENT_AXES.items()}
    wrong = slopes(LATENT_AXES["H, rank as D"], factors, FACTORS, seeds, steps, at_base(*FACTORS.values()))
    figure, worst = shown(right)
    said = ", ".join(f"{role} {each:.2f}" for role, each in wrong.items())
    extent = f"sizes times {factors}, {steps} steps of AdamW, exponent 1; over H at the base's rates: {said}"
    return Measured(figure, extent, f"0-{seeds - 1}", worst <= 0.25 and min(wrong.values()) >= 0.5)


def qwen(heads: float = 4, groups: float = 2, key_dim: float = 8, width: float = 32, hidden: float = 64) -> Any:
    """Return a tiny model with grouped queries, norms behind queries and keys, and a gated MLP (Qwen3)."""
    heads, groups, key_dim, width, hidden = map(round, (heads, groups, key_dim, width, hidden))
    return tiny.build("qwen3", heads=heads, key_value_heads=groups, key_dim=key_dim, width=width, hidden=hidden)


BLOCK_AXES: dict[str, Build] = {
    "H": lambda factor: qwen(4 * factor, 2 * factor, width=32 * factor, hidden=64 * factor),
    "N": lambda factor: qwen(key_dim=8 * factor, width=32 * factor, hidden=64 * factor),
    "H over K": lambda factor: qwen(16, 16 / factor, width=64),
    "D alone": lambda factor: qwen(width=32 * factor),
    "F alone": lambda factor: qwen(hidden=64 * factor),
}


def blocks(folder: Path, factors: list[float], seeds: int, steps: int, optimizer: str = "adam") -> Measured:
    """Measure a block with grouped queries, norms behind queries and keys and a gated MLP along every axis."""
    found = {
        axis: slopes(build, factors, BLOCK, seeds, steps, optimizer=optimizer) for axis, build in BLOCK_AXES.items()
    }
    figure, worst = shown(found)
    rule = "AdamW" if optimizer == "adam" else "Muon beside AdamW"
    extent = f"Qwen3, sizes times {factors}, {steps} steps of {rule}, exponent 1"
    return Measured(figure, extent, f"0-{seeds - 1}", worst <= 0.25)


def wide_mlp(folder: Path, factors: list[float], seeds: int, steps: int) -> Measured:
    """Measure the output matrix of a gated MLP over F alone: trained by itself, and beside the gate and the input."""
    found = {
        name: slopes(BLOCK_AXES["F alone"], factors, {"down_proj": "mlp_out"}, seeds, steps, rates)["mlp_out"]
        for name, rates in (("alone", only("mlp_out")), ("with all others", at_base()))
    }
    figure = ", ".join(f"{name} {slope:.2f}" for name, slope in found.items())
    extent = f"Qwen3, F times {factors}, {steps} steps of AdamW"
    return Measured(figure, extent, f"0-{seeds - 1}", abs(found["alone"]) <= 0.05)


FIGURES = (
    Figure(
        "families",
        "families of transformers take their roles from the configuration, and right groups raise no alarm",
        "60 families known or refused, at least 30 trained, 0 false alarms",
        families,
        {"seeds": 1},
    ),
    Figure(
        "families-muon",
        "the same under Muon beside AdamW, in families whose matrices have two axes",
        "at least 12 trained, 0 false alarms",
        families,
        {"seeds": 1, "optimizer": "muon"},
    ),
    Figure(
        "experts",
        "routers, experts and sinks move what they compute by as much at every H",
        "|slope| <= 0.25; of a router at the base's rate >= 0.5",
        experts,
        {"heads": [2, 4, 8, 16], "seeds": 3, "steps": 10},
    ),
    Figure(
        "latent",
        "the low-rank factors of latent attention (MLA) move what they compute alike along H, N, D, L and the rank",
        "|slope| <= 0.25; at the base's rates >= 0.5 over H",
        latent,
        {"factors": [1, 2, 4, 8], "seeds": 3, "steps": 10},
    ),
    Figure(
        "blocks",
        "grouped queries, norms behind queries and keys, gated MLP: weights move what they compute alike along every "
        "axis, the number of query heads for each key head and the width of the MLP included",
        "|slope| <= 0.25",
        blocks,
        {"factors": [1, 2, 4, 8], "seeds": 3, "steps": 10},
    ),
    Figure(
        "blocks-muon",
        "the same under Muon beside AdamW",
        "|slope| <= 0.25",
        blocks,
        {"factors": [1, 2, 4, 8], "seeds": 3, "steps": 10, "optimizer": "muon"},
    ),
    Figure(
        "blocks-wide-mlp",
        "output matrix of a gated MLP over F alone: its own update is flat where it trains by itself",
        "|slope| <= 0.05 by itself; beside all others it is shown",
        wide_mlp,
        {"factors": [8, 16, 32, 64], "seeds": 4, "steps": 10},
    ),
)
