r"""What every parameter of a model needs: initial spread, learning rate, epsilon and weight decay, folding included.

A model whose forward pass cannot be changed still multiplies its logits by :math:`N^{-1/2}` and its branches by one.
A factor c that the parametrization wants in the forward pass is then *folded* into the weight behind it: the model
computes with :math:`W' = c\,W`, whose gradient is 1/c times that of W, so W' follows c W exactly if it starts at c
times the spread and trains with c times Adam's rate and 1/c times its epsilon, or with :math:`c^2` times the rate of
gradient descent. Decoupled weight decay stays one over the rate. Derived here.

* The branch factor :math:`(L/L_0)^{-\alpha_L}` goes into :math:`W_O`, the second matrix of the MLP, and their biases.
* The logit factor :math:`(N/N_0)^{1/2-\alpha_A}` goes into the queries and their bias.
* A tied embedding is one parameter in two classes. As an embedding it starts and moves by order one; as an unembedding
  it has to act with :math:`m = d_0/d\,\gamma_0^{-1}` times that. Its two gradients are then of one size under Adam
  (:math:`1/d`, the embedding's epsilon), and :math:`m^2 \cdot d\,\gamma_0^2 = 1/d` is the unembedding's rate under
  gradient descent: an embedding with a multiplier m behind it is both. The m goes into gain and shift of the last norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING

from manyheads.errors import UsageError
from manyheads.limits.parametrization.architecture import CARRIES, HIDDEN, PARTS
from manyheads.transformer.scaling import ROLES

if TYPE_CHECKING:
    from manyheads.limits.parametrization.architecture import Anatomy, Place
    from manyheads.limits.parametrization.parametrization import Parametrization
    from manyheads.limits.parametrization.power_laws import Power
    from manyheads.transformer.shape import Shape

QUANTITIES = ("initial", "rate", "epsilon", "weight_decay")


@dataclass(frozen=True)
class Tuned:
    """What was tuned at the base shape.

    Attributes
    ----------
    rate
        The learning rate; under a schedule its peak.
    epsilon
        Adam's epsilon.
    weight_decay
        Decoupled weight decay.
    spreads
        Standard deviation at the base by role (`manyheads.transformer.scaling.ROLES`, and `"hidden"`); roles left out
        have the family's usual one, which a plain module has not.
    spared
        Roles without weight decay. Where a role is too wide, a part of it
        (`manyheads.limits.parametrization.architecture.PARTS`): the bias
        of a ViT's patches scales as its positions do and has their role, and is the part `"embedding_bias"`.

    Raises
    ------
    UsageError
        A number that cannot be, or an unknown role.

    Examples
    --------
    >>> Tuned(rate=3e-4, weight_decay=0.1, spared=("norm", "bias", "embedding_bias")).epsilon
    1e-08
    """

    rate: float
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    spreads: Mapping[str, float] = field(default_factory=dict)
    spared: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), ("epsilon", self.epsilon)):
            if not (_is_size(value) and value > 0):
                raise UsageError(f"{name}={value!r}: it is a positive number")
        if not _is_size(self.weight_decay):
            raise UsageError(f"weight_decay={self.weight_decay!r}: it is not negative, and a number")
        known = (*ROLES, HIDDEN)
        if unknown := [role for role in self.spreads if role not in known]:
            raise UsageError(f"no role is called {unknown[0]!r}: choose from {', '.join(known)}")
        if unknown := [role for role in self.spared if role not in known and role not in PARTS]:
            parts = ", ".join(part for part in PARTS if part not in known)
            raise UsageError(
                f"no role is called {unknown[0]!r}: choose from {', '.join(known)}; or from their parts, {parts}"
            )
        if bad := [role for role, spread in self.spreads.items() if not _is_size(spread)]:
            raise UsageError(f"the spread of {bad[0]} is {self.spreads[bad[0]]!r}: it is not negative, and a number")


def _is_size(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= value < 1e100  # type: ignore[operator]


@dataclass(frozen=True)
class Factors:
    """What changes from the base to a shape; one at the base."""

    initial: float
    rate: float
    epsilon: float

    def fold(self, c: float, optimizer: str) -> Factors:
        """Return the factors of c times the weight."""
        adam = optimizer == "adam"
        return Factors(self.initial * c, self.rate * (c if adam else c * c), self.epsilon / c if adam else 1.0)


@dataclass(frozen=True)
class Forward:
    """What the forward pass of a parametrized model multiplies, relative to what it multiplies at the base.

    Attributes
    ----------
    branch
        Every branch: (L / L0) to the minus alpha_L.
    logit
        The logits: (N / N0) to the minus alpha_A.
    output
        The read-out, if the read-out starts and trains as an embedding does: d0 / d over gamma0.
    """

    branch: float = 1.0
    logit: float = 1.0
    output: float = 1.0


@dataclass(frozen=True)
class Want:
    """What one parameter needs.

    Attributes
    ----------
    place
        The parameter.
    role
        Its class, joined by `+` where several share it.
    factors
        Relative to the base.
    initial
        Standard deviation at which it starts; for gains the number itself; None where the base's is not known.
    rate, epsilon, weight_decay
        The numbers of its group; epsilon is the base's under gradient descent.
    """

    place: Place
    role: str
    factors: Factors
    initial: float | None
    rate: float
    epsilon: float
    weight_decay: float


def forward_factors(p: Parametrization, shape: Shape) -> Forward:
    """Return what a model that is written for a parametrization multiplies in its forward pass.

    The standard scheme has no multiplier on its output, tied or not.

    Examples
    --------
    >>> from manyheads.transformer.scaling import Shape
    >>> from manyheads.limits import Parametrization
    >>> forward_factors(Parametrization(base=Shape(8, 2, 2)), Shape(16, 2, 8))
    Forward(branch=0.25, logit=0.5, output=0.5)
    """
    table = replace(p, form="effective").table(shape)
    output = 1.0 if p.scheme == "standard" else table["unembedding"].initial / table["embedding"].initial
    logit = (shape.key_dim / p.base.key_dim) ** -p.logit_exponent
    return Forward(table.branch, logit, output)


def refuse_depth(p: Parametrization, shape: Shape) -> None:
    """Refuse to scale post-norm blocks in depth.

    Raises
    ------
    UsageError
        The depth is not the base's, and the scheme has powers of it.
    """
    if p.scheme == "limits" and shape.depth != p.base.depth:
        raise UsageError(
            f"post-norm blocks, L={shape.depth} and a base of L={p.base.depth}: how depth scales there is outside the "
            "theory; tune a base of the same depth, or use pre-norm"
        )


def list_wants(
    p: Parametrization, anatomy: Anatomy, tuned: Tuned, folded: bool = True, logit: float | None = None
) -> tuple[Want, ...]:
    """Return what every parameter of a model needs.

    Parameters
    ----------
    p
        The parametrization; its form does not matter.
    anatomy
        The model.
    tuned
        What was tuned at the base.
    folded
        Whether the model multiplies nothing itself, so that branch, logit and output factors go into the weights.
        Otherwise it applies all of `forward_factors`, and its read-out trains as in mup, with the multiplier beside it.
    logit
        What the model multiplies its logits by, relative to the base; None for N to the minus 1/2.

    Raises
    ------
    UsageError
        A model that the parametrization does not describe, or a parameter that cannot carry what it would have to.
    """
    if not isinstance(tuned, Tuned):
        raise UsageError(f"tuned={tuned!r}: give Tuned(rate=..., epsilon=..., weight_decay=...), as at the base")
    shape = anatomy.shape
    if anatomy.post_norm:
        refuse_depth(p, shape)
    output = forward_factors(p, shape).output
    if folded:
        carried = folded_factors(p, shape, logit)
        closing, carried["output"] = carried["output"], 1.0
    else:
        closing, carried = 1.0, {"branch": 1.0, "logit": 1.0, "output": 1 / output}
    factors = role_factors(p, shape)
    if folded and anatomy.open_end and output != 1:
        tied = next((place.name for place in anatomy.places if place.tied), "a frozen table")
        raise UsageError(
            f"{tied} is embedding and unembedding at once and needs the factor {output:.4g} behind it, which no "
            f"parameter of this model can carry: {anatomy.open_end}; untie it (tie_word_embeddings=False), or let the "
            "model multiply logits, branches and outputs itself and say folded=False"
        )
    return tuple(_want(place, p, factors, carried, closing, (tuned, anatomy, folded)) for place in anatomy.places)


def folded_factors(p: Parametrization, shape: Shape, logit: float | None = None) -> dict[str, float]:
    """Return what a model of the usual kind does not multiply, and its weights have to carry: branch, logit, output.

    Parameters
    ----------
    logit
        What the model multiplies its logits by, relative to the base; None for N to the minus 1/2.
    """
    asked = forward_factors(p, shape)
    given = (shape.key_dim / p.base.key_dim) ** -0.5 if logit is None else logit
    return {"branch": asked.branch, "logit": asked.logit / given, "output": asked.output}


def role_factors(p: Parametrization, shape: Shape) -> dict[str, Factors]:
    """Return the factors of every role in effective form, that of matrices above the blocks included.

    Those scale as the weights of a block do, without what depth puts there.
    """
    table = replace(p, form="effective").table(shape)
    found = {row.role: Factors(row.initial, row.rate, row.epsilon) for row in table.rows}
    law = p.laws()["value"]

    def at_shape(power: Power) -> float:
        return replace(power, depth=0.0).ratio(shape, p.base, p.richness)

    return found | {HIDDEN: Factors(at_shape(law.initial), at_shape(law.rate), at_shape(law.epsilon))}


def _want(
    place: Place,
    p: Parametrization,
    factors: Mapping[str, Factors],
    carried: Mapping[str, float],
    closing: float,
    about: tuple[Tuned, Anatomy, bool],
) -> Want:
    tuned, anatomy, folded = about
    found = {}
    for part in place.parts:
        c = carried[CARRIES[part]] if part in CARRIES else closing if place.closes else 1.0
        c = carried["output"] if part == "unembedding" else c
        each = factors[PARTS[part]].fold(c, p.optimizer)
        # Width-only practice leaves epsilon alone in the form in which it is published, multipliers in the forward.
        found[part] = replace(each, epsilon=1.0) if p.scheme == "mup" and not folded else each
    first = _agree(place, found)
    decayed = not any(name in tuned.spared for part in place.parts for name in (part, PARTS[part]))
    initial = None
    if place.start != "random":
        initial = first.initial if place.start == "one" else 0.0
    elif (spread := _spread(place, p, tuned, anatomy)) is not None:
        initial = spread * first.initial
    return Want(
        place=place,
        role="+".join(dict.fromkeys(PARTS[part] for part in place.parts)),
        factors=first,
        initial=initial,
        rate=tuned.rate * first.rate,
        epsilon=tuned.epsilon * first.epsilon,
        weight_decay=tuned.weight_decay / first.rate if decayed else 0.0,
    )


def _agree(place: Place, found: Mapping[str, Factors]) -> Factors:
    """Return the factors that all parts of one parameter share, or refuse it by name."""
    parts = list(found)
    first = found[parts[0]]
    for part in parts[1:]:
        for name in ("initial", "rate", "epsilon"):
            one, other = getattr(first, name), getattr(found[part], name)
            irrelevant = name == "initial" and place.start == "zero"
            if not irrelevant and abs(one - other) > 1e-9 * abs(one):
                raise UsageError(
                    f"{place.name} holds {', '.join(parts)} in one parameter, and they need different {name} factors "
                    f"({parts[0]}: {one:.4g}, {part}: {other:.4g}). At logit exponent 1, let the model scale its "
                    "logits itself (scale_logits(model, parametrization)); at 1/2, grow heads and depth alone; or "
                    "split the parameter into three"
                )
    return first


def _spread(place: Place, p: Parametrization, tuned: Tuned, anatomy: Anatomy) -> float | None:
    """Return the spread of a parameter at the base: as tuned, else as its family starts."""
    roles = [PARTS[part] for part in place.parts]
    given = {tuned.spreads[role] for role in roles if role in tuned.spreads}
    if len(given) > 1 or (given and not all(role in tuned.spreads for role in roles)):
        raise UsageError(f"{place.name} holds {' and '.join(roles)}: give all of them the same spread")
    if given:
        return given.pop()
    if anatomy.spread is None:
        return None
    # GPT-2 starts what writes to the stream smaller, by the root of the number of branches.
    writes = anatomy.family == "gpt2" and place.parts[0] in ("output", "mlp_out")
    return anatomy.spread / (2 * p.base.depth) ** 0.5 if writes else anatomy.spread
