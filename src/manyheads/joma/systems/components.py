"""The finite systems of theorem 4: components and lower layers that are integrated, and components that are trained.

The flows are solved by diffrax and know nothing of the quadratures of `manyheads.joma.theory.salient_first`.
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import diffrax
import jax
import jax.numpy as jnp

from manyheads._arrays import on_host, takes_arrays, to_numpy
from manyheads._settings import double_precision
from manyheads.errors import UsageError
from manyheads.joma.theory.salient_first import EXP, Law

Dynamics = Literal["exp", "softmax", "uniform", "linear"]

DYNAMICS: dict[str, str] = {
    "exp": "exp attention",
    "softmax": "softmax attention",
    "uniform": "attention held uniform",
    "linear": "linear activation",
}
"""What a lower layer learns under: the first two saturate with attention, the third without, the fourth never ends."""


@takes_arrays
def relax(targets: Any, times: Any, law: Law = EXP, normalised: Any = False) -> Any:
    r"""Log deficits of components that relax to their targets, from :math:`\dot L = r(\mu(1 - e^{-L}))`.

    Parameters
    ----------
    targets
        mu >= 0, shape (M,); a component of target 0 stays at zero.
    times
        Rising, from zero or later, shape (T,).
    law
        How attention speeds up a component.
    normalised
        Whether the rates are divided by their mean over the components that have a target, as in softmax attention; a
        boolean, traced or not.

    Returns
    -------
    Array
        ln(1/delta), shape (T, M), with v = targets * (1 - exp(-L)). Relative accuracy 1e-9 at any size.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.joma.theory.salient_first import find_log_deficit
    >>> found = relax(np.array([1.0, 2.0]), np.array([0.5, 2.0]))
    >>> bool(np.allclose(found, find_log_deficit([1.0, 2.0], [[0.5], [2.0]]), rtol=1e-8))
    True
    """
    return _followed(_relax, (targets, times, normalised), (law,))


@partial(jax.jit, static_argnames="law")
def _relax(targets: jax.Array, times: jax.Array, normalised: jax.Array, law: Law) -> jax.Array:
    present = targets > 0

    def rates(t: Any, deficit: jax.Array, args: Any) -> jax.Array:
        log_rate = law.log_rate(-targets * jnp.expm1(-deficit), targets, jnp)
        mean = jax.nn.logsumexp(log_rate, where=present) - jnp.log(present.sum())
        return jnp.where(present, jnp.exp(log_rate - normalised * mean), 0)

    return _solve(rates, jnp.zeros_like(targets), times, (1e-10, 1e-12))


@takes_arrays
def relax_layer(wanted: Any, start: Any, times: Any, dynamics: Dynamics = "exp") -> Any:
    r"""Lower layers on their way to what they want: :math:`\dot W = (B - W) \circ r(z)`.

    The logit of token m is :math:`z_m = \tfrac12 \sum_k w_{km}^2`, the conserved relation of theorem 1.

    Parameters
    ----------
    wanted, start
        B and W(0), neurons by tokens, shape (K, M).
    times
        Rising, from zero or later, shape (T,).
    dynamics
        "exp": r = exp(z), the conserved relation of exp attention; "softmax": M softmax(z); "uniform": 1; "linear":
        the pull B never fades, :math:`\dot W = B \circ M \mathrm{softmax}(z)`, as behind a linear activation.

    Returns
    -------
    Array
        Shape (T, K, M).

    Examples
    --------
    >>> import numpy as np
    >>> path = relax_layer(np.eye(2), np.zeros((2, 2)), np.array([0.0, 1.0]), "uniform")
    >>> path[1].round(6).tolist()
    [[0.632121, 0.0], [0.0, 0.632121]]
    """
    if dynamics not in DYNAMICS:
        raise UsageError(f"dynamics={dynamics!r}: expected one of {', '.join(DYNAMICS)}")
    return _followed(_relax_layer, (wanted, start, times, *map(float, SWITCHES[dynamics])), ())


SWITCHES = {"exp": (1, 0, 1), "softmax": (1, 1, 1), "uniform": (0, 0, 1), "linear": (1, 1, 0)}
"""Whether attention learns, whether it is normalised, whether components saturate: numbers, so that one compiled
program serves all dynamics."""


@jax.jit
def _relax_layer(
    wanted: jax.Array, start: jax.Array, times: jax.Array, learns: jax.Array, normalised: jax.Array, fades: jax.Array
) -> jax.Array:
    def rates(t: Any, weights: jax.Array, args: Any) -> jax.Array:
        z = learns * (weights**2).sum(0) / 2  # (M,)
        mean = jax.nn.logsumexp(z) - jnp.log(z.size)
        return (wanted - fades * weights) * jnp.exp(z - normalised * mean)

    return _solve(rates, start, times, (1e-8, 1e-10))


def _followed(function: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...]) -> Any:
    """Call in double precision for NumPy arrays, without `follows_caller`: diffrax checks its times while tracing."""
    if not on_host(arrays):
        return function(*map(jnp.asarray, arrays), *settings)
    with double_precision():
        return to_numpy(function(*(jnp.asarray(array, jnp.float64) for array in arrays), *settings))


def _solve(rates: Any, start: jax.Array, times: jax.Array, tolerances: tuple[float, float]) -> jax.Array:
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(rates),
        diffrax.Dopri8(),
        t0=0.0,
        t1=times[-1],
        dt0=None,
        y0=start,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.PIDController(rtol=tolerances[0], atol=tolerances[1]),
        max_steps=1 << 16,
    )
    return solution.ys


class Descent(NamedTuple):
    """How components are trained.

    Attributes
    ----------
    rate
        Learning rate of logits and weights, in units in which `rate * steps` is the time of the flow.
    steps
        Updates, a multiple of `snapshots`.
    share
        Probability with which a token is in the batch of one update.
    snapshots
        How often the components are kept, the start not counted.
    """

    rate: float
    steps: int
    share: float = 0.5
    snapshots: int = 32


class TrainedComponents(NamedTuple):
    """The path of trained components, each of shape (snapshots + 1, M).

    Attributes
    ----------
    logits, weights, answers
        z, v and h = v exp(z).
    log_deficits
        ln(1/delta) of the weight that would give the answer on the conserved relation, :math:`u e^{u^2/2} = h`. At a
        finite rate z - v²/2 is conserved up to an error of the order of the rate, so that v itself does not end at mu;
        what the loss fits is the answer.
    """

    logits: jax.Array
    weights: jax.Array
    answers: jax.Array
    log_deficits: jax.Array


LOSSES = ("matched", "squared")


@takes_arrays
def invert_output(output: jax.Array) -> jax.Array:
    r"""Solve :math:`v e^{v^2/2} = h` for v: :math:`v = \mathrm{sign}(h) \sqrt{W(h^2)}` with Lambert's W, by Newton.

    Examples
    --------
    >>> import math
    >>> round(float(invert_output(jnp.asarray(2 * math.exp(2.0)))), 5)
    2.0
    """
    size = jnp.abs(output)
    log = jnp.log1p(size)
    v = size / (1 + log) ** 0.5 / (1 + size / (1 + (2 * log) ** 0.5))  # between h and (2 ln h)^(1/2)
    for _ in range(12):  # in ln h, which is concave in v: from below Newton stays below and doubles its digits
        v = jnp.where(size > 0, v * (1 + (jnp.log(jnp.where(size > 0, size / v, 1.0)) - v**2 / 2) / (1 + v**2)), 0.0)
    return jnp.sign(output) * v


@takes_arrays
def train_components(targets: jax.Array, loss: str, training: Descent, key: jax.Array) -> TrainedComponents:
    r"""Train one neuron and its attention logits on contexts of one token, and return its path.

    A context holds token l alone; exp attention passes :math:`e^{z_l}` of it on, and the neuron answers
    :math:`h_l = v_l e^{z_l}`. Both z and v start at zero and are trained by SGD; every token is in a batch with the
    given probability. The losses of an answer:

    * "matched": :math:`\ell(h) = \sup_u [u h - (e^{u^2/2} - 1)] - \mu h`, convex, with
      :math:`\ell'(h) = \sqrt{W(h^2)} - \mu` (Lambert's W). Since the conserved relation makes
      :math:`h = v e^{v^2/2}`, its gradient flow is theorem 4's :math:`\dot v = (\mu - v) e^{v^2/2}` exactly. For small
      answers it is the squared loss, for large ones it grows as :math:`h (2 \ln h)^{1/2}`. Found here.
    * "squared": :math:`\tfrac12 (h - \mu e^{\mu^2/2})^2`, with the same solution and the law
      `manyheads.joma.theory.salient_first.REGRESSION`.

    Can be traced; gradients are taken by JAX from the loss.

    Examples
    --------
    >>> train_components(jnp.ones(3), "matched", Descent(0.01, 64), jax.random.key(0)).answers.shape
    (33, 3)
    """
    if loss not in LOSSES:
        raise UsageError(f"loss={loss!r}: expected one of {', '.join(LOSSES)}")
    _check(training)
    return _train_components(jnp.asarray(targets), key, loss, training)


@partial(jax.jit, static_argnames=("loss", "training"))
def _train_components(targets: jax.Array, key: jax.Array, loss: str, training: Descent) -> TrainedComponents:
    def total(state: tuple[jax.Array, jax.Array], seen: jax.Array) -> jax.Array:
        z, v = state
        h = v * jnp.exp(z)
        if loss == "squared":
            losses = (h - targets * jnp.exp(targets**2 / 2)) ** 2 / 2
        else:
            u = jax.lax.stop_gradient(invert_output(h))  # where the supremum is: its own derivative does not count
            losses = u * h - jnp.expm1(u**2 / 2) - targets * h
        return (seen * losses).sum() / training.share

    logits, weights = _descend(total, (jnp.zeros_like(targets), jnp.zeros_like(targets)), key, training)
    answers = weights * jnp.exp(logits)
    return TrainedComponents(logits, weights, answers, -jnp.log1p(-invert_output(answers) / targets))


class TrainedLayer(NamedTuple):
    """The path of a trained layer: attention logits (snapshots + 1, M) and lower weights (snapshots + 1, K, M)."""

    logits: jax.Array
    weights: jax.Array


@takes_arrays
def train_layer(wanted: jax.Array, start: jax.Array, training: Descent, key: jax.Array) -> TrainedLayer:
    r"""Train K neurons and their shared attention logits by SGD to answer each token as a layer of weights B would.

    A context holds token m alone, exp attention passes :math:`e^{z_m}` of it on, and the loss is
    :math:`\tfrac12 \sum_k (w_{km} e^{z_m} - b_{km} e^{|b_m|^2/2})^2`: regression, with the solution W = B on the
    conserved relation :math:`z_m = \tfrac12 \sum_k w_{km}^2`, where the logits start as well. Can be traced.

    Examples
    --------
    >>> train_layer(jnp.eye(3), jnp.zeros((3, 3)), Descent(0.01, 64), jax.random.key(0)).weights.shape
    (33, 3, 3)
    """
    _check(training)
    return _train_layer(jnp.asarray(wanted), jnp.asarray(start), key, training)


@partial(jax.jit, static_argnames="training")
def _train_layer(wanted: jax.Array, start: jax.Array, key: jax.Array, training: Descent) -> TrainedLayer:
    answers = wanted * jnp.exp((wanted**2).sum(0) / 2)  # (K, M)

    def total(state: tuple[jax.Array, jax.Array], seen: jax.Array) -> jax.Array:
        z, weights = state
        return (seen * (weights * jnp.exp(z) - answers) ** 2).sum() / (2 * training.share)

    states = _descend(total, ((start**2).sum(0) / 2, start), key, training)
    return TrainedLayer(*states)


def _check(training: Descent) -> None:
    if training.steps % training.snapshots or training.steps < 1 or not 0 < training.share <= 1:
        raise UsageError(f"{training}: steps must be a positive multiple of snapshots, and share lie in (0, 1]")


def _descend(total: Any, start: Any, key: jax.Array, training: Descent) -> Any:
    """Descend with a random part of the tokens in every step, and return the states with the start in front."""
    tokens, each = start[0].size, training.steps // training.snapshots

    def step(state: Any, seen: jax.Array) -> tuple[Any, None]:
        slopes = jax.grad(total)(state, seen)
        return jax.tree.map(lambda weight, slope: weight - training.rate * slope, state, slopes), None

    def block(state: Any, part: jax.Array) -> tuple[Any, Any]:
        seen = jax.random.bernoulli(part, training.share, (each, tokens)).astype(start[0].dtype)
        state, _ = jax.lax.scan(step, state, seen)
        return state, state

    _, path = jax.lax.scan(block, start, jax.random.split(key, training.snapshots))
    return jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), start, path)
