"""Panels of `bigram/sample-complexity`: samples and time of the plateau escape, and the share of flipped signs."""

from manyheads.study import Curve, Lines
from manyheads.study.panels import Panel

TIME = "e-foldings until the escape"
RATIO = "noise-to-signal ratio κ₂"


def escape_panels(curves: dict[str, tuple[Curve, ...]], length: int, noise: float) -> tuple[Panel, ...]:
    """Return one panel for each axis; `length` and `noise` are those of the comparisons along the other axes."""
    titles = {
        "length": ("Samples until the plateau escape, by length", "context length T [tokens]", "samples / T"),
        "noise": (f"Noise, T = {length:,}", RATIO, TIME),
        "vocabulary": (f"Vocabulary, T = {length:,}", "vocabulary N [tokens]", TIME),
        "flips": (f"Runs with flipped signs, T = {length:,}", RATIO, "share of escaped runs"),
    }
    notes = {
        "length": "Median of a replicate's runs without flipped signs; bands: replicates.",
        "noise": f"Bands: replicates; the scaling law is claimed up to a ratio of {noise:g}.",
        "vocabulary": "Samples are these times T / (κ₂ K_P K_Q).",
        "flips": "W and the deviations of the attention both have the wrong sign; flipping both corrects it.",
    }
    claims = {
        "length": "Under SGD the samples of the plateau escape grow as T (ln T + 1.3)",
        "noise": "The signal system predicts",
        "vocabulary": "do not depend on the vocabulary",
        "flips": "Under the reduced model the probability of flipped signs",
    }
    return tuple(
        Lines(*titles[name], curves[name], log_x=True, note=notes[name], shows=(claims[name],)) for name in titles
    )
