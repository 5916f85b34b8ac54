"""Methods of extraction: the choice for an oracle, the order of attempts, and numerical failures as refusals."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from manyheads._overview import distinct_texts
from manyheads.errors import ManyheadsError
from manyheads.recovery._types import Generator
from manyheads.recovery.oracle.noise_estimate import OracleNoise
from manyheads.recovery.oracle.oracle import Oracle, OracleSettings
from manyheads.recovery.queries.bounded.method import extract_bounded
from manyheads.recovery.queries.effort import ACCURATE, BASED, BOUNDED, PROBES, SPARING, Effort
from manyheads.recovery.queries.nets.sigmoid_network import EXACT
from manyheads.recovery.queries.options import ExtractionOptions
from manyheads.recovery.queries.rotary.method import extract_rotary, extract_rotary_on_sphere
from manyheads.recovery.queries.scores.method import extract_scores
from manyheads.recovery.queries.scores.normalized import extract_scores_behind_norm
from manyheads.recovery.queries.subspaces.method import extract_by_subspaces, extract_on_sphere
from manyheads.recovery.queries.vocabulary.method import check_vocabulary, extract_from_vocabulary
from manyheads.recovery.refusals import FitError, LimitError, NotALayer, RecoveryRefused
from manyheads.recovery.result.results import Extracted

# Tolerance from which, and noise up to which, single precision is met by `probes`. On a trained GPT-2 its
# certificates state 4e-6 to 3e-3, for a sixth of the calls of the bounded method (row `trained-probes`).
LOOSE, ROUNDED = 1e-2, 1e-6
SINGLE = 3e-8  # noise of sines and cosines that were rounded to float32, whatever the rest is computed in
# Largest dimension at which a layer that has no room for disjoint output spaces is tried with O(d^2) calls unasked
WIDEST = 256


@dataclass(frozen=True)
class Attempt:
    """One run of one method, and when it is made."""

    # What is run
    method: str
    accurate: bool
    reason: str  # why this method
    # "unverified": where an earlier one found a layer that failed on fresh sequences; "ranks": where one was refused
    # because the output spaces of the heads are not disjoint; "refused": where all earlier ones were refused
    after: Literal["always", "unverified", "ranks", "refused"] = "always"
    noise: float = 0.0  # least noise that the method assumes
    guess: bool = False  # whether what it finds counts only if it is right


def settle(settings: OracleSettings, options: ExtractionOptions, measured: OracleNoise) -> OracleSettings:
    """Return the settings of the oracle with what was found out; refuse what contradicts the options."""
    if options.causal not in (None, measured.causal):
        found, said = (("", "not "), ("not ", ""))[not measured.causal]
        what = f"the layer is {found}causal, and was said {said}to be: say causal={measured.causal}, or None"
        raise NotALayer(what, measured.causal, not measured.causal)
    if measured.positional and not (options.rotary or options.scores):
        what = "exchanging two earlier tokens changes the last row: positions, or more than one layer. Say rotary=True "
        what += "of rotated queries and keys, scores=True of other scores; take positions out that are added to tokens"
        raise NotALayer(what, measured.order, 10 * measured.level)
    return dataclasses.replace(settings, causal=measured.causal, pad=settings.pad and measured.causal)


def check_limits(oracle: Oracle, options: ExtractionOptions) -> None:
    """Refuse limits within which nothing can be extracted, before anything is asked."""
    limits = options.limits
    if limits.vocabulary is not None:
        check_vocabulary(limits.vocabulary, oracle.dim)
        if options.rotary or options.scores or options.normalized:
            raise LimitError("a vocabulary with rotary positions or a norm in front: give the function without them")
    if oracle.longest < 3 <= limits.longest:
        what = f"lengths from {limits.min_length} to {limits.max_length}: three tokens, repeated, have none in between"
        raise LimitError(f"{what}. If it is causal and shows all rows, say causal=True: then sequences are padded")
    if limits.longest < 3:
        raise LimitError(f"max_length={limits.max_length}: sequences of three tokens are needed; two leave signs open")
    if (options.rotary or options.scores) and limits.last_row and limits.min_length > 1:
        what = "behind positions shorter sequences cannot be lengthened; extract where all rows are answered"
        raise LimitError(f"min_length={limits.min_length} with last_row: {what}")


# Tokens of the longest sequence, and units sqrt(d) of the largest norm, that a method cannot do without
ROOM: Mapping[str, tuple[int, float]] = MappingProxyType(
    {"sphere": (10, 2.0), "rotary": (33, np.inf), "rotary-sphere": (16, 2.0)}
    | {"scores": (33, 3.0), "scores-sphere": (33, 2.0), "vocabulary": (8, 0.0)}
)


def check_room(method: str, oracle: Oracle) -> None:
    """Refuse limits within which a method cannot work, before it begins."""
    length, norm = ROOM.get(method, (3, 0.0))
    limits = oracle.limits
    if oracle.longest < length:
        what = f"method {method!r} asks sequences of {length} tokens and more, and the server takes {limits.max_length}"
        raise LimitError(what)
    if limits.reach < norm * np.sqrt(oracle.dim):
        needed = "of any norm" if norm == np.inf else f"of norm {norm * np.sqrt(oracle.dim):.3g}"
        raise LimitError(f"method {method!r} asks tokens {needed}, and the server takes {limits.max_norm:g}")


def plan_attempts(method: str, level: float, measured: OracleNoise, options: ExtractionOptions) -> list[Attempt]:
    """Return what is tried, in this order: the method with several seeds, then what may still help."""
    if method == "auto":
        method, reason = _choose(level, measured, options)
    else:
        reason = "asked for"
    plan = [Attempt(method, options.accurate, reason)] * options.tries
    if (options.rotary or options.scores) and not measured.positional and reason != "asked for":
        plain, _ = _choose(level, measured, dataclasses.replace(options, rotary=False, scores=False))
        reason = "exchanging earlier tokens changes no answer, so that scores may be plain"
        plan.insert(0, Attempt(plain, options.accurate, reason, guess=True))
    if not options.accurate:
        plan.append(Attempt(method, True, "more calls for more digits", "unverified"))
    if method.startswith("rotary") and level < SINGLE:
        reason = "positions that were turned in single precision"
        plan.append(Attempt(method, True, reason, "refused", SINGLE))
    if method.startswith("scores") and not options.accurate:
        plan.append(Attempt(method, True, "more calls for more digits", "refused"))
    if method == "rotary" or (method == "rotary-sphere" and not options.mlp):
        other = method.replace("rotary", "scores")
        plan.append(Attempt(other, options.accurate, f"any score, as {method} refused", "refused"))
    if method == "probes" and reason != "asked for":
        reason = "heads could not be followed from probe to probe"
        plan += [Attempt("bounded", options.accurate, reason, after) for after in ("unverified", "refused")]
    if method == "subspaces" and reason != "asked for" and measured.dim <= WIDEST:
        plan.append(Attempt("bounded", True, "the output spaces of the heads are not disjoint", "ranks"))
    return plan


def _choose(level: float, measured: OracleNoise, options: ExtractionOptions) -> tuple[str, str]:
    if options.limits.vocabulary is not None:
        return "vocabulary", "the server takes the tokens of a vocabulary alone"
    normalized = measured.normalized if options.normalized is None else options.normalized
    kind = "scores" if options.scores else "rotary" if options.rotary else ""
    if normalized:
        also = {"scores": ", and its scores are others than rotary ones", "": ""}
        also["rotary"] = ", and turns queries and keys by their positions"
        return f"{kind}-sphere".strip("-"), f"the function normalizes its tokens{also[kind]}"
    if kind:
        said = "the attention scores are said to be others than plain or rotary ones"
        return kind, said if options.scores else "queries and keys are turned by their positions"
    noise, exact, rounded = distinct_texts(level, EXACT, ROUNDED, digits=1)
    if level <= EXACT:
        return "subspaces", f"the relative noise {noise} is at most {exact}"
    if level <= ROUNDED and options.tolerance >= LOOSE:
        return "probes", f"the relative noise {noise} is at most {rounded}, and the tolerance at least {LOOSE:g}"
    return "bounded", f"the relative noise {noise} is above {exact}"


# run(oracle, noise, rng, accurate) asks the oracle, whose answers have the relative error `noise`, and returns a layer
# that is not yet verified, with the figures of its stages; it raises `RecoveryRefused`.
Runner = Callable[[Oracle, float, Generator, bool], Extracted]


def _runner(
    extract: Callable[[Oracle, float, Generator, Effort], Extracted], sparing: Effort, accurate: Effort
) -> Runner:
    """Return an extractor with its effort for few calls and for many digits."""
    return lambda oracle, noise, rng, many: extract(oracle, noise, rng, accurate if many else sparing)


METHODS: Mapping[str, Runner] = MappingProxyType(
    {
        "subspaces": _runner(extract_by_subspaces, SPARING, ACCURATE),
        "probes": _runner(extract_by_subspaces, PROBES, dataclasses.replace(PROBES, sketch=12.0)),
        "bounded": _runner(extract_bounded, BOUNDED, dataclasses.replace(BOUNDED, queries=3.0, tries=24)),
        "sphere": _runner(extract_on_sphere, BASED, dataclasses.replace(ACCURATE, extra=10)),
        "rotary": _runner(extract_rotary, SPARING, ACCURATE),
        "scores": _runner(extract_scores, SPARING, ACCURATE),
        "scores-sphere": _runner(extract_scores_behind_norm, SPARING, ACCURATE),
        "vocabulary": _runner(extract_from_vocabulary, BASED, dataclasses.replace(ACCURATE, extra=12)),
        "rotary-sphere": _runner(extract_rotary_on_sphere, SPARING, ACCURATE),
    }
)


def run_method(attempt: Attempt, oracle: Oracle, level: float, rng: Generator) -> Extracted:
    """Run a method, and convert numerical failures to `FitError`."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of what is checked below
            found = METHODS[attempt.method](oracle, max(level, attempt.noise), rng, attempt.accurate)
    except ManyheadsError:
        raise
    except (np.linalg.LinAlgError, ArithmeticError, ValueError) as error:
        # SciPy says by ValueError, in several wordings, that it was handed NaN; any other is a mistake of ours.
        arithmetic = isinstance(error, np.linalg.LinAlgError | ArithmeticError)
        if not arithmetic and not any(word in str(error).lower() for word in ("nan", "inf", "numeric")):
            raise
        raise _not_finite(attempt, error) from error
    # what a layer holds besides (forms of other offsets) shows in its predictions
    parts = (getattr(found.layer, name, None) for name in ("theta", "projection", "key_bias", "bias"))
    if not all(np.isfinite(np.asarray(part)).all() for part in parts if part is not None):
        raise _not_finite(attempt, "the layer found has weights that are not finite")
    return found


def _not_finite(attempt: Attempt, error: Any) -> RecoveryRefused:
    what = f"arithmetic of method {attempt.method!r} broke down ({error}): answers fit no such layer, or are too noisy"
    return FitError(what, np.inf, 1.0)
