"""Interpolated n-gram model: the baseline of character models."""

import numpy as np

from manyheads._arrays import as_integers, takes_arrays
from manyheads._extras import Float, Integer
from manyheads.errors import UsageError


@takes_arrays
def ngram_losses(
    train: "Integer[np.ndarray, ' n']", validation: "Integer[np.ndarray, ' m']", vocabulary: int, context: int
) -> "Float[np.ndarray, ' predicted']":
    r"""Loss of an interpolated n-gram model on every token, in nats: counts on one text, tested on another.

    With :math:`n(h,w)` the count of token :math:`w` after the context :math:`h`, :math:`n(h)` their sum and
    :math:`t(h)` the number of different tokens seen after :math:`h`, each order is mixed with the next shorter context
    :math:`h'`,

    .. math:: p(w \mid h) = \frac{n(h,w) + t(h)\, p(w \mid h')}{n(h) + t(h)},

    down to the uniform distribution (Witten and Bell, *The zero-frequency problem*, IEEE Transactions on Information
    Theory 37, 1991, method C).

    The prediction sees `context` tokens: 0 gives frequencies only. The losses are those of every token of `validation`
    (m,) that has a whole context before it, (m - context,).

    Raises `UsageError`: a text too short for the context, a token outside the vocabulary, or contexts that are too many
    to number.

    Examples
    --------
    >>> ngram_losses(np.array([0, 1, 0, 1]), np.array([0, 1, 0]), 2, context=1).round(3).tolist()
    [0.182, 0.288]
    """
    train, validation = as_integers(train, "train"), as_integers(validation, "validation")
    for name, tokens in (("train", train), ("validation", validation)):
        if len(tokens) <= context:
            raise UsageError(f"{name} holds {len(tokens)} tokens: a context of {context} needs more")
        if tokens.min() < 0 or tokens.max() >= vocabulary:
            raise UsageError(f"{name} holds tokens outside 0 to {vocabulary - 1}")
    if vocabulary ** (context + 1) > np.iinfo(np.int64).max:
        raise UsageError(f"{vocabulary} tokens in contexts of {context} are too many to number: shorten the context")
    probability = np.full(len(validation) - context, 1 / vocabulary)
    for order in range(context + 1):
        seen, wanted = (_codes(tokens, order, vocabulary) for tokens in (train, validation[context - order :]))
        pairs, pair_counts = np.unique(seen, return_counts=True)
        contexts, first = np.unique(pairs // vocabulary, return_index=True)
        totals = np.add.reduceat(pair_counts, first)  # n(h)
        kinds = np.diff(np.append(first, len(pairs)))  # t(h)
        together = _lookup(pairs, pair_counts, wanted)
        total, kind = (_lookup(contexts, values, wanted // vocabulary) for values in (totals, kinds))
        mixed = (together + kind * probability) / np.maximum(total + kind, 1)
        probability = np.where(total > 0, mixed, probability)
    return -np.log(probability)


def _codes(tokens: np.ndarray, order: int, vocabulary: int) -> np.ndarray:
    """Turn every run of `order` + 1 tokens into a number, the last token in the lowest place."""
    powers = vocabulary ** np.arange(order, -1, -1, dtype=np.int64)
    return np.lib.stride_tricks.sliding_window_view(tokens, order + 1) @ powers


def _lookup(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return the value of each wanted key, zero for a key that is not there; `keys` are sorted."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
