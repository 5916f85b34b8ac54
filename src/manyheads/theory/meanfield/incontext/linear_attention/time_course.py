"""Time course of training linear attention, predicted from the initial weights of either kind."""

from __future__ import annotations

from manyheads.theory.meanfield.incontext.linear_attention.heads import Heads, MergedHeads
from manyheads.theory.meanfield.incontext.linear_attention.merged_weights import SingleDrop, predict_single_drop
from manyheads.theory.meanfield.incontext.linear_attention.plateau_escape import Staircase, predict_staircase
from manyheads.theory.meanfield.incontext.linear_attention.regression import InContextRegression


def predict_drops(task: InContextRegression, heads: Heads) -> SingleDrop | Staircase:
    """Predict when the loss of linear attention drops under gradient flow.

    Parameters
    ----------
    task
        In-context linear regression.
    heads
        Initial weights, as `draw_heads` returns them: merged, or separate with rank-one keys and queries.

    Returns
    -------
    `half_times`, (D,), at which half of each eigenvector is learned, and `learned(times)`, (T, D), the share of its
    optimum that the circuit has reached; times are steps times learning rate.

    Raises
    ------
    UsageError
        Heads of another dimension, or separate heads of a rank above one.
    CertificateError
        Separate heads whose initialization is so large that drops overlap, or from which none grows.

    Examples
    --------
    >>> import jax
    >>> from manyheads.theory.meanfield import InContextRegression, predict_drops
    >>> from manyheads.theory.meanfield.incontext.linear_attention.heads import draw_heads
    >>> task = InContextRegression((1.0, 0.5), prompt_length=32)
    >>> [drop.direction for drop in predict_drops(task, draw_heads(jax.random.key(0), 2, 4, 0.02)).drops]
    [0, 1]
    """
    return predict_single_drop(task, heads) if isinstance(heads, MergedHeads) else predict_staircase(task, heads)
