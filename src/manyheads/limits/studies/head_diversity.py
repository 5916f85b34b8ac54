"""`limits/head-diversity`: whether heads stay different from one another as the key dimension grows."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.limits.checks.coordinate_check import finite_size_bias
from manyheads.limits.comparisons.logit_distributions import geometric_curve, power_guides
from manyheads.limits.comparisons.schemes import CAPTION, Plan, bordelon, caption_verdict, lesson_of
from manyheads.limits.parametrization.scaling_exponents import Optimizer
from manyheads.limits.systems.transformers import Recipe, measure_updates
from manyheads.statistics import fit_exponent
from manyheads.statistics.exponents import ExponentFit
from manyheads.study import Cell, Lines, Source, Study, Verdict
from manyheads.study.reporting.panels import Panel
from manyheads.transformer.shape import Shape

EXPONENTS = {"limits": "logit exponent 1", "half-logit": "logit exponent 1/2"}
# Rate, checkpoints and sequences of a step; gradient descent: after training of order one, and with little noise.
OWN: dict[Optimizer, tuple[float, tuple[int, ...], dict[str, int]]] = {
    "adam": (0.003, (25, 100), {"digits": 16, "text": 8}),
    "sgd": (0.3, (20, 60), {"digits": 96, "text": 48}),
}


@dataclass(frozen=True)
class HeadDiversity(Study):
    """Variance of attention logits over heads against N, before and after training, for both logit exponents.

    Attributes
    ----------
    task
        ``"digits"`` or ``"text"``.
    optimizer
        ``"adam"`` or ``"sgd"``.
    base
        N, H, L at which both scalings are one.
    key_dims
        Sizes N.
    checkpoints
        Numbers of updates at which the variance is looked at; the claims are about the last. None takes the
        optimizer's own.
    rate
        Learning rate at the base; 0 takes the optimizer's own.

    Notes
    -----
    The power of N after training is derived for gradient descent. At the start the gradient of a logit is of size
    N^(-1/2) and random in every head; Adam makes it of size one, and heads set out in directions of their own by an
    amount that does not fall with N. So a refutation under Adam says that its heads are no copies. One under gradient
    descent says that sizes are too small for how far logits have moved.
    """

    name: ClassVar[str] = "limits/head-diversity"
    claim: ClassVar[str] = "The variance of logits over heads goes as 1/N at logit exponent 1, N^0 at 1/2"
    source: ClassVar[Source] = bordelon("figure 2b and its caption, table 3; the powers of N are derived here")

    task: str = "digits"
    optimizer: Optimizer = "adam"
    base: tuple[int, int, int] = (8, 4, 2)
    key_dims: tuple[int, ...] = (4, 8, 16, 32)
    checkpoints: tuple[int, ...] = ()
    rate: float = 0.0

    def __post_init__(self) -> None:
        if self.optimizer not in OWN:
            raise UsageError(f"optimizer={self.optimizer!r}: choose one of {', '.join(OWN)}")
        if not 0 <= self.rate < math.inf:
            raise UsageError(f"rate={self.rate}: give a positive number, or 0 for the optimizer's own")
        steps = self.updates()
        if list(steps) != sorted(set(steps)) or steps[0] < 1:
            raise UsageError(f"checkpoints={steps}: give numbers of updates, from 1, in rising order")
        if self.base[1] < 2:
            raise UsageError(f"base={self.base}: a variance over heads needs two heads or more")
        lesson_of(self.task, 1)
        self.plan()

    @classmethod
    def full(cls) -> HeadDiversity:
        """Return the study with the figure's 16 heads and 2,500 updates."""
        return cls(base=(16, 16, 4), key_dims=(4, 8, 16, 32, 64), checkpoints=(25, 2500))

    @classmethod
    def small(cls) -> HeadDiversity:
        """Return the smallest configuration in which every claim can change."""
        return cls(base=(4, 2, 2), key_dims=(4, 8), checkpoints=(1, 2))

    def plan(self) -> Plan:
        """Return the networks."""
        return Plan(Shape(*self.base), (("key_dim", self.key_dims),), tuple(EXPONENTS), self.optimizer)

    def updates(self) -> tuple[int, ...]:
        """Return the numbers of updates at which the variance is looked at."""
        return self.checkpoints or OWN[self.optimizer][1]

    def cells(self) -> tuple[Cell, ...]:
        """Return both exponents at every N; at the base they are one network."""
        return self.plan().cells()

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the power of N: with independent heads a logit's variance is N^(1 - 2 alpha_A).

        Before training that is exact in the first layer. Gradient descent adds to every head what the limit prescribes,
        which at alpha_A = 1 is the same for all, and fluctuations about it of relative size N^(-1/2): the power stays.
        """
        attributes = {"long_name": "power of N in the variance of logits over heads", "units": "1"}
        return xr.Dataset({"power": ("scheme", np.array([-1.0, 0.0]), attributes)}, coords={"scheme": list(EXPONENTS)})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one network and look at the variance of its logits over heads, mean over layers and pairs of tokens."""
        parametrization, shape = self.plan().train_with(cell)
        own, _, batches = OWN[self.optimizer]
        lesson = lesson_of(self.task, batches[self.task])
        rate = self.rate or own
        found = measure_updates(lesson, parametrization, shape, Recipe(), rate, self.updates(), key)
        variance = np.concatenate([found.head_variance_start[None], found.head_variance])
        moved = np.concatenate([np.zeros(1), found.logits])
        steps = np.asarray([0, *self.updates()])
        return xr.Dataset(
            {
                "variance": ("step", variance, {"long_name": "variance of the logits over heads", "units": "1"}),
                "motion": ("step", moved, {"long_name": "motion of the attention logits", "units": "1"}),
            },
            coords={"step": ("step", steps, {"long_name": "updates", "units": "1"})},
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Test the power of N before and after training, and the caption's."""
        last = self.updates()[-1]
        # A variance is a square: its correction is twice that of a root mean square.
        bias = -2 * finite_size_bias(self.key_dims)
        basis = f"a correction 1 + N^(-1/2) of the spread moves the power of its square by {bias:.2f} over these sizes"
        exact = "exact in the first layer; corrections of relative size 1/(N H) above it"
        verdicts = []
        for scheme, label in EXPONENTS.items():
            power = float(predicted["power"].sel(scheme=scheme))
            before, after = (self.fit(trained, scheme, place) for place in (0, -1))
            words = f"like N^{power:g}" if power else "by as much at every N"
            verdicts += [
                _claim(f"{label}: before training logits vary over heads {words}", before, power, 0.1, exact),
                self._after(
                    scheme, _claim(f"{label}: after {last} steps they still do, {words}", after, power, bias, basis)
                ),
            ]
        verdicts.append(caption_verdict(self.fit(trained, "limits", -1)))
        return tuple(verdicts)

    def _after(self, scheme: str, verdict: Verdict) -> Verdict:
        """Expect what is derived: descent keeps the power; Adam's first steps move each head in its own direction."""
        adam, copies = self.optimizer == "adam", scheme == "limits"
        return replace(verdict, expected="refuted" if adam and copies else "holds", derived=copies or not adam)

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the variance against N before and after training, and how far logits have moved."""
        return self._variances(trained), self._motions(trained)

    def fit(self, trained: xr.Dataset, scheme: str, place: int) -> ExponentFit:
        """Return the power of N at one of the checkpoints, 0 being before training."""
        return fit_exponent(self.key_dims, self.plan().along(trained, "variance", scheme, "key_dim")[..., place])

    def _variances(self, trained: xr.Dataset) -> Panel:
        curves = []
        for number, (scheme, label) in enumerate(EXPONENTS.items()):
            values = self.plan().along(trained, "variance", scheme, "key_dim")
            for place, when in ((0, "before training"), (-1, f"after {self.updates()[-1]} steps")):
                curves.append(
                    geometric_curve(self.key_dims, values[..., place], f"{label}, {when}", 2 * number + (place != 0))
                )
        curves += power_guides(self.key_dims, curves[1].y[0], (-1.0, CAPTION), 4)
        return Lines(
            "Variance of attention logits over heads",
            "key dimension N",
            "variance over heads",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="Geometric means over replicates, bands reach over all. Grey: powers of N from the first point.",
        )

    def _motions(self, trained: xr.Dataset) -> Panel:
        curves = [
            geometric_curve(
                self.key_dims, self.plan().along(trained, "motion", scheme, "key_dim")[..., -1], label, 2 * number + 1
            )
            for number, (scheme, label) in enumerate(EXPONENTS.items())
        ]
        return Lines(
            f"Motion of attention logits in {self.updates()[-1]} steps",
            "key dimension N",
            "root mean square",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="Geometric means over replicates, bands range over all. In the limit what training adds is of order "
            "one for both exponents.",
        )


def _claim(claim: str, fit: ExponentFit, power: float, tolerance: float, basis: str) -> Verdict:
    return Verdict.from_interval(
        claim, fit.interval, figure=fit.exponent, target=power, tolerance=tolerance, basis=basis
    )
