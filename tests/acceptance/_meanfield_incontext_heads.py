"""Merged and separate key-query weights of linear attention: one drop, and one drop for each eigenvector."""

from tests.acceptance._lane import Figure
from tests.acceptance._studies import study, words_of

STUDY, REPLICATES = "meanfield/saddle-to-saddle", 16

FIGURES = [
    Figure(
        "incontext-saddle-to-saddle",
        "Merged key-query weights learn in one drop, separate ones in one for each eigenvector, at predicted times",
        "all verdicts as expected",
        study,
        {"name": STUDY, "replicates": REPLICATES},
        command=words_of(STUDY, REPLICATES),
    ),
]
