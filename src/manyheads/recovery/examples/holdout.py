"""Holdout: errors of a learned layer on examples that no fit has seen.

Labels without noise leave nothing, so that each unseen sequence is a test. Labels with noise leave the noise, about
whose tails nothing is assumed: then the *mean* over the unseen sequences decides, and the bound on a single one is what
follows from it, n times the mean that is allowed.

Two tokens can leave signs open. With a_1 = sigmoid(l) the weight of the first token and l the difference of two logits,
a head adds a_1 x_1 W + (1 - a_1) x_2 W to a row; turned, with -Theta, -beta and -W, it adds the same minus (x_1 + x_2)
W. A set of heads may therefore be turned together wherever its projections sum to zero, and nobody can tell; beside
a head whose logits are constant, which takes up (x_1 + x_2) W, every set may.

Derived here.
"""

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.recovery.examples.student import free_numbers
from manyheads.recovery.fit.variable_projection import Examples, stack_theta
from manyheads.recovery.layers.evaluation import relative_error, sequence_errors
from manyheads.recovery.result.certificates import Certificate, state_errors

EXACT = 1e-10  # relative squared error of labels without noise: float32 labels leave some 1e-14
LARGEST = 1e-6  # relative squared error of any sequence behind the certificate, where labels are exact
CHANCE = 5.0  # standard errors that are put down to chance: one in three million
ENUMERATED = 12  # heads up to which all sets are looked at


def error_of_noise(noise: float, examples: Examples, heads: int, held_out: Examples) -> float:
    """Return the relative squared error that noise leaves on held-out labels, and five of its standard errors.

    sigma^2 (1 + p / n) (1 + 5 sqrt(2 / n')) relative to the variance of the held-out labels, with p free numbers, n
    labels of the fit and n' held out.
    """
    each = examples.y[0].size
    grown = 1 + free_numbers(examples, heads) / (len(examples) * each)
    share = noise**2 * len(held_out) * each / held_out.power
    return float(share * grown * (1 + CHANCE * (2 / (len(held_out) * each)) ** 0.5))


def certify_examples(layer: AttentionLayer, unseen: Examples, confidence: float, wanted: float) -> Certificate:
    """State what sequences that no fit has seen prove: `manyheads.recovery.result.certificates`."""
    each = unseen.y[0].size
    size = unseen.power / (len(unseen) * each)
    relative = sequence_errors(layer, unseen) / each / size
    labels = "their labels as given" if wanted <= EXACT else "their labels as given, noise in them counted as error"
    tolerance = LARGEST if wanted <= EXACT else len(unseen) * wanted
    drawn = f"sequences drawn independently as the examples were, {labels}"
    return state_errors(relative, size, tolerance, drawn, confidence)


def drift_of_errors(layer: AttentionLayer, held_out: Examples, unseen: Examples) -> float:
    """Return by how much the mean error of unseen sequences exceeds that of held-out ones, in standard errors."""
    ours, theirs = (sequence_errors(layer, part) / part.y[0].size for part in (held_out, unseen))
    variance = 0.0
    for errors, part in ((ours, held_out), (theirs, unseen)):
        gaussian = 2 * ours.mean() ** 2 / part.y[0].size
        variance += max(gaussian, float(errors.var(ddof=1)) if len(errors) > 1 else 0.0) / len(errors)
    excess = float(theirs.mean() - ours.mean())
    return excess / variance**0.5 if variance > 0 else np.inf * np.sign(excess) if excess else 0.0


def note_undetermined(layer: AttentionLayer, train: Examples, unseen: Examples) -> tuple[str, ...]:
    """Say in words what the examples leave open about the heads, beside their order."""
    notes = []
    tokens = unseen.x.reshape(-1, unseen.dim) if len(unseen) * unseen.x.shape[1] > 4 * unseen.dim else train.x[:, 0]
    rank = int(np.linalg.matrix_rank(tokens))
    if rank < unseen.dim:
        notes.append(
            f"the tokens span {rank} of {unseen.dim} dimensions: what the layer does with the others was never seen"
        )
    heads = range(layer.heads)
    if unseen.x.shape[1] != 2 or layer.heads > ENUMERATED:
        return tuple(notes)
    both = unseen.x.sum(1)  # (n, d)
    covariance = both.T @ both
    error = relative_error(layer, unseen)
    # what the labels resolve: the error's share for each of p + 25 numbers (25: five standard deviations)
    limit = max(EXACT, error * (free_numbers(train, layer.heads) + 25) / train.y.size)
    theta = stack_theta(layer)
    sums = np.linalg.norm(theta[:, None] + theta, axis=(2, 3))  # that of a head with itself is twice its size
    if layer.heads > 1 and sums.min() <= max(EXACT, error) ** 0.5 * sums.max():
        first, second = sorted(map(int, np.unravel_index(sums.argmin(), sums.shape)))
        what = (
            f"head {first} has constant logits" if first == second else f"heads {first}, {second} have opposite Theta"
        )
        notes.append(
            f"sequences of two tokens leave signs open: {what}, so that any head may change the signs of Theta and W"
        )
    for chosen in range(1, 2**layer.heads):
        turned = [head for head in heads if chosen >> head & 1]
        total = np.asarray(layer.projection, np.float64)[turned].sum(0)
        if 2 * np.sum((covariance @ total) * total) <= limit * unseen.power:  # both rows change alike
            which = ", ".join(map(str, turned))
            what = f"heads {which} may change the signs of Theta, key bias and W together, since their projections sum"
            notes.append(f"two tokens leave a sign open: {what} to less than these labels resolve")
    return tuple(notes)
