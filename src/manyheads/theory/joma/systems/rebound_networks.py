"""Systems of the drop-and-rebound study: random target vectors, random lower layers, and two trained networks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import erfinv

from manyheads.theory.joma.systems.components import relax, train_layer
from manyheads.theory.joma.systems.gradient_flow import FixedSteps, gradient_descent
from manyheads.theory.joma.systems.layer import CrossEntropy, LayerParameters, token_weights
from manyheads.theory.joma.systems.recording import SGDOptions
from manyheads.theory.joma.task import JomaTask, UpdateRule
from manyheads.theory.joma.theorems.rebound import entropy_of, final_rank_slope
from manyheads.theory.joma.theorems.salient_first import EXP, UNIFORM, RateLaw

COMPONENTS = 19  # the largest number of components of a random vector; the smallest is two
SALIENCES = (0.5, 3.0)
SIDE = 24  # neurons and tokens of the layer
HORIZONS = {"exp": 12.0, "softmax": 60.0, "uniform": 12.0, "linear": 3.0}  # of the layer
RANDOM_HORIZONS = {"exp": 60.0, "softmax": 3000.0, "uniform": 60.0}  # of the random vectors
RECORDS = 96
CLASSES = 8


def record_times(horizon: float) -> np.ndarray:
    """Space the records of a flow logarithmically up to the horizon."""
    return np.concatenate([[0.0], np.geomspace(1e-2, horizon, RECORDS)])


def blowup_fractions() -> np.ndarray:
    """Space the records under a linear activation in fractions of the blow-up time, up to a largest weight of five."""
    return np.concatenate([[0.0], 1 - np.geomspace(1.0, 6e-7, RECORDS)])


def draw_targets(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw vectors of 2 to 19 uniform targets, the rest zero, shape (count, 19)."""
    sizes = rng.integers(2, COMPONENTS + 1, size=(count, 1))
    return np.where(np.arange(COMPONENTS) < sizes, rng.uniform(*SALIENCES, size=(count, COMPONENTS)), 0.0)


def target_entropies(dynamics: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Compute the entropy of random vectors of targets over time, (count, RECORDS + 1)."""
    targets = draw_targets(rng, count)
    if dynamics == "linear":  # by the erf law
        reach = blowup_fractions()[:, None] * (targets / targets.max(-1, keepdims=True))[:, None]  # (V, T, M)
        logits = erfinv(reach) ** 2
    else:
        law = UNIFORM if dynamics == "uniform" else EXP
        deficits = _relax_all(targets, record_times(RANDOM_HORIZONS[dynamics]), dynamics == "softmax", law)
        logits = (targets[:, None] * np.expm1(-np.asarray(deficits))) ** 2 / 2
    return np.asarray(_entropies(logits, targets > 0))


def draw_layer(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw the target of a layer (neuron k: token k, with decreasing salience, plus noise) and its initialization."""
    salience = 0.5 + 1.6 * np.exp(-np.arange(SIDE) / 4.0)
    target = np.diag(salience) + 0.05 * rng.normal(size=(SIDE, SIDE))
    return target, 0.02 * rng.normal(size=(SIDE, SIDE))


def straight_layers(rng: np.random.Generator, count: int) -> tuple[float, float]:
    """Return the shares of straight lines whose stable rank rises, and whose final slope has the predicted sign."""
    passed = -np.expm1(-record_times(HORIZONS["uniform"]))[:, None, None]
    rises, ends, predicted = [], [], []
    for _ in range(count):
        target, init = draw_layer(rng)
        path = init + passed * (target - init)
        ranks = (path**2).sum((1, 2)) / np.linalg.norm(path, 2, axis=(1, 2)) ** 2
        rises.append(ranks[-1] > ranks.min())
        ends.append(ranks[-1] > ranks[-2])
        predicted.append(final_rank_slope(target, init) > 0)
    return float(np.mean(rises)), float(np.mean(np.equal(ends, predicted)))


def train_regression(resolution: float, rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Train a layer by SGD on the outputs of a random target layer; return logits and weights over time."""
    target, init = map(jnp.asarray, draw_layer(rng))
    learning_rate = resolution / ((1 + 2.5**2) * float(np.exp(2.5**2)))  # column norms are 2.2 at most or so
    steps = RECORDS * -(-int(8.0 / learning_rate) // RECORDS)
    return train_layer(target, init, SGDOptions(learning_rate, steps, RECORDS), 0.5, _fresh_key(rng))


def train_classification(updates: int, rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
    """Train a layer on classes named by single tokens, by cross-entropy; return logits and weights over time."""
    task = _topics(rng)
    network = LayerParameters(np.zeros((1, SIDE)), 0.1 * rng.normal(size=(SIDE + 1, SIDE)))
    upper = CrossEntropy(4 * SIDE**-0.5 * rng.normal(size=(CLASSES, SIDE)))
    steps = FixedSteps(0.5, max(1, updates // RECORDS), RECORDS)
    path = gradient_descent(network, task, upper, UpdateRule("softmax", "relu"), steps, (_fresh_key(rng), 32)).network
    return path.logits[:, 0], token_weights(task, np.asarray(path.weights))


def _topics(rng: np.random.Generator, count: int = 2048) -> JomaTask:
    """Draw contexts of random tokens and the token of the class, whose frequency decreases with the class."""
    labels = rng.integers(CLASSES, size=count)
    noise = rng.dirichlet(np.ones(SIDE), count)
    share = (0.5 * np.exp(-labels / 4.0) * rng.uniform(0.5, 1.0, count))[:, None]
    frame = np.linalg.qr(rng.normal(size=(SIDE + 1, SIDE + 1)))[0]
    contexts = noise * (1 - share) + share * np.eye(SIDE)[labels]
    return JomaTask(contexts, np.zeros(count, int), labels, frame[:, :SIDE], frame[:, SIDE:])


@jax.jit
def _entropies(logits: jax.Array, present: jax.Array) -> jax.Array:
    return entropy_of(logits, present[:, None])


@partial(jax.jit, static_argnames="law")
def _relax_all(targets: jax.Array, clock: jax.Array, normalized: jax.Array, law: RateLaw) -> jax.Array:
    return jax.vmap(lambda mu: relax(mu, clock, law, normalized))(targets)


def _fresh_key(rng: np.random.Generator) -> jax.Array:
    return jax.random.key(int(rng.integers(2**62)))
