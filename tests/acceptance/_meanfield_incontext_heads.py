"""Heads under linear attention and as particles: merged and separate key-query weights, limit of many heads."""

from tests.acceptance._lane import Figure
from tests.acceptance._studies import study, words_of


def verdicts(name: str, claim: str, replicates: int) -> Figure:
    """Return the figure that consists of the verdicts of a study."""
    words = f"meanfield/{name}"
    settings = {"name": words, "replicates": replicates}
    command = words_of(words, replicates)
    return Figure(f"incontext-{name}", claim, "all verdicts as expected", study, settings, command=command)


FIGURES = [
    verdicts(
        "saddle-to-saddle",
        "Merged key-query weights learn in one drop, separate ones in one for each eigenvector, at predicted times",
        16,
    ),
    verdicts("head-particles", "Logits and loss of H averaged softmax heads against the limit of many", 8),
]
