"""The studies of the mean-field theory, each with eight replicates, on a seed with which nothing was tried out."""

from tests.acceptance._lane import Figure
from tests.acceptance._limits_checks import verdicts_of

COMPLETE = "--norm --activation gelu --logit-exponents 1.0"
RICH = (
    "--depth 4 --richness 1.5 --learning-rate 0.15 --steps 10 --heads-counts 32 128 --logit-exponents 1.0 --networks 64"
)


def fresh(name: str, title: str, claim: str, flags: str = "") -> Figure:
    return verdicts_of(f"limits/{name}", title, claim, flags=f"{flags} --seed 1".strip())


FIGURES = (
    fresh("infinite-key-dim", "study-key-dim", "networks of growing key dimension, digits"),
    fresh("infinite-key-dim", "study-key-dim-text", "networks of growing key dimension, text", "--task text"),
    fresh("infinite-heads", "study-heads", "networks of more and more heads, both logit exponents, digits"),
    fresh("infinite-heads", "study-heads-text", "the same on text", "--task text --steps 16"),
    fresh("infinite-heads", "study-heads-complete", "the same for complete pre-norm blocks, digits", COMPLETE),
    fresh("infinite-heads", "study-heads-rich", "four blocks when features move far, digits", RICH),
    fresh(
        "head-diversity",
        "study-attention",
        "variance and distribution of logits over heads, measured as limits/attention-over-heads",
    ),
    fresh(
        "head-diversity",
        "study-attention-networks",
        "the same with more networks",
        "--key-dims 2 16 --networks 32",
    ),
    fresh("head-diversity", "study-attention-rich", "the same when features move far", "--richness 1.5"),
    fresh("initialization", "study-initialization", "kernels against H, logits of single heads against N, at the init"),
    fresh("weight-movement", "study-weight-movement", "movement of attention matrices against L, both depth exponents"),
    fresh(
        "logit-exponent", "study-logit-exponent", "which logit exponent larger N favours, at fixed steps and compute"
    ),
    fresh("infinite-depth", "study-depth", "deeper and deeper networks, depth exponents 1 and 1/2"),
    fresh("lazy-to-rich", "study-richness", "from kernel descent to features that move"),
    fresh("key-dim-stability", "study-stability", "why infinite key dimension needs logit exponent 1"),
    fresh("approach", "study-approach", "a small vision transformer against its largest N, H and L"),
    fresh("approach", "study-approach-key-dim", "the same along N, with more networks", "--axes key_dim --networks 32"),
    fresh("approach", "study-approach-heads", "the same along H, with more networks", "--axes heads --networks 32"),
    fresh("approach", "study-approach-depth", "the same along L, with more networks", "--axes depth --networks 32"),
)
