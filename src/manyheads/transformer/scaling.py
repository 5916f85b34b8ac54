"""Scales of a transformer: standard deviations at init, forward multipliers, logit, branch and output scales.

A theory of infinite limits says how these numbers depend on key dimension, heads and depth. The transformer only
consumes them, so one compiled training step serves every scheme.
"""

from typing import TYPE_CHECKING, Any

from manyheads._trees import Tree
from manyheads.errors import UsageError
from manyheads.transformer.inputs import Input
from manyheads.transformer.shape import Shape

if TYPE_CHECKING:
    from jax import Array

    Number = float | Array
else:
    Number = Any

ROLE_OF = {
    **{name: name for name in ("embedding", "positional", "query", "key", "value", "output", "mlp_in", "mlp_out")},
    **dict.fromkeys(("attention_gain", "attention_shift", "mlp_gain", "mlp_shift"), "norm"),  # inside the blocks
    **dict.fromkeys(("query_bias", "key_bias"), "logit_bias"),
    **dict.fromkeys(("value_bias", "output_bias", "mlp_in_bias", "mlp_out_bias"), "bias"),
    **dict.fromkeys(("final_gain", "final_shift"), "final_norm"),
    **{name: name for name in ("unembedding", "unembedding_bias")},
}
"""Array of the transformer → role."""

ROLES = tuple(dict.fromkeys(ROLE_OF.values()))


class Scaling(Tree):
    r"""The scales of one transformer, numbers or traced scalars.

    A weight of role :math:`c` starts as :math:`W \sim \mathcal N(0, s_c^2)` and acts as :math:`m_c W`; gains of role
    `norm` and `final_norm` start at the constant :math:`s_c`, shifts at zero. Logits are
    :math:`p\,N^{-\alpha}\,q\cdot k`, a branch adds :math:`b` times what it computes, the read-out is multiplied by
    :math:`o`.

    Examples
    --------
    >>> from manyheads.transformer.inputs import TokenInput
    >>> scaling = standard_scaling(Shape(8, 2, 1), TokenInput(30))
    >>> scaling.initial["query"], scaling.multiplier["query"], round(scaling.logit(8), 6)
    (0.25, 1.0, 0.353553)
    """

    initial: dict[str, Number]  # s_c for every role
    multiplier: dict[str, Number]  # m_c for every role
    logit_prefactor: Number = 1.0  # p
    logit_exponent: Number = 0.5  # alpha
    branch: Number = 1.0  # b, for attention and MLP alike
    output: Number = 1.0  # o

    def __post_init__(self) -> None:
        for name in ("initial", "multiplier"):
            given = set(getattr(self, name))
            if given != set(ROLES):
                missing, unknown = sorted(set(ROLES) - given), sorted(given - set(ROLES))
                raise UsageError(f"{name} needs one number a role: missing {missing}, unknown {unknown}")

    def logit(self, key_dim: int) -> Number:
        """Scale of the logits at key dimension N: prefactor times N to the minus exponent."""
        return self.logit_prefactor * key_dim ** (-self.logit_exponent)


def standard_scaling(shape: Shape, inputs: Input, mlp_ratio: int = 4) -> Scaling:
    r"""Return the standard scaling: standard deviations :math:`1/\sqrt{\text{fan-in}}`, logits over :math:`\sqrt N`.

    Learned positions start with standard deviation 1.

    Examples
    --------
    >>> from manyheads.transformer.inputs import PatchInput
    >>> standard_scaling(Shape(8, 2, 3), PatchInput(4)).initial["embedding"]
    0.5
    """
    bulk = shape.width**-0.5
    initial = dict.fromkeys(ROLES, bulk)
    initial |= dict.fromkeys(("positional", "norm", "final_norm"), 1.0)
    initial |= dict.fromkeys(("logit_bias", "bias", "unembedding_bias"), 0.0)
    initial |= {"embedding": inputs.fan_in**-0.5, "output": (shape.key_dim * shape.heads) ** -0.5}
    initial["mlp_out"] = (max(mlp_ratio, 1) * shape.width) ** -0.5
    return Scaling(initial=initial, multiplier=dict.fromkeys(ROLES, 1.0))
