"""Whole transformer blocks: attention extracted, MLP left as an oracle, and what is refused."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._recovery_model import trained_checkpoints
from tests.acceptance._recovery_scores import train_briefly
from tests.acceptance._recovery_trained import hidden_states
from tests.recovery.oracle.test_front_doors import tiny
from tests.recovery.planted_blocks import CONTROLS, PlantedBlock
from tests.recovery.score_checkpoints import BEHIND_NORMS, MODELS, tiny_model

from manyheads.recovery import ExtractionOptions, RecoveryRefused, compare_layers, extract_layer
from manyheads.recovery.oracle.checkpoint_oracles import checkpoint_oracle

SEEDS = [0, 1, 2, 3, 4]
OWN = ("noise", "selection", "verification")  # stages that measure and verify
PLAIN = {
    "GELU": {},
    "parallel": {"parallel": True},
    "all tokens": {"causal": False},
    "RMSNorm, ReLU": {"centred": False, "activation": lambda x: np.maximum(x, 0.0)},
    "MLP 10 times as large": {"mlp": 10.0},
}
TURNED = {"RoPE": {}, "RoPE, parallel": {"parallel": True}}
FAMILIES = ("gpt2", "gpt_bigcode", "opt", "biogpt", "roberta-prelayernorm", "vit", "deit", "vit_mae", "ijepa")
FAMILIES += ("dinov2", "beit", "clip_vision_model", "llama", "mistral", "phi3", "arcee", "mixtral", "falcon")
FAMILIES += ("Pythia", "Phi", "Gemma", "OLMo")
TRAINED = ("gpt2", "opt", "llama", "mistral", "phi3", "falcon", "Pythia", "Phi")


def composition_error(block: Callable, found: Any, x: np.ndarray) -> float:
    """Return the squared error of a composition, relative to what other tokens change in the answers."""
    y = block(x)
    alone = block(x.reshape(-1, 1, x.shape[2])).reshape(x.shape)
    return float(np.mean((found.extracted(x) - y) ** 2) / np.mean((y - alone) ** 2))


def own_calls(found: Any) -> int:
    """Return the calls of the extraction itself."""
    return sum(counts.calls for name, counts in found.counts.items() if name not in OWN)


class Tally:
    """Outcomes of extractions of blocks."""

    def __init__(self) -> None:
        self.right = self.wrong = self.runs = 0
        self.errors: list[float] = []
        self.calls: list[int] = []
        self.times: list[float] = []
        self.refused: Counter[str] = Counter()

    def add(self, name: str, block: Callable, heads: int, seed: int, *more: np.ndarray, alone: Any = None) -> Any:
        """Extract a block; compare the composition on Gaussian tokens and on more, its calls with the attention's."""
        self.runs += 1
        try:
            found = extract_layer(block, seed=seed)
        except RecoveryRefused as refusal:
            self.refused[f"{name}: {type(refusal).__name__}"] += 1
            return None
        self.right += found.heads == heads
        self.wrong += found.heads != heads
        self.calls.append(own_calls(found))
        if alone is not None:
            self.times.append(own_calls(found) / own_calls(extract_layer(alone, seed=seed)))
        drawn = np.random.default_rng([seed, 1]).standard_normal((20, 16, found.layer.dim))
        self.errors += [composition_error(block, found, x) for x in (drawn, *more)]
        return found

    def measured(self, seeds: list[int], least: float, limit: float, extent: str = "") -> Measured:
        """State the outcomes; passed if no number of heads is wrong and all but 1 - `least` are extracted."""
        refused = ", ".join(f"{name} ({count})" for name, count in self.refused.items()) or "none"
        errors = self.errors or [np.inf]
        return Measured(
            f"{self.right} of {self.runs} with all heads, {self.wrong} with a wrong number; "
            f"composition {max(errors):.1e}, median {np.median(errors):.1e}",
            f"{min(self.calls or [0])} to {max(self.calls or [0])} calls{extent}; refused: {refused}",
            ", ".join(map(str, seeds)),
            self.wrong == 0 and self.right >= least * self.runs and max(errors) < limit,
        )


def planted(folder: Path, seeds: list[int], rotary: bool) -> Measured:
    """Random blocks, and their attention alone behind the same norm."""
    tally, theta, projection = Tally(), [], []
    for name, kind in (TURNED if rotary else PLAIN).items():
        for dim, heads in ((16, 2), (32, 4)):
            for seed in seeds:
                given = {"rotary": True, "centred": False} if rotary else {}
                block = PlantedBlock(np.random.default_rng(seed), dim, heads, **given, **kind)
                found = tally.add(f"{name} {dim}", block, heads, seed, alone=_Attention(block))
                if found is not None and found.heads == heads:
                    errors = compare_layers(block.truth, found.layer)
                    theta.append(errors.theta)
                    projection.append(errors.projection)
    times = f", median {np.median(tally.times):.3g} times those of the attention alone ({min(tally.times):.2g} to "
    times += f"{max(tally.times):.3g}); weights within {max(theta):.1e} (Theta), {max(projection):.1e} (W)"
    return tally.measured(seeds, 0.95, 1e-7, times)


class _Attention:
    """x + A(N x) of a planted block."""

    residual, normalized = True, True

    def __init__(self, block: PlantedBlock):
        self.block, self.dim, self.rotary = block, block.dim, block.rotary

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return x + self.block.attend(x)


def _model(family: str, seed: int, *, language: bool = False) -> tuple[Any, int]:
    """Return a random model of two layers, and its number of heads."""
    if family in MODELS | BEHIND_NORMS:
        return tiny_model(family, seed, language=language)[0], 4
    return tiny(family, seed, language=language), 2


def models(folder: Path, seeds: list[int]) -> Measured:
    """Blocks of random models as transformers calls them."""
    tally = Tally()
    for family in FAMILIES:
        for seed in seeds:
            model, heads = _model(family, seed)
            alone = checkpoint_oracle(model, 1, through="block")
            tally.add(family, checkpoint_oracle(model, 1, through="block-with-mlp"), heads, seed, alone=alone)
    times = f", median {np.median(tally.times):.3g} times those of x + attn(norm(x)); {len(FAMILIES)} families"
    return tally.measured(seeds, 0.95, 1e-7, times)


def trained_models(folder: Path, seeds: list[int]) -> Measured:
    """Blocks of models that were trained briefly on characters; errors also on hidden states of held-out text."""
    import torch

    tally = Tally()
    for family in TRAINED:
        for seed in seeds:
            model, heads = _model(family, seed, language=True)
            body, held = train_briefly(model, seed)
            with torch.no_grad():
                states = body(input_ids=held, output_hidden_states=True).hidden_states[1]
            block = checkpoint_oracle(body, 1, through="block-with-mlp")
            tally.add(family, block, heads, seed, states.double().numpy())
    return tally.measured(seeds, 0.9, 1e-6, f"; {len(TRAINED)} families")


def trained_gpt2(folder: Path, seeds: list[int]) -> Measured:
    """All blocks of both checkpoints of the GPT-2 of this lane; errors also on hidden states of held-out text."""
    tally = Tally()
    for name, path in trained_checkpoints().items():
        for layer in range(4):
            for seed in seeds:
                block = checkpoint_oracle(path, layer, through="block-with-mlp")
                tally.add(f"{name} {layer}", block, 8, seed, hidden_states(path)[layer])
    return tally.measured(seeds, 0.95, 1e-6)


def controls(folder: Path, seeds: list[int]) -> Measured:
    """Functions that are no block of this form, said to be one, with positions and without."""
    accepted, refused = 0, Counter[str]()
    for control in CONTROLS:
        for seed in seeds:
            for rotary in (False, True):
                block = PlantedBlock(np.random.default_rng(seed))
                try:
                    extract_layer(control(block), 16, seed=seed, options=ExtractionOptions(mlp=True, rotary=rotary))
                    accepted += 1
                except RecoveryRefused as refusal:
                    refused[f"{control.__name__}: {type(refusal).__name__}"] += 1
    return Measured(
        f"{accepted} of {2 * len(seeds) * len(CONTROLS)} accepted",
        ", ".join(f"{name} ({count})" for name, count in refused.items()),
        ", ".join(map(str, seeds)),
        accepted == 0,
    )


REQUIRED = "no wrong number of heads; 19 of 20 extracted; squared error of the composition below 1e-7"
FIGURES = [
    Figure(
        "block-with-mlp-planted",
        "planted blocks with their MLP (GELU, ReLU, sequential, parallel, causal, full): d = 16, 32 with 2, 4 heads",
        REQUIRED,
        planted,
        {"seeds": SEEDS, "rotary": False},
    ),
    Figure(
        "block-with-mlp-rotary",
        "planted blocks with their MLP and RoPE behind an RMSNorm, sequential and parallel: d = 16, 32, 2, 4 heads",
        REQUIRED,
        planted,
        {"seeds": SEEDS, "rotary": True},
    ),
    Figure(
        "block-with-mlp-models",
        "layer 1 of random models of transformers with its MLP (2 or 4 heads, d = 16 or 32)",
        REQUIRED,
        models,
        {"seeds": SEEDS[:3]},
    ),
    Figure(
        "block-with-mlp-trained",
        "layer 1 of models with its MLP after 150 steps on text (2 or 4 heads), on Gaussian tokens and on text",
        "no wrong number of heads; 9 of 10 extracted; squared error of the composition below 1e-6",
        trained_models,
        {"seeds": SEEDS[:3]},
    ),
    Figure(
        "block-with-mlp-gpt2",
        "all blocks of a trained GPT-2 with their MLP (4 layers, 8 heads, d = 128), on Gaussian tokens and on text",
        "no wrong number of heads; 19 of 20 extracted; squared error of the composition below 1e-6",
        trained_gpt2,
        {"seeds": SEEDS[:2]},
    ),
    Figure(
        "block-with-mlp-controls",
        "post-norm, no residual, no norm, MLPs that mix tokens, two blocks: said to be a block with its MLP",
        "none accepted",
        controls,
        {"seeds": SEEDS},
    ),
]
