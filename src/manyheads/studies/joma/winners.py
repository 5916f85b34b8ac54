"""`joma/winners`: winner-take-all attention of theorem 2, its blow-up time and the limits of the other weights.

The joint flow of logits and weights is integrated and compared with the erf law, for constant gradients as in the
theorem and for the gradient of a logistic loss, which fades while the layer learns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from scipy.integrate import simpson
from scipy.special import erf, erfc

from manyheads.errors import UsageError
from manyheads.study import Cell, Claim, Lines, Listing, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, select_cell
from manyheads.theory.joma.systems.gradient_flow import (
    AdaptiveSteps,
    FixedSteps,
    FlowTrajectory,
    adaptive_gradient_flow,
    gradient_flow,
)
from manyheads.theory.joma.systems.layer import (
    LayerParameters,
    LinearLoss,
    LogisticLoss,
    Loss,
    attend,
    forward,
    token_weights,
)
from manyheads.theory.joma.task import JomaTask, Sizes, UpdateRule, draw_joma_task
from manyheads.theory.joma.theorems.winner_take_all import (
    blowup_time,
    common_ratio,
    linear_attention_at,
    reaching_time,
    weights_at,
)
from manyheads.theory.papers import TIAN

EXACT, QUADRATURE = 1e-10, 1e-6
GAIN = "gain, in units that put the blow-up at time 1"
FRACTION = 0.98  # of the blow-up time, up to which trajectories are compared
FADING = FixedSteps.until(20.0, 0.005, 4000)  # blow-up times of the initial gradient, every step kept
LONGEST = 400.0  # blow-up times; softmax attention needs as many to reach the level


@dataclass(frozen=True)
class Winners(Study):
    """Token weights under a linear activation and constant gradients, beside the erf law.

    Attributes
    ----------
    tokens, contexts
        Size of the task; softmax attention sees one context.
    records
        Number of states kept.
    level
        The flow ends where the largest weight reaches this value.
    """

    name: ClassVar[str] = "joma/winners"
    claim: ClassVar[str] = "Under exp attention one token takes all at time sqrt(pi/2)/max|Delta|"
    source: ClassVar[Source] = replace(
        TIAN,
        locus="theorem 2; the blow-up time, the limits and the solution for linear attention are derived here",
    )
    revision: ClassVar[int] = 2  # gradients that fade
    # Not vectorized: one program per attention serves both of its flows and all replicates.
    tokens: int = 12
    contexts: int = 40
    records: int = 40
    level: float = 6.0

    def __post_init__(self) -> None:
        if self.tokens < 2 or self.records < 2 or not 2.5 < self.level <= 7:
            raise UsageError(
                f"tokens={self.tokens}, records={self.records}, level={self.level}: expected two or more of the first, "
                f"and a level in (2.5, 7]; below, the flow ends before {FRACTION} of the blow-up time, above, the time "
                "left to it is below its rounding"
            )

    @classmethod
    def full(cls) -> Winners:
        """Return the study with more tokens."""
        return cls(tokens=40, contexts=200)

    @classmethod
    def small(cls) -> Winners:
        """Return the smallest configuration in which every claim can change."""
        return cls(tokens=3, contexts=4, records=4, level=3.0)

    def cells(self) -> tuple[Cell, ...]:
        """Return the three kinds of attention, and exp attention with a gradient that fades."""
        return grid(attention=("exp", "linear", "softmax"), gradient=("constant",)) + grid(
            attention=("exp",), gradient=("fading",)
        )

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the fraction of the blow-up time that is left when the largest weight reaches the level."""
        left = float(erfc(self.level * 0.5**0.5))
        return dataset({"left": ((), left, "fraction of the blow-up time that is left at the level")})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Integrate one layer to just before the blow-up time of exp attention, and to the level."""
        rule = UpdateRule(str(cell["attention"]), "identity")  # type: ignore[arg-type]
        contexts = 1 if rule.attention == "softmax" else self.contexts
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        sizes = Sizes(self.tokens, contexts=contexts, neurons=1, width=self.tokens + 1)
        task = draw_joma_task(sizes, rng)
        gradients = 0.5 + rng.normal(size=(contexts, 1))
        gains = (gradients * task.contexts).mean(0)  # (M,)
        if cell["gradient"] == "fading":
            gains = ((task.labels % 2 - 0.5)[:, None] * task.contexts).mean(0)
        # Gradients are scaled so that the blow-up time is one: every trajectory has the same times.
        scale = (np.pi / 2) ** 0.5 / np.abs(gains).max()
        loss = LogisticLoss(scale) if cell["gradient"] == "fading" else LinearLoss(gradients * scale)
        logits = np.full((1, self.tokens), float(rule.attention == "linear"))
        init = LayerParameters(logits, np.zeros((sizes.width, 1)))

        def flow(horizon: float) -> FlowTrajectory:
            steps = AdaptiveSteps(horizon, self.records, 1e-12, 1e-14, limit=self.level)
            return adaptive_gradient_flow(init, task, loss, rule, steps)

        near = flow(FRACTION)
        fading = cell["gradient"] == "fading"
        last = gradient_flow(init, task, loss, rule, FADING) if fading else flow(LONGEST)
        total = _accumulate(last, task, loss, rule) if fading else gains * scale * float(last.times[-1])
        end = token_weights(task, last.network.weights[-1])[:, 0]
        attention = np.asarray(attend(rule, jnp.asarray(last.network.logits[-1]), jnp.asarray(task.contexts))).mean(0)
        path = token_weights(task, near.network.weights)[..., 0]
        return dataset(
            {
                "gain": ("token", gains / np.abs(gains).max() * (np.pi / 2) ** 0.5, GAIN),
                "total": ("token", total, "gain accumulated to the end of the flow"),
                "weights": (("time", "token"), path, "token weights"),
                "end": ("token", end, "final token weights"),
                "end_time": ((), last.times[-1], "final time over the blow-up time"),
                "reached": ((), last.stopped, "whether the level was reached", None),
                "shares": ("token", attention / attention.sum(), "final attention, normalized"),
            },
            coords={
                "time": (np.linspace(0, FRACTION, self.records + 1), "time over blow-up time"),
                "token": (np.arange(self.tokens), "token"),
            },
        )

    def claims(self) -> tuple[Claim, ...]:
        """Test equalities to the error of the integrator, and laws that do not hold to a tenth."""
        integrator = "an equality: the error of the integrator, 1e-12 per step, summed over the flow"
        equality: dict[str, Any] = {"target": 0.0, "tolerance": EXACT, "basis": integrator}
        no_constant: dict[str, Any] = {
            "target": 0.0,
            "tolerance": 0.1,
            "expected": "refuted",
            "resolution": EXACT,
            "basis": "a tenth of the ratio itself",
        }
        return (
            Claim(
                "Under exp attention all weights follow erf(v/sqrt 2) = sqrt(2/pi) Delta t to 98% of the blow-up time",
                _worst("exp", lambda path: np.abs(path["weights"] - weights_at(path["gain"], _times(path))).max()),
                quantity="largest distance of weights",
                **equality,
            ),
            Claim(
                "Under exp attention erf(v/sqrt 2)/Delta is the same for all tokens",
                _worst("exp", lambda path: common_ratio(path["gain"], path["weights"][-1], 0.5**0.5)),
                quantity="relative spread over tokens",
                **equality,
            ),
            Claim(
                "Under exp attention erf(v/2)/Delta is the same for all tokens",
                _each("exp", lambda path: common_ratio(path["gain"], path["weights"][-1], 0.5)),
                quantity="relative spread over tokens",
                **no_constant,
            ),
            Claim(
                f"The weight of the largest gain reaches {self.level:g} at the time of the erf law",
                _worst("exp", lambda path: abs(path["end_time"] / reaching_time(path["gain"], self.level) - 1)),
                quantity="relative error of the time",
                **equality,
            ),
            Claim(
                "The other weights converge to erf(v/sqrt 2) = Delta/max|Delta|",
                _worst("exp", lambda path: np.abs(erf(path["end"] * 0.5**0.5) - path["gain"] / _top(path)).max()),
                quantity="largest distance",
                target=0.0,
                tolerance=lambda predicted: float(predicted["left"]) + EXACT,
                basis="the fraction of the blow-up time left at the level where the flow ends, and the integrator",
            ),
            Claim(
                "Exp attention becomes one-hot on the token of the largest gain",
                _least("exp", _winner),
                quantity="smallest share of the winner",
                target=1.0,
                tolerance=0.01,
                basis="the other weights stay finite: their share is exp(-level^2/2) times that of gains equal to 1e-6",
            ),
            Claim(
                "Under linear attention the weights are sinh(Delta t), without blow-up or convergence",
                _worst("linear", _sinh_error),
                quantity="largest relative error",
                **equality,
            ),
            Claim(
                "When the gradient fades, erf(v/sqrt 2) is sqrt(2/pi) times the gain accumulated over time",
                _worst("exp", _accumulation_error, "fading"),
                quantity="largest distance",
                target=0.0,
                tolerance=QUADRATURE,
                basis="an equality: Simpson's rule between the states kept, every step of the flow",
            ),
            Claim(
                "When the gradient fades, erf(v/sqrt 2)/Delta of the initial gain is the same for all tokens",
                _each("exp", lambda path: common_ratio(path["gain"], path["end"], 0.5**0.5), "fading"),
                quantity="spread over tokens (relative)",
                **no_constant,
            ),
            Claim(
                "When the gradient fades, exp attention becomes one-hot on the token of the largest initial gain",
                _each("exp", _winner, "fading"),
                quantity="share of the winner",
                target=1.0,
                tolerance=0.01,
                expected="refuted",
                resolution=EXACT,
                bounds=(0.0, 1.0),
                basis="as for a constant gradient",
            ),
            Claim(
                "Under softmax attention with one context erf(v/sqrt 2)/Delta is the same for all tokens",
                _each("softmax", lambda path: common_ratio(path["gain"], path["end"], 0.5**0.5)),
                quantity="relative spread over tokens",
                **no_constant,
            ),
            Claim(
                "Under softmax attention with one context the token of the largest gain has the largest weight",
                _least("softmax", lambda path: abs(path["end"][np.abs(path["gain"]).argmax()]) / self.level),
                quantity="weight of the winner over the level, smallest",
                target=1.0,
                tolerance=EXACT,
                basis="the flow ends where the largest weight is at the level; this weight over it, worst replicate",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the weights of the first replicate, and the figures of all."""
        return (*(self._lines(trained, name) for name in ("exp", "linear", "softmax")), _figures(trained))

    def _lines(self, trained: xr.Dataset, attention: str) -> Panel:
        path, times = _paths(trained, attention)[0], trained["time"].values
        order = np.argsort(-np.abs(path["gain"]))
        tokens = order[np.unique(np.linspace(0, len(order) - 1, 4).astype(int))]
        law = linear_attention_at(path["gain"], times)[0] if attention == "linear" else weights_at(path["gain"], times)
        curves = []
        for group, token in enumerate(tokens):
            label = f"gain {path['gain'][token] / _top(path):+.2f}"
            curves.append(spread_curve(times, path["weights"][:, token], label, group=group))
            curves.append(spread_curve(times, law[:, token], "", "predicted", group))
        return Lines(
            f"{attention} attention: weights of four tokens",
            "time over the blow-up time of exp attention",
            "token weight v",
            tuple(curves),
            note=f"First replicate. Dashed: {'sinh(gain t)' if attention == 'linear' else 'erf law of exp attention'}.",
            shows=SHOWN[attention],
        )


SHOWN = {  # claims by kind of attention
    "exp": ("all weights follow erf",),
    "linear": ("Under linear attention",),
    "softmax": ("has the largest weight",),
}


def _accumulate(path: FlowTrajectory, task: JomaTask, loss: Loss, rule: UpdateRule) -> np.ndarray:
    """Integrate the gains E[g x] of a single neuron along a trajectory, (M,)."""

    def gains(state: LayerParameters) -> jax.Array:
        preactivations = forward(state, task, rule)[1]
        gradient = jax.grad(lambda a: loss(rule.function(a), task))(preactivations)  # of the mean over samples
        return -gradient[:, 0] @ jnp.asarray(task.contexts)

    rates = jax.jit(jax.vmap(gains))(jax.tree.map(jnp.asarray, path.network))
    return np.asarray(simpson(np.asarray(rates), x=np.asarray(path.times), axis=0))


def _accumulation_error(path: dict[str, Any]) -> float:
    return float(np.abs(erf(path["end"] * 0.5**0.5) - (2 / np.pi) ** 0.5 * path["total"]).max())


def _paths(trained: xr.Dataset, attention: str, gradient: str = "constant") -> list[dict[str, Any]]:
    """Return the variables of one kind of attention and gradient, a dictionary per replicate."""
    cell = select_cell(trained, attention=attention, gradient=gradient)
    runs = (cell.isel(replicate=number) for number in range(cell.sizes["replicate"]))
    return [{str(name): run[name].values for name in (*run.data_vars, "time")} for run in runs]


def _times(path: dict[str, Any]) -> np.ndarray:
    """Return the times of a trajectory, clipped below the blow-up of its gains."""
    return np.minimum(path["time"], 0.999 * blowup_time(path["gain"]))


def _top(path: dict[str, Any]) -> float:
    return float(np.abs(path["gain"]).max())


def _sinh_error(path: dict[str, Any]) -> float:
    return float(np.abs(path["weights"] - linear_attention_at(path["gain"], path["time"])[0]).max())


def _winner(path: dict[str, Any]) -> float:
    """Return the attention of the token with the largest gain."""
    return float(path["shares"][np.abs(path["gain"]).argmax()])


def _each(attention: str, figure: Callable[[dict[str, Any]], float], gradient: str = "constant") -> Measure:
    """Measure one figure per replicate under one kind of attention."""
    return lambda predicted, trained: [figure(path) for path in _paths(trained, attention, gradient)]


def _worst(attention: str, figure: Callable[[dict[str, Any]], float], gradient: str = "constant") -> Measure:
    return lambda predicted, trained: max(figure(path) for path in _paths(trained, attention, gradient))


def _least(attention: str, figure: Callable[[dict[str, Any]], float]) -> Measure:
    return lambda predicted, trained: min(figure(path) for path in _paths(trained, attention))


def _figures(trained: xr.Dataset) -> Panel:
    rows = []
    for attention in ("exp", "linear", "softmax"):
        paths = _paths(trained, attention)
        ratios = [common_ratio(path["gain"], path["end"], 0.5**0.5) for path in paths]
        ends = [float(path["end_time"]) for path in paths]
        shares = [_winner(path) for path in paths]
        rows.append((attention, *(f"{min(of):.4g} to {max(of):.4g}" for of in (ends, shares, ratios))))
    return Listing(
        "End of the flow",
        (
            "attention",
            "time over blow-up time",
            "attention of the largest gain",
            "range of erf(v/√2)/gain over its mean",
        ),
        tuple(rows),
        note="Smallest and largest over replicates, where the largest weight reaches the level.",
    )
