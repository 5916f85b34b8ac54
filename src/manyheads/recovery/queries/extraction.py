"""Extraction of an attention layer from queries, verified on held-out sequences.

Every result is verified, whatever the method: on trained layers, heads can be exchanged between two probes while all
internal checks pass, and only fresh sequences show it (measured here).
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from manyheads._machine import machine_memory
from manyheads.errors import UsageError, check_integer
from manyheads.recovery._types import Array, ArrayFunction, Generator
from manyheads.recovery.oracle import answers, checkpoint_oracles, front_doors, noise_estimate
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries import methods
from manyheads.recovery.queries.block.method import Block, Composition, open_block
from manyheads.recovery.queries.options import CERTIFICATES, ExtractionOptions
from manyheads.recovery.queries.vocabulary.method import vocabulary_noise
from manyheads.recovery.refusals import RankBudgetError, RecoveryRefused, VerificationError
from manyheads.recovery.result.certificates import OBSERVED, Certificate, certify, oracle_errors
from manyheads.recovery.result.distributions import Draw, ShortSequences
from manyheads.recovery.result.results import Extracted, HeadAccuracy, Recovery, head_accuracies, note_unresolved

OnSphere = Literal["sphere", "rotary-sphere", "scores-sphere"]
Method = Literal["auto", "subspaces", "probes", "bounded", "rotary", "scores", "vocabulary", OnSphere]
SELECTION = 20  # sequences on which an attempt is judged before the certificate is drawn
MATRICES = 12  # matrices (d, d) that an extraction holds at least: W_S, its readings, and Theta and W of a head or two
VERIFIED = 64  # tokens that the verification holds for each of its sequences, copies included
ACCURACY = 48  # sequences on which the contributions of heads are compared; the oracle is not asked about them


def extract_layer(
    function: Callable[[Any], Any] | str | os.PathLike[str],
    dim: int | None = None,
    *,
    layer: int | None = None,
    through: checkpoint_oracles.Through = "attention",
    method: Method = "auto",
    noise: float | None = None,
    seed: int = 0,
    options: ExtractionOptions | None = None,
) -> Recovery:
    """Recover the weights of a black-box multi-head attention layer from queries, and verify them.

    y = sum_i softmax_rows(x Theta_i x^T + 1 (x beta_i)^T + mask) x W_i + 1 c^T

    Number of heads, ranks, biases and weights are found. A key bias shared by all queries is invisible, Theta_i and
    W_i are determined, their factors are not; heads with the same pattern are one head.

    Parameters
    ----------
    function
        Takes sequences (n, k, d) as a NumPy array and returns answers of the same shape, in any floating-point type:
        NumPy, JAX, or a tensor of PyTorch. It must answer for every length k. Or a module of PyTorch that maps such
        tensors, also an attention sub-module of transformers; a model of transformers or a checkpoint folder, with
        `layer`; the file of a saved layer. Modules are copied and widened to float64.
    dim
        Token dimension d; not needed where the function has an attribute of that name, and not for the others.
    layer
        Number of a layer of a model, from 0.
    through
        What of that layer is asked: "attention", its sub-module; "block", x + attn(norm(x)); "block-with-mlp", the
        whole block as the model calls it. Its MLP stays an oracle then, and the certificate is about both together.
        The result's `extracted` is the function that was asked, and `extracted.attention` the attention alone.
    method
        "subspaces" needs O(d) calls and answers exact to rounding in float64; "bounded" needs O(d^2) and bears noise;
        "sphere" is for functions that normalize their tokens; "rotary" for positions that turn queries and keys;
        "rotary-sphere" for both; "scores" for these with biases, and for other scores; "scores-sphere" for these behind
        a norm; "probes" for answers in single precision, with fewer calls and digits than "bounded"; "vocabulary" for
        servers that take the rows of a table of embeddings alone. "auto" chooses by what is measured, and the result
        says which, and why.
    noise
        Relative noise of the answers; None measures it.
    seed
        Everything that is drawn follows from it.
    options
        What is known of the function, and what the extraction may cost.

    Returns
    -------
    Recovery: the layer, float64, with merged weights; its certificate; counts of calls, tokens and numbers; what was
    measured, what was tried.

    Raises
    ------
    NotALayer
        The answers break a rule that every attention layer obeys.
    VerificationError
        What was found fails on fresh sequences; it is carried as `result`.
    RecoveryRefused
        Or a subclass: what the last attempt stumbled over; the others are in its notes.
    OracleError
        The function raised, or answered with another shape, dtype, or NaN.
    LimitError
        The limits of the server leave no room for the method.
    BudgetSpent
        More calls, tokens or seconds are needed than were allowed.
    FileRefused
        `options.store` holds answers of another function.
    NotExtractable, CheckpointRefused
        A part of a model that no method extracts, or a folder that cannot be read.
    UsageError
        Arguments that cannot mean what was asked for, or need more memory than this machine has.

    Examples
    --------
    >>> import numpy as np
    >>> import manyheads as mh
    >>> from manyheads.recovery import compare_layers, evaluate_layer, gpt_layer
    >>> layer = gpt_layer(np.random.default_rng(0), 16, 2)
    >>> found = mh.extract_layer(lambda x: evaluate_layer(layer, x), 16)
    >>> found.heads, found.method, found.certificate.accepted
    (2, 'subspaces', True)
    >>> compare_layers(layer, found.layer).theta < 1e-6
    True

    References
    ----------
    The form of the layer is that of S. Chen, Y. Li, "Provably learning a multi-head attention layer", arXiv 2402.04084
    (equation 1). The designs of the queries are derived here; see the modules of `manyheads.recovery.queries`.
    """
    options = options or ExtractionOptions()
    if method not in ("auto", *methods.METHODS):
        raise UsageError(f"method {method!r}: one of auto, {', '.join(methods.METHODS)}")
    check_integer("seed", seed, 0)
    if noise is not None and not 0 < noise < 1:
        raise UsageError(f"noise = {noise}: give the relative noise of the answers, or None to measure it")
    streams = [np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(7 + options.tries)]
    target = front_doors.open_oracle(function, dim, layer, options.dtype, through)
    options = options.knowing(target)
    oracle = Oracle(target.function, target.dim, options.oracle(), options.store)
    _check_memory(oracle.dim, options)
    methods.check_limits(oracle, options)
    with oracle.showing():
        block = open_block(oracle, options, method, streams[0]) if options.mlp else None
        asked = oracle if block is None else block.attention
        unsteady = options.stochastic or noise is not None
        if options.limits.vocabulary is None:
            sinks = options.scores and block is None
            measured = noise_estimate.oracle_noise(asked, streams[0], stochastic=unsteady, sinks=sinks)
        else:
            measured = vocabulary_noise(oracle, streams[0], stochastic=unsteady)
        if block is not None:
            measured = dataclasses.replace(measured, level=max(measured.level, block.level))
        asked.settings = methods.settle(asked.settings, options, measured)
        oracle.settings = dataclasses.replace(oracle.settings, causal=measured.causal)
        level = measured.level if noise is None else noise
        plan = methods.plan_attempts(method, level, measured, options)
        plan = plan if block is None else [attempt for attempt in plan if block.can_run(attempt.method)]
        methods.check_room(plan[-1].method if plan[0].guess else plan[0].method, asked)
        steady = noise_estimate.Steadiness(oracle, level, streams[-1])
        found = _Extraction(oracle, options, measured, level, steady, streams[1], streams[2], block).run(
            plan, streams[3:-1]
        )
    if target.itself is None:
        return found
    assert found.extracted is not None
    draw = _cover(options.draw, found.extracted)(np.random.default_rng([seed, OBSERVED]), OBSERVED, target.dim)
    return dataclasses.replace(found, certificate=_add_model_error(found.certificate, target, draw))


@dataclasses.dataclass
class _Extraction:
    """The attempts of one extraction, until one of them is verified."""

    oracle: Oracle
    options: ExtractionOptions
    measured: noise_estimate.OracleNoise
    level: float
    steady: noise_estimate.Steadiness
    selection: Generator
    certification: Generator
    block: Block | None = None
    tried: list[str] = dataclasses.field(default_factory=list)
    refusals: list[RecoveryRefused] = dataclasses.field(default_factory=list)
    best: tuple[float, methods.Attempt, Extracted] | None = None
    certificates: int = 0
    rejected: Recovery | None = None

    def __post_init__(self) -> None:
        self.asked = self.oracle if self.block is None else self.block.attention  # by the methods
        self.verified = self.oracle if self.block is None else self.block.beyond

    def run(self, plan: list[methods.Attempt], streams: list[Generator]) -> Recovery:
        """Make the attempts of the plan until one is verified."""
        guesses = [attempt for attempt in plan if attempt.guess]
        drawn = [*self.selection.spawn(len(guesses)), *streams]
        for attempt, rng in zip(plan, drawn, strict=False):
            if not self._is_due(attempt) or self.certificates == CERTIFICATES:
                continue
            error = self._try(attempt, rng)  # on sequences that the certificate does not use: this choice is no favour
            if error is not None and error <= self.options.tolerance:
                recovery = self._certify()
                if recovery.certificate.accepted:
                    self.steady.check()
                    return dataclasses.replace(recovery, counts=dict(self.oracle.counts))
        self.steady.check()
        if self.best is None:
            refusal = self.refusals[-1]
            for line in self.tried[:-1]:
                refusal.add_note(line)
            raise refusal
        raise self._rejection(self.rejected or self._certify())

    def _is_due(self, attempt: methods.Attempt) -> bool:
        if attempt.after in ("always", "unverified"):
            return attempt.after == "always" or self.best is not None
        overlap = any(isinstance(refusal, RankBudgetError) for refusal in self.refusals)
        return self.best is None and (attempt.after == "refused" or overlap)

    def _try(self, attempt: methods.Attempt, rng: Generator) -> float | None:
        """Run one attempt; return the largest error on fresh sequences, None where it was refused."""
        name = f"{attempt.method}{', accurate' if attempt.accurate else ''}"
        try:
            found = methods.run_method(attempt, self.asked, self.level, rng)
        except RecoveryRefused as refusal:
            self.refusals += [] if attempt.guess else [refusal]
            self.tried.append(f"{name}: {type(refusal).__name__}: {refusal}")
            return None
        found = found if self.block is None else self.block.compose(found)
        if self.options.residual:
            attention = found.attention
            found = dataclasses.replace(found, whole=lambda x: x + attention(x))
        with self.oracle.stage("selection"):
            draw = _cover(self.options.draw, found)
            errors = oracle_errors(self.verified, _predictor(found), self.selection, SELECTION, draw)
        error = float(errors.relative.max())
        self.tried.append(f"{name}: {found.layer.heads} heads, relative squared error {error:.2g}")
        if attempt.guess and error > self.options.tolerance:
            return None
        if self.best is None or error < self.best[0]:
            self.best = error, attempt, found
        return error

    def _certify(self) -> Recovery:
        assert self.best is not None
        _, attempt, found = self.best
        self.certificates += 1
        settings = self.options.verification()
        settings = dataclasses.replace(settings, distribution=_cover(settings.distribution, found))
        certificate = certify(self.verified, _predictor(found), self.certification, settings)
        if self.block is not None:
            unit = f"{certificate.distribution}; relative to what other tokens change in the answers"
            certificate = dataclasses.replace(certificate, distribution=unit)
        accuracies = self._accuracies(found, certificate)
        of_method = (found.layer, certificate, found.stages, attempt.method, attempt.reason, dict(self.oracle.counts))
        of_all = (self.measured, tuple(self.tried), found, note_unresolved(accuracies), accuracies)
        recovery = Recovery(*of_method, *of_all)
        if not certificate.accepted:
            self.tried.append(f"rejected: relative squared error {certificate.largest_error:.2g} on fresh sequences")
            self.rejected = recovery
            # a better one is looked for; this one would be chosen again by its small error on the selection.
            self.best = float("inf"), attempt, found
        return recovery

    def _accuracies(self, found: Extracted, certificate: Certificate) -> tuple[HeadAccuracy, ...]:
        draw = _cover(self.options.draw, found)
        stacks = draw(self.selection, ACCURACY, self.oracle.dim)
        stacks = stacks if found.prepare is None else [found.prepare(x) for x in stacks]
        error, variance = certificate.largest_error, certificate.variance
        if self.block is not None:
            error, variance = self.block.attention_error(found, self.selection, SELECTION, draw)
        return head_accuracies(found.layer, stacks, error, variance)

    def _rejection(self, recovery: Recovery) -> VerificationError:
        certificate: Certificate = recovery.certificate
        # What was asked since it was certified counts too.
        recovery = dataclasses.replace(recovery, counts=dict(self.oracle.counts), tried=tuple(self.tried))
        why = "it is no such layer, or too noisy; another seed, accurate=True or a larger tolerance may help"
        if self.level**2 > certificate.tolerance:
            why = f"the noise of the answers has the relative size {self.level:.1g}; give a tolerance above its square"
        why = f"the layer found ({recovery.heads} heads, method {recovery.method}) is wrong on fresh sequences: {why}"
        error = VerificationError(why, certificate.largest_error, certificate.tolerance, recovery)
        for line in self.tried:
            error.add_note(line)
        return error


def _predictor(found: Extracted) -> ArrayFunction:
    """Return what is compared with the oracle that is verified."""
    return found.whole.beyond_one_token if isinstance(found.whole, Composition) else found.attention


def _add_model_error(certificate: Certificate, target: answers.LayerOracle, stacks: list[Array]) -> Certificate:
    """Add the largest error against the model in its own precision: that of the copy and the distance between both."""
    assert target.itself is not None
    function, kind = target.itself
    apart = [np.mean((np.asarray(function(x), np.float64) - target.function(x)) ** 2, axis=(1, 2)) for x in stacks]
    distance = float(np.nan_to_num(np.concatenate(apart).max(), nan=np.inf)) / certificate.variance  # NaN: overflow
    largest = (certificate.largest_error**0.5 + distance**0.5) ** 2
    return dataclasses.replace(certificate, itself=largest, type_itself=kind)


def _cover(draw: Draw, found: Extracted) -> Draw:
    """Return the part of a distribution that a layer answers for."""
    return draw if found.longest is None else ShortSequences(draw, found.longest)


def _check_memory(dim: int, options: ExtractionOptions) -> None:
    """Refuse an extraction whose arrays this machine cannot hold, before anything is asked."""
    memory = machine_memory()
    for what, value, needed in (
        ("dim", dim, 8 * MATRICES * dim**2),
        ("verify", options.verify, 8 * VERIFIED * options.verify * dim),
    ):
        if memory is not None and needed > memory:
            sizes = f"{needed / 1e9:.3g} GB, and this machine has {memory / 1e9:.3g} GB"
            raise UsageError(f"{what}={value}: the extraction would hold {sizes}; give less, or use a larger machine")
