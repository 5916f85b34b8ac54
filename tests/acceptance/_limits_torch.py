"""PyTorch adapters: planted mistakes and false alarms of the audit, folding, and the groups of the package mup."""

import itertools
import math
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.scaling.torch.test_folding import folded_curves
from tests.scaling.torch.test_groups import distance_from_mup
from tests.scaling.torch_models import BASE, FAMILIES, build, grown

from manyheads.scaling import BaseHyperparameters, Parametrization, audit_model, initialize_model, torch_groups
from manyheads.transformer import Shape

TUNED = BaseHyperparameters(learning_rate=1e-3, epsilon=1e-8, weight_decay=0.1)


def right_model(p, family, shape, seed):
    """Return a model of a family that was initialized, and its groups."""
    import torch

    model = build(family, shape)
    initialize_model(p, model, TUNED, generator=torch.Generator().manual_seed(seed))
    return model, torch_groups(p, model, TUNED)


def false_alarms(folder: Path, families: list[str], seeds: int) -> Measured:
    """Audit right groups of every family at every shape it can take, for both optimizers."""
    import torch

    alarms, numbers, models = [], 0, 0
    for family in families:
        for parameter, shape in enumerate(grown(family)):
            for optimizer, kind in (("adam", torch.optim.AdamW), ("sgd", torch.optim.SGD)):
                p = Parametrization(base=BASE, optimizer=optimizer)
                for seed in range(seeds):
                    model, groups = right_model(p, family, shape, 100 * seed + parameter)
                    audit = audit_model(p, model, kind(groups, lr=1.0), TUNED)
                    alarms += [(family, shape, each) for each in audit.faults]
                    numbers, models = numbers + len(audit.findings), models + 1
    extent = f"{models} models of {len(families)} families, {numbers:,} numbers judged"
    return Measured(f"{len(alarms)} false alarms", extent, f"0-{seeds - 1}", not alarms)


def forget(model, groups, ratio):
    """Leave a group at the base's numbers."""
    group = next(group for group in groups if group["role"] == "mlp_in")
    group.update(lr=TUNED.learning_rate, eps=TUNED.epsilon, weight_decay=TUNED.weight_decay)
    return group["names"], {"learning_rate": ratio, "epsilon": ratio, "weight_decay": 1 / ratio}


def decay_twice(model, groups, ratio):
    """Scale the weight decay of a group twice."""
    group = next(group for group in groups if group["role"] == "mlp_in")
    group["weight_decay"] *= ratio
    return group["names"], {"weight_decay": ratio}


def leave_epsilon(model, groups, ratio):
    """Scale everything but epsilon."""
    group = next(group for group in groups if group["role"] == "norm")
    group["eps"] = TUNED.epsilon
    return group["names"], {"epsilon": ratio}


def draw_wide(model, groups, ratio):
    """Leave one weight at the base's std."""
    import torch

    name = next(name for group in groups if group["role"] == "mlp_in" for name in group["names"])
    with torch.no_grad():
        dict(model.named_parameters())[name].mul_(ratio**0.5)
    return [name], {"initial": ratio**0.5}


def tie_twice(model, groups, ratio):
    """Scale a tied embedding as embedding and as unembedding."""
    table = model.get_input_embeddings().weight
    home = next(group for group in groups if any(tensor is table for tensor in group["params"]))
    parameter = next(number for number, tensor in enumerate(home["params"]) if tensor is table)
    alone = {**home, "params": [home["params"].pop(parameter)], "names": [home["names"].pop(parameter)]}
    groups.append({**alone, "lr": alone["lr"] / ratio})
    return alone["names"], {"learning_rate": 1 / ratio}


MISTAKES = {"forget": forget, "decay": decay_twice, "epsilon": leave_epsilon, "std": draw_wide, "tied": tie_twice}
WORDS = {"forget": "the base's", "decay": "twice", "epsilon": "not rescaled", "std": "the base's", "tied": "tied"}
TIED = ("gpt2", "opt", "qwen2", "bert")


def planted(folder: Path, families: list[str], seeds: int) -> Measured:
    """Plant one mistake at a time; it is found if it alone is named, with its factor and what it is."""
    found, missed = 0, []
    wider = [(f, s) for f in families for s in grown(f) if s.width > BASE.width]
    cases = [(*each, seed) for each in wider for seed in range(seeds)]
    for (family, shape, seed), mistake in itertools.product(cases, MISTAKES):
        if mistake == "tied" and family not in TIED:
            continue
        p = Parametrization(base=BASE)
        model, groups = right_model(p, family, shape, seed)
        names, factors = MISTAKES[mistake](model, groups, shape.width / BASE.width)
        faults = audit_model(p, model, groups, TUNED).faults
        named = {(each.name, each.quantity) for each in faults} == set(itertools.product(names, factors))
        # A std is known to its sampling error, five sigma of which are 0.11 with the 1,000 or more entries here.
        close = {True: 0.12, False: 1e-6}[mistake == "std"]
        right = all(abs(each.factor / factors.get(each.quantity, math.nan) - 1) < close for each in faults)
        if named and right and all(WORDS[mistake] in each.meaning for each in faults):
            found += 1
        else:
            missed.append((family, mistake))
    total = found + len(missed)
    extent = f"{', '.join(MISTAKES)}, one at a time in {len(wider)} models; missed: {missed or 'none'}"
    return Measured(f"{found} of {total} found, named and with their factor", extent, f"0-{seeds - 1}", not missed)


def folding(folder: Path, seeds: int) -> Measured:
    """Compare loss curves of folded torch groups with those of the house's transformer."""
    cases = [("adam", 1.0, 1.0), ("adam", 0.5, 0.75), ("sgd", 1.0, 0.5), ("sgd", 0.5, 1.0)]
    worst, least = 0.0, math.inf
    for case, seed in itertools.product(cases, range(seeds)):
        expected, folded, without = folded_curves(*case, seed)
        worst = max(worst, *(abs(one - other) for one, other in zip(folded, expected, strict=True)))
        least = min(least, max(abs(one - other) for one, other in zip(without, expected, strict=True)))
    extent = f"worst of {len(cases)} cases, 6 steps each; without groups at least {least:.1e}"
    return Measured(f"{worst:.1e}", extent, f"0-{seeds - 1}", worst <= 1e-6)


def mup_groups(folder: Path, shapes: list[list[int]]) -> Measured:
    """Compare width-only groups with those of the package mup, parameter by parameter."""
    pairs = itertools.product(("adam", "sgd"), shapes)
    worst = max(distance_from_mup(optimizer, Shape(*shape)) for optimizer, shape in pairs)
    return Measured(
        f"{worst:.1e}", f"largest relative difference, {len(shapes)} shapes, Adam and SGD", "", worst < 1e-12
    )


def factors(folder: Path, faults: int, clean: int, seed: int) -> Measured:
    """Plant one factor that follows N, H or L anywhere in the forward pass of a GPT drawn at random."""
    from tests.scaling.planted_factors import PLACES, draw_clean, draw_fault, judge

    rng = np.random.default_rng(seed)
    drawn = [draw_fault(rng) for _ in range(faults)]
    found = [judge(variant, shape, {place: factor})[0] for variant, shape, place, factor, _ in drawn]
    missed = [f"{each[4]} {PLACES[each[2]]}" for each, outcome in zip(drawn, found, strict=True) if outcome == "passed"]
    variants = [draw_clean(rng) for _ in range(clean)]
    right = [judge(*each)[0] for each in variants]
    alarms, silent = right.count("refused") + right.count("wrong"), right.count("passed")
    constants = sum(bool(variant.constants) for variant, _ in variants)
    figure = f"{found.count('refused')} of {faults} refused, {found.count('noted')} more named; {alarms} false alarms"
    extent = f"{len(PLACES)} places; missed: {missed or 'none'}; of {clean} right models {silent} pass without a note, "
    extent += f"{constants} have constants, which are named"
    return Measured(figure, extent, f"{seed}", not (missed or alarms or silent < clean - constants))


FIGURES = (
    Figure(
        "torch-right-groups",
        "audit raises no alarm on right groups of every supported family",
        "no false alarm",
        false_alarms,
        {"families": list(FAMILIES), "seeds": 8},
    ),
    Figure(
        "torch-planted-mistakes",
        "audit finds a forgotten group, weight decay scaled twice, epsilon left, a wrong std, a tie treated twice",
        "every one named, with its factor, and nothing else",
        planted,
        {"families": list(FAMILIES), "seeds": 8},
    ),
    Figure(
        "torch-planted-factors",
        "audit finds factors that follow a size between any two weights of a plain PyTorch GPT, and right ones pass",
        "every fault refused or named as not judged, no right model refused, notes on constants alone",
        factors,
        {"faults": 400, "clean": 200, "seed": 7},
    ),
    Figure(
        "torch-folding",
        "factors folded into the weights of a plain torch module train as the house's transformer",
        "loss curves equal to 1e-6",
        folding,
        {"seeds": 4},
    ),
    Figure(
        "torch-mup",
        "width-only groups are those of the package mup (pip install mup)",
        "equal to rounding, 1e-12",
        mup_groups,
        {"shapes": [[4, 6, 2], [16, 2, 3], [12, 10, 2], [4, 2, 5]]},
    ),
)
