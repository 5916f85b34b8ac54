"""In-context learning by an MLP under linear attention: prompt length, width, escape, attention speed, landscape."""

from pathlib import Path

import jax
import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.acceptance._studies import study, words_of

from manyheads.studies.meanfield.incontext.prompt_length import representation
from manyheads.theory.meanfield import prompt_loss
from manyheads.theory.meanfield.incontext.circle import circle_flow, conserved_quantity, escape_rate
from manyheads.theory.meanfield.incontext.crossings import first_crossing
from manyheads.theory.meanfield.incontext.prompt_length import draw_prompt_losses, length_coefficient, solve_attention

SIGNAL, FOREIGN = np.diag([0.3, 0.03]), 0.6 * np.eye(2)


def prompt_length(folder: Path, lengths: list[int], prompts: list[int], seed: int) -> Measured:
    """Compare drawn tasks, prompts and queries with L + c/n."""
    task, h = representation()
    attention = solve_attention(task, h).weights
    coefficient, shown, worst = length_coefficient(task, h, attention), [], 0.0
    for length, count in zip(lengths, prompts, strict=True):
        raw = draw_prompt_losses(
            task, h, attention, length, count, jax.random.fold_in(jax.random.key(seed), length)
        ).raw
        error, exact = raw.std() / count**0.5, prompt_loss(task, h, attention, length)
        worst = max(worst, abs(raw.mean() - exact) / error)
        shown.append(f"n = {length}: {raw.mean():.4f} +- {error:.4f} against {exact:.4f}")
    passed = worst < 3 and abs(coefficient - 1.916) < 5e-4
    return Measured(f"{worst:.2f} standard errors, c = {coefficient:.4f}", "; ".join(shown), str(seed), bool(passed))


def escape(folder: Path, sizes: list[float]) -> Measured:
    """Fit the escape time of the closed equations, and follow their conserved quantity."""
    times = np.linspace(0.0, 500.0, 2001)
    flows = [circle_flow(np.diag([0.3, size]), FOREIGN, times) for size in sizes]
    found = [first_crossing(times, flow.loss, 0.25) for flow in flows]
    slope = float(np.polyfit(np.log10(1 / np.asarray(sizes)), found, 1)[0])
    predicted = float(np.log(10) / escape_rate(0.36))
    drift = max(float(np.abs(kept - kept[0]).max()) for kept in map(conserved_quantity, flows))
    shown = f"{slope:.2f} a decade, predicted {predicted:.2f}"
    extent = f"times {', '.join(f'{each:.1f}' for each in found)}; conserved quantity moves by {drift:.1e}"
    return Measured(shown, extent, "none", bool(abs(slope / predicted - 1) < 0.005 and drift < 5e-8))


def verdicts(name: str, claim: str, replicates: int, revision: int = 1) -> Figure:
    """Return the figure that consists of the verdicts of a study."""
    study_name = f"meanfield/{name}"
    settings = {"name": study_name, "replicates": replicates, "flags": ""}
    command = words_of(study_name, replicates)
    return Figure(f"incontext-{name}", claim, "all verdicts as expected", study, settings, command, revision)


FIGURES = [
    Figure(
        "incontext-drawn-prompts",
        "the loss of drawn prompts is L + c/n",
        "within 3 standard errors at every n; c = 1.916",
        prompt_length,
        {"lengths": [4, 16, 64, 256, 1024], "prompts": [200_000, 200_000, 200_000, 20_000, 8000], "seed": 0},
    ),
    Figure(
        "incontext-escape-time",
        "a missed feature escapes after (g^2/kappa) ln(1/eps)",
        "73.63 a decade, to 0.5%; conserved quantity to 5e-8",
        escape,
        {"sizes": [1e-2, 1e-3, 1e-4, 1e-5, 1e-6]},
    ),
    verdicts("prompt-length", "the excess of finite prompts is c/n", 8),
    verdicts("saddle-escape", "escape times and flat saddles", 8),
    verdicts("attention-speed", "the two-timescale limit errs as 1/r from r = 1000", 8),
    verdicts("mlp-width", "finite width against the limit, one layer and both", 8),
    verdicts("prompt-training", "SGD on 10,000 prompts of 1000 pairs against the mean-field flow", 16, revision=2),
    verdicts("benign-landscape", "saddles, their curvature, and training from 16 Gaussian starts", 16),
]
