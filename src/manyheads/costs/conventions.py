"""Conventions of counting operations: data, with a row for every published one.

Counters disagree by factors of two and four because they answer different questions: is a multiply-add one operation
or two, does a causal mask halve the score products, is recomputed work counted? A `Convention` answers all of them; a
`manyheads.costs.Cost` keeps its parts apart, so that it can be read under another convention without a guess.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from manyheads._constraints import CHECKED, Constraint, check_fields, constrained
from manyheads.errors import UsageError

Causal = Literal["exact", "halved", "dense", "executed"]
Embedding = Literal["gather", "onehot", "executed"]
Recompute = Literal["none", "scores", "block", "block-needed", "block+scores", "executed"]
Backward = Literal["needed", "twice", "executed"]
ExpertsCounted = Literal["visited", "all"]

CAUSAL = {
    "exact": "causal pairs exactly",
    "halved": "causal square halved",
    "dense": "causal mask ignored",
    "executed": "score products as the program runs them",
}
EMBEDDING = {
    "gather": "embedding is a gather (0)",
    "onehot": "embedding is a one-hot product",
    "executed": "embedding as run",
}
RECOMPUTE = {
    "none": "recomputation not counted",
    "scores": "scores recomputed in the backward pass",
    "block": "every block's forward pass run again in full",
    "block-needed": "every block's forward pass run again but for its last product",
    "block+scores": "every block's forward pass run again, and its scores once more",
    "executed": "recomputation as run",
}
BACKWARD = {
    "needed": "only gradients that are needed",
    "twice": "backward = 2 x forward for every product",
    "executed": "backward as run",
}


class ConventionError(UsageError):
    """A count lacks the information that another convention needs, or two conventions were mixed."""


@dataclass(frozen=True)
class Convention:
    """The questions that a count of operations has to answer.

    Under a causal mask the `n` queries are the last of the `m` keys. ``"exact"``: the `n m - n (n - 1) / 2` pairs that
    are not masked; ``"halved"``: `n m - n^2 / 2`, half of the square when `n = m`; ``"dense"``: `n m`. Elementwise work
    on scores has no half pairs: ``"halved"`` counts it exactly.

    ``"executed"`` marks a count of a program as it runs (`manyheads.costs.count`): it stands in all four fields that
    a program answers by itself, and such a count can only change its `multiply_add`.

    Raises `UsageError`: a field has a value outside its table, or ``"executed"`` in some fields only.

    Examples
    --------
    >>> Convention(causal="dense", multiply_add=1).describe().split("; ")[:3]
    ['multiply-add = 1', 'causal mask ignored', 'softmax not in FLOPs']
    """

    multiply_add: Literal[1, 2] = constrained(2, Constraint(choices=(1, 2)))  # its operations: 2 (FLOPs) or 1 (MACs)
    causal: Causal = field(default="exact", metadata=CHECKED)  # score products under a causal mask
    softmax: int = constrained(0, Constraint(least=0))  # added to `flops` for each score; 0: left to `elementwise`
    # Work of the backward pass that only recreates activations and is counted
    recompute: Recompute = field(default="none", metadata=CHECKED)
    # A token embedding is a gather and costs nothing, or a product with one-hot rows
    embedding: Embedding = field(default="gather", metadata=CHECKED)
    # "needed": products whose gradient nobody asks for are not counted; "twice": the rule of thumb
    backward: Backward = field(default="needed", metadata=CHECKED)
    # Experts that a token "visited", or "all" as if it had visited every one
    experts: ExpertsCounted = field(default="visited", metadata=CHECKED)

    def __post_init__(self) -> None:
        check_fields(self, "convention: ")
        answers = {value == "executed" for value in (self.causal, self.recompute, self.embedding, self.backward)}
        if len(answers) > 1 or (self.executed and (self.softmax or self.experts == "all")):
            fields = "causal, recompute, embedding and backward"
            raise UsageError(
                f"convention: 'executed' stands in {fields} together, with softmax=0 and visited experts, or in none"
            )

    @property
    def executed(self) -> bool:
        """Whether this describes a program as it runs, not a formula."""
        return self.causal == "executed"

    @property
    def name(self) -> str:
        """The first preset that equals this convention, or ``"custom"``."""
        return next((name for name, preset in PRESETS.items() if preset.convention == self), "custom")

    def describe(self) -> str:
        """Say in one line what is counted."""
        softmax = f"softmax {self.softmax} FLOPs a score" if self.softmax else "softmax not in FLOPs"
        parts = (f"multiply-add = {self.multiply_add}", CAUSAL[self.causal], softmax, RECOMPUTE[self.recompute])
        experts = ("every expert counted",) if self.experts == "all" else ()
        return "; ".join((*parts, EMBEDDING[self.embedding], BACKWARD[self.backward], *experts))


@dataclass(frozen=True)
class Preset:
    """A named convention and who counts so."""

    convention: Convention
    source: str


_EXECUTED: dict[str, Any] = dict.fromkeys(("causal", "recompute", "embedding", "backward"), "executed")

PRESETS: dict[str, Preset] = {
    "exact": Preset(Convention(), "useful work: the smallest number of products that gives the result"),
    "halved": Preset(
        Convention(causal="halved"),
        "model FLOPs with the causal square divided by two; MaxText since its pull request 1988",
    ),
    "dense": Preset(
        Convention(causal="dense"), "PyTorch FlopCounterMode where its formulas apply; model FLOPs of PaLM's appendix B"
    ),
    "mac": Preset(
        Convention(multiply_add=1, causal="dense"), "fvcore, ptflops and thop: one multiply-add is one operation"
    ),
    "palm": Preset(
        Convention(causal="dense"),
        "Chowdhery et al. 2022 (PaLM), appendix B: 6 N + 12 L H Q T per token, N the weights of matrix products",
    ),
    "megatron": Preset(
        Convention(causal="dense", recompute="block"),
        "Narayanan et al. 2021, equation 3: 96 B s l h^2 (1 + s / 6h + V / 16lh), blocks recomputed, logits not",
    ),
    "flash": Preset(
        Convention(causal="halved", recompute="scores"),
        "Dao 2023 (FlashAttention-2), section 4.1: causal divided by 2, backward 2.5 times the forward pass",
    ),
    "chinchilla": Preset(
        Convention(causal="dense", softmax=3, embedding="onehot", backward="twice"),
        "Hoffmann et al. 2022 (Chinchilla), appendix F: one-hot embedding, 3 operations a score, backward twice",
    ),
    "all-experts": Preset(
        Convention(experts="all"), "exact, as if every token visited every expert: how some figures of mixtures count"
    ),
    "executed": Preset(Convention(**_EXECUTED), "a program as it runs, dead code removed (manyheads.count)"),
    "executed-mac": Preset(Convention(multiply_add=1, **_EXECUTED), "the same with multiply-add = 1"),
}


def find_convention(convention: "str | Convention") -> Convention:
    """Return the convention of that name, or the convention itself."""
    if isinstance(convention, Convention):
        return convention
    if convention not in PRESETS:
        raise UsageError(f"unknown convention {convention!r}: known are {', '.join(PRESETS)}")
    return PRESETS[convention].convention
