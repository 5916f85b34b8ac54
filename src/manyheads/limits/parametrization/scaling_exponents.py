r"""Scaling exponents of every class of weights in N, H, L: initial std, prescribed update, size of the gradient.

One table serves both optimizers. A class has three sizes, entry by entry and in *effective form*, that is for the
weight that the forward pass multiplies by (no multiplier beside it):

* its initial std;
* the update that training should give it in unit time, so that what it computes moves by an amount of order one (of
  order :math:`L^{-1}` of the stream in each block);
* the size of its gradient.

Adam divides the gradient by its size, so its learning rate *is* the update and its epsilon goes with the gradient; the
rate of gradient descent is update over gradient. With the read-out :math:`f = w \cdot h/(\gamma_0 d)`, the backward
signal on the stream is of size :math:`1/(\gamma_0 d)` in each entry, a branch multiplies it by :math:`L^{-\alpha_L}`,
and the softmax logits :math:`N^{-\alpha_A} q\cdot k` let the queries see :math:`N^{1-\alpha_A}` of it, because the
gradient of an attention weight sums N aligned products :math:`e \cdot v`.

Source: Bordelon, Chaudhry, Pehlevan, "Infinite limits of multi-head transformer dynamics" (2024), Table 1, gives the
rates and multipliers of SGD and Adam; the factorization into update and gradient, the biases, the gains, epsilon and
weight decay are derived here.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from manyheads.limits.parametrization.power_laws import ONE, WIDTH, Power

Scheme = Literal["limits", "mup", "standard"]
Optimizer = Literal["adam", "sgd"]

SCHEMES: tuple[str, ...] = get_args(Scheme)
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)


class ScalingExponents(NamedTuple):
    """Scaling exponents of one class of weights, in effective form."""

    initial: Power
    learning_rate: Power
    epsilon: Power  # Adam's; gradient descent has none


class ClassScales(NamedTuple):
    """A class under the consistent scaling, in effective form."""

    initial: Power
    update: Power
    gradient: Power


def consistent_scales(logit_exponent: float, depth_exponent: float) -> dict[str, ClassScales]:
    """Return the sizes of every role at logit exponent alpha_A and depth exponent alpha_L.

    Examples
    --------
    >>> sizes = consistent_scales(0.5, 1.0)["query"]
    >>> print(sizes.initial, "|", sizes.update, "|", sizes.gradient)
    N^-1/2 H^-1/2 | N^-3/2 H^-1 | N^-1/2 H^-1 L^-1 γ^-1
    """
    stream = WIDTH**-1 * Power(richness=-1)  # the backward signal on an entry of the residual stream
    moves = Power(depth=depth_exponent - 1)  # a block's share of the update, before the branch multiplier
    inside = Power(depth=-depth_exponent) * stream  # the backward signal on an entry inside a branch
    logit_moves = moves * Power(key_dim=logit_exponent - 1)
    logit_inside = inside * Power(key_dim=1 - logit_exponent)
    bulk = ClassScales(WIDTH**-0.5, moves / WIDTH, inside)
    logit = ClassScales(WIDTH**-0.5, logit_moves / WIDTH, logit_inside)
    return {
        "embedding": ClassScales(ONE, ONE, stream),
        "positional": ClassScales(ONE, ONE, stream),
        "query": logit,
        "key": logit,
        "value": bulk,
        "output": bulk,
        "mlp_in": bulk,
        "mlp_out": bulk,
        "norm": ClassScales(ONE, moves, inside),
        "logit_bias": ClassScales(ONE, logit_moves, logit_inside),
        "bias": ClassScales(ONE, moves, inside),
        "final_norm": ClassScales(ONE, ONE, stream),
        "unembedding": ClassScales(WIDTH**-1 * Power(richness=-1), WIDTH**-1 * Power(richness=-1), ONE),
        "unembedding_bias": ClassScales(ONE, Power(richness=-1), ONE),
    }


def standard_initial() -> dict[str, Power]:
    """Return the usual initial stds: one over the square root of the fan-in, gains one."""
    return {role: ONE if sizes.initial == ONE else WIDTH**-0.5 for role, sizes in consistent_scales(1.0, 1.0).items()}


def scaling_exponents(
    scheme: Scheme, optimizer: Optimizer, logit_exponent: float, depth_exponent: float
) -> dict[str, ScalingExponents]:
    """Return the laws of all roles.

    Parameters
    ----------
    scheme
        `"limits"`: the consistent scaling in N, H and L. `"mup"`: the same with width d = N H alone and plain rates
        for queries and keys, which is right for logit exponent 1 only; epsilon is not rescaled, as in Yang et al.
        (2022). `"standard"`: fan-in stds, one rate and one epsilon for all.
    optimizer
        `"adam"` or `"sgd"`.
    logit_exponent, depth_exponent
        alpha_A and alpha_L; the other schemes ignore them.

    Examples
    --------
    >>> print(scaling_exponents("limits", "sgd", 0.5, 1.0)["query"].learning_rate)
    N^-1 L γ^2
    >>> print(scaling_exponents("mup", "adam", 1.0, 1.0)["value"].learning_rate)
    N^-1 H^-1
    """
    if scheme == "standard":
        return {role: ScalingExponents(initial, ONE, ONE) for role, initial in standard_initial().items()}
    alone = scheme == "mup"
    sizes = consistent_scales(1.0, 1.0) if alone else consistent_scales(logit_exponent, depth_exponent)
    found = {}
    for role, (initial, update, gradient) in sizes.items():
        learning_rate = update if optimizer == "adam" else Power(richness=1) * update / gradient
        law = ScalingExponents(initial, learning_rate, gradient if optimizer == "adam" else ONE)
        found[role] = ScalingExponents(initial.without_depth(), learning_rate.without_depth(), ONE) if alone else law
    return found
