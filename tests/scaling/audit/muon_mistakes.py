"""Planted mistakes of Muon runs as data: each a model, its optimizers or groups, and what an audit says of it."""

from tests.scaling.torch_models import build

from manyheads.scaling import (
    BaseHyperparameters,
    Muon,
    MuonHyperparameters,
    Parametrization,
    initialize_model,
    torch_groups,
)
from manyheads.transformer import Shape

BASE = Shape(16, 2, 2)
WIDE = Shape(16, 8, 2)  # four times the heads
LONG = Shape(32, 2, 2)  # twice the key dimension
TUNED = BaseHyperparameters(3e-3, weight_decay=0.05, muon=MuonHyperparameters(0.02, weight_decay=0.01))


def parametrization(split="whole", factor="original"):
    return Parametrization(0.5, 1.0, optimizer="muon", base=BASE, muon=Muon(split, factor))


def setup(p, shape=WIDE, family="llama", **changes):
    """A fresh model and its right groups: those of Muon, those of AdamW."""
    model = build(family, shape, **changes)
    initialize_model(p, model, TUNED)
    groups = torch_groups(p, model, TUNED)
    return model, *([group for group in groups if group["algorithm"] == name] for name in ("muon", "adamw"))


def optimizers(p, muon, adamw):
    import torch

    return [torch.optim.Muon(muon, adjust_lr_fn=p.muon.factor), torch.optim.AdamW(adamw)]


def moved(muon, adamw, name):
    """Put a parameter from AdamW's groups into Muon's."""
    for group in adamw:
        for place, own in enumerate(group["names"]):
            if own == name:
                tensor = group["params"].pop(place)
                group["names"].pop(place)
                first = muon[0]
                return [*muon, first | {"params": [tensor], "names": [name]}], [g for g in adamw if g["params"]]
    raise AssertionError(name)


def by_head(p, split):
    """Groups that say how their Muon cuts matrices, with the base's rate for the matrices of attention."""
    model, muon, adamw = setup(p)
    splits = dict.fromkeys(("query", "key", "value"), "heads") | (
        {"output": "head-columns"} if split == "heads" else {}
    )
    rows = [
        group | ({"split": splits[role], "lr": 0.02, "weight_decay": 0.01} if (role := group["role"]) in splits else {})
        for group in muon
    ]
    return model, [*rows, *adamw]


def scaled(groups, factor, roles=None, key="lr"):
    return [group | ({key: group[key] * factor} if roles is None or group["role"] in roles else {}) for group in groups]


def changed(change, shape=WIDE, factor="original", **changes):
    """Right groups but for a change of Muon's."""
    p = parametrization(factor=factor)
    model, muon, adamw = setup(p, shape, **changes)
    return p, model, optimizers(p, change(muon), adamw)


def table_in_muon(name):
    p = parametrization()
    model, muon, adamw = setup(p)
    return p, model, optimizers(p, *moved(muon, adamw, name))


def gains_in_muon():
    p = parametrization()
    model, muon, adamw = setup(p)
    rows = [row | ({"algorithm": "muon"} if row["role"] in ("norm", "final_norm") else {}) for row in adamw]
    return p, model, [*muon, *rows]


def matrix_in_adamw():
    p = parametrization()
    model, muon, adamw = setup(p)
    rows = [row | ({"algorithm": "adamw", "eps": 1e-8} if row["role"] == "mlp_in" else {}) for row in muon]
    return p, model, [*rows, *adamw]


def forgotten(role):
    p = parametrization()
    model, muon, adamw = setup(p)
    return p, model, optimizers(p, [row for row in muon if row["role"] != role], adamw)


def doubled():
    import torch

    p = parametrization()
    model, muon, adamw = setup(p, tie_word_embeddings=True)
    muon.append(muon[0] | {"params": [model.lm_head.weight], "names": ["lm_head.weight"]})
    return p, model, [torch.optim.AdamW(adamw), torch.optim.Muon(muon)]


def fused_whole():
    import torch

    p = parametrization()
    model = build("gpt2", LONG)
    initialize_model(p, model, TUNED)
    matrices = [t for name, t in model.named_parameters() if t.dim() == 2 and ".h." in name]
    rest = [t for name, t in model.named_parameters() if not (t.dim() == 2 and ".h." in name)]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.01)
    return p, model, [muon, torch.optim.AdamW(rest, lr=3e-3, weight_decay=0.05)]


def thirds():
    p = parametrization()
    model, muon, adamw = setup(p, family="gpt_neox")
    return p, model, [*(row | ({"split": "thirds"} if "query" in row["role"] else {}) for row in muon), *adamw]


def wrong_axis():
    p = parametrization("heads-in")
    model, muon, adamw = setup(p)
    attention = ("query", "key", "value", "output")
    return p, model, [*(row | ({"num_heads": 8} if row["role"] in attention else {}) for row in muon), *adamw]


def columns():
    p = parametrization("heads")
    model, rows = by_head(p, "heads")
    return p, model, rows


def deep():
    """At depth exponent 1/2 the rate of Muon falls as L^-1/2: that of the base is kept."""
    p = Parametrization(0.5, 0.5, optimizer="muon", base=BASE)
    model, muon, adamw = setup(p, Shape(16, 2, 8))
    kept = ("output", "mlp_out")
    rows = [
        row | ({} if row["role"] in kept else {"lr": row["lr"] * 2, "weight_decay": row["weight_decay"] / 2})
        for row in muon
    ]
    return p, model, optimizers(p, rows, adamw)


def with_settings(**settings):
    import torch

    p = parametrization()
    model, muon, adamw = setup(p)
    return p, model, [torch.optim.Muon(muon, **settings), torch.optim.AdamW(adamw)]


def moonlight():
    return changed(lambda groups: scaled(groups, 2.0), factor="match_rms_adamw")


def adam_power():
    return changed(lambda groups: scaled(groups, 0.25))


def decay(factor):
    return lambda: changed(lambda groups: scaled(groups, factor, key="weight_decay"))


def one_rate():
    return changed(lambda groups: scaled(groups, 2**0.5, ("query", "key")), LONG)


ANOTHER = "match_rms_adamw"
RATE, DECAY = "learning_rate", "weight_decay"
MISTAKES = {  # mistake → quantity, what the one finding says, and how it is made
    "embedding in Muon": ("optimizer", "one-hot", lambda: table_in_muon("model.embed_tokens.weight")),
    "read-out in Muon": ("optimizer", "D^-1/2", lambda: table_in_muon("lm_head.weight")),
    "gains of norms in Muon": ("optimizer", "it needs AdamW", gains_in_muon),
    "matrices of the MLP in AdamW": ("optimizer", "was Muon's at the base", matrix_in_adamw),
    "tied table in both optimizers": (RATE, "stepped by two optimizers", doubled),
    "values in no optimizer": (RATE, "never trained", lambda: forgotten("value")),
    "fused QKV whole, N grown": ("block", "queries, keys and values in one polar factor", fused_whole),
    "QKV in thirds, rows by head": ("block", "a third mixes all three", thirds),
    "W_O by heads of rows": ("block", "its heads are columns", wrong_axis),
    "W_O by heads at the base's rate": (RATE, "it has the base's", columns),
    "Moonlight's factor, base's rate": (RATE, "it has the base's", moonlight),
    "AdamW's 1/D on Muon": (RATE, "all learning rates", adam_power),
    "weight decay lost": (DECAY, "all weight decays of Muon", decay(0.0)),
    "torch's default weight decay": (DECAY, "all weight decays of Muon", decay(10.0)),
    "queries and keys at the values' rate": (RATE, "it has the base's", one_rate),
    "rate not scaled with L": (RATE, "it has the base's", deep),
    "another adjust_lr_fn": ("shape_factor", "another shape factor", lambda: with_settings(adjust_lr_fn=ANOTHER)),
    "another momentum": ("momentum", "momentum is not the base's", lambda: with_settings(momentum=0.9)),
    "Nesterov off": ("nesterov", "nesterov is not the base's", lambda: with_settings(nesterov=False)),
    "other Newton-Schulz steps": ("ns_steps", "ns_steps is not the base's", lambda: with_settings(ns_steps=3)),
}
