r"""Prompt length: loss of the linear-attention transformer at n pairs, exactly, and the limit of infinite prompts.

With the representation :math:`h = \int a\,\sigma(w^\top x)\,d\mu(a, w)` the transformer answers a query with

.. math:: \hat y = \frac1n \sum_{i \le n} y_i\, h(x_i)^\top W\, h(x_q).

Write :math:`S = E[h h^\top]`, :math:`C = E[f° h^\top]`, :math:`S_\circ = E[f° f°^\top]`, :math:`\Gamma = C^\top C` and
:math:`A = E[(|f°|^2 + s^2) h h^\top]`, with s² the variance of the labels' noise. A prompt enters through
:math:`F_n = \frac1n\sum y_i h(x_i)` only, whose mean is :math:`C^\top v` and whose second moment, averaged over v, is

.. math:: P_n = \Gamma + \frac{A - \Gamma}{n},

so that for every n, mu and W

.. math:: L_n(\mu, W) = \tfrac12 \operatorname{tr} S_\circ - \operatorname{tr} C W C^\top
          + \tfrac12 \operatorname{tr} W S W^\top P_n
          = L(\mu, W) + \frac{1}{2n} \operatorname{tr} W S W^\top (A - \Gamma).

Its minimum over W is :math:`W = P_n^{-1} \Gamma S^{-1}`, with the loss :math:`\frac12\operatorname{tr} S_\circ -
\frac12 \operatorname{tr} \Gamma S^{-1} \Gamma P_n^{-1}`; for :math:`n \to \infty` any W with :math:`C W = C S^{-1}`.
At :math:`W = S^{-1}` the correction is at most :math:`k \max(|f°|^2 + s^2) / 2n`, for every mu.

The paper (Kim and Suzuki, arXiv 2402.01258) states :math:`|L_n - L| \lesssim \sqrt{\log k / n}`; the formulas are
derived here.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray
from scipy.linalg import cho_factor, cho_solve

from manyheads._settings import double_precision
from manyheads.errors import CertificateError, check_integer
from manyheads.theory.meanfield.incontext.task import FeatureTask, as_matrix

PAIRS = 1 << 19  # pairs that are held at once
LARGEST_CONDITION = 1e12  # of the second moments of the representation: four digits are left in double precision


class Moments(NamedTuple):
    """Second moments of a representation h with itself and with the target features."""

    representation: Float[Array, "k k"]  # S
    cross: Float[Array, "k k"]  # C, one row a target
    weighted: Float[Array, "k k"]  # A
    power: Float[Array, ""]  # trace of S_o

    @classmethod
    def of(
        cls, h: Float[Array, "nodes k"], targets: Float[Array, "nodes k"], label_noise: Float[ArrayLike, ""] = 0.0
    ) -> "Moments":
        """Average over the nodes."""
        squares = (targets**2).sum(1)
        weights = (squares + label_noise)[:, None]
        return cls(h.T @ h / len(h), targets.T @ h / len(h), (weights * h).T @ h / len(h), squares.mean())

    def second_moment(self, length: Float[ArrayLike, ""] | None) -> Float[Array, "k k"]:
        """Return P_n, that of the prompt's average; of infinitely many pairs for None."""
        square = self.cross.T @ self.cross
        return square if length is None else square + (self.weighted - square) / length


def joint_loss(
    moments: Moments, attention: Float[Array, "k k"], length: Float[ArrayLike, ""] | None = None
) -> Float[Array, ""]:
    """Return L_n(mu, W) in `jax.numpy`."""
    inner = attention @ moments.representation @ attention.T
    linear = (moments.cross @ attention * moments.cross).sum()
    return 0.5 * moments.power - linear + 0.5 * (inner * moments.second_moment(length)).sum()


def reduced_loss(moments: Moments, length: Float[ArrayLike, ""] | None = None) -> Float[Array, ""]:
    """Return the minimum of L_n(mu, W) over W in `jax.numpy`: NaN where a matrix is not positive definite."""
    factor = jax.scipy.linalg.cho_factor(moments.representation)
    explained = moments.cross @ jax.scipy.linalg.cho_solve(factor, moments.cross.T)  # C S^-1 C^T
    if length is None:
        return 0.5 * (moments.power - jnp.trace(explained))
    inner = moments.cross.T @ explained @ moments.cross  # Gamma S^-1 Gamma
    prompt = jax.scipy.linalg.cho_factor(moments.second_moment(length))
    return 0.5 * (moments.power - jnp.trace(jax.scipy.linalg.cho_solve(prompt, inner)))


class OptimalAttention(NamedTuple):
    """The attention matrix of least loss, its loss, and the condition numbers on the way."""

    weights: Float[np.ndarray, "k k"]
    loss: float
    condition: float  # of S
    prompt_condition: float  # of P_n; 1 for infinite prompts, where it is not inverted


def solve_attention(
    task: FeatureTask, representation: Float[ArrayLike, "nodes k"], length: int | None = None
) -> OptimalAttention:
    r"""Solve the two-timescale limit: the attention matrix of least loss for a fixed representation.

    The representation is h at the task's nodes. For infinitely many pairs (`length` None) :math:`W = S^{-1}` is
    returned, which satisfies the paper's :math:`C W = C S^{-1}` also where C is singular and W is not unique.
    """
    h = as_matrix(representation, "representation", task.targets.shape)
    with double_precision():
        moments = _moments(task, h)
        condition = check_condition(moments.representation, "the representation")
        weights, prompt_condition = cho_solve(cho_factor(moments.representation), np.eye(task.features)), 1.0
        if length is not None:
            prompt = moments.second_moment(check_integer("length", length))
            prompt_condition = check_condition(prompt, "the prompt's average")
            weights = cho_solve(cho_factor(prompt), moments.cross.T @ moments.cross @ weights)
        return OptimalAttention(weights, float(reduced_loss(moments, length)), condition, prompt_condition)


def prompt_loss(
    task: FeatureTask,
    representation: Float[ArrayLike, "nodes k"],
    attention: Float[ArrayLike, "k k"],
    length: int | None = None,
) -> float:
    r"""Return the exact loss of prompts of a length, averaged over tasks, prompts and queries.

    Parameters
    ----------
    representation, attention
        h at the task's nodes; W.
    length
        Pairs n of a prompt; None for infinitely many.

    Returns
    -------
    float
        Half the mean squared error of the answer to a query, in squared units of the labels.

    Raises
    ------
    ShapeError
        Arrays that do not fit the task.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.theory.meanfield.incontext.task import circle_task
    >>> task = circle_task()
    >>> [round(prompt_loss(task, task.targets, np.eye(2), length), 6) for length in (1, 10, None)]
    [1.0, 0.1, 0.0]
    """
    h = as_matrix(representation, "representation", task.targets.shape)
    weights = as_matrix(attention, "attention", (task.features, task.features))
    length = None if length is None else check_integer("length", length)
    return float(joint_loss(_moments(task, h), weights, length))  # type: ignore[arg-type]


def length_coefficient(
    task: FeatureTask, representation: Float[ArrayLike, "nodes k"], attention: Float[ArrayLike, "k k"]
) -> float:
    """Return c of the exact loss L + c/n at n pairs a prompt."""
    single = prompt_loss(task, representation, attention, 1)
    return single - prompt_loss(task, representation, attention)


def _moments(task: FeatureTask, h: np.ndarray) -> Moments:
    """Return the moments as NumPy arrays: nothing is compiled for a single loss."""
    return Moments.of(h, task.targets, task.label_noise)  # type: ignore[arg-type]


def check_condition(moments: Float[ArrayLike, "k k"], of: str) -> float:
    """Return the condition number of second moments, or raise where a solve would leave no digits."""
    levels = np.linalg.eigvalsh(np.asarray(moments))
    condition = float(levels[-1] / levels[0]) if levels[0] > 0 else float("inf")
    if not condition <= LARGEST_CONDITION:
        raise CertificateError(
            f"the second moments of {of} are singular: start from particles whose mean map has full rank",
            measured=condition,
            threshold=LARGEST_CONDITION,
        )
    return condition


class PromptLosses(NamedTuple):
    """Losses on drawn prompts."""

    raw: Float[np.ndarray, " prompts"]  # half the squared error on one query of one task
    averaged: Float[np.ndarray, " prompts"]  # the same, averaged over tasks and queries for the pairs as drawn


def draw_prompt_losses(
    task: FeatureTask,
    representation: Float[ArrayLike, "nodes k"],
    attention: Float[ArrayLike, "k k"],
    length: int,
    prompts: int,
    key: PRNGKeyArray,
) -> PromptLosses:
    """Draw prompts of a length and return the loss of the transformer on each.

    Labels have noise of the task's variance; tasks are standard normal. `averaged` is a loss of the same mean and a
    smaller variance, available where the labels have no noise (NaN otherwise). Half a million pairs are held at once.
    """
    h = as_matrix(representation, "representation", task.targets.shape)
    weights = as_matrix(attention, "attention", (task.features, task.features))
    length, prompts = check_integer("length", length), check_integer("prompts", prompts)
    chunk = max(1, min(prompts, PAIRS // length))
    with double_precision():
        nodes = (jnp.asarray(h), jnp.asarray(task.targets), jnp.asarray(weights), task.label_noise**0.5)
        found = [
            _losses(*nodes, jax.random.fold_in(key, at), length=length, prompts=chunk)
            for at in range(0, prompts, chunk)
        ]
        raw, averaged = (
            np.concatenate([np.asarray(each) for each in part])[:prompts] for part in zip(*found, strict=True)
        )
    return PromptLosses(raw, averaged if task.label_noise == 0 else np.full(prompts, np.nan))


@partial(jax.jit, static_argnames=("length", "prompts"))
def _losses(
    h: Float[Array, "nodes k"],
    f: Float[Array, "nodes k"],
    attention: Float[Array, "k k"],
    noise: float,
    key: PRNGKeyArray,
    *,
    length: int,
    prompts: int,
) -> tuple[jax.Array, jax.Array]:
    """Return raw and averaged losses of one chunk."""
    pairs, queries, tasks, labels = jax.random.split(key, 4)
    v = jax.random.normal(tasks, (prompts, f.shape[1]), h.dtype)
    at = jax.random.randint(pairs, (prompts, length), 0, len(h))
    query = jax.random.randint(queries, (prompts,), 0, len(h))
    products = (f[:, :, None] * h[:, None, :]).reshape(len(h), -1)  # (nodes, k k)
    average = products[at].mean(1).reshape(prompts, *attention.shape)  # of f h^T over the prompt
    error = noise * jax.random.normal(labels, (prompts, length), h.dtype)
    read = jnp.einsum("pi,pij->pj", v, average) + jnp.einsum("pn,pnj->pj", error, h[at]) / length
    answer = jnp.einsum("pj,jl,pl->p", read, attention, h[query])
    raw = 0.5 * ((v * f[query]).sum(1) - answer) ** 2
    cross, second = f.T @ h / len(h), h.T @ h / len(h)
    image = average @ attention  # (prompts, k, k)
    averaged = 0.5 * (f**2).sum(1).mean() - (image * cross).sum((1, 2)) + 0.5 * (image @ second * image).sum((1, 2))
    return raw, averaged
