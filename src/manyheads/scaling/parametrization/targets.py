r"""Parameter targets: initial std, learning rate, epsilon and weight decay, folding included.

A model whose forward pass cannot be changed still multiplies its logits by :math:`N^{-1/2}` and its branches by one.
A factor c that the parametrization prescribes in the forward pass is then *folded* into the weight behind it: the model
computes with :math:`W' = c\,W`, whose gradient is 1/c times that of W, so W' follows c W exactly if it starts at c
times the std and trains with c times Adam's rate and 1/c times its epsilon, or with :math:`c^2` times the rate of
gradient descent. Decoupled weight decay stays one over the rate. Derived here.

* The branch factor :math:`(L/L_0)^{-\alpha_L}` goes into :math:`W_O`, the second matrix of the MLP, and their biases.
* The logit factor :math:`(N/N_0)^{1/2-\alpha_A}` goes into the queries and their bias.
* A tied embedding is one parameter in two classes. As an embedding it starts and moves by order one; as an unembedding
  it has to act with :math:`m = d_0/d\,\gamma_0^{-1}` times that. Its two gradients are then of one size under Adam
  (:math:`1/d`, the embedding's epsilon), and :math:`m^2 \cdot d\,\gamma_0^2 = 1/d` is the unembedding's rate under
  gradient descent: an embedding with a multiplier m behind it is both. The m goes into gain and shift of the last norm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, Literal

from manyheads.errors import UsageError
from manyheads.models.parts import HIDDEN, PARTS, Architecture, ForwardMultipliers, Parameter, init_of
from manyheads.scaling.parametrization.hyperparameters import BaseHyperparameters
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.parametrization.power_laws import KEY_VALUE_RANK, QUERIES, QUERY_RANK
from manyheads.scaling.parametrization.scaling_exponents import ScalingExponents
from manyheads.transformer.shape import Shape


@dataclass(frozen=True)
class Factors:
    """Factors from the base to a shape; one at the base."""

    initial: float
    learning_rate: float
    epsilon: float
    rule: str = "adam"  # what steps the weight: "adam", "sgd" or "muon"

    def fold(self, c: float) -> Factors:
        """Return the factors of c times the weight."""
        if self.rule == "sgd":
            return Factors(self.initial * c, self.learning_rate * c * c, 1.0, "sgd")
        return Factors(self.initial * c, self.learning_rate * c, self.epsilon / c, self.rule)

    def near(self, other: Factors) -> bool:
        """Whether both are the same within rounding."""
        (*mine, rule), (*theirs, same) = astuple(self), astuple(other)
        return rule == same and all(abs(one - two) <= 1e-9 * abs(one) for one, two in zip(mine, theirs, strict=True))


@dataclass(frozen=True)
class ParameterTarget:
    """Target settings of one parameter; Muon's hold before its shape factor."""

    parameter: Parameter
    role: str  # its class, joined by `+` where several share it
    factors: Factors  # relative to the base
    initial: float | None  # std, or the gain itself, 1 + w where the module adds one; None where the base's is unknown
    learning_rate: float
    epsilon: float  # the base's under gradient descent
    weight_decay: float
    conflict: str = ""  # why one orthogonalization of several roles cannot serve all of them
    highest: float = 1.0  # how many times higher the rate may be: head blocks of Muon have bounds, no power

    @staticmethod
    def of(
        parameter: Parameter, role: str, factors: Factors, std: float | None, base: BaseHyperparameters, **more: Any
    ) -> ParameterTarget:
        """Return what a parameter needs from its factors, its std at the base and what was tuned there."""
        tuned = base.of(factors.rule)
        initial = None if std is None else std * factors.initial
        learning_rate = base.rate_of(parameter.parts, factors.rule) * factors.learning_rate
        decay = tuned.weight_decay / factors.learning_rate if base.decays(parameter) else 0.0
        numbers = (initial, learning_rate, tuned.epsilon * factors.epsilon, decay)
        return ParameterTarget(parameter, role, factors, *numbers, **more)

    @property
    def start(self) -> Literal["random", "one", "zero"]:
        """Init: a bias at random where it was at the base."""
        return "random" if self.parameter.start == "zero" and self.initial else self.parameter.start


def forward_multipliers(p: Parametrization, shape: Shape | Sequence[int]) -> ForwardMultipliers:
    """Return what a model that is written for a parametrization multiplies in its forward pass.

    The standard scheme has no multiplier on its output, tied or not.

    Examples
    --------
    >>> from manyheads.transformer.scaling import Shape
    >>> from manyheads.scaling import Parametrization
    >>> forward_multipliers(Parametrization(base=Shape(8, 2, 2)), Shape(16, 2, 8))
    ForwardMultipliers(branch=0.25, logit=0.5, output=0.5, embedding=1.0)
    """
    shape = Shape.of(shape)
    table = replace(p, form="effective").table(shape)
    output = 1.0 if p.scheme == "standard" else table["unembedding"].initial / table["embedding"].initial
    logit = (shape.key_dim / p.base.key_dim) ** -p.logit_exponent
    return ForwardMultipliers(table.branch, logit, output)


def usual_multipliers(p: Parametrization, shape: Shape) -> ForwardMultipliers:
    """Return the multipliers of a model without a parametrization: its logits, by N to the minus 1/2."""
    return ForwardMultipliers(logit=(shape.key_dim / p.base.key_dim) ** -0.5)


def refuse_depth(p: Parametrization, shape: Shape) -> None:
    """Refuse to scale post-norm blocks in depth."""
    if p.scheme == "completep" and shape.depth != p.base.depth:
        raise UsageError(
            f"post-norm blocks, L={shape.depth} and {p.base.depth} at the base: outside the theory, keep the depth"
        )


def parameter_targets(
    p: Parametrization,
    architecture: Architecture,
    hyperparameters: BaseHyperparameters,
    forward: ForwardMultipliers | None = None,
) -> tuple[ParameterTarget, ...]:
    """Return what every parameter of a model needs; the form of the parametrization does not matter.

    `forward` is what the model multiplies itself, relative to the base; None for N to the minus 1/2 on the logits
    alone. Branch, logit and output factors that are missing go into the weights. With `forward_multipliers` nothing is
    missing, and the read-out trains as in mup, with the multiplier beside it.
    """
    if not isinstance(hyperparameters, BaseHyperparameters):
        raise UsageError(f"hyperparameters={hyperparameters!r}: give BaseHyperparameters(learning_rate=...)")
    shape = architecture.shape
    hyperparameters.of("muon" if p.optimizer == "muon" else "adam")  # refuses what is missing
    if architecture.post_norm:
        refuse_depth(p, shape)
    moved = p.logit_exponent != 1 and shape.key_dim != p.base.key_dim
    if moved and (architecture.normed_queries or architecture.latent):
        kinds = ("queries with a norm", "the norm's gains"), ("latent attention (MLA)", "a shared latent")
        kind, rate = kinds[not architecture.normed_queries]
        words = f"{kind}, logit exponent {p.logit_exponent:g}, N = {shape.key_dim} and {p.base.key_dim} at the base"
        raise UsageError(f"{words}: the rate of {rate} is not derived; keep N, or take logit exponent 1")
    if architecture.latent:
        _refuse_latent(p, shape)
    forward = forward or usual_multipliers(p, shape)
    missing = missing_multipliers(p, shape, forward)
    for name in sorted(architecture.normed):
        refuse_folding(name, getattr(missing, name))
    closing = missing.output * forward.embedding  # a tied table holds one over the second, and needs both behind it
    if architecture.open_end and closing != 1:
        tied = next((parameter.name for parameter in architecture.parameters if parameter.tied), "a frozen table")
        said = f"{tied} is embedding and unembedding at once and needs the factor {closing:.4g} behind it"
        remedy = "untie it (tie_word_embeddings=False), or folded=False"
        raise UsageError(f"{said}, which no parameter can carry: {architecture.open_end}; {remedy}")
    factors = role_factors(p, shape)
    return tuple(
        _target(parameter, p, factors, (missing, forward), hyperparameters, architecture)
        for parameter in architecture.parameters
    )


def refuse_folding(name: str, missing: float) -> None:
    """Refuse a factor on logits or branches that no weight can carry."""
    if abs(missing - 1) > 1e-6:
        keep = {"logit": "logits", "branch": "branches"}[name], {"logit": "key dimension", "branch": "depth"}[name]
        raise UsageError(
            f"the factor {missing:.4g} on the {keep[0]} would have no effect in a weight: a norm without gains stands "
            f"behind it; keep the {keep[1]} of the base, or multiply in the model (logits of a family: scale_logits)"
        )


def _refuse_latent(p: Parametrization, shape: Shape) -> None:
    """Refuse ranks along which the gradient of latent attention is not derived."""
    for rank in (QUERY_RANK, KEY_VALUE_RANK):
        if p.optimizer == "sgd" and (ratio := (QUERIES / rank).ratio(shape, p.base)) != 1:
            said = f"latent attention (MLA) under gradient descent, and {QUERIES / rank} is {ratio:g} times the base's"
            raise UsageError(f"{said}: the gradient is not derived then; keep the ratio, or train with AdamW or Muon")


def missing_multipliers(p: Parametrization, shape: Shape, forward: ForwardMultipliers) -> ForwardMultipliers:
    """Return what a parametrization asks of a forward pass beyond what it multiplies: weights have to carry it."""
    asked = forward_multipliers(p, shape)
    return ForwardMultipliers(
        *(getattr(asked, each.name) / getattr(forward, each.name) for each in fields(ForwardMultipliers))
    )


def role_factors(p: Parametrization, shape: Shape) -> dict[str, Factors]:
    """Return the factors of every role in effective form, also of those that the library's transformer does not have.

    Matrices above the blocks scale as the weights of a block do, without what depth puts there.
    """
    table = replace(p, form="effective").table(shape)
    found = {row.role: Factors(row.initial, row.learning_rate, row.epsilon, row.rule) for row in table.rows}
    by_adam = replace(p, optimizer="adam") if p.optimizer == "muon" else p
    value = by_adam.scaling_exponents()["value"]
    initial, learning_rate, epsilon = (replace(power, depth=0.0) for power in value[:3])
    hidden = ScalingExponents(initial, learning_rate, epsilon, value.rule)
    others = {role: law for role, law in p.scaling_exponents().items() if role not in found}
    for role, law in (others | {HIDDEN: hidden}).items():
        std, rate, eps = (power.ratio(shape, p.base, p.richness) for power in law[:3])
        found[role] = Factors(std, rate / p.rate_factor(role, shape, law.rule), eps, law.rule)
    return found


def _target(
    parameter: Parameter,
    p: Parametrization,
    factors: Mapping[str, Factors],
    about: tuple[ForwardMultipliers, ForwardMultipliers],
    hyperparameters: BaseHyperparameters,
    architecture: Architecture,
) -> ParameterTarget:
    missing, forward = about
    # Width-only practice leaves epsilon alone in the form in which it is published, multipliers in the forward.
    published = p.scheme == "mup" and forward == forward_multipliers(p, architecture.shape)
    found = {}
    for part in parameter.parts:
        c = getattr(missing, architecture.carries[part]) if part in architecture.carries else 1.0
        c = missing.output * forward.embedding if parameter.closes else c
        c = 1 / forward.output if part == "unembedding" else c
        each = factors[PARTS[part]].fold(c)
        found[part] = replace(each, epsilon=1.0) if published else each
    std = _std(parameter, p, hyperparameters, architecture)
    starts = parameter.start != "zero" or bool(std)
    first, conflict = _agree(parameter, found, starts) if p.optimizer != "muon" else _divide(parameter, found, starts)
    if parameter.offset and first.initial != 1 and hyperparameters.weight_decay and hyperparameters.decays(parameter):
        raise UsageError(
            f"{parameter.name} is a gain of the form {parameter.offset:g} + w that has to carry {first.initial:.4g}, "
            f"and weight decay draws it to {parameter.offset:g} instead: exempt it, no_decay=({parameter.parts[0]!r},)"
        )
    role = "+".join(dict.fromkeys(PARTS[part] for part in parameter.parts))
    by_head = all(p.muon.cuts(PARTS[part]) for part in parameter.parts)
    by_head &= p.optimizer == "muon" and p.scheme == "completep"
    highest = (architecture.shape.heads / p.base.heads) ** 0.5 if by_head else 1.0
    return ParameterTarget.of(parameter, role, first, std, hyperparameters, conflict=conflict, highest=highest)


def _divide(parameter: Parameter, found: Mapping[str, Factors], starts: bool) -> tuple[Factors, str]:
    """Return the factors of the last part, and what the others need beside it: a Muon of its own may split a matrix."""
    last = list(found.values())[-1]
    alike = {part: replace(each, learning_rate=1.0, epsilon=1.0) for part, each in found.items()}
    initial = _agree(parameter, alike, starts)[0].initial
    others = {part: each.learning_rate / last.learning_rate for part, each in found.items()}
    shown = ", ".join(f"{part} {ratio:.4g}" for part, ratio in others.items())
    same = all(abs(ratio - 1) < 1e-9 for ratio in others.values())
    return replace(last, initial=initial), "" if same else f"its parts need different learning rates: {shown}"


def _agree(parameter: Parameter, found: Mapping[str, Factors], starts: bool) -> tuple[Factors, str]:
    """Return the factors that all parts of one parameter share, or refuse it by name; of zeros the init is none."""
    parts = list(found)
    first = found[parts[0]]
    for part in parts[1:]:
        for name in ("initial", "learning_rate", "epsilon"):
            one, other = getattr(first, name), getattr(found[part], name)
            if (starts or name != "initial") and abs(one - other) > 1e-9 * abs(one):
                raise UsageError(
                    f"{parameter.name} holds {', '.join(parts)} in one parameter, and they need different {name} "
                    f"factors ({parts[0]}: {one:.4g}, {part}: {other:.4g}). At logit exponent 1, use "
                    "scale_logits(model, parametrization); at 1/2, grow heads and depth alone; or split the parameter"
                )
    return first, ""


def _std(
    parameter: Parameter, p: Parametrization, hyperparameters: BaseHyperparameters, architecture: Architecture
) -> float | None:
    """Return the std of a parameter at the base: as tuned, else one for gains, zero for biases, the family's."""
    given = {given_std(part, hyperparameters) for part in parameter.parts}
    if len(given) > 1:
        roles = " and ".join(dict.fromkeys(PARTS[part] for part in parameter.parts))
        raise UsageError(f"{parameter.name} holds {roles}: give all of them the same std")
    if (std := given.pop()) is not None:
        return std
    if parameter.value is not None:
        return parameter.value
    if parameter.start != "random":
        return float(parameter.start == "one")
    if architecture.std is None:
        return None
    # GPT-2 starts what writes to the stream smaller, by the root of the number of branches.
    writes = architecture.family in ("gpt2", "gpt_bigcode") and parameter.parts[0] in ("output", "mlp_out")
    return architecture.std / (2 * p.base.depth) ** 0.5 if writes else architecture.std


def given_std(part: str, hyperparameters: BaseHyperparameters) -> float | None:
    """Return the std that was given for a part: its own, else its role's, unless the part alone starts at zero."""
    role = PARTS[part]
    mixed = len({init_of(each) for each in PARTS if PARTS[each] == role}) > 1
    names = (part, *([] if mixed and init_of(part) == "zero" else [role]), *(["bias"] * (role == "logit_bias")))
    return next((hyperparameters.stds[name] for name in names if name in hyperparameters.stds), None)
