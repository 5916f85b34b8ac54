"""`Parametrization`: from a base and a target shape to init, multiplier, learning rate and epsilon of every weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.errors import UsageError
from manyheads.scaling.parametrization.muon import WHOLE, Muon
from manyheads.scaling.parametrization.power_laws import ONE, Power, same_ratio
from manyheads.scaling.parametrization.scaling_exponents import (
    OPTIMIZERS,
    SCHEMES,
    Optimizer,
    ScalingExponents,
    Scheme,
    scaling_exponents,
)
from manyheads.scaling.parametrization.table import OUTSIDE, Row, Table
from manyheads.transformer.scaling import ROLES, Scaling, standard_scaling
from manyheads.transformer.shape import Shape

if TYPE_CHECKING:
    import optax

    from manyheads.transformer.inputs import Input

Form = Literal["effective", "multiplier"]
FORMS: tuple[str, ...] = get_args(Form)
UNIT = Shape(1, 1, 1)
WIDER = (
    "the stream's width over N H changes: AdamW's rates of what reads heads, and all epsilons, are upper bounds then; "
    "they are exact while the ratio stays"
)
GROUPS = "the number of query heads for each key head"
SMALLEST = 1e-100  # factors are larger, and smaller than its inverse: products of a few of them are still numbers


@dataclass(frozen=True)
class Parametrization:
    r"""How a transformer scales from a base shape, where nothing changes, along N, H and L.

    Nothing is stored on arrays, and there is no file of base shapes: every number follows from (shape, role, base).

    Attributes
    ----------
    logit_exponent
        alpha_A: logits are :math:`N^{-\alpha_A} q\cdot k`. 1 makes heads copies of each other as N grows, 1/2 keeps
        them different.
    depth_exponent
        alpha_L: a branch is multiplied by :math:`L^{-\alpha_L}`. 1 lets the weights of every block learn as L grows;
        1/2 keeps the randomness of the blocks and lets them learn less and less.
    richness
        gamma0 relative to the base: the output is divided by it. Small is lazy, large learns features.
    optimizer
        ``"adam"`` (and what divides by the gradient's size likewise), ``"sgd"``, or ``"muon"``: Muon for the matrices
        in the blocks, AdamW for all other weights.
    base
        The shape at which init, learning rate and epsilon were tuned; all factors are one there. N = H = L = 1 gives
        the theory's table itself.
    scheme
        ``"completep"``, consistent in N, H and L, or one to compare it with: ``"mup"`` (width alone), ``"standard"``.
    form
        ``"effective"`` changes init, rate and epsilon of each weight; ``"multiplier"`` gives the weights forward
        multipliers instead, chosen so that all classes share one learning rate. Both train the same function.
    muon
        The variant of Muon: what it orthogonalizes together, and its shape factor.

    Notes
    -----
    With W = W_eff / m, gradient descent at the rate eta / m^2, or Adam at the rate eta / m with epsilon times m, moves
    m W exactly as the rate eta moves W_eff: the multiplier form takes the m for which that rate is the same for all.

    References
    ----------
    Bordelon, Chaudhry, Pehlevan, "Infinite limits of multi-head transformer dynamics", 2024, Table 1;
    Yang et al., "Tensor programs V", 2022 (``"mup"``); Dey et al., "CompleteP", 2025 (``"completep"``).

    Examples
    --------
    >>> p = Parametrization(base=Shape(16, 4, 2))
    >>> table = p.table(Shape(16, 8, 2))
    >>> table["value"].learning_rate, table["embedding"].learning_rate, table["unembedding"].initial
    (0.5, 1.0, 0.5)
    """

    logit_exponent: float = constrained(1.0, Constraint(choices=(0.5, 1.0)))
    depth_exponent: float = constrained(1.0, Constraint(least=0.5, most=1))
    richness: float = constrained(1.0, Constraint(above=0))
    optimizer: Optimizer = constrained("adam", Constraint(choices=OPTIMIZERS))  # noqa: RUF009
    base: Shape = UNIT
    scheme: Scheme = constrained("completep", Constraint(choices=SCHEMES))  # noqa: RUF009
    form: Form = constrained("effective", Constraint(choices=FORMS))  # noqa: RUF009
    muon: Muon = WHOLE

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "base", Shape.of(self.base, "base"))
        if not isinstance(self.muon, Muon):
            raise UsageError(f"muon={self.muon!r}: expected Muon(split=..., factor=...)")
        if self.optimizer == "muon" and self.form != "effective":
            raise UsageError("form='multiplier' with optimizer='muon': two optimizers share no rate; use 'effective'")
        if self.scheme != "completep" and self.richness != 1:
            raise UsageError(f"richness={self.richness}: the scheme {self.scheme!r} has no richness")

    @classmethod
    def standard(cls, base: Shape, optimizer: Optimizer = "adam") -> Parametrization:
        """Return the usual practice: fan-in stds, logits over the root of N, one rate for all, no branch factor."""
        return cls(logit_exponent=0.5, optimizer=optimizer, base=base, scheme="standard")

    @classmethod
    def mup(cls, base: Shape, optimizer: Optimizer = "adam", logit_exponent: float = 1.0) -> Parametrization:
        """Return the width-only maximal update parametrization, with no power of depth.

        With `logit_exponent` 1/2 it keeps its plain rates for queries and keys: a common mistake, kept for comparison.
        """
        return cls(logit_exponent=logit_exponent, optimizer=optimizer, base=base, scheme="mup")

    @classmethod
    def complete_p(cls, base: Shape) -> Parametrization:
        """Return the member with both exponents one under Adam, known as CompleteP."""
        return cls(base=base)

    def scaling_exponents(self) -> dict[str, ScalingExponents]:
        """Return the powers of every role in effective form."""
        return scaling_exponents(self.scheme, self.optimizer, self.logit_exponent, self.depth_exponent, self.muon)

    @property
    def branch(self) -> Power:
        """The power of the branch multiplier."""
        return Power(depth=-self.depth_exponent) if self.scheme == "completep" else ONE

    def multipliers(self) -> dict[str, Power]:
        """Return the power of every forward multiplier: one in effective form."""
        if self.form == "effective":
            return dict.fromkeys(ROLES, ONE)
        found = self.scaling_exponents()
        order = 0.5 if self.optimizer == "sgd" else 1.0  # rate in effective form ~ m (Adam), m^2 (gradient descent)
        bulk = found["value"]
        shared = bulk.learning_rate / bulk.initial ** (1 / order)  # so that the value weights start with std one
        return {role: (law.learning_rate / shared) ** order for role, law in found.items()}

    def table(self, shape: Shape | Sequence[int]) -> Table:
        """Return what every class of weights needs at a shape, relative to the base.

        Refused is a shape so far from the base that a factor has no float, or a ratio of sizes without a known power.

        Examples
        --------
        >>> Parametrization(0.5, base=Shape(8, 4, 2)).table(Shape(32, 4, 2))["query"].learning_rate
        0.125
        """
        shape = Shape.of(shape)
        self._refuse_ratios(shape)
        multipliers = self.multipliers()
        rows = []
        laws = self.scaling_exponents()
        for role in ROLES:
            law, m = laws[role], multipliers[role]
            powers = {
                "initial": law.initial / m,
                "multiplier": m,
                "learning_rate": law.learning_rate / (m**2 if law.rule == "sgd" else m),
                "epsilon": ONE if law.rule == "sgd" else law.epsilon * m,
            }
            try:
                numbers = {name: power.ratio(shape, self.base, self.richness) for name, power in powers.items()}
                rate_factor = self._rate_factor(role, shape) if law.rule == "muon" else 1.0
                numbers["learning_rate"] /= self.rate_factor(role, shape, law.rule)
                held = all(SMALLEST < number < 1 / SMALLEST for number in numbers.values())
            except OverflowError:
                held = False
            if not held:
                raise UsageError(f"the factors of {role} are beyond what a float holds: take closer shapes")
            shown = {name: str(power.at(shape, self.base)) for name, power in powers.items()}
            if law.rule == "muon" and self.scheme == "completep":
                own = self.muon.rate_factor_power(role, shape, self.base)
                shown["learning_rate"] = str((law.learning_rate / own).at(shape, self.base)) if own else "by its sides"
            decay = 1 / numbers["learning_rate"]
            rows.append(Row(role, **numbers, weight_decay=decay, powers=shown, rule=law.rule, rate_factor=rate_factor))
        notes = () if self._same_aspect(shape) else (WIDER,)
        return Table(
            scheme=self.scheme,
            optimizer=self.optimizer,
            form=self.form,
            base=self.base,
            shape=shape,
            rows=tuple(rows),
            logit_exponent=self.logit_exponent,
            logit_prefactor=self.base.key_dim ** (self.logit_exponent - 0.5),
            branch=self.branch.ratio(shape, self.base),
            outside=(*OUTSIDE, *notes, *(self.muon.notes if self.optimizer == "muon" else ())),
        )

    def rate_factor(self, role: str, shape: Shape, rule: str) -> float:
        """Return by how much a role's learning rate is divided because its optimizer multiplies it itself: Muon's."""
        return self._rate_factor(role, shape) if rule == "muon" and self.scheme == "completep" else 1.0

    def _rate_factor(self, role: str, shape: Shape) -> float:
        return self.muon.rate_factor(role, shape, self.base) / self.muon.rate_factor(role, self.base, shape)

    def _same_aspect(self, shape: Shape) -> bool:
        return self.base.width * shape.key_dim * shape.heads == shape.width * self.base.key_dim * self.base.heads

    def _refuse_ratios(self, shape: Shape) -> None:
        """Refuse ratios of sizes that have no known power under the optimizer."""
        if self.scheme != "completep":
            return
        changed = "" if self._same_aspect(shape) else "the stream's width over N H"
        stated = shape.key_heads is not None and self.base.key_heads is not None
        if stated and not same_ratio("key_heads", "heads", shape, self.base):
            changed = GROUPS
        if changed and self.optimizer == "sgd":
            raise UsageError(
                f"{changed} differs from the base's, and how the size of a gradient changes with it is not derived: it "
                "goes from a random to an aligned sum in training; keep the ratio, or train with AdamW or Muon"
            )
        if self.optimizer == "muon" and self.muon.split == "fused":
            if changed == GROUPS:
                raise UsageError(f"{changed} differs from the base's in one fused matrix: split it, split='whole'")
            if self.logit_exponent != 1 and shape.key_dim != self.base.key_dim:
                raise UsageError(
                    "queries and keys need another rate than values at logit exponent 1/2 where N changes, and one "
                    "fused matrix has one: split it (split='whole'), or keep N"
                )

    def scaling(self, shape: Shape | Sequence[int], inputs: Input, mlp_ratio: int = 4) -> Scaling:
        """Return the scales of the library's `Transformer` at a shape: at the base the standard ones.

        Examples
        --------
        >>> from manyheads.transformer.inputs import TokenInput
        >>> base = Shape(8, 4, 2)
        >>> p = Parametrization(base=base)
        >>> p.scaling(base, TokenInput(30)).initial == standard_scaling(base, TokenInput(30)).initial
        True
        """
        table = self.table(shape)
        start = standard_scaling(self.base, inputs, mlp_ratio)
        factors, multipliers = table.column("initial"), table.column("multiplier")
        return Scaling(
            initial={role: start.initial[role] * factors[role] for role in ROLES},
            multiplier={role: start.multiplier[role] * multipliers[role] for role in ROLES},
            logit_prefactor=table.logit_prefactor,
            logit_exponent=table.logit_exponent,
            branch=start.branch * table.branch,
            output=start.output,
        )

    def optax(self, transformation: optax.GradientTransformation, roles: Any, shape: Shape | Sequence[int]) -> Any:
        """Give every weight its rate, epsilon and weight decay under an optax transformation tuned at the base.

        Parameters
        ----------
        transformation
            The base's optimizer, a schedule included. Clip by the global norm before it,
            `optax.chain(optax.clip_by_global_norm(1.0), p.optax(...))`, not inside.
        roles
            Names of roles, a tree in the structure of the weights: `manyheads.transformer.weights.roles(weights)`.
            A name in place of a branch holds for all of it.
        shape
            The shape that is trained.

        Examples
        --------
        >>> import jax.numpy as jnp, optax
        >>> weights = {"table": jnp.ones(3), "projection": jnp.ones(3)}
        >>> labels = {"table": "embedding", "projection": "value"}
        >>> tx = Parametrization(base=Shape(8, 1, 1)).optax(optax.adam(0.1), labels, Shape(32, 1, 1))
        >>> updates, _ = tx.update(weights, tx.init(weights), weights)
        >>> {name: round(float(updates[name][0]), 4) for name in ("table", "projection")}
        {'table': -0.1, 'projection': -0.025}
        """
        from manyheads.scaling.parametrization.optax_scaling import rescale

        table = self.table(shape)
        return rescale(transformation, roles, table.column("learning_rate"), table.column("epsilon"))
