"""Families of Hugging Face by configuration: works or refused by name, false alarms, and experts and sinks measured."""

from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.limits.torch.test_families import REFUSED, alarms
from tests.models import tiny

from manyheads.limits import BaseHyperparameters, Parametrization, initialize_model, torch_groups
from manyheads.limits.torch.model import read_model
from manyheads.models.families import FAMILIES, UNSUPPORTED
from manyheads.transformer import Shape

TUNED = BaseHyperparameters(learning_rate=3e-3, epsilon=1e-12)
MEASURED = {"gate": "router", "router": "router", "sinks": "sink", "gate_up_proj": "expert", "q_proj": "query"}
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


def moved(family: str, heads: int, seed: int, base: Shape, wrong: bool, steps: int) -> dict[str, float]:
    """Train a tiny model of experts; return the root mean square by which changed weights move what they compute."""
    import torch

    torch.manual_seed(seed)
    sizes = {"heads": heads, "key_value_heads": max(heads // 2, 1), "width": 8 * heads, "expert_hidden": 16 * heads}
    model = tiny.build(family, **sizes, hidden=16 * heads)
    p = Parametrization(base=base)
    initialize_model(p, model, TUNED, generator=torch.Generator().manual_seed(seed))
    groups = torch_groups(p, model, TUNED)
    for group in groups:
        group["lr"] = TUNED.learning_rate if wrong and group["role"] == "router" else group["lr"]
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


def slopes(family: str, heads: list[int], seeds: int, wrong: bool, steps: int) -> dict[str, float]:
    """Fit the power of H that the motion of every measured class follows."""
    base = read_model(tiny.build(family, heads=4, key_value_heads=2, width=32, expert_hidden=64)).architecture.shape
    rows = [[moved(family, each, seed, base, wrong, steps) for seed in range(seeds)] for each in heads]
    means = {role: [np.mean([run[role] for run in row]) for row in rows] for role in rows[0][0]}
    return {role: float(np.polyfit(np.log(heads), np.log(mean), 1)[0]) for role, mean in means.items()}


def experts(folder: Path, heads: list[int], seeds: int, steps: int) -> Measured:
    """Measure routers, experts and sinks over H, and a router at the base's rate beside them."""
    right = {(family, role): slope for family in ("mixtral", "gpt_oss")
             for role, slope in slopes(family, heads, seeds, False, steps).items()}  # fmt: skip
    wrong = slopes("mixtral", heads, seeds, True, steps)["router"]
    figure = ", ".join(f"{family} {role} {slope:.2f}" for (family, role), slope in right.items())
    passed = max(map(abs, right.values())) <= 0.25 and wrong >= 0.5
    extent = f"H = {', '.join(map(str, heads))}, {steps} steps of AdamW"
    return Measured(f"{figure}; a router at the base's rate {wrong:.2f}", extent, f"0-{seeds - 1}", passed)


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
)
