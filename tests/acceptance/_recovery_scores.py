"""Extraction of layers with other attention scores: planted ones, models of transformers, and what is refused."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.acceptance._lane import ROOT, Figure, Measured
from tests.acceptance._recovery_model import WIKITEXT
from tests.recovery.score_checkpoints import MODELS, t5_attention, tiny_model
from tests.recovery.score_layers import KINDS, planted_score_layer

from manyheads.data.characters import read_characters
from manyheads.recovery import ExtractionOptions, RecoveryRefused, extract_layer
from manyheads.recovery.layers.evaluation import softmax
from manyheads.recovery.layers.matching import function_error
from manyheads.recovery.layers.scores import ScoreLayer
from manyheads.recovery.oracle.checkpoint_oracles import checkpoint_oracle

SEEDS = [0, 1, 2, 3, 4]
STEPS, RATE, BATCH, LENGTH = 150, 5e-3, 16, 48
OPTIONS = ExtractionOptions(scores=True)
SINGLE = ("cap", "window", "ALiBi", "buckets", "ALiBi and biases")


class Tally:
    """Outcomes of extractions, and the worst figures of those that were accepted."""

    def __init__(self) -> None:
        self.runs = self.right = self.wrong = 0
        self.errors: list[float] = []
        self.calls: list[int] = []
        self.refused: Counter[str] = Counter()

    def add(self, name: str, function: Callable, heads: int, seed: int, hidden: np.ndarray | None = None) -> None:
        """Extract a function, and compare it with what was found on fresh sequences."""
        self.runs += 1
        try:
            found = extract_layer(function, seed=seed, options=OPTIONS)
        except RecoveryRefused as refusal:
            self.refused[f"{name}: {type(refusal).__name__}"] += 1
            return
        self.right += found.heads == heads
        self.wrong += found.heads != heads
        self.calls.append(found.total.calls)
        rng = np.random.default_rng([seed, 1])
        drawn = [rng.standard_normal((10, length, found.layer.dim)) for length in (8, 64)]
        self.errors += [
            function_error(function, found.layer, x) for x in (*drawn, *([] if hidden is None else [hidden]))
        ]

    def measured(self, seeds: list[int], least: float, limit: float = 1e-7) -> Measured:
        """State the outcomes; passed if none has a wrong number, all but 1 - `least` accepted."""
        refused = ", ".join(f"{name} ({count})" for name, count in self.refused.items()) or "none"
        errors = self.errors or [np.inf]
        return Measured(
            f"{self.right} of {self.runs} with all heads, {self.wrong} with a wrong number; "
            f"function {max(errors):.1e}, median {np.median(errors):.1e}",
            f"{min(self.calls or [0])} to {max(self.calls or [0])} calls; refused: {refused}",
            ", ".join(map(str, seeds)),
            self.wrong == 0 and self.right >= least * self.runs and max(errors) < limit,
        )


class Stated:
    """A function of sequences that says its dimension."""

    def __init__(self, function: Callable, dim: int):
        self.function, self.dim = function, dim

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return self.function(x)


def planted(folder: Path, seeds: list[int]) -> Measured:
    """Random layers of every kind of score."""
    tally = Tally()
    for kind in KINDS:
        for dim, heads in ((16, 2), (32, 4)):
            for seed in seeds:
                layer = planted_score_layer(np.random.default_rng(seed), dim, heads, kind)
                tally.add(f"{kind} {dim}", Stated(layer, dim), heads, seed)
    return tally.measured(seeds, 0.95)


def single(folder: Path, seeds: list[int]) -> Measured:
    """Random layers whose answers are rounded to single precision."""
    tally = Tally()
    for kind in SINGLE:
        for dim, heads in ((16, 2), (32, 4)):
            for seed in seeds:
                layer = planted_score_layer(np.random.default_rng(seed), dim, heads, kind)
                tally.add(f"{kind} {dim}", Stated(rounded(layer), dim), heads, seed)
    return tally.measured(seeds, 0.95, 1e-6)


def rounded(function: Callable) -> Callable:
    """Return a function whose answers are rounded to single precision."""
    return lambda x: function(x).astype(np.float32)


def random_models(folder: Path, seeds: list[int]) -> Measured:
    """Random models of transformers, their own attention sub-module."""
    tally = Tally()
    for name in MODELS:
        for seed in seeds:
            model, layer = tiny_model(name, seed)
            tally.add(name, checkpoint_oracle(model, layer), 4, seed)
    for seed in seeds:
        tally.add("T5, decoder", t5_attention(seed), 4, seed)
    return tally.measured(seeds, 0.95)


def trained_models(folder: Path, seeds: list[int]) -> Measured:
    """Models that were trained briefly on characters; errors also on hidden states of held-out text."""
    tally = Tally()
    for name in MODELS:
        for seed in seeds:
            model, layer, hidden = _train(name, seed)
            tally.add(name, checkpoint_oracle(model, layer), 4, seed, hidden)
    return tally.measured(seeds, 0.9)


def _train(name: str, seed: int):
    """Return the body of a trained model, the layer, and what its attention reads of held-out text."""
    import torch

    model, layer = tiny_model(name, seed, language=True)
    body, held = train_briefly(model, seed)
    seen = {}
    inside = next(
        part
        for place, part in body.named_modules()
        if "Attention" in type(part).__name__ and f".{layer}." in f".{place}."
    )
    hook = inside.register_forward_pre_hook(
        lambda module, given, named: seen.update(x=named["hidden_states"] if "hidden_states" in named else given[0]),
        with_kwargs=True,
    )
    with torch.no_grad():
        body(input_ids=held)
    hook.remove()
    return body, layer, seen["x"].double().numpy()


def train_briefly(model, seed: int):
    """Train a language model of 29 tokens on characters for 150 steps; return its body, and held-out text."""
    import torch

    torch.set_num_threads(1)
    _, (training, validation) = read_characters(ROOT / WIKITEXT)
    draws = np.random.default_rng(seed)

    def batch(tokens):
        starts = draws.integers(len(tokens) - LENGTH, size=BATCH)
        return torch.from_numpy(np.stack([tokens[start : start + LENGTH] % 29 for start in starts])).long()

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        tokens = batch(training)
        loss = torch.nn.functional.cross_entropy(
            model(input_ids=tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.base_model.eval(), batch(validation)


def controls(folder: Path, seeds: list[int]) -> Measured:
    """Functions whose scores are of no kind here."""
    accepted, refused = 0, Counter()
    for seed in seeds:
        base = planted_score_layer(np.random.default_rng(seed), 16, 2, "cap")
        for name, scores in _STRANGE.items():

            def answer(x, base=base, scores=scores):
                weights = scores(base, x)
                return sum((weights[head] @ x) @ base.projection[head] for head in range(2))

            try:
                extract_layer(answer, 16, seed=seed, options=OPTIONS)
                accepted += 1
            except RecoveryRefused as refusal:
                refused[f"{name}: {type(refusal).__name__}"] += 1
    return Measured(
        f"{accepted} of {len(seeds) * len(_STRANGE)} accepted",
        ", ".join(f"{name} ({count})" for name, count in refused.items()),
        ", ".join(map(str, seeds)),
        accepted == 0,
    )


def _apart(x: np.ndarray) -> np.ndarray:
    return np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])


def _cubes(layer: ScoreLayer, x: np.ndarray) -> np.ndarray:
    scores = layer.logits(x)
    return softmax(np.where(np.isfinite(scores), np.nan_to_num(scores, neginf=0.0) ** 3, -np.inf))


def _swelling(layer: ScoreLayer, x: np.ndarray) -> np.ndarray:
    factor = 1 + 0.5 * np.sin(np.maximum(_apart(x), 0) ** 2)
    return softmax(np.where(_apart(x) >= 0, np.nan_to_num(layer.logits(x), neginf=0.0) * factor, -np.inf))


def _sinks(layer: ScoreLayer, x: np.ndarray) -> np.ndarray:
    scores = layer.logits(x)
    sinks = np.broadcast_to(np.sin(3 * x[None, :, :, :1]), (*scores.shape[:-1], 1))
    return softmax(np.concatenate([scores, sinks], axis=-1))[..., :-1]


def _growing_sinks(layer: ScoreLayer, x: np.ndarray) -> np.ndarray:
    scores = layer.logits(x)
    sinks = np.broadcast_to(np.sqrt(np.arange(x.shape[1]))[:, None], (*scores.shape[:-1], 1))
    return softmax(np.concatenate([scores, sinks], axis=-1))[..., :-1]


def _two_windows(layer: ScoreLayer, x: np.ndarray) -> np.ndarray:
    scores = layer.logits(x)
    scores[0] = np.where(_apart(x) < 9, scores[0], -np.inf)
    return softmax(scores)


_STRANGE = {
    "cubes": _cubes,
    "swelling": _swelling,
    "sinks of queries": _sinks,
    "growing sinks": _growing_sinks,
    "two windows": _two_windows,
}

FIGURES = [
    Figure(
        "scores-planted",
        f"planted layers of {len(KINDS)} kinds of score ({', '.join(KINDS)}), d = 16 with 2 heads, 32 with 4, float64",
        "no wrong number of heads, 95% accepted, function < 1e-7",
        planted,
        {"seeds": SEEDS},
    ),
    Figure(
        "scores-single",
        f"the same, {', '.join(SINGLE)}, with answers that are rounded to float32",
        "no wrong number of heads, 95% accepted, function < 1e-6",
        single,
        {"seeds": SEEDS},
    ),
    Figure(
        "scores-models",
        f"random models of transformers ({', '.join(MODELS)}, T5), d = 32, 4 heads, their own attention, float64",
        "no wrong number of heads, 95% accepted, function < 1e-7",
        random_models,
        {"seeds": SEEDS},
    ),
    Figure(
        "scores-trained",
        f"the same models, {STEPS} steps on characters of WikiText-2; on Gaussian tokens and hidden states of text",
        "no wrong number of heads, 90% accepted, function < 1e-7",
        trained_models,
        {"seeds": SEEDS[:3]},
    ),
    Figure(
        "scores-controls",
        "negative controls: cubes of forms, forms that swell with the offset, sinks that depend on the query or "
        "grow with the row, a window of one head only",
        "none accepted",
        controls,
        {"seeds": SEEDS},
    ),
]
