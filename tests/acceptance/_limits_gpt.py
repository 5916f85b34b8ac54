"""Learning-rate transfer of a plain PyTorch GPT on text: Muon's table beside mup and usual practice, in one run."""

from pathlib import Path
from typing import Any

import numpy as np
from tests.acceptance._lane import Figure, Measured

from manyheads.data.characters import read_characters
from manyheads.scaling import (
    BaseHyperparameters,
    MuonHyperparameters,
    Parametrization,
    initialize_model,
    torch_groups,
    transfer_check,
)
from manyheads.scaling.axes import LETTERS
from manyheads.scaling.checks.transfer_check import ALLOWED_DECADES, LAST
from manyheads.transformer import Shape

WIKITEXT = "../shared/data/wikitext-2/valid.txt"
BASE = Shape(8, 4, 2)
SIZES = {"key_dim": (4, 8, 32), "heads": (2, 4, 16), "depth": (2, 4, 16)}
BATCH, LENGTH, WARM_UP = 8, 32, 5
MUON_OVER_ADAMW = 5.0  # of the learning rates at the base; both are swept together
ARMS = {
    "Muon, table": Parametrization(optimizer="muon", base=BASE),
    "Muon, one rate": Parametrization.standard(BASE, "muon"),
    "mup, AdamW": Parametrization.mup(BASE),
    "AdamW, one rate": Parametrization.standard(BASE),
}
STDS = dict.fromkeys(("query", "key", "value", "output", "mlp_in", "unembedding"), BASE.width**-0.5)
STDS |= {"mlp_out": (2 * BASE.width) ** -0.5, "embedding": 1.0, "positional": 0.3}
ROLES = {"wte.*": "embedding", "wpe.*": "positional", "*.q.*": "query", "*.k.*": "key", "*.v.*": "value",
         "*.o.*": "output", "*.fc.*": "mlp_in", "*.proj.*": "mlp_out", "*.ln_1.*": "attention_gain",
         "*.ln_2.*": "mlp_gain", "ln_f.*": "final_gain", "head.*": "unembedding"}  # fmt: skip


def build(shape: Shape, vocabulary: int) -> Any:
    """Return a GPT as people write it: pre-norm, GELU, learned positions, logits over the root of N."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self, d: int) -> None:
            super().__init__()
            self.ln_1, self.ln_2 = nn.LayerNorm(d, bias=False), nn.LayerNorm(d, bias=False)
            self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
            self.fc, self.proj = nn.Linear(d, 2 * d, bias=False), nn.Linear(2 * d, d, bias=False)

        def forward(self, x: Any) -> Any:
            z = self.ln_1(x)
            q, k, v = (each(z).unflatten(-1, (shape.heads, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(mixed.transpose(1, 2).flatten(2))
            return x + self.proj(functional.gelu(self.fc(self.ln_2(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            d = shape.width
            self.wte, self.wpe = nn.Embedding(vocabulary, d), nn.Embedding(LENGTH, d)
            self.h = nn.Sequential(*(Block(d) for _ in range(shape.depth)))
            self.ln_f, self.head = nn.LayerNorm(d, bias=False), nn.Linear(d, vocabulary, bias=False)

        def forward(self, tokens: Any) -> Any:
            return self.head(self.ln_f(self.h(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))))

    return GPT()


def muon(groups: list[dict[str, Any]]) -> Any:
    """Return Muon as published, with the shape factor of Keller Jordan: torch's iterates in bfloat16, slow on CPUs."""
    import torch

    class Muon(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for weight in group["params"]:
                    buffer = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                    buffer.lerp_(weight.grad, 0.05)
                    x = weight.grad.lerp(buffer, 0.95)
                    x = x / (x.norm() + 1e-7)
                    x = x.T if (tall := len(x) > len(x.T)) else x
                    for _ in range(5):
                        a = x @ x.T
                        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
                    x = x.T if tall else x
                    weight.add_(x, alpha=-group["lr"] * max(1.0, len(x) / len(x.T)) ** 0.5)

    return Muon(groups, {})


def optimizers(p: Parametrization, model: Any, shape: Shape, rate: float, seed: int) -> list[Any]:
    """Draw the weights; return Muon beside AdamW, or AdamW alone, at a learning rate of AdamW at the base."""
    import torch

    tuned = BaseHyperparameters(rate, stds=STDS, muon=MuonHyperparameters(MUON_OVER_ADAMW * rate, weight_decay=0.0))
    initialize_model(p, model, tuned, ROLES, shape, generator=torch.Generator().manual_seed(seed))
    groups = torch_groups(p, model, tuned, ROLES, shape)
    matrices = [group for group in groups if group.get("algorithm") == "muon"]
    rest = [group for group in groups if group.get("algorithm") != "muon"]
    return [torch.optim.AdamW(rest), *([muon(matrices)] if matrices else [])]


def train(p: Parametrization, shape: Shape, rate: float, seed: int, steps: int, tokens: np.ndarray) -> float:
    """Train on windows of a text; return the mean loss over the last eighth of the steps."""
    import torch
    from torch.nn import functional

    model = build(shape, int(tokens.max()) + 1)
    stepping = optimizers(p, model, shape, rate, seed)
    schedules = [torch.optim.lr_scheduler.LinearLR(each, 1 / WARM_UP, total_iters=WARM_UP) for each in stepping]
    places, losses = np.random.default_rng(seed), []
    for _ in range(steps):
        starts = places.integers(len(tokens) - LENGTH, size=BATCH)
        batch = torch.from_numpy(np.stack([tokens[start : start + LENGTH + 1] for start in starts]).astype(np.int64))
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        losses.append(float(loss.detach()))
        model.zero_grad()
        loss.backward()
        for each in (*stepping, *schedules):
            each.step()
    return float(np.mean(losses[-max(1, steps // LAST) :]))


def transfers(
    folder: Path,
    axis: str,
    seeds: int,
    first: int,
    steps: int,
    points: int,
    sizes: tuple[int, ...] = (),
    arms: tuple[str, ...] = tuple(ARMS),
) -> Measured:
    """Find the drift of the best learning rate of every arm over a factor of eight along one axis."""
    tokens = read_characters(Path(WIKITEXT))[1].train
    shapes = [Shape(**{"key_dim": 8, "heads": 4, "depth": 2, axis: size}) for size in sizes or SIZES[axis]]
    shown, extents, within = [], [], {}
    for name, p in ((arm, ARMS[arm]) for arm in arms):

        def losses(shape: Shape, rates: np.ndarray, seed: int, p: Parametrization = p) -> np.ndarray:
            return np.array([train(p, shape, float(rate), seed, steps, tokens) for rate in rates])

        check = transfer_check(
            shapes, 4e-3 * 2.0 ** np.arange(points), losses, seeds=range(first, first + seeds), widenings=3
        )
        middle, low, high = check.decades
        shown.append(f"{name}: {middle:+.2f}")
        extents.append(f"[{low:+.2f}, {high:+.2f}]: {check.sentence().partition(':')[0].partition(' (')[0]}")
        within[name] = low >= -ALLOWED_DECADES and high <= ALLOWED_DECADES
    return Measured("<br>".join(shown), "<br>".join(extents), f"{first}-{first + seeds - 1}", within["Muon, table"])


FIGURES = [
    *(
        Figure(
            f"gpt-transfer-{name}",
            f"plain PyTorch GPT on text: drift of the best learning rate over x8 in {LETTERS[axis]}, in decades",  # type: ignore[index]
            "Muon's table within .25 with its 99% interval; mup and one rate are shown",
            transfers,
            {"axis": axis, "seeds": seeds, "first": 50, "steps": 60, "points": 5},
        )
        for axis, name, seeds in (("key_dim", "key-dim", 5), ("heads", "heads", 8), ("depth", "depth", 4))
    ),
    Figure(
        "gpt-transfer-heads-larger",
        "the same over H for Muon's table at larger H, where finite size matters less",
        "Muon's table within .25 with its 99% interval",
        transfers,
        {
            "axis": "heads",
            "seeds": 5,
            "first": 80,
            "steps": 60,
            "points": 4,
            "sizes": [8, 16, 32],
            "arms": ["Muon, table"],
        },
    ),
]
