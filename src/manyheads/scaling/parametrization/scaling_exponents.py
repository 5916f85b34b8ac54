r"""Scaling exponents of every class of weights in N, H, L: initial std, prescribed update, size of the gradient.

One table serves all optimizers. A class has three sizes, entry by entry and in *effective form*, that is for the
weight that the forward pass multiplies by (no multiplier beside it):

* its initial std;
* the update that training should give it in unit time, so that what it computes moves by an amount of order one (of
  order :math:`L^{-1}` of the stream in each block);
* the size of its gradient.

Adam divides the gradient by its size, so its learning rate *is* the update and its epsilon goes with the gradient; the
rate of gradient descent is update over gradient; Muon's, of the matrices in the blocks, follows from the sides of what
it orthogonalizes (`muon`), and the other weights are AdamW's. With the read-out :math:`f = w \cdot h/(\gamma_0 d)`,
the backward signal on the stream is of size :math:`1/(\gamma_0 d)` in each entry, a branch multiplies it by
:math:`L^{-\alpha_L}`, and the softmax logits :math:`N^{-\alpha_A} q\cdot k` let the queries see
:math:`N^{1-\alpha_A}` of it, because the gradient of an attention weight sums N aligned products :math:`e \cdot v`.

The stream's width D may differ from M = N H: what reads the stream has the fan-in D, :math:`W_O` has M, the second
matrix of the MLP F. A backward signal on a value is then :math:`(DM)^{-1/2}/\gamma_0` at the start and
:math:`1/(M\gamma_0)` once aligned; epsilon takes the first, which is exact while M/D stays.

Source: Bordelon, Chaudhry, Pehlevan, "Infinite limits of multi-head transformer dynamics" (2024), Table 1, gives the
rates and multipliers of SGD and Adam; the factorization into update and gradient, the biases, the gains, epsilon and
weight decay are derived here. Init, learning rate and epsilon under Adam with exponents of one (CompleteP), D being the
stream's width, K the key heads, F the MLP's width, Rq and Rkv latent ranks, γ the richness:

>>> for role, law in scaling_exponents("completep", "adam", 1.0, 1.0).items():
...     print(f"{role:<17}{law.initial!s:<16}{law.learning_rate!s:<10}{law.epsilon}")
embedding        1               1         D^-1 γ^-1
positional       1               1         D^-1 γ^-1
query            D^-1/2          D^-1      N^-1/2 H^-1/2 D^-1/2 L^-1 γ^-1
key              D^-1/2          D^-1      N^-1/2 D^-1/2 K^-1/2 L^-1 γ^-1
value            D^-1/2          D^-1      N^-1/2 D^-1/2 K^-1/2 L^-1 γ^-1
output           N^-1/2 H^-1/2   N^-1 H^-1 D^-1 L^-1 γ^-1
mlp_in           D^-1/2          D^-1      D^-1/2 F^-1/2 L^-1 γ^-1
mlp_out          F^-1/2          F^-1      D^-1 L^-1 γ^-1
norm             1               1         D^-1 L^-1 γ^-1
logit_bias       1               1         D^-1 L^-1 γ^-1
bias             1               1         D^-1 L^-1 γ^-1
final_norm       1               1         D^-1 γ^-1
unembedding      D^-1 γ^-1       D^-1 γ^-1 1
unembedding_bias 1               γ^-1      1
query_down       D^-1/2          D^-1      D^-1/2 Rq^-1/2 L^-1 γ^-1
query_up         Rq^-1/2         Rq^-1     N^-1/2 H^-1/2 D^-1/2 L^-1 γ^-1
key_value_down   D^-1/2          D^-1      D^-1/2 Rkv^-1/2 L^-1 γ^-1
key_value_up     Rkv^-1/2        Rkv^-1    N^-1/2 H^-1/2 D^-1/2 L^-1 γ^-1
router           D^-1/2          D^-1      D^-1/2 L^-1 γ^-1
sink             1               1         N^1/2 H^-1/2 D^-1/2 L^-1 γ^-1
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from manyheads.scaling.parametrization.muon import LATENT_BLOCKS, MUON_ROLES, Muon
from manyheads.scaling.parametrization.power_laws import (
    HIDDEN_WIDTH,
    KEY_VALUE_RANK,
    KEYS,
    ONE,
    QUERIES,
    QUERY_RANK,
    WIDTH,
    Power,
)

Scheme = Literal["completep", "mup", "standard"]
Optimizer = Literal["adam", "sgd", "muon"]
SCHEMES: tuple[str, ...] = get_args(Scheme)
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)


class ScalingExponents(NamedTuple):
    """Scaling exponents of one class of weights, in effective form."""

    initial: Power
    learning_rate: Power
    epsilon: Power  # Adam's or Muon's; gradient descent has none
    rule: str = "adam"  # what steps the class: "adam", "sgd" or "muon"


class ClassScales(NamedTuple):
    """A class under the consistent scaling, in effective form."""

    initial: Power
    update: Power
    gradient: Power


def class_scales(logit_exponent: float, depth_exponent: float) -> dict[str, ClassScales]:
    r"""Return the sizes of every role at logit exponent alpha_A and depth exponent alpha_L.

    A router reads d inputs, starts and moves as values do; its gradient is at the start a sum of d independent products
    of backward signal and an expert's output. A sink is a logit and moves by what a gain in a block moves; its gradient
    is, as that of an attention weight, a sum of N aligned products.

    Latent attention (MLA) factors the queries, and the keys and values, through a norm: :math:`W^U c` with the latent
    :math:`c = \mathrm{norm}(W^D x)` of R entries. The norm makes a motion of :math:`W^D x` relative to its size, so
    that :math:`W^D` starts and moves as values do; :math:`W^U` reads R entries of size one. What moves the latent of
    the queries by :math:`\delta` moves a logit by between :math:`N^{1/2-\alpha_A} \delta`, at a fixed rank, where
    :math:`W^{U\top} k` is a sum of N random terms, and :math:`N^{1-\alpha_A} \delta`, at a rank in proportion to N H:
    by :math:`\delta` at exponent 1 and wherever N stays, at any rank. `parameter_targets` refuses the rest. The
    gradient of a latent is at the start a sum of N H independent products with entries :math:`R^{-1/2}`.

    Examples
    --------
    >>> sizes = class_scales(0.5, 1.0)
    >>> print(sizes["query"].initial, "|", sizes["query"].update, "|", sizes["query"].gradient)
    D^-1/2 | N^-1/2 D^-1 | H^-1/2 D^-1/2 L^-1 γ^-1
    >>> print(sizes["router"].update, "|", sizes["sink"].update, "|", sizes["sink"].gradient.plain())
    D^-1 | 1 | H^-1 L^-1 γ^-1
    """
    stream = WIDTH**-1 * Power(richness=-1)  # the backward signal on an entry of the residual stream
    moves = Power(depth=depth_exponent - 1)  # a block's share of the update, before the branch multiplier
    inside = Power(depth=-depth_exponent) * stream  # the backward signal on an entry inside a branch
    logit_moves = moves * Power(key_dim=logit_exponent - 1)
    at_heads = inside * (WIDTH / QUERIES) ** 0.5  # the backward signal on an entry of a head's outputs
    at_logits = Power(key_dim=1 - logit_exponent)  # and that on queries and keys over it
    shared = (QUERIES / KEYS) ** 0.5  # H/K query heads drive one key and value

    def reads(update: Power, gradient: Power) -> ClassScales:
        return ClassScales(WIDTH**-0.5, update / WIDTH, gradient)

    def latent(name: str, rank: Power, update: Power, gradient: Power) -> dict[str, ClassScales]:
        down, up = reads(moves, gradient * (QUERIES / rank) ** 0.5), ClassScales(rank**-0.5, update / rank, gradient)
        return {f"{name}_down": down, f"{name}_up": up}

    return {
        "embedding": ClassScales(ONE, ONE, stream),
        "positional": ClassScales(ONE, ONE, stream),
        "query": reads(logit_moves, at_heads * at_logits),
        "key": reads(logit_moves, at_heads * at_logits * shared),
        "value": reads(moves, at_heads * shared),
        "output": ClassScales(QUERIES**-0.5, moves / QUERIES, inside),
        "mlp_in": reads(moves, inside * (WIDTH / HIDDEN_WIDTH) ** 0.5),
        "mlp_out": ClassScales(HIDDEN_WIDTH**-0.5, moves / HIDDEN_WIDTH, inside),
        "norm": ClassScales(ONE, moves, inside),
        "logit_bias": ClassScales(ONE, logit_moves, inside * at_logits),
        "bias": ClassScales(ONE, moves, inside),
        "final_norm": ClassScales(ONE, ONE, stream),
        "unembedding": ClassScales(stream, stream, ONE),
        "unembedding_bias": ClassScales(ONE, Power(richness=-1), ONE),
        # Of other architectures than the library's transformer
        **latent("query", QUERY_RANK, logit_moves, at_heads * at_logits),
        **latent("key_value", KEY_VALUE_RANK, moves, at_heads),
        "router": reads(moves, inside * WIDTH**0.5),
        "sink": ClassScales(ONE, moves, at_heads * Power(key_dim=1)),
    }


def scaling_exponents(
    scheme: Scheme, optimizer: Optimizer, logit_exponent: float, depth_exponent: float, muon: Muon | None = None
) -> dict[str, ScalingExponents]:
    """Return the laws of all roles.

    * `"completep"`: the consistent scaling in N, H and L; at exponents of one under Adam, CompleteP.
    * `"mup"`: the same with width d = N H alone, ignoring both exponents, and plain rates for queries and keys, right
      for logit exponent 1 only; epsilon is not rescaled, as in Yang et al. (2022).
    * `"standard"`: fan-in stds, one rate and one epsilon for all.

    Rows of Muon, for the matrices in the blocks, are those before the shape factor, which is no power of one size; the
    other schemes leave the rate of its groups alone, as recipes do that trust the shape factor. Its epsilon is held
    against the Frobenius norm of the gradient, an entry times the root of the number of entries.

    Examples
    --------
    >>> print(scaling_exponents("completep", "sgd", 0.5, 1.0)["query"].learning_rate.plain())
    N^-1 L γ^2
    >>> print(scaling_exponents("mup", "adam", 1.0, 1.0)["value"].learning_rate)
    D^-1
    """
    consistent = scheme == "completep"
    if not consistent:
        logit_exponent = depth_exponent = 1.0

    def law(role: str, scales: ClassScales) -> ScalingExponents:
        initial, update, gradient = scales
        by_muon = optimizer == "muon" and (role in MUON_ROLES or role in LATENT_BLOCKS)
        rule = "adam" if optimizer == "muon" and not by_muon else optimizer
        if scheme == "standard":
            return ScalingExponents(WIDTH**-0.5 if role == "unembedding" else initial, ONE, ONE, rule)
        rate = Power(richness=1) * update / gradient if rule == "sgd" else update
        if not consistent:
            return ScalingExponents(initial.without_depth(), ONE if by_muon else rate.without_depth(), ONE, rule)
        if not by_muon:
            return ScalingExponents(initial, rate, ONE if rule == "sgd" else gradient, rule)
        block = (muon or Muon()).block(role)
        queries = Power(key_dim=logit_exponent - 1) if role in ("query", "key", "query_up") else ONE
        rate = block.learning_rate * queries * Power(depth=depth_exponent - 1)
        return ScalingExponents(initial, rate, gradient * (block.rows * block.cols) ** 0.5, rule)

    return {role: law(role, scales) for role, scales in class_scales(logit_exponent, depth_exponent).items()}
