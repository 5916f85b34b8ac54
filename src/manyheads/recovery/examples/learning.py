"""Learning of a layer from examples (x, y), by the student or in six stages, verified on held-out examples.

The **student** is the default, because it wins where both were compared: in `recovery/violations`, on layers of two
heads that break one assumption of the theory each and on ones that break none, it finds the function of every layer but
the parity layer, from a fifth of the sequences that the six stages are given, some of which they refuse. The rows that
the stages live on, in which all heads agree, become rare with every further head (`recovery/acceptance`). What they
have that the student has not: sums over examples that need not be in one place, and a theorem.

Both are judged by sequences that neither has seen (`manyheads.recovery.examples.holdout`), and what those say is the
certificate.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from manyheads._arrays import takes_arrays
from manyheads._constraints import Constraint, check_fields, constrained
from manyheads._extras import Num
from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError, check_integer
from manyheads.recovery._types import Generator
from manyheads.recovery.examples import holdout
from manyheads.recovery.examples.head_count import eliminate_heads, fit_until_flat, fit_wanted, note_count
from manyheads.recovery.examples.six_stages import LITERAL, StageSettings, learn_in_six_stages
from manyheads.recovery.examples.stages.shards import list_shards, load_shard, open_shards
from manyheads.recovery.examples.student import ENOUGH, Fit, StudentSettings, fit_student, free_numbers
from manyheads.recovery.fit.gauss_newton import as_examples
from manyheads.recovery.fit.variable_projection import Examples, Form
from manyheads.recovery.layers.evaluation import relative_error
from manyheads.recovery.refusals import NoFit, check_positive
from manyheads.recovery.result.certificates import Certificate
from manyheads.recovery.result.results import HeadAccuracy, Recovery, Stage, StageLog, head_accuracies, note_unresolved

Method = Literal["student", "six-stage"]
SLIGHT = 1e-6  # share of the noise that a further step of the refinement must be worth
FIGURES = ("train_error", "held_out_error", "restarts", "evaluations", "products")  # of a fit, in the report
ACCURACY = 200  # sequences on which the contributions of heads are compared
CEILING = 0.5  # share of the labels that noise of unknown size may be


@dataclass(frozen=True)
class LearningOptions:
    """Known properties of the layer and of its labels, and their use.

    Parameters
    ----------
    key_bias, bias, causal
        Whether the layer has a key bias, an output bias, and a causal mask. Student only.
    noise
        Standard deviation of independent noise in the labels. 0 for none; "estimate" to take for noise what no further
        head explains, which must be less than half of the labels.
    tolerance
        Mean relative squared error that the answer must reach, on held-out sequences and on those of the certificate.
        None: 1e-10, or what `noise` leaves, (1 + numbers / labels) times its share, and five standard errors of that.
    most_heads
        Largest number of heads that is tried when it is not given.
    held_out
        Share of the sequences that choose the number of heads and the start, and share that nothing sees but the
        certificate; at most 2000 each.
    confidence
        Of the certificate.
    student
        How hard the student tries.
    stages
        Forms and sizes of the six stages: `StageSettings`, "published" for the forms of Chen and Li, None for the
        default.
    executor
        Works on the shards of the six stages: any `concurrent.futures.Executor`.
    """

    key_bias: bool = False
    bias: bool = False
    causal: bool = False
    noise: float | Literal["estimate"] = 0.0
    tolerance: float | None = None
    most_heads: int = constrained(12, Constraint(least=1))
    held_out: float = constrained(0.1, Constraint(above=0, most=0.4))
    confidence: float = constrained(1 - 1e-4, Constraint(above=0, below=1))
    student: StudentSettings = field(default_factory=StudentSettings)
    stages: StageSettings | Literal["published"] | None = None
    executor: Executor | None = None

    def __post_init__(self) -> None:
        if self.noise != "estimate" and not (isinstance(self.noise, float | int) and 0 <= self.noise < np.inf):
            raise UsageError(f"noise={self.noise!r}: a standard deviation, 0 for none, or 'estimate'")
        check_fields(self)
        check_positive(self, "tolerance", none="rounding, or the noise")  # infinite allows any
        if isinstance(self.stages, str) and self.stages != "published":
            raise UsageError(f"stages={self.stages!r}: give StageSettings, 'published', or None")

    @property
    def form(self) -> Form:
        """Parts of the layer besides Theta and W."""
        return Form(self.key_bias, self.bias, self.causal)


@takes_arrays
def learn_layer(
    x: Num[ArrayLike, "n k d"] | Iterable[Any],
    y: Num[ArrayLike, "n k d"] | None = None,
    heads: int | None = None,
    *,
    method: Method = "student",
    seed: int = 0,
    options: LearningOptions | None = None,
) -> Recovery:
    """Learn a multi-head attention layer from sequences and what the layer made of them.

    Parameters
    ----------
    x, y
        Sequences and labels, (n, k, d), real numbers of any dtype, used in float64; or x alone: an iterable of shards,
        each a pair (x, y) or a function that returns one. The student reads all shards into memory.
    heads
        Number of heads, at most; None to find it. Heads that held-out sequences do not tell from none, or two of one
        Theta, are dropped or merged, which a note says.
    method
        "student", or "six-stage" for the learner of Chen and Li.
    seed
        Draws the split of the examples, the starts and the samples; not negative.
    options
        What is known of the layer and of the noise.

    Returns
    -------
    Recovery. Its certificate is about sequences drawn as the examples were, and counts noise in the labels as error;
    where labels are noisy, what decided is the mean error, on sequences that chose nothing. Its `notes` say what such
    examples leave open however many there are: common signs of heads whose projections sum to zero, where sequences
    have two tokens, and directions that no token has.

    Raises
    ------
    ShapeError, UsageError
        Arrays that are not (n, k, d), differ, hold NaN or are zero; sequences of one token; fewer labels than the
        unknowns need; a bias or a causal mask asked of the six stages.
    NoFit
        No number of heads reaches the tolerance; the best fit is the error's `result`.
    RecoveryRefused
        The other refusals of the six stages.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.recovery import learn_layer, planted_layer, sequences
    >>> rng = np.random.default_rng(0)
    >>> layer, x = planted_layer(rng, dim=4, heads=2), sequences(rng, 600, 3, 4)
    >>> found = learn_layer(x, layer(x))
    >>> found.heads, found.certificate.largest_error < 1e-24
    (2, True)

    A function of another kind, here one that knows positions, is refused:

    >>> learn_layer(x, x[:, ::-1], options=LearningOptions(most_heads=1))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    manyheads.recovery.refusals.NoFit: no layer with 1 head explains ...

    References
    ----------
    S. Chen, Y. Li, "Provably learning a multi-head attention layer", arXiv 2402.04084: the six stages. The comparison
    with the student is measured here (`manyheads study run recovery/passive-against-queries`, `make bench
    NAME=recovery`).
    """
    options = LearningOptions() if options is None else options
    if not isinstance(options, LearningOptions):
        raise UsageError(f"options of type {type(options).__name__}: expected LearningOptions")
    if method not in get_args(Method):
        raise UsageError(f"method={method!r}: expected one of {', '.join(get_args(Method))}")
    heads = None if heads is None else check_integer("heads", heads)
    check_integer("seed", seed, 0)
    if method == "six-stage":
        _check_form(options)
    split, draws = np.random.default_rng(seed).spawn(2)
    shards = list_shards(x) if y is None else ((x, y),)
    if method == "six-stage":
        return _in_six_stages(shards, heads, options, draws)
    examples = as_examples(*_gather(shards), options.form)
    if examples.x.shape[1] < 2:
        raise UsageError("sequences of one token: attention shows with two or more")
    parts = _split(examples, options.held_out, split)
    counts = _affordable(parts[0], heads, options)
    return _by_student(parts, counts, options, draws)


def _by_student(
    parts: tuple[Examples, Examples, Examples], counts: range, options: LearningOptions, rng: Generator
) -> Recovery:
    train, held_out, unseen = parts
    student = options.student
    if options.noise:  # what is not worth the noise is not worth the time
        gain, inner = max(student.refinement.gain, SLIGHT), min(student.refinement.inner, 100)
        student = replace(student, refinement=replace(student.refinement, gain=gain, inner=inner))
    if options.noise == "estimate" and options.tolerance is None:
        wanted = CEILING
        few = replace(student, restarts=min(2, student.restarts))
        fits = fit_until_flat(train, held_out, counts, rng, settings=few)
    else:
        noise = 0.0 if options.noise == "estimate" else float(options.noise)
        wanted = options.tolerance or max(holdout.EXACT, holdout.error_of_noise(noise, train, counts[-1], held_out))
        if len(counts) == 1:
            fits = [fit_student(train, held_out, counts[0], rng, wanted=wanted, settings=student)]
        else:
            fits = fit_wanted(train, held_out, counts, rng, wanted=wanted, settings=student)
    found, log = fits[-1], StageLog()
    count: tuple[str, ...] = ()
    if found.held_out_error <= wanted:
        reduced = eliminate_heads(found.layer, train, held_out, log, student.refinement)
        count = note_count(reduced, found.heads)
        found = replace(found, layer=reduced.layer, held_out_error=reduced.error)
    certificate = holdout.certify_examples(found.layer, unseen, options.confidence, wanted)
    accuracies = _accuracies(found.layer, unseen, certificate)
    notes = (
        count + holdout.note_undetermined(found.layer, train, unseen) + note_unresolved(accuracies, bool(log.stages))
    )
    stages = (*map(_stage, fits), *log.stages)
    result = Recovery(found.layer, certificate, stages, "student", notes=notes, head_accuracy=accuracies)
    if found.held_out_error > wanted or not certificate.accepted:
        raise _refuse(counts, found, wanted, held_out, result)
    _check_unseen(result, parts, options, wanted)
    return result


def _accuracies(layer: AttentionLayer, unseen: Examples, certificate: Certificate) -> tuple[HeadAccuracy, ...]:
    return head_accuracies(layer, [unseen.x[:ACCURACY]], certificate.largest_error, certificate.variance)


def _check_unseen(
    result: Recovery, parts: tuple[Examples, Examples, Examples], options: LearningOptions, wanted: float
) -> None:
    """Refuse a layer whose mean error is larger on sequences that chose nothing than chance allows."""
    train, held_out, unseen = parts
    if wanted <= holdout.EXACT:
        return  # each of the sequences has passed
    if options.noise == "estimate" and options.tolerance is None:
        measured, threshold = holdout.drift_of_errors(result.layer, held_out, unseen), holdout.CHANCE
        what = "is larger than on those that chose the number of heads, in standard errors"
    else:
        threshold = options.tolerance or holdout.error_of_noise(float(options.noise), train, result.heads, unseen)
        measured, what = relative_error(result.layer, unseen), "is larger than the tolerance"
    if measured > threshold:
        raise NoFit(f"mean error on {len(unseen)} unseen sequences {what}: add examples", measured, threshold, result)


def _refuse(counts: range, best: Fit, wanted: float, held_out: Examples, result: Recovery) -> NoFit:
    size = (held_out.power / held_out.y.size) ** 0.5
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    noise = f"noise= (up to {size * best.held_out_error**0.5:.2g} would explain this) or noise='estimate'"
    what = f"no layer with {number} head{'s' if counts[-1] > 1 else ''} explains the held-out examples; the best has "
    what += (
        f"{best.heads}. Check key_bias, bias and causal; give more heads or examples; if labels are noisy, say {noise}"
    )
    return NoFit(what, best.held_out_error, wanted, result)


def _stage(fit: Fit) -> Stage:
    figures = {name: getattr(fit, name) for name in FIGURES}
    return Stage(f"{fit.heads} head{'s' if fit.heads > 1 else ''}", figures, fit.seconds)


def _split(examples: Examples, share: float, rng: Generator) -> tuple[Examples, Examples, Examples]:
    """Return examples to fit, to choose by, and for the certificate."""
    held = min(2000, int(share * len(examples)))
    if held < 2:
        raise UsageError(f"{len(examples)} sequences: too few to hold out {share:.0%} for the number of heads")
    order = rng.permutation(len(examples))
    places = order[2 * held :], order[:held], order[held : 2 * held]
    fitted, chosen, unseen = (examples.take(np.sort(part)) for part in places)
    if not all(part.power for part in (fitted, chosen, unseen)):
        raise UsageError("nearly all labels are the same: there is nothing to fit")
    return fitted, chosen, unseen


def _affordable(train: Examples, heads: int | None, options: LearningOptions) -> range:
    """Return the numbers of heads to try, all of which the labels suffice for."""
    labels = train.y.size
    wanted = range(heads, heads + 1) if heads else range(1, options.most_heads + 1)
    enough = [count for count in wanted if labels >= ENOUGH * free_numbers(train, count)]
    if not enough:
        unknowns = free_numbers(train, wanted[0])
        needed = int(np.ceil(ENOUGH * unknowns / train.y[0].size / (1 - 2 * options.held_out))) + 2
        sizes = f"{len(train)} sequences to fit hold {labels} numbers, and {wanted[0]} heads have {unknowns}"
        remedy = f"give {needed} sequences or more, held-out ones included"
        raise UsageError(f"{sizes}: a fit needs {ENOUGH:g} numbers for each, so {remedy}")
    return range(enough[0], enough[-1] + 1)


def _gather(shards: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return all shards as one pair of arrays."""
    pairs = [load_shard(shard, place) for place, shard in enumerate(shards)]
    if len(pairs) == 1:
        return pairs[0]
    for pair in pairs:
        as_examples(*pair)  # says which shapes do not fit
    try:
        x, y = (np.concatenate([np.asarray(pair[side]) for pair in pairs]) for side in (0, 1))
    except ValueError as error:
        raise UsageError(f"shards of shapes {[np.shape(pair[0]) for pair in pairs]} are not of one kind") from error
    return x, y


def _check_form(options: LearningOptions) -> None:
    """Refuse parts of a layer that the six stages do not know, by name and before anything is loaded."""
    asked = [name for name, there in options.form._asdict().items() if there]
    if asked:
        what = f"{', '.join(asked)}: the six stages know neither biases nor causal masks; method='student' does"
        raise UsageError(what)
    if options.noise == "estimate":
        raise UsageError("noise='estimate' is the student's; the six stages want a standard deviation")


def _in_six_stages(shards: tuple[Any, ...], heads: int | None, options: LearningOptions, rng: Generator) -> Recovery:
    settings = options.stages
    if not isinstance(settings, StageSettings):
        settings = replace(StageSettings() if settings is None else LITERAL, most_heads=options.most_heads)
    noise, tolerance = float(options.noise) or settings.noise, options.tolerance
    settings = replace(settings, noise=noise, tolerance=settings.tolerance if tolerance is None else tolerance)
    data = open_shards(shards, options.executor)
    count = min(2000, int(options.held_out * data.count))
    if count < 1:
        raise UsageError(f"{data.count} sequences: too few to hold some out for the certificate")
    unseen = as_examples(*data.take(np.arange(data.count - count, data.count)))
    found = learn_in_six_stages(data.without_last(count), heads, settings=settings, rng=rng)
    wanted = float(found.certificate["threshold"])
    certificate = holdout.certify_examples(found.layer, unseen, options.confidence, wanted)
    accuracies = _accuracies(found.layer, unseen, certificate)
    notes = found.notes + holdout.note_undetermined(found.layer, unseen, unseen) + note_unresolved(accuracies)
    result = replace(found, certificate=certificate, notes=notes, head_accuracy=accuracies)
    measured = relative_error(found.layer, unseen)
    if measured > max(wanted, holdout.EXACT) or not certificate.accepted:
        raise NoFit(f"the error on {count} unseen sequences is too large: give more examples", measured, wanted, result)
    return result
