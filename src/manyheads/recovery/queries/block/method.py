r"""Extraction of the attention of a whole transformer block, its MLP left as an oracle.

B0  How the block is built, and the size of tokens at which its token-wise part is inverted (`token_wise`).
B1  Sum of the projections and epsilon of the norm, from sequences of one repeated token (`value_sum`).
B2  With both, every answer of the block gives the attention's (`attention`): the methods for layers behind a norm run
    on it unchanged.
B3  The layer found and the block's answers to single tokens make the function of the block (`composition`), which is
    what the certificate is about.

Identifiable is what a norm in front leaves of the layer, but the output bias, which the token-wise part absorbs. That
part stays an oracle: g(y) = F([k^-1(y)]), one sequence of one token.
"""

import dataclasses
from dataclasses import dataclass

from manyheads.errors import UsageError
from manyheads.recovery._types import Generator
from manyheads.recovery.layers.evaluation import apply_layer
from manyheads.recovery.oracle.noise_estimate import root_mean_square
from manyheads.recovery.oracle.normalization import Normalization
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.block.attention import BeyondOneToken, BlockAttention
from manyheads.recovery.queries.block.composition import Composition
from manyheads.recovery.queries.block.token_wise import open_token_wise
from manyheads.recovery.queries.block.value_sum import read_value_sum
from manyheads.recovery.queries.options import ExtractionOptions
from manyheads.recovery.refusals import LimitError, NotALayer
from manyheads.recovery.result.certificates import oracle_errors
from manyheads.recovery.result.distributions import Draw
from manyheads.recovery.result.results import Extracted, Stage, StageLog

METHODS = ("auto", "sphere", "rotary-sphere", "scores-sphere")


@dataclass(frozen=True)
class Block:
    """A block whose attention can be asked."""

    attention: BlockAttention  # the attention as an oracle
    beyond: BeyondOneToken  # what other tokens change in the answers, as an oracle: what is verified
    norm: Normalization  # in front of the attention
    level: float  # relative noise of the attention's answers
    stages: tuple[Stage, ...]  # figures of what was asked so far

    def compose(self, found: Extracted) -> Extracted:
        """Return an extracted attention as the function of the block."""
        norm, layer = self.norm, dataclasses.replace(found.layer, bias=None)
        kept = found.acts_on.partition(found.prepare.formula)[2] if isinstance(found.prepare, Normalization) else ""
        acts_on = f"u = {norm.formula}{kept}; the rest of the block, MLP and output bias, stays an oracle"
        whole = Composition(self.attention.token_wise, layer, norm)
        return Extracted(layer, (*self.stages, *found.stages), acts_on, norm, found.longest, whole)

    def can_run(self, method: str) -> bool:
        """Tell whether a method asks what can be asked: tokens of every length only beside an MLP."""
        return self.attention.token_wise.parallel or not method.startswith("scores")

    def attention_error(self, found: Extracted, rng: Generator, count: int, draw: Draw) -> tuple[float, float]:
        """Return the largest squared error of the attention alone, relative to its variance, and the variance."""
        scale = self.attention.token_wise.scale
        with self.beyond.stage("selection"):
            errors = oracle_errors(
                self.attention, lambda x: apply_layer(found.layer, self.norm(scale * x)), rng, count, draw
            )
        return float(errors.relative.max()), errors.variance


def open_block(oracle: Oracle, options: ExtractionOptions, method: str, rng: Generator) -> Block:
    """Take the token-wise part of a block out, so that its attention can be asked."""
    _check(options, method)
    log = StageLog(oracle)
    with log.stage("structure") as figures:
        token_wise = open_token_wise(oracle, rng)
        figures |= {"parallel": token_wise.parallel, "scale": token_wise.scale, "rate": token_wise.rate}
        if options.scores and not token_wise.parallel:
            what = "other scores than plain or rotary ones, with an MLP behind. Extract the attention without it"
            raise NotALayer(what, token_wise.scale)
    with log.stage("value sum") as figures:
        projection, norm = read_value_sum(token_wise, options.rotary or options.scores, rng, figures)
        left = figures["left"]
    attention = BlockAttention(token_wise, projection, norm)
    x = rng.standard_normal((4, 3, oracle.dim))
    with attention.stage("noise"):
        one, two = attention(x), attention((1 + 1e-5) * x)
    level = max(left, root_mean_square(two - one) / root_mean_square(one))
    return Block(attention, BeyondOneToken(token_wise), norm, level, tuple(log.stages))


def _check(options: ExtractionOptions, method: str) -> None:
    if method not in METHODS:
        raise UsageError(f"method {method!r}: behind the norm of a block choose from {', '.join(METHODS)}")
    for name, said in (("residual", options.residual), ("normalized=False", options.normalized is False)):
        if said:
            raise UsageError(f"mlp with {name}: a block reads its residual stream through a norm; leave {name} out")
    limits = options.limits
    if limits.decimals is not None or limits.bits is not None or limits.vocabulary is not None:
        what = "rounded answers or a vocabulary leave no room for the large tokens by which an MLP is inverted"
        raise LimitError(f"{what}: extract the attention alone")
