r"""Heads as particles: softmax attention whose logit is an average over heads, trained with cross-entropy.

The logit of a layer on a prompt X with labels y_n and answer y is

.. math:: z(X) = \frac1H\sum_h f(\theta_h; X) = \int f(\theta; X)\,\mu_H(d\theta), \qquad
          f(a, W; X) = a\sum_n\operatorname{softmax}_n(x_n^\top Wx_q)\,y_n,

a linear functional of the empirical measure of the heads. Gradient descent on the cross-entropy
:math:`L = \mathbb E_X\ln(1 + e^{-yz(X)})` with learning rates in proportion to H moves every head in the same field,

.. math:: \dot\theta_h = -\nabla_\theta V(\theta_h; \mu_H), \qquad
          V(\theta; \mu) = -\mathbb E_X\,\frac{y}{1 + e^{yz(X)}}\,f(\theta; X),

so that :math:`\mu_H` obeys the limiting transport equation :math:`\partial_t\mu = \nabla\cdot(\mu\nabla V)`, or its
explicit Euler steps, exactly: only the initial value of :math:`\mu_H` is random. Logit and loss after a fixed number
of steps are smooth functionals F of that value. Their expansion around the distribution of a head has a first-order
term, a mean of independent numbers, and a second-order one, so that

.. math:: \operatorname{Var} F(\mu_H) = c/H + O(1/H^2), \qquad \mathbb E F(\mu_H) - F(\mu) = b/H + O(1/H^2),

with :math:`c = \operatorname{Var}f(\theta; X)` and b = 0 exactly for the logit at initialization. The rms error is
:math:`\sqrt{c/H + b^2/H^2}`: where b is large against :math:`\sqrt c`, as it is for the loss, the error of few heads
falls faster than :math:`H^{-1/2}`, and the two parts have to be measured apart. Derived here.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

DIM = 2  # of the inputs
PARAMETERS = 1 + DIM**2  # of a head
NODES = 60  # Gauss-Hermite nodes in each dimension of the variance


class LabelledPrompts(NamedTuple):
    """Prompts of N labelled inputs, a query and its answer; labels and answers are -1 and 1."""

    inputs: Float[np.ndarray, "prompt pair dim"]
    labels: Float[np.ndarray, "prompt pair"]
    query: Float[np.ndarray, "prompt dim"]
    answer: Float[np.ndarray, " prompt"]


class HeadParticles(NamedTuple):
    """Value weight a and merged query-key weights W of every head."""

    value: Float[Array, "*system head"]
    matrix: Float[Array, "*system head dim dim"]

    @classmethod
    def of(cls, points: Float[ArrayLike, "*system head parameter"]) -> "HeadParticles":
        """Split points, standard normal ones for the initial weights."""
        points = jnp.asarray(points)
        return cls(points[..., 0], points[..., 1:].reshape(*points.shape[:-1], DIM, DIM))


def draw_labelled_prompts(rng: np.random.Generator, prompts: int, length: int) -> LabelledPrompts:
    """Draw normal inputs of two dimensions, labelled by the sign of a projection that is new for every prompt."""
    points = rng.standard_normal((prompts, length + 1, DIM))
    labels = np.sign(np.einsum("pnd,pd->pn", points, rng.standard_normal((prompts, DIM))))
    return LabelledPrompts(points[:, 1:], labels[:, 1:], points[:, 0], labels[:, 0])


def head_outputs(heads: HeadParticles, prompts: LabelledPrompts) -> Float[Array, "head prompt"]:
    """Compute f of every head on every prompt."""
    logits = jnp.einsum("pnd,hde,pe->hpn", prompts.inputs, heads.matrix, prompts.query)
    return heads.value[:, None] * jnp.einsum("hpn,pn->hp", jax.nn.softmax(logits, axis=-1), prompts.labels)


def initial_variance(prompts: LabelledPrompts) -> Float[np.ndarray, " prompt"]:
    """Compute Var f at initialization by Gauss-Hermite quadrature over W x_q, which is normal of variance |x_q|^2."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    field = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, DIM)
    mass = np.outer(weights, weights).ravel() / (2 * np.pi)
    norm = np.linalg.norm(prompts.query, axis=-1)
    logits = np.einsum("pnd,kd,p->kpn", prompts.inputs, field, norm)
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    read = np.einsum("kpn,pn->kp", shares / shares.sum(-1, keepdims=True), prompts.labels)
    return mass @ read**2


@partial(jax.jit, static_argnames=("steps", "summed"))
def train_head_particles(
    heads: HeadParticles, prompts: LabelledPrompts, *, learning_rate: float, steps: int, summed: bool = False
) -> Float[Array, "system time prompt"]:
    """Train systems of heads on all prompts by gradient descent; return the logits z before every step and at the end.

    Learning rates are `learning_rate` times H where outputs are averaged and over H where they are summed, so that
    logits move at the same speed in both.
    """
    count = heads.value.shape[-1]
    scale = 1.0 if summed else 1 / count
    rate = learning_rate / (count * scale**2)

    def objective(weights: HeadParticles) -> tuple[jax.Array, jax.Array]:
        logits = scale * head_outputs(weights, prompts).sum(0)
        return cross_entropy(logits, prompts.answer), logits

    def update(weights: HeadParticles, _: None) -> tuple[HeadParticles, jax.Array]:
        gradient, logits = jax.grad(objective, has_aux=True)(weights)
        return jax.tree.map(lambda weight, slope: weight - rate * slope, weights, gradient), logits

    return jax.vmap(lambda weights: jax.lax.scan(update, weights, None, length=steps + 1)[1])(heads)


def cross_entropy(logits: Float[Array, "*batch prompt"], answer: Float[ArrayLike, " prompt"]) -> Float[Array, "*batch"]:
    """Compute the mean cross-entropy over prompts."""
    return jax.nn.softplus(-jnp.asarray(answer) * logits).mean(-1)
