"""Systems of theorem 4: relaxing components and lower layers, integrated as flows or trained by SGD.

The flows are solved by diffrax, independently of the quadratures of `manyheads.theory.joma.theorems.salient_first`.
"""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from manyheads._arrays import on_host, takes_arrays, to_numpy
from manyheads._constraints import Constraint
from manyheads._settings import double_precision
from manyheads.errors import UsageError
from manyheads.theory.joma.systems.recording import SGDOptions, integrate, record_states
from manyheads.theory.joma.theorems.salient_first import EXP, RateLaw

Dynamics = Literal["exp", "softmax", "uniform", "linear"]

DYNAMICS: dict[str, str] = {
    "exp": "exp attention",
    "softmax": "softmax attention",
    "uniform": "attention held uniform",
    "linear": "linear activation",
}
"""Dynamics of a lower layer: the first two saturate with attention, the third without, the fourth never saturates."""


@takes_arrays
def relax(
    targets: Float[ArrayLike, " tokens"],
    times: Float[ArrayLike, " times"],
    law: RateLaw = EXP,
    normalized: Bool[ArrayLike, ""] | bool = False,
) -> Float[Array, "times tokens"]:
    r"""Integrate the log deficits of components that relax to their targets, :math:`\dot L = r(\mu(1 - e^{-L}))`.

    Targets mu >= 0; a component of target 0 stays at zero. Times rise. Returns ln(1/delta), with v = targets * (1 -
    exp(-L)), relative accuracy 1e-9 at any size. With `normalized`, traced or not, rates are divided by their mean over
    the components with a target, as in softmax attention.
    """
    return _run_in_double(_relax, (targets, times, normalized), (law,))


@partial(jax.jit, static_argnames="law")
def _relax(targets: jax.Array, times: jax.Array, normalized: jax.Array, law: RateLaw) -> jax.Array:
    present = targets > 0

    def rates(t: Any, deficit: jax.Array, args: Any) -> jax.Array:
        log_rate = law.log_rate(-targets * jnp.expm1(-deficit), targets, jnp)
        mean = jax.nn.logsumexp(log_rate, where=present) - jnp.log(present.sum())
        return jnp.where(present, jnp.exp(log_rate - normalized * mean), 0)

    return integrate(rates, jnp.zeros_like(targets), times, 1e-10, 1e-12, max_steps=1 << 16).ys


@takes_arrays
def relax_layer(
    target: Float[ArrayLike, "neurons tokens"],
    init: Float[ArrayLike, "neurons tokens"],
    times: Float[ArrayLike, " times"],
    dynamics: Dynamics = "exp",
) -> Float[Array, "times neurons tokens"]:
    r"""Integrate a lower layer that relaxes to its target B, :math:`\dot W = (B - W) \circ r(z)`.

    The logit of token m is :math:`z_m = \tfrac12 \sum_k w_{km}^2`, as theorem 1 has it. "exp": r = exp(z); "softmax":
    r = M softmax(z); "uniform": r = 1; "linear": without saturation, :math:`\dot W = B \circ M \mathrm{softmax}(z)`,
    as behind a linear activation.
    """
    if dynamics not in DYNAMICS:
        raise UsageError(f"dynamics={dynamics!r}: expected one of {', '.join(DYNAMICS)}")
    return _run_in_double(_relax_layer, (target, init, times, *map(float, SWITCHES[dynamics])), ())


SWITCHES = {"exp": (1, 0, 1), "softmax": (1, 1, 1), "uniform": (0, 0, 1), "linear": (1, 1, 0)}
"""Whether attention learns, is normalized, and components saturate: as numbers, so that one compiled program serves
all dynamics."""


@jax.jit
def _relax_layer(
    target: jax.Array, init: jax.Array, times: jax.Array, learns: jax.Array, normalized: jax.Array, saturates: jax.Array
) -> jax.Array:
    def rates(t: Any, weights: jax.Array, args: Any) -> jax.Array:
        z = learns * (weights**2).sum(0) / 2  # (M,)
        mean = jax.nn.logsumexp(z) - jnp.log(z.size)
        return (target - saturates * weights) * jnp.exp(z - normalized * mean)

    return integrate(rates, init, times, 1e-8, 1e-10, max_steps=1 << 16).ys


def _run_in_double(function: Any, arrays: tuple[Any, ...], settings: tuple[Any, ...]) -> Any:
    """Run NumPy arrays in double precision, without `follows_caller`: diffrax checks its times while tracing."""
    if not on_host(arrays):
        return function(*map(jnp.asarray, arrays), *settings)
    with double_precision():
        return to_numpy(function(*(jnp.asarray(array, jnp.float64) for array in arrays), *settings))


LOSSES = ("matched", "squared")


@takes_arrays
def invert_output(output: Float[Array, "..."]) -> Float[Array, "..."]:
    r"""Solve :math:`v e^{v^2/2} = h` for v: :math:`v = \mathrm{sign}(h) \sqrt{W(h^2)}` with Lambert's W, by Newton."""
    size = jnp.abs(output)
    log = jnp.log1p(size)
    v = size / (1 + log) ** 0.5 / (1 + size / (1 + (2 * log) ** 0.5))  # between h and (2 ln h)^(1/2)
    for _ in range(12):  # in ln h, which is concave in v: from below Newton stays below and doubles its digits
        v = jnp.where(size > 0, v * (1 + (jnp.log(jnp.where(size > 0, size / v, 1.0)) - v**2 / 2) / (1 + v**2)), 0.0)
    return jnp.sign(output) * v


@takes_arrays
@partial(jax.jit, static_argnames=("loss", "training", "token_probability"))
def train_components(
    targets: Float[Array, " tokens"], loss: str, training: SGDOptions, token_probability: float, key: jax.Array
) -> Float[Array, "snapshots tokens"]:
    r"""Train one neuron and its attention logits on contexts of a single token; return ln(1/delta) of its components.

    A context holds token l alone, exp attention weights it by :math:`e^{z_l}`, and the output is
    :math:`h_l = v_l e^{z_l}`. Both z and v are initialized at zero and trained by SGD, a token being in the batch of a
    step with `token_probability`. The losses of an output:

    * "matched": :math:`\ell(h) = \sup_u [u h - (e^{u^2/2} - 1)] - \mu h`, convex, with
      :math:`\ell'(h) = \sqrt{W(h^2)} - \mu` (Lambert's W). By theorem 1 :math:`h = v e^{v^2/2}`: its gradient flow is
      that of theorem 4, :math:`\dot v = (\mu - v) e^{v^2/2}`, exactly. For small outputs it is the squared loss, for
      large ones it grows as :math:`h (2 \ln h)^{1/2}`. Derived here.
    * "squared": :math:`\tfrac12 (h - \mu e^{\mu^2/2})^2`, with the same minimum and the rate law
      `manyheads.theory.joma.theorems.salient_first.REGRESSION`.

    Deficits are those of the weight u that gives the output on the conserved manifold, :math:`u e^{u^2/2} = h`: at
    finite learning rate z - v²/2 is conserved up to an error of that order, so v itself does not converge to mu.
    Traceable; gradients are those of the loss.
    """
    if loss not in LOSSES:
        raise UsageError(f"loss={loss!r}: expected one of {', '.join(LOSSES)}")

    def total(state: tuple[jax.Array, jax.Array], seen: jax.Array) -> jax.Array:
        z, v = state
        h = v * jnp.exp(z)
        if loss == "squared":
            losses = (h - targets * jnp.exp(targets**2 / 2)) ** 2 / 2
        else:
            # The maximizer: by the envelope theorem its derivative drops out.
            u = jax.lax.stop_gradient(invert_output(h))
            losses = u * h - jnp.expm1(u**2 / 2) - targets * h
        return (seen * losses).sum() / token_probability

    init = jnp.zeros_like(targets), jnp.zeros_like(targets)
    logits, weights = _descend(total, init, key, training, token_probability)
    return -jnp.log1p(-invert_output(weights * jnp.exp(logits)) / targets)


@takes_arrays
@partial(jax.jit, static_argnames=("training", "token_probability"))
def train_layer(
    target: Float[Array, "neurons tokens"],
    init: Float[Array, "neurons tokens"],
    training: SGDOptions,
    token_probability: float,
    key: jax.Array,
) -> tuple[Float[Array, "snapshots tokens"], Float[Array, "snapshots neurons tokens"]]:
    r"""Train K neurons and their shared attention logits by SGD on the outputs of a layer B; return logits and weights.

    A context holds token m alone, exp attention weights it by :math:`e^{z_m}`, and the loss is
    :math:`\tfrac12 \sum_k (w_{km} e^{z_m} - b_{km} e^{|b_m|^2/2})^2`: regression, with its minimum at W = B
    on the conserved manifold :math:`z_m = \tfrac12 \sum_k w_{km}^2`, where the logits are initialized. Traceable.
    """
    outputs = target * jnp.exp((target**2).sum(0) / 2)  # (K, M)

    def total(state: tuple[jax.Array, jax.Array], seen: jax.Array) -> jax.Array:
        z, weights = state
        return (seen * (weights * jnp.exp(z) - outputs) ** 2).sum() / (2 * token_probability)

    return _descend(total, ((init**2).sum(0) / 2, init), key, training, token_probability)


def _descend(total: Any, init: Any, key: jax.Array, training: SGDOptions, probability: float) -> Any:
    """Run SGD with a random subset of the tokens in every step and record the states."""
    Constraint(above=0, most=1).kept("token_probability", probability, "float")

    def step(state: Any, seen: jax.Array) -> tuple[Any, None]:
        slopes = jax.grad(total)(state, seen)
        return jax.tree.map(lambda weight, slope: weight - training.learning_rate * slope, state, slopes), None

    def block(state: Any, part: jax.Array) -> Any:
        seen = jax.random.bernoulli(part, probability, (training.block(), init[0].size)).astype(init[0].dtype)
        return jax.lax.scan(step, state, seen)[0]

    return record_states(block, init, jax.random.split(key, training.snapshots))
