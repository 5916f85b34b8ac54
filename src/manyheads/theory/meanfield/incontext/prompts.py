"""Prompts that are really drawn: tasks, pairs and queries, and the transformer's loss on them."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from manyheads._settings import double_precision
from manyheads.errors import check_integer
from manyheads.theory.meanfield.incontext.task import FeatureTask, as_matrix

PAIRS = 1 << 19  # pairs that are held at once


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
