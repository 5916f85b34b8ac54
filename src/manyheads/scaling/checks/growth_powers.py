"""Powers of a size by which the updates of a transformer grow: prescribed by a scaling, and the lowest it may show."""

from __future__ import annotations

from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.parametrization.power_laws import ONE, Power

QUANTITIES: dict[str, str] = {
    "outputs": "outputs",
    "residual": "residual stream after the last block",
    "logits": "attention logits",
    "query_by_weights": "queries, moved by their own weights",
    "value_by_weights": "values, moved by their own weights",
}
"""The quantities that a coordinate check follows, and the module in which each stands."""


def required_growth(parametrization: Parametrization) -> dict[str, Power]:
    """Return the power of every quantity that a consistent scaling with these exponents prescribes.

    The updates of outputs, stream and logits are independent of size. Queries move by N^(alpha_A - 1), so that a
    logit, N products of moved queries with keys over N^alpha_A, moves by one: that holds for every logit exponent, also
    where the parametrization does not provide for it. In each of L blocks weights move what they compute by
    L^(alpha_L - 1), which together move the stream by one; parametrizations without a depth exponent are asked for one.

    """
    moves = Power(depth=parametrization.depth_exponent - 1) if parametrization.scheme == "completep" else ONE
    queries = Power(key_dim=parametrization.logit_exponent - 1)
    found = dict.fromkeys(QUANTITIES, ONE)
    return found | {"query_by_weights": moves * queries, "value_by_weights": moves}


def least_growth(parametrization: Parametrization, early: bool = False) -> dict[str, Power]:
    """Return the lowest power of every quantity that a consistent scaling may show at finite size or short time.

    * A logit moves by an aligned sum, of order one, and by a random sum of N terms over N^alpha_A. At alpha_A = 1 the
      random one is N^(-1/2): while it counts, the power lies between. And it moves because the stream does, by one, and
      because its own weights do, by L^(alpha_L - 1).
    * The stream moves by L aligned contributions of L^(-alpha_L) L^(alpha_L - 1) and by L random ones of L^(-alpha_L),
      which make L^(1/2 - alpha_L).
    * At the start values and backward signals are independent, and the gradient of a logit, their product over N, is
      N^(-1/2) instead of one. Gradient descent then moves queries and logits by N^(-1/2) of what is prescribed, until
      training of order one has aligned them; Adam divides the gradient by its size and does not wait.
    * Parametrizations without a depth exponent may move a block's quantities like any exponent between 1/2 and 1.

    Derived here.

    Examples
    --------
    >>> least = least_growth(Parametrization(1.0, 1.0))
    >>> print(least["logits"], least["residual"], least["outputs"])
    N^-1/2 L^-1/2 1
    """
    required = required_growth(parametrization)
    consistent = parametrization.scheme == "completep"
    waits = Power(key_dim=-0.5) if early and parametrization.optimizer == "sgd" else ONE
    blocks = ONE if consistent else Power(depth=-0.5)
    random = Power(depth=0.5 - (parametrization.depth_exponent if consistent else 1.0))
    return required | {
        # Both reasons for slow logits are one N^(-1/2) each, and the slower part is not seen beside the other.
        "logits": (waits if waits != ONE else Power(key_dim=0.5 - parametrization.logit_exponent))
        * Power(depth=required["query_by_weights"].depth)
        * blocks,
        "residual": random,
        "query_by_weights": required["query_by_weights"] * waits * blocks,
        "value_by_weights": required["value_by_weights"] * blocks,
    }
