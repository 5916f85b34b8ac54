"""What sampled branches answer, against the same samples written down as a network would see them, and its tangents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manyheads.theory.dmft.branches.attention_infinite_heads import InfiniteHeadsAttention
from manyheads.theory.dmft.branches.branch import BranchProcess
from manyheads.theory.dmft.branches.gaussian_fields import factor, matched_normals, signed_normals
from manyheads.theory.dmft.branches.mlp import InfiniteWidthMLP
from manyheads.theory.dmft.grids.depth import finite_depth_step
from manyheads.theory.dmft.problem import Problem
from manyheads.theory.dmft.recursion import solve_recursion

STEPS, SAMPLES, TOKENS = 2, 2, 2
ROWS = SAMPLES * TOKENS


class Watched(BranchProcess):
    """A process whose questions and answers are kept."""

    def __init__(self, process):
        self.process, self.up, self.down = process, [], []

    def forward(self, inputs):
        self.up.append((inputs, self.process.forward(inputs)))
        return self.up[-1][1]

    def backward(self, inputs):
        self.down.append((inputs, self.process.backward(inputs)))
        return self.down[-1][1]


def watch(branch, rng):
    """Trajectory once; the questions and answers, and the kernels at the end."""
    drawn = rng.standard_normal((SAMPLES, TOKENS, 6))
    drawn /= np.sqrt((drawn**2).mean(-1, keepdims=True))
    problem = Problem(drawn, np.array([1.0, -1.0]), steps=STEPS, learning_rate=0.5, richness=1.5)
    seed = rng.integers(2**31)
    watched = Watched(branch.start(problem, np.random.default_rng(seed)))
    solve_recursion(problem, [[watched]], finite_depth_step(problem))
    inputs = watched.down[-1][0]
    return watched, factor(inputs.below), factor(inputs.above), np.random.default_rng(seed)


def heads(sources, watched, branch):
    """Heads of a network: logits q.k / N^alpha, gradients by the chain rule, slow queries and keys (n, heads, N)."""
    size, slow = branch.key_dim**-branch.logit_exponent, branch.key_dim ** (2 * branch.logit_exponent - 2)
    value, query, key, error = sources
    written, sent, to_query, to_key = ([] for _ in range(4))

    def past(rows, history):
        return jnp.einsum("ab,bhn->ahn", rows, jnp.concatenate(history)) if history else 0.0

    def in_samples(rows):
        return rows.reshape(SAMPLES, TOKENS, *rows.shape[1:])

    for t in range(STEPS):
        now, (up, _), (down, _) = slice(t * ROWS, (t + 1) * ROWS), watched.up[t], watched.down[t]
        v = in_samples(value[now] + past(up.response + up.learned, sent))
        q = in_samples(query[now] + past(up.response + slow * up.learned, to_query))
        k = in_samples(key[now] + past(up.response + slow * up.learned, to_key))
        pattern = jax.nn.softmax(size * jnp.einsum("pahn,pbhn->phab", q, k), axis=-1)
        u = jnp.einsum("phab,pbhn->pahn", pattern, v)
        written.append(u.reshape(ROWS, *u.shape[2:]))
        rows = jnp.asarray(down.response).at[:, : t * ROWS].add(down.learned)
        e = in_samples(error[now] + past(rows, written))

        def read(q, k, v, e=e):
            scores = jax.nn.softmax(size * jnp.einsum("pahn,pbhn->phab", q, k), axis=-1)
            return jnp.sum(e * jnp.einsum("phab,pbhn->pahn", scores, v))

        for history, gradient in zip((to_query, to_key, sent), jax.grad(read, (0, 1, 2))(q, k, v), strict=True):
            history.append(gradient.reshape(ROWS, *gradient.shape[2:]))
    return tuple(jnp.concatenate(history) for history in (written, sent, to_query, to_key))


def neurons(sources, watched, branch):
    """Neurons of a network, (n, neurons, 1)."""
    inner, outer = sources
    written, sent = [], []
    for t in range(STEPS):
        now, (up, _), (down, _) = slice(t * ROWS, (t + 1) * ROWS), watched.up[t], watched.down[t]
        before = inner[now]
        if t:
            before = before + jnp.einsum("ab,bhn->ahn", up.response + up.learned, jnp.concatenate(sent))
        u, pull = jax.vjp(lambda z: jax.nn.gelu(z, approximate=False), before)
        written.append(u)
        rows = jnp.asarray(down.response).at[:, : t * ROWS].add(down.learned)
        sent.append(pull(outer[now] + jnp.einsum("ab,bhn->ahn", rows, jnp.concatenate(written)))[0])
    return jnp.concatenate(written), jnp.concatenate(sent)


def tangents(run, sources):
    """<d answer_a / d source_b> (sources, answers, n, n), means over samples and components, from exact tangents."""
    fields, rows, _, width = sources.shape

    def one(place):
        field, row, component = place
        moved = jnp.zeros_like(sources).at[field, row, :, component].set(1.0)
        answers = jax.jvp(run, (sources,), (moved,))[1]
        return jnp.take(answers, component, axis=-1).mean(-1)  # (answers, n)

    every = jnp.stack([each.ravel() for each in jnp.meshgrid(*map(jnp.arange, (fields, rows, width)), indexing="ij")])
    found = np.asarray(jax.jit(lambda places: jax.lax.map(one, places))(every.T))  # (fields rows width, answers, n)
    return found.reshape(fields, rows, width, -1, rows).mean(2).transpose(0, 2, 3, 1)


def covariance(rows, others=None):
    rows = np.asarray(rows).reshape(len(rows), -1)
    return rows @ rows.T / rows.shape[1]


def stein(root, *pairs):
    """Sum of <x z> root^-1 over pairs of rows x and normals z, up to the own moment (n, n)."""
    moments = sum(np.asarray(rows).reshape(len(rows), -1) @ drawn.T / drawn.shape[1] for rows, drawn in pairs)
    return np.linalg.solve(root.T, np.kron(np.tril(np.ones((STEPS, STEPS))), np.ones((ROWS, ROWS))).T * moments.T).T


def near(found, exact, share):
    return np.sqrt(np.mean((found - exact) ** 2)) < share * np.sqrt(np.mean(exact**2))


def check(pairs, name, exact, strict=False, through=None, share=1e-5):
    """Rows of one answer against a matrix (n, n) over all moments.

    Responses count by what they do to a source of a covariance, `through`: alone they are not determined where it is
    singular, as where all tokens of a sample share their gradient.
    """
    found, wanted = [], []
    for t, (_, answer) in enumerate(pairs):
        size = (t if strict else t + 1) * ROWS
        rows = getattr(answer, name), exact[t * ROWS : (t + 1) * ROWS, :size]
        if through is not None:
            rows = tuple(each @ through[:size, :size] for each in rows)
        found.append(rows[0].ravel())
        wanted.append(rows[1].ravel())
    assert near(np.concatenate(found), np.concatenate(wanted), share)


@pytest.mark.slow
def test_heads_answer_what_a_network_does(rng):
    """At logit exponent 1/2, where signals through initial queries and keys are larger by the square root of N."""
    branch = InfiniteHeadsAttention(2, 4096, 0.5)
    watched, below, above, again = watch(branch, rng)
    drawn = signed_normals(again, STEPS * ROWS, branch.samples, branch.key_dim)
    sources = np.stack([below, below, below, above]) @ drawn
    with jax.enable_x64(True):
        stacked = jnp.asarray(sources.reshape(4, -1, branch.samples, branch.key_dim))
        written, sent, to_query, to_key = heads(stacked, watched, branch)
        slopes = tangents(lambda sources: jnp.stack(heads(sources, watched, branch)), stacked)
    slow = branch.key_dim ** (2 * branch.logit_exponent - 2)
    moved = covariance(to_query) + covariance(to_key)
    check(watched.up, "covariance", covariance(written))
    check(watched.down, "covariance", covariance(sent) + moved)
    check(watched.down, "learned", covariance(sent) + slow * moved)
    check(watched.up, "response", slopes[3, 0], strict=True, through=above @ above.T, share=0.3)
    back = slopes[0, 1] + slopes[1, 2] + slopes[2, 3]
    check(watched.down, "response", back, through=below @ below.T, share=0.3)
    # Queries and keys have little of the response: that they count in full shows only without the noise of samples.
    found = stein(below, (sent, drawn[0]), (to_query, drawn[1]), (to_key, drawn[2]))
    check(watched.down, "response", found, through=below @ below.T, share=1e-4)


@pytest.mark.slow
def test_neurons_answer_what_a_network_does(rng):
    branch = InfiniteWidthMLP("gelu", 8192)
    watched, below, above, again = watch(branch, rng)
    drawn = matched_normals(again, 2, STEPS * ROWS, branch.samples)
    with jax.enable_x64(True):
        stacked = jnp.asarray((np.stack([below, above]) @ drawn)[..., None])
        written, sent = neurons(stacked, watched, branch)
        slopes = tangents(lambda sources: jnp.stack(neurons(sources, watched, branch)), stacked)
    check(watched.up, "covariance", covariance(written))
    check(watched.down, "covariance", covariance(sent))
    check(watched.up, "response", slopes[1, 0], strict=True, through=above @ above.T, share=0.3)
    check(watched.down, "response", slopes[0, 1], through=below @ below.T, share=0.3)
