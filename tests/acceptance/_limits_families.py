"""Families of Hugging Face by configuration: works or refused by name, false alarms, and experts and sinks measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.limits.torch.test_families import REFUSED, alarms
from tests.models import tiny

from manyheads.limits import BaseHyperparameters, Parametrization, initialize_model, scale_logits, torch_groups
from manyheads.limits.torch.model import read_model
from manyheads.models.families import FAMILIES, UNSUPPORTED

TUNED = BaseHyperparameters(learning_rate=3e-3, epsilon=1e-12)
MEASURED = {
    "gate": "router", "router": "router", "sinks": "sink", "gate_up_proj": "expert", "q_proj": "query",
    "q_a_proj": "query_down", "q_b_proj": "query_up", "kv_a_proj_with_mqa": "key_value_down",
    "kv_b_proj": "key_value_up",
}  # fmt: skip
"""Last word of a name → what it is called here."""


def families(folder: Path, seeds: int) -> Measured:
    """Train every family that is not refused at two shapes and audit it before and after."""
    trained = [family for family in FAMILIES if family not in REFUSED]
    faults, judged = [], 0
    for family in trained:
        for seed in range(seeds):
            found, number = alarms(family, seed)
            faults, judged = faults + found, judged + number
    print(*faults[:10], sep="\n")
    extent = (
        f"{len(trained)} families at two shapes, {judged:,} numbers judged; {len(REFUSED) + len(UNSUPPORTED)} more are "
        "refused by name with the reason"
    )
    return Measured(f"{len(faults)} false alarms in {len(trained)} families", extent, f"0-{seeds - 1}", not faults)


def moved(model: Any, p: Parametrization, seed: int, steps: int, wrong: tuple[str, ...] = ()) -> dict[str, float]:
    """Train a tiny model, at the base's rates in the wrong roles; return the root mean square by which changed weights
    move what they compute."""
    import torch

    initialize_model(p, model, TUNED, generator=torch.Generator().manual_seed(seed))
    groups = torch_groups(p, model, TUNED)
    for group in groups:
        group["lr"] = TUNED.learning_rate if group["role"] in wrong else group["lr"]
    optimizer, start = torch.optim.AdamW(groups), {name: t.detach().clone() for name, t in model.named_parameters()}
    ids = torch.randint(2, 29, (8, 13), generator=torch.Generator().manual_seed(seed))
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found: dict[str, list[float]] = {}
    inputs = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, given, name=name: inputs.update({name: given}))
    with torch.no_grad():
        model(input_ids=ids)
    for name, tensor in model.named_parameters():
        *path, last = name.removesuffix(".weight").split(".")
        if last not in MEASURED:
            continue
        change = tensor.detach() - start[name]
        if last == "gate_up_proj":  # aligned inputs of size one
            motion = change.square().mean().sqrt() * model.config.hidden_size
        elif tensor.dim() == 1:
            motion = change.square().mean().sqrt()
        else:
            x = inputs[".".join([*path, last])][0].detach()
            motion = (x.reshape(-1, x.shape[-1]) @ change.T).square().mean().sqrt()
        found.setdefault(MEASURED[last], []).append(float(motion))
    return {role: float(np.mean(values)) for role, values in found.items()}


def slope(sizes: list[int], rows: list[list[dict[str, float]]]) -> dict[str, float]:
    """Fit the power of a size that the mean over seeds of every quantity follows."""
    means = {role: [np.mean([run[role] for run in row]) for row in rows] for role in rows[0][0]}
    return {role: float(np.polyfit(np.log(sizes), np.log(mean), 1)[0]) for role, mean in means.items()}


def over_heads(family: str, heads: list[int], seeds: int, wrong: tuple[str, ...], steps: int) -> dict[str, float]:
    """Fit the power of H that the motion of every measured class of a family with experts follows."""
    import torch

    def build(number: int) -> Any:
        return tiny.build(family, heads=number, key_value_heads=max(number // 2, 1), width=8 * number,
                          expert_hidden=16 * number, hidden=16 * number)  # fmt: skip

    p = Parametrization(base=read_model(build(4)).architecture.shape)
    rows = []
    for number in heads:
        rows.append([])
        for seed in range(seeds):
            torch.manual_seed(seed)
            rows[-1].append(moved(build(number), p, seed, steps, wrong))
    return slope(heads, rows)


def experts(folder: Path, heads: list[int], seeds: int, steps: int) -> Measured:
    """Measure routers, experts and sinks over H, and a router at the base's rate beside them."""
    right = {(family, role): slope for family in ("mixtral", "gpt_oss")
             for role, slope in over_heads(family, heads, seeds, (), steps).items()}  # fmt: skip
    wrong = over_heads("mixtral", heads, seeds, ("router",), steps)["router"]
    figure = ", ".join(f"{family} {role} {slope:.2f}" for (family, role), slope in right.items())
    passed = max(map(abs, right.values())) <= 0.25 and wrong >= 0.5
    extent = f"H = {', '.join(map(str, heads))}, {steps} steps of AdamW"
    return Measured(f"{figure}; a router at the base's rate {wrong:.2f}", extent, f"0-{seeds - 1}", passed)


def latent_model(heads: int = 4, key_dim: int = 16, width: int = 64, rank: int = 32, layers: int = 2) -> Any:
    """Return a tiny model with latent attention (DeepSeek-V3) and no experts."""
    ranks = {"q_lora_rank": rank, "kv_lora_rank": rank}
    dims = {"qk_nope_head_dim": key_dim // 2, "qk_rope_head_dim": key_dim // 2, "v_head_dim": key_dim}
    sizes = {"heads": heads, "width": width, "hidden": 2 * width, "layers": layers}
    return tiny.build("deepseek_v3", first_k_dense_replace=layers, **sizes, **ranks, **dims)


LATENT_AXES: dict[str, Callable[[int], dict[str, int]]] = {
    "H, rank fixed": lambda factor: {"heads": 4 * factor, "width": 64 * factor},
    "H, rank as D": lambda factor: {"heads": 4 * factor, "width": 64 * factor, "rank": 32 * factor},
    "N, rank fixed": lambda factor: {"key_dim": 16 * factor, "width": 64 * factor},
    "N, rank as D": lambda factor: {"key_dim": 16 * factor, "width": 64 * factor, "rank": 32 * factor},
    "D alone": lambda factor: {"width": 64 * factor},
    "rank alone": lambda factor: {"rank": 32 * factor},
    "L": lambda factor: {"layers": 2 * factor},
}
"""Axis → sizes at a multiple of the base."""


def latent_slopes(axis: str, factors: list[int], seeds: int, wrong: tuple[str, ...], steps: int) -> dict[str, float]:
    """Fit the powers of one axis that the low-rank factors of latent attention follow."""
    p, rows = Parametrization(base=read_model(latent_model()).architecture.shape), []
    for factor in factors:
        model = latent_model(**LATENT_AXES[axis](factor))
        scale_logits(model, p)
        rows.append([moved(model, p, seed, steps, wrong) for seed in range(seeds)])
    return slope(factors, rows)


def latent(folder: Path, factors: list[int], seeds: int, steps: int) -> Measured:
    """Measure the low-rank factors of latent attention along every axis, and at the base's rates over H."""
    right = {axis: latent_slopes(axis, factors, seeds, (), steps) for axis in LATENT_AXES}
    down, up = ("query_down", "key_value_down"), ("query_up", "key_value_up")
    wrong = latent_slopes("H, rank as D", factors, seeds, (*down, *up), steps)
    worst = max(abs(each) for found in right.values() for each in found.values())
    figure = "<br>".join(
        f"{axis}: " + ", ".join(f"{role} {each:.2f}" for role, each in found.items()) for axis, found in right.items()
    )
    said = ", ".join(f"{role} {wrong[role]:.2f}" for role in (*down, *up))
    extent = f"sizes times {', '.join(map(str, factors))}, {steps} steps of AdamW, exponent 1; H, base's rates: {said}"
    return Measured(
        figure, extent, f"0-{seeds - 1}", worst <= 0.25 and min(wrong[role] for role in (*down, *up)) >= 0.5
    )


FIGURES = (
    Figure(
        "families",
        "families of transformers take their roles from the configuration, and right groups raise no alarm",
        "60 families known or refused, at least 30 trained, 0 false alarms",
        families,
        {"seeds": 1},
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
)
