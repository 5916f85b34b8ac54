"""Adam-mini, NorMuon, Shampoo and SOAP, as short as their papers state them: which table their updates follow."""

from dataclasses import replace

import pytest

from manyheads.scaling import Muon, audit_model, preflight

pytestmark = pytest.mark.torch


def updates():
    """Return the update of a matrix by optimizer, from (gradient, state)."""
    import torch

    def adam(gradient, state):
        state["m"] = 0.1 * gradient + 0.9 * state.get("m", 0.0)
        state["v"] = 0.05 * gradient.square() + 0.95 * state.get("v", 0.0)
        state["t"] = state.get("t", 0) + 1
        return state["m"] / (1 - 0.9 ** state["t"]) / ((state["v"] / (1 - 0.95 ** state["t"])).sqrt() + 1e-12)

    def adam_mini(gradient, state):  # one second moment a row
        state["m"] = 0.1 * gradient + 0.9 * state.get("m", 0.0)
        state["v"] = 0.05 * gradient.square().mean(1, keepdim=True) + 0.95 * state.get("v", 0.0)
        state["t"] = state.get("t", 0) + 1
        return state["m"] / (1 - 0.9 ** state["t"]) / ((state["v"] / (1 - 0.95 ** state["t"])).sqrt() + 1e-12)

    def normuon(gradient, state, rms):  # orthogonalized, then divided by the size of every row
        state["m"] = 0.05 * gradient + 0.95 * state.get("m", 0.0)
        polar = torch.optim._muon._zeropower_via_newtonschulz(state["m"], (3.4445, -4.775, 2.0315), 5, 1e-7).float()
        state["v"] = 0.05 * polar.square().mean(1, keepdim=True) + 0.95 * state.get("v", 0.0)
        rows = polar / (state["v"].sqrt() + 1e-10)
        return rows / rows.norm() * (0.2 * rows.numel() ** 0.5 if rms else polar.norm())

    def shampoo(gradient, state):
        for side, square in (("left", gradient @ gradient.T), ("right", gradient.T @ gradient)):
            state[side] = state.get(side, 1e-6 * torch.eye(len(square))) + square
        left, right = (
            vectors @ torch.diag(values.clamp(1e-8) ** -0.25) @ vectors.T
            for values, vectors in map(torch.linalg.eigh, (state["left"], state["right"]))
        )
        return left @ gradient @ right

    def soap(gradient, state):  # Adam in the basis of Shampoo
        for side, square in (("left", gradient @ gradient.T), ("right", gradient.T @ gradient)):
            state[side] = 0.05 * square + 0.95 * state.get(side, 0.0)
        left, right = (torch.linalg.eigh(state[side])[1] for side in ("left", "right"))
        return left @ adam(left.T @ gradient @ right, state.setdefault("rotated", {})) @ right.T

    return {
        "adam-mini": adam_mini,
        "normuon, norm kept": lambda gradient, state: normuon(gradient, state, False),
        "normuon, RMS of 0.2": lambda gradient, state: normuon(gradient, state, True),
        "shampoo": shampoo,
        "soap": soap,
    }


def training(name, p):
    """Return `make` of the Llama-like script with the matrices of its blocks under an optimizer."""
    import torch
    from tests.scaling.preflight import scripts

    made, update = scripts.script("llama", p), updates()[name]

    class Own(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.sub_(group["lr"] * update(weight.grad, self.state[weight]))

    def make(shape, seed):
        model, optimizers, *more = made(shape, seed)
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        groups = [{"params": g["params"], "lr": g["lr"]} for each in optimizers for g in each.param_groups]
        blocks = {id(t) for name, t in model.named_parameters() if "layers" in name and t.dim() == 2}
        inside = [all(id(t) in blocks for t in group["params"]) for group in groups]
        parts = [[g for g, is_in in zip(groups, inside, strict=True) if is_in is each] for each in (True, False)]
        return model, [Own(parts[0], {}), torch.optim.AdamW(parts[1], weight_decay=0.0)], *more

    return make


@pytest.mark.parametrize(
    ("name", "factor", "outcome"),
    [
        ("adam-mini", "", "holds"),  # follows Adam's table
        ("normuon, norm kept", "normuon:preserve_norm", "holds"),
        ("shampoo", "shampoo", "holds"),
        ("normuon, RMS of 0.2", "match_rms_adamw", "refuted"),  # grows where gradients fill few directions
        ("soap", "", "refuted"),
    ],
)
def test_updates_of_the_blocks_follow_the_table_that_is_said(name, factor, outcome):
    from tests.scaling.preflight import scripts

    p = scripts.parametrization("muon" if factor else "adam")
    p = replace(p, muon=Muon(factor=factor)) if factor else p
    found = preflight(
        training(name, p), scripts.BASE, axes={"heads": (4, 16)}, parametrization=p, seeds=range(3), steps=4
    )
    matrices = {each.module.rpartition(".")[2]: each for each in found.growths if each.module.startswith("layers.*.w")}
    assert set(matrices) == {"wq", "wk", "wv", "wo", "w1", "w2", "w3"}
    slopes = {key: each.fit.exponent for key, each in matrices.items()}
    if outcome == "holds":
        assert not any(each.outcome == "refuted" for each in matrices.values()), slopes
        assert max(map(abs, slopes.values())) < 0.25, slopes
    else:
        assert any(each.outcome == "refuted" for each in matrices.values()), slopes
    if name == "soap":
        assert -0.9 < sum(slopes.values()) / 7 < -0.3  # between Adam's table, 0, and Muon's, -1


def test_an_adam_mini_is_audited_as_adam():
    import torch
    from tests.scaling.preflight import scripts

    class Adam_mini(torch.optim.Optimizer):  # the name of its package
        def step(self):
            raise NotImplementedError

    p = scripts.parametrization()
    model, optimizer, *_ = scripts.script("llama", p)(scripts.BASE, 0)
    kept = [{key: group[key] for key in ("params", "lr", "weight_decay", "eps")} for group in optimizer.param_groups]
    given = (scripts.TUNED, scripts.LLAMA, scripts.BASE)
    assert audit_model(p, model, Adam_mini(kept, {}), *given).passed
    kept[0]["lr"] *= 2
    assert not audit_model(p, model, Adam_mini(kept, {}), *given).passed
