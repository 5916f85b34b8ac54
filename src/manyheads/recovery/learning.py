"""The front door of passive learning: a layer from examples (x, y), beside what is known of it.

The **student** is the default, because it wins. On layers that satisfy the assumptions of the theory, with up to four
heads, it gives the same answer as the six stages from 12 to 100 times fewer sequences and in a small part of the time;
beyond four heads the six stages need more sequences than one can have, and the student goes on. No layer is known that
the six stages learn and the student does not. What they have that it has not: sums over examples that need not be in
one place, a spectral gap that shows the number of heads, and a theorem.

Both are judged by sequences that neither has seen, and what those say is the certificate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from manyheads.errors import UsageError
from manyheads.recovery.certificates import Certificate, exceeding_share
from manyheads.recovery.head_count import fit_until_flat, fit_wanted
from manyheads.recovery.polishing import as_examples
from manyheads.recovery.refusals import NoFit
from manyheads.recovery.results import Recovery, Stage
from manyheads.recovery.student import ENOUGH, Fit, StudentSettings, fit_student, free_numbers, sequence_errors
from manyheads.recovery.tangents import Examples, Form

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from manyheads.recovery.stages.settings import StageSettings

Method = Literal["student", "six-stage"]
EXACT = 1e-10  # relative squared error of labels without noise: float32 labels leave some 1e-14
LARGEST = 1e-6  # relative squared error of any sequence behind the certificate, where labels are exact
SLIGHT = 1e-6  # share of the noise that a further step of a polish must be worth
CEILING = 0.5  # share of the labels that noise of unknown size may be


@dataclass(frozen=True)
class LearningOptions:
    """What is known of the layer and of its labels, and how they are used.

    Parameters
    ----------
    key_bias, bias, causal
        Whether the layer has a key bias, an output bias, and a causal mask. Student only.
    noise
        Standard deviation of independent noise in the labels. 0 for none; "estimate" to take for noise what no further
        head explains, which must be less than half of the labels.
    tolerance
        Relative squared error on held-out sequences that the answer must reach. None: 1e-10, or what `noise` leaves,
        (1 + numbers / labels) times its share, and five standard errors of that on the held-out sequences.
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
        Forms and sizes of the six stages; None for the default.
    executor
        Works on the shards of the six stages: any `concurrent.futures.Executor`.
    """

    key_bias: bool = False
    bias: bool = False
    causal: bool = False
    noise: float | Literal["estimate"] = 0.0
    tolerance: float | None = None
    most_heads: int = 12
    held_out: float = 0.1
    confidence: float = 1 - 1e-4
    student: StudentSettings = field(default_factory=StudentSettings)
    stages: StageSettings | None = None
    executor: Executor | None = None

    def __post_init__(self) -> None:
        if self.noise != "estimate" and not (isinstance(self.noise, float | int) and 0 <= self.noise < np.inf):
            raise UsageError(f"noise={self.noise!r}: a standard deviation, 0 for none, or 'estimate'")
        if self.tolerance is not None and not self.tolerance > 0:
            raise UsageError(f"tolerance={self.tolerance}: a positive relative squared error, or None")
        if not 0 < self.held_out <= 0.4 or not 0 < self.confidence < 1:
            raise UsageError(f"held_out={self.held_out}, confidence={self.confidence}: in (0, 0.4] and (0, 1)")
        if self.most_heads < 1:
            raise UsageError(f"most_heads={self.most_heads}: one or more")

    @property
    def form(self) -> Form:
        """Which parts the layer has besides Theta and W."""
        return Form(self.key_bias, self.bias, self.causal)


def learn_layer(
    x: ArrayLike | Iterable[Any],
    y: ArrayLike | None = None,
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
        Number of heads; None to find it.
    method
        "student", or "six-stage" for the learner of Chen and Li.
    seed
        Draws the split of the examples, the starts and the samples.
    options
        What is known of the layer and of the noise.

    Returns
    -------
    Recovery; its certificate is about sequences drawn as the examples were, and counts noise in the labels as error.

    Raises
    ------
    ShapeError, UsageError
        Arrays that are not (n, k, d), differ, hold NaN or are zero; fewer labels than the unknowns need.
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
    options = options or LearningOptions()
    if method not in get_args(Method):
        raise UsageError(f"method={method!r}: expected one of {', '.join(get_args(Method))}")
    if heads is not None and heads < 1:
        raise UsageError(f"heads={heads}: one or more, or None to find the number")
    split, draws = np.random.default_rng(seed).spawn(2)
    if method == "six-stage":
        return _in_six_stages(_as_shards(x, y), heads, options, draws)
    examples = as_examples(*_gather(x, y), options.form)
    parts = _split(examples, options.held_out, split)
    counts = _affordable(parts[0], heads, options)
    return _by_student(parts, counts, options, draws)


def error_of_noise(noise: float, examples: Examples, heads: int, held_out: Examples) -> float:
    """Return the relative squared error that noise leaves on held-out labels, and five of its standard errors.

    sigma^2 (1 + p / n) (1 + 5 sqrt(2 / n')) relative to the mean square of the held-out labels, with p free numbers, n
    labels of the fit and n' held out.
    """
    each = examples.y[0].size
    grown = 1 + free_numbers(examples, heads) / (len(examples) * each)
    share = noise**2 * len(held_out) * each / held_out.power
    return float(share * grown * (1 + 5 * (2 / (len(held_out) * each)) ** 0.5))


def certify_examples(layer_errors: np.ndarray, held: Examples, confidence: float, tolerance: float) -> Certificate:
    """State what errors of sequences that nothing has seen prove: `manyheads.recovery.certificates`."""
    each = held.y[0].size
    size = held.power / (len(held) * each)
    relative = layer_errors / each / size
    return Certificate(
        largest_error=float(relative.max()),
        median_error=float(np.median(relative)),
        exceeding=exceeding_share(len(held), confidence),
        confidence=confidence,
        sequences=len(held),
        tolerance=tolerance,
        mean_square=size,
        distribution="sequences drawn independently as the examples were, their labels as given",
    )


def _by_student(
    parts: tuple[Examples, Examples, Examples], counts: range, options: LearningOptions, rng: np.random.Generator
) -> Recovery:
    train, held_out, unseen = parts
    student = options.student
    if options.noise:  # what is not worth the noise is not worth the time
        few = replace(student.polish, gain=max(student.polish.gain, SLIGHT), inner=min(student.polish.inner, 100))
        student = replace(student, polish=few)
    if options.noise == "estimate" and options.tolerance is None:
        wanted = CEILING
        fits = fit_until_flat(
            train, held_out, counts, rng, settings=replace(student, restarts=min(2, student.restarts))
        )
    else:
        noise = 0.0 if options.noise == "estimate" else float(options.noise)
        wanted = options.tolerance or max(EXACT, error_of_noise(noise, train, counts[-1], held_out))
        if len(counts) == 1:
            fits = [fit_student(train, held_out, counts[0], rng, wanted=wanted, settings=student)]
        else:
            fits = fit_wanted(train, held_out, counts, rng, wanted=wanted, settings=student)
    found = fits[-1]
    allowed = LARGEST if wanted <= EXACT else np.inf  # of one sequence; where there is noise, its mean has decided
    certificate = certify_examples(sequence_errors(found.layer, unseen), unseen, options.confidence, allowed)
    result = Recovery(found.layer, certificate, tuple(map(_stage, fits)), "student")
    if found.held_out_error > wanted or not certificate.accepted:
        raise _refuse(counts, found, wanted, held_out, result)
    return result


def _refuse(counts: range, best: Fit, wanted: float, held_out: Examples, result: Recovery) -> NoFit:
    size = (held_out.power / held_out.y.size) ** 0.5
    number = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return NoFit(
        f"no layer with {number} head{'s' if counts[-1] > 1 else ''} explains the held-out examples; the best has "
        f"{best.heads}. Check key_bias, bias and causal; give more heads, examples or restarts; if labels are noisy, "
        f"say noise= (up to {size * best.held_out_error**0.5:.2g} would explain this) or noise='estimate'",
        measured=best.held_out_error,
        threshold=wanted,
        result=result,
    )


def _stage(fit: Fit) -> Stage:
    figures = {
        "train_error": fit.train_error,
        "held_out_error": fit.held_out_error,
        "restarts": fit.restarts,
        "evaluations": fit.evaluations,
        "products": fit.products,
    }
    return Stage(f"{fit.heads} head{'s' if fit.heads > 1 else ''}", figures, fit.seconds)


def _split(examples: Examples, share: float, rng: np.random.Generator) -> tuple[Examples, Examples, Examples]:
    """Return examples to fit, to choose by, and for the certificate."""
    held = min(2000, int(share * len(examples)))
    if held < 2:
        raise UsageError(f"{len(examples)} sequences: too few to hold out {share:.0%} for the number of heads")
    order = rng.permutation(len(examples))
    places = order[2 * held :], order[:held], order[held : 2 * held]
    fitted, chosen, unseen = (examples.take(np.sort(part)) for part in places)
    for part in (fitted, chosen, unseen):
        if part.power == 0:
            raise UsageError("nearly all labels are zero: there is nothing to fit")
    return fitted, chosen, unseen


def _affordable(train: Examples, heads: int | None, options: LearningOptions) -> range:
    """Return the numbers of heads to try, all of which the labels suffice for."""
    labels = train.y.size
    wanted = range(heads, heads + 1) if heads else range(1, options.most_heads + 1)
    enough = [count for count in wanted if labels >= ENOUGH * free_numbers(train, count)]
    if not enough:
        unknowns = free_numbers(train, wanted[0])
        needed = int(np.ceil(ENOUGH * unknowns / train.y[0].size / (1 - 2 * options.held_out))) + 2
        raise UsageError(
            f"{len(train)} sequences to fit hold {labels} numbers, and {wanted[0]} heads have {unknowns}: a fit needs "
            f"{ENOUGH:g} numbers for each, so give {needed} sequences or more, held-out ones included"
        )
    return range(enough[0], enough[-1] + 1)


def _gather(x: Any, y: Any) -> tuple[Any, Any]:
    """Return all shards as one pair of arrays."""
    if y is not None:
        return x, y
    pairs = [shard() if callable(shard) else shard for shard in _as_shards(x, None)]
    for pair in pairs:
        as_examples(*pair)  # says which shapes do not fit
    try:
        return tuple(np.concatenate([np.asarray(pair[side]) for pair in pairs]) for side in (0, 1))  # type: ignore[return-value]
    except ValueError as error:
        raise UsageError(f"shards of shapes {[np.shape(pair[0]) for pair in pairs]} are not of one kind") from error


def _as_shards(x: Any, y: Any) -> list[Any]:
    if y is not None:
        return [(x, y)]
    if isinstance(x, np.ndarray):
        raise UsageError("x without y: give both, or an iterable of shards (x, y)")
    shards = list(x)
    if not shards:
        raise UsageError("no shard: give x and y, or an iterable of shards (x, y)")
    return shards


def _in_six_stages(
    shards: list[Any], heads: int | None, options: LearningOptions, rng: np.random.Generator
) -> Recovery:
    from manyheads.recovery.six_stages import learn_in_six_stages
    from manyheads.recovery.stages.settings import StageSettings

    if any(options.form):
        raise UsageError("the six stages know neither biases nor a causal mask: method='student' does")
    settings = options.stages or StageSettings(most_heads=options.most_heads)
    if options.noise == "estimate":
        raise UsageError("noise='estimate' is the student's; the six stages want a standard deviation")
    settings = replace(settings, noise=float(options.noise) or settings.noise)
    if options.tolerance is not None:
        settings = replace(settings, tolerance=options.tolerance)
    *others, last = shards
    x, y = last() if callable(last) else last
    unseen = min(2000, int(options.held_out * len(x)))
    if unseen < 1:
        raise UsageError(f"{len(x)} sequences in the last shard: too few to hold some out for the certificate")
    held = as_examples(x[-unseen:], y[-unseen:])
    rest: Callable[[], Any] | tuple[Any, Any] = (
        partial(_all_but, last, unseen) if callable(last) else (x[:-unseen], y[:-unseen])
    )
    found = learn_in_six_stages([*others, rest], heads, settings=settings, rng=rng, executor=options.executor)
    certificate = certify_examples(sequence_errors(found.layer, held), held, options.confidence, np.inf)
    return replace(found, certificate=certificate)


def _all_but(shard: Callable[[], tuple[Any, Any]], count: int) -> tuple[Any, Any]:
    x, y = shard()
    return x[:-count], y[:-count]
