r"""Training of MLP and attention together: SGD on drawn prompts, and the gradient flow of their exact mean loss.

A prompt enters the answer only through its average :math:`F = \frac1n\sum_i y_i h(x_i)`. Inputs are nodes, so that

.. math:: F = \sum_m A_m h(x_m), \qquad A_m = \frac{c_m}{n}\, v^\top f°(x_m),

with :math:`c_m` the number of pairs at node m; noise of the labels adds its sum over these pairs, over n. A does not
change in training: P prompts of n pairs cost the MLP on M nodes and a product with a (P, M) matrix, exactly, where
evaluating every pair costs the MLP on P n inputs.

A step of size :math:`\eta` in mean-field time moves the particles by :math:`-\eta N \nabla L` and the attention by
:math:`-\eta r \nabla L`, with r the attention speed. For small steps, many prompts and large batches this is the
gradient flow of :math:`L_n(\mu, W)`, and for :math:`r \to \infty` the two-timescale flow of `particles`.

Near a saddle, at infinite prompts and :math:`W = S^{-1}`, a missed target feature j that overlaps with component j of
h alone grows at the rate

.. math:: (S^{-1})_{jj}\Big(E_\mu\big[E_x[f_j\sigma]^2\big] + E_\mu\big[a_j^2\,|E_x[f_j\sigma' x]|^2\big]\Big),

the first term from the second layer, the second one from the first layer, up to mixed terms
of different features and components. Derived here; the model is that of Kim and Suzuki (arXiv 2402.01258).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Float, Int

from manyheads._arrays import check_generator, check_times
from manyheads._constraints import Constraint
from manyheads._settings import double_precision
from manyheads._trees import PyTree
from manyheads.errors import ShapeError, UsageError, check_integer
from manyheads.theory.meanfield.incontext.circle import activation_of
from manyheads.theory.meanfield.incontext.gradient_flow import integrate_in_steps
from manyheads.theory.meanfield.incontext.particles import FlowProblem, Particles, check_particles
from manyheads.theory.meanfield.incontext.prompt_length import Moments, joint_loss
from manyheads.theory.meanfield.incontext.task import FeatureTask, as_matrix
from manyheads.theory.meanfield.initial_value import refuse_divergence

ACTIVATION = "sigmoid"


class NodePrompts(NamedTuple):
    """Prompts as weights on the nodes, with the query's node and its true answer."""

    weights: Float[Array, "prompts nodes"]  # A
    query: Int[Array, " prompts"]
    answer: Float[Array, " prompts"]


class TransformerWeights(NamedTuple):
    """All weights of the transformer."""

    outer: Any  # a, (N, k)
    inner: Any  # w, (N, input_dim)
    attention: Any  # W, (k, k)


class TrainingTrajectory(NamedTuple):
    """Exact losses and moments of a transformer at recorded times, and its weights at the last one."""

    times: Float[np.ndarray, " times"]
    loss: Float[np.ndarray, " times"]  # L_n(mu, W) over all tasks, prompts and queries
    limit_loss: Float[np.ndarray, " times"]  # the same weights at infinite prompts
    cross: Float[np.ndarray, "times k k"]  # C
    explained: Float[np.ndarray, "times k"]  # (C S^-1 C^T)_jj over the variance of target j
    sample_loss: Float[np.ndarray, " times"]  # of the prompts trained on; NaN for the flow
    weights: TransformerWeights


def collect_prompts(
    task: FeatureTask,
    counts: Int[np.ndarray, "prompts nodes"],
    tasks: Float[np.ndarray, "prompts k"],
    query: Int[np.ndarray, " prompts"],
    dtype: DTypeLike = np.float32,
) -> NodePrompts:
    """Return prompts with the given numbers of pairs at every node, tasks v, and nodes of the query."""
    weights = (counts / counts.sum(1, keepdims=True)) * (tasks @ task.targets.T)
    answer = (tasks * task.targets[query]).sum(1)
    return NodePrompts(jnp.asarray(weights, dtype), jnp.asarray(query), jnp.asarray(answer, dtype))


def draw_prompts(task: FeatureTask, prompts: int, length: int, rng: np.random.Generator) -> NodePrompts:
    """Draw prompts of independent pairs, with standard normal tasks and independent queries, in single precision.

    The noise of the labels is normal, with the variance of the task; the answer to the query has none.
    """
    prompts, length, rng = check_integer("prompts", prompts), check_integer("length", length), check_generator(rng)
    nodes = len(task.inputs)
    counts = rng.multinomial(length, np.full(nodes, 1 / nodes), size=prompts)
    tasks = rng.standard_normal((prompts, task.features))
    drawn = collect_prompts(task, counts, tasks, rng.integers(0, nodes, prompts))
    if not task.label_noise:
        return drawn
    noise = np.sqrt(task.label_noise * counts) * rng.standard_normal(counts.shape)  # summed over the pairs at a node
    return drawn._replace(weights=drawn.weights + jnp.asarray(noise / length, drawn.weights.dtype))


def saddle_start(
    task: FeatureTask, inner: Float[ArrayLike, "width dim"], foreign: float, signal: float
) -> TransformerWeights:
    r"""Return weights next to the saddle at which every target feature is missed.

    The second layer is the sign of the first layer's weights in k directions that no target uses (the last k), made
    orthogonal to the targets and to constants (a sigmoid has the mean 1/2) and scaled to :math:`S = g^2 I`; then the
    smallest addition that gives :math:`C_{jj} = \varepsilon g\sqrt{(S_\circ)_{jj}}` and no other overlap. The
    attention is :math:`S^{-1}`.

    `inner` are first-layer weights (N, d), d at least twice the number of features; `foreign` is g and `signal` is eps,
    the overlap of each target with its slot, relative to g.
    """
    inner, count = np.asarray(inner, np.float64), task.features
    dim = task.inputs.shape[1]
    if inner.ndim != 2 or inner.shape[1] != dim or dim < 2 * count or len(inner) < 2 * count:
        raise ShapeError(
            f"inner: shape {inner.shape}, expected (N, {dim}) with N and the dimension at least {2 * count}"
        )
    with double_precision():
        active = np.asarray(activation_of(ACTIVATION)(jnp.asarray(task.inputs @ inner.T)))
    reads = active.T @ task.targets / len(active)  # (N, k): E[f sigma_i]
    bound = np.column_stack([reads, np.ones(len(inner))])
    dual = bound @ np.linalg.inv(bound.T @ bound)
    outer = np.sign(inner[:, -count:])
    outer = outer - dual @ (bound.T @ outer)
    h = active @ outer / len(inner)
    values, axes = np.linalg.eigh(h.T @ h / len(h))
    outer = foreign * outer @ (axes / np.sqrt(values)) @ axes.T
    overlaps = signal * foreign * np.diag(np.sqrt(np.diag(task.covariance)))
    outer = outer + len(inner) * dual[:, :count] @ overlaps
    h = active @ outer / len(inner)
    return TransformerWeights(outer, inner, np.linalg.inv(h.T @ h / len(h)))


def missed_growth_rates(
    task: FeatureTask, particles: Particles | TransformerWeights, activation: str = ACTIVATION
) -> Float[np.ndarray, " k"]:
    """Return the rates at which missed target features grow at a saddle, at infinite prompts and W = S^-1."""
    outer, inner = check_particles(task, particles[:2])
    x, f = task.inputs, task.targets
    with double_precision():
        active, slope = jax.jvp(
            activation_of(activation), (jnp.asarray(x @ inner.T),), (jnp.ones((len(x), len(inner))),)
        )
    active, slope = np.asarray(active), np.asarray(slope)
    second = (active.T @ f / len(x)) ** 2  # (N, k)
    first = np.stack([((slope.T @ (x * column[:, None]) / len(x)) ** 2).sum(1) for column in f.T], 1)
    h = active @ outer / len(inner)
    return (second + outer**2 * first).mean(0) * np.diag(np.linalg.inv(h.T @ h / len(h)))


def joint_flow(
    task: FeatureTask,
    weights: TransformerWeights,
    times: Float[ArrayLike, " times"],
    *,
    length: int,
    attention_speed: float,
    step: float,
    activation: str = ACTIVATION,
) -> TrainingTrajectory:
    """Integrate the gradient flow of the exact loss at n pairs, of both layers and of the attention.

    Times are mean-field times and rise. Stable `step` sizes of the Runge-Kutta method are below 2.8 over r times the
    largest eigenvalues of S and C^T C, r the attention speed.
    """
    times, start = check_times(times), _check_weights(task, weights)
    with double_precision():
        problem = _Problem.of(task, length, attention_speed, activation)
        found, end = integrate_in_steps(_derivative, _observe, jax.tree.map(jnp.asarray, start), problem, times, step)
    return TrainingTrajectory._make((times, *found, np.full(times.shape, np.nan), end))


def train_on_prompts(
    task: FeatureTask,
    weights: TransformerWeights,
    prompts: NodePrompts,
    rng: np.random.Generator,
    *,
    length: int,
    attention_speed: float,
    learning_rate: float,
    batch: int,
    records: int,
    record_every: int,
    activation: str = ACTIVATION,
) -> TrainingTrajectory:
    """Train by SGD on batches of prompts, drawn without replacement in every epoch, in the precision of the prompts.

    The exact loss is reported at `length` pairs. The learning rate is a step in mean-field time: particles move by N
    times its product with the gradient. There are `records` records after the first one, `record_every` steps apart.
    """
    count = len(prompts.answer)
    batch, records = check_integer("batch", batch), check_integer("records", records)
    record_every = check_integer("record_every", record_every)
    rng = check_generator(rng)
    Constraint(above=0).kept("learning_rate", learning_rate, "float")
    if batch > count:
        raise UsageError(f"batch={batch}: expected at most the {count} prompts")
    total = records * record_every * batch
    order = np.concatenate([rng.permutation(count) for _ in range(-(-total // count))])[:total]
    dtype = prompts.weights.dtype
    start = jax.tree.map(lambda each: jnp.asarray(each, dtype), _check_weights(task, weights))
    problem = _Problem.of(task, length, attention_speed, activation, dtype)
    plan = jnp.asarray(order.reshape(records, record_every, batch))
    found, end = jax.tree.map(np.asarray, _train(start, problem, prompts, plan, learning_rate))
    refuse_divergence(found[0], "lower learning_rate or attention_speed")
    return TrainingTrajectory._make((learning_rate * record_every * np.arange(records + 1), *found, end))


class _Problem(FlowProblem):
    """What stays constant in training."""

    speed: Array

    @classmethod
    def of(
        cls, task: FeatureTask, length: int, speed: float, activation: str, dtype: DTypeLike = np.float64
    ) -> "_Problem":
        """Collect, and refuse a speed that is not positive."""
        Constraint(above=0).kept("attention_speed", speed, "float")
        pairs = float(check_integer("length", length))
        inputs, targets = jnp.asarray(task.inputs, dtype), jnp.asarray(task.targets, dtype)
        noise, n, r = (jnp.asarray(each, dtype) for each in (task.label_noise, pairs, speed))
        return cls(inputs, targets, noise, n, activation, r)

    def moments(self, weights: TransformerWeights) -> Moments:
        """Return the second moments of h, with the noise of the labels."""
        return Moments.of(self.represent(weights[:2]), self.targets, self.label_noise)

    def descend(self, weights: TransformerWeights, slopes: TransformerWeights) -> TransformerWeights:
        """Return the velocity of the weights for the slopes of a loss."""
        width = len(weights.outer)
        return TransformerWeights(-width * slopes.outer, -width * slopes.inner, -self.speed * slopes.attention)


def _derivative(weights: TransformerWeights, problem: _Problem) -> TransformerWeights:
    def loss(weights: TransformerWeights) -> Array:
        return joint_loss(problem.moments(weights), weights.attention, problem.length)

    return problem.descend(weights, jax.grad(loss)(weights))


def _observe(weights: TransformerWeights, problem: _Problem) -> tuple[Array, Array, Array, Array]:
    """Return L_n, the loss at infinite prompts, C, and the explained share of every target."""
    moments = problem.moments(weights)
    losses = (joint_loss(moments, weights.attention, length) for length in (problem.length, None))
    fitted = moments.cross @ jnp.linalg.solve(moments.representation, moments.cross.T)
    return *losses, moments.cross, jnp.diag(fitted) / (problem.targets**2).mean(0)  # type: ignore[return-value]


def prompt_losses(h: Float[Array, "nodes k"], attention: Float[Array, "k k"], prompts: NodePrompts) -> Float[Array, ""]:
    """Return half the mean squared error of the answers to the queries of drawn prompts."""
    answers = ((prompts.weights @ h) @ attention * h[prompts.query]).sum(1)
    return 0.5 * ((prompts.answer - answers) ** 2).mean()


@jax.jit
def _train(
    weights: TransformerWeights, problem: _Problem, prompts: NodePrompts, plan: Array, learning_rate: float
) -> PyTree:
    """Return the observations before training and after every row of the plan, and the weights at the end."""

    def loss(weights: TransformerWeights, chosen: NodePrompts) -> Array:
        return prompt_losses(problem.represent(weights[:2]), weights.attention, chosen)

    def step(weights: TransformerWeights, batch: Array) -> tuple[TransformerWeights, None]:
        slopes = jax.grad(loss)(weights, NodePrompts(*(each[batch] for each in prompts)))
        moved = problem.descend(weights, slopes)
        return jax.tree.map(lambda value, rate: value + learning_rate * rate, weights, moved), None

    def observe(weights: TransformerWeights) -> tuple[Array, ...]:
        return *_observe(weights, problem), loss(weights, prompts)

    def record(weights: TransformerWeights, batches: Array) -> tuple[TransformerWeights, tuple[Array, ...]]:
        weights, _ = jax.lax.scan(step, weights, batches)
        return weights, observe(weights)

    end, found = jax.lax.scan(record, weights, plan)
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), observe(weights), found), end


def _check_weights(task: FeatureTask, weights: TransformerWeights) -> TransformerWeights:
    outer, inner = check_particles(task, weights[:2])
    return TransformerWeights(outer, inner, as_matrix(weights.attention, "attention", (task.features,) * 2))
