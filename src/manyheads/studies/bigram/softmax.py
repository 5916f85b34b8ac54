"""`bigram/softmax`: softmax and linear attention, trained on the same samples, for equal and unequal planted weights.

The same samples train a linear head and three softmax heads: with the learning rate scaled by the largest weight, with
Adam, and with logits of tokens beside those of positions. Every query attends to two positions, with equal or unequal
weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.study import Cell, Claim, Lines, Listing, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import unstack
from manyheads.theory.bigram import setups as shared
from manyheads.theory.bigram.engines.generator import draw_step_batch
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.training.proximal_sgd import State, StepSettings, initial_state
from manyheads.theory.bigram.training.record import record, trajectory
from manyheads.theory.bigram.training.softmax_training import (
    SoftmaxSettings,
    SoftmaxState,
    as_linear,
    descend_softmax,
    initial_softmax_state,
    predict_second_weight,
)
from manyheads.theory.papers import REN

HEADS = {"linear": "linear", "softmax": "softmax", "adam": "softmax, Adam", "tokens": "softmax, tokens too"}
RECORDS = 40
NEAR = 0.9  # of the initial loss: the end of the early phase
HALF = 0.5  # of its planted value: a larger second weight is found


@dataclass(frozen=True)
class Softmax(Study):
    """Early training and final weights of softmax and linear heads, by the larger of two planted weights.

    Attributes
    ----------
    shares
        Planted weights of the first of two positions, from .5 (equal) up.
    length, vocabulary
        T and N.
    batch, steps
        Of a run.
    growth
        Growth per step of the linear model; the values of all heads have its learning rate.
    adam_learning_rate
        Learning rate of Adam for the logits.
    """

    name: ClassVar[str] = "bigram/softmax"
    revision: ClassVar[int] = 3
    claim: ClassVar[str] = "Softmax and linear heads train alike early, and to the end for equal weights"
    source: ClassVar = REN

    shares: tuple[float, ...] = (0.5, 0.52, 0.62)
    length: int = 256
    vocabulary: int = 3
    batch: int = 512
    steps: int = 400
    growth: float = 0.05
    adam_learning_rate: float = 0.03

    def __post_init__(self) -> None:
        if len(self.shares) < 2 or self.shares[0] != 0.5 or list(self.shares) != sorted(set(self.shares)):
            raise UsageError(f"shares={self.shares}: give 0.5 first, then larger ones in increasing order")
        if self.shares[-1] >= 0.85 or self.steps < RECORDS:
            raise UsageError(
                f"shares={self.shares}, steps={self.steps}: give shares below .85, and {RECORDS} steps or more"
            )

    @classmethod
    def full(cls) -> Softmax:
        """Return the study at a thousand tokens with twice the batch."""
        return cls(length=1000, batch=1024, steps=2000, growth=0.02)

    @classmethod
    def small(cls) -> Softmax:
        """Return the smallest configuration in which every claim can change."""
        return cls(shares=(0.5, 0.62), length=24, batch=8, steps=40)

    def cells(self) -> tuple[Cell, ...]:
        """Return every head with every pair of weights."""
        return grid(head=tuple(HEADS), share=self.shares)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the second weight when the first has taken over, and the loss of the first position alone."""
        pairs = [(share, 1 - share) for share in self.shares]
        runner = [predict_second_weight(self.length, *pair) for pair in pairs]
        alone = [0.0 if larger == smaller else smaller**2 / (larger**2 + smaller**2) for larger, smaller in pairs]
        return xr.Dataset(
            {
                "runner_up": (
                    "share",
                    runner,
                    {"long_name": "second weight at the blow-up of the first", "units": "1"},
                ),
                "excess": ("share", alone, shared.EXCESS),
            },
            coords={"share": list(self.shares)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one head and record its loss and its two weights."""
        seed, head, share = shared.replicate_seed(key), str(cell["head"]), float(cell["share"])
        task = self._task(seed, share)
        rates = self.growth / task.attention_squared_norm, self.growth / task.transition_squared_norm
        if head == "linear":
            result = _train_linear(task, StepSettings(self.batch, *rates), self.steps, seed)
        else:
            rule, speed = ("adam", self.adam_learning_rate) if head == "adam" else ("scaled", rates[1])
            settings = SoftmaxSettings(self.batch, rates[0], speed, rule, token_logits=head == "tokens")  # type: ignore[arg-type]
            result = _train_softmax(task, settings, self.steps, seed)
        losses, state, by_token = result
        weights = np.take_along_axis(state.attention.astype(float), task.positions, axis=1)  # (N, 2)
        order = np.argsort(-task.weights, axis=1, kind="stable")
        larger, smaller = np.take_along_axis(weights, order, axis=1).T
        if task.weights[0, 0] == task.weights[0, 1]:
            larger, smaller = np.maximum(larger, smaller), np.minimum(larger, smaller)
        planted = task.weights.min(1)
        samples = np.arange(RECORDS + 1) * (self.steps // RECORDS) * self.batch
        return xr.Dataset(
            {
                "excess": ("progress", losses, shared.EXCESS),
                "reached": ((), _first_below(losses, samples), {"long_name": "samples to .9", "units": "1"}),
                "larger": ((), larger.mean(), {"long_name": "first weight", "units": "1"}),
                "smaller": ((), smaller.mean(), {"long_name": "second weight", "units": "1"}),
                "found": ((), (smaller > HALF * planted).mean(), {"long_name": "second positions found", "units": "1"}),
                "by_token": ((), by_token, {"long_name": "largest logit of a token", "units": "1"}),
            },
            coords={"progress": ("progress", samples, {"long_name": "samples drawn"})},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare heads early in training, at the end, and the second weight with the blow-up of the first."""
        last = self.shares[-1]
        unequal = f"q = ({last:g}, {1 - last:g})"

        def early(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            reached = unstack(trained, "reached").sel(share=0.5)
            return np.log2(reached.sel(head="softmax").values / reached.sel(head="linear").values)

        def against_linear(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            smaller = unstack(trained, "smaller").sel(share=last)
            return smaller.sel(head="softmax").values / smaller.sel(head="linear").values

        def against_blow_up(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            smaller = unstack(trained, "smaller").sel(head="softmax", share=last)
            return np.log2(smaller.values / float(predicted["runner_up"].sel(share=last)))

        def final_excess(head: str) -> Measure:
            return lambda predicted, trained: (
                unstack(trained, "excess").isel(progress=-1).sel(head=head, share=last).values
            )

        def alone(predicted: xr.Dataset) -> float:
            return float(predicted["excess"].sel(share=last))

        def both_found(text: str, head: str, share: float, basis: str) -> Claim:
            return Claim(
                text,
                lambda predicted, trained: unstack(trained, "found").sel(head=head, share=share).values,
                quantity="share of queries with both positions",
                bounds=(0.0, 1.0),
                target=1.0,
                tolerance=0.5,
                resolution=1 / (self.vocabulary * 2),
                basis=f"in more than half of the queries{basis}",
            )

        return (
            Claim(
                "For equal weights softmax and linear attention need the same samples to reduce the loss by "
                f"{1 - NEAR:.0%} "
                "(log2 ratio)",
                early,
                quantity="samples of softmax over those of linear attention (log2)",
                target=0.0,
                tolerance=float(np.log2(1.25)),
                resolution=shared.ROUNDING,
                basis="both obey the same equations while the weights of a row are equal and below one: a quarter for "
                "the finite step, of size eta ln 2, and for noise that separates the two weights",
            ),
            Claim(
                f"Softmax attention learns the weights of linear attention (ratio of the second ones, {unequal})",
                against_linear,
                quantity="second weight of softmax over that of linear attention",
                target=1.0,
                tolerance=0.5,
                expected="refuted",
                basis="a half of the weight of the linear head, either way",
            ),
            Claim(
                f"For {unequal} the second softmax weight remains 1/(T(1 - q2/q1)) after the blow-up of the first "
                "(log2 ratio)",
                against_blow_up,
                quantity="second weight, measured over predicted (log2)",
                target=0.0,
                tolerance=2.0,
                basis="a factor of four: the blow-up is that of constant values, the values grow meanwhile, and "
                "afterwards the weight grows at a rate of its square",
            ),
            Claim(
                f"For {unequal} the softmax head keeps the excess loss q2^2/(q1^2 + q2^2) of its first position alone",
                final_excess("softmax"),
                quantity="relative excess loss",
                target=alone,
                tolerance=0.1,
                basis="closed form; noise of values and attention adds a few hundredths",
            ),
            both_found("For equal weights the softmax head finds both positions", "softmax", 0.5, ""),
            both_found(
                f"For {unequal} the linear head finds both positions",
                "linear",
                last,
                ", whose weights grow in proportion",
            ),
            both_found(
                f"For {unequal} a softmax head trained by Adam finds both positions",
                "adam",
                last,
                ": Adam moves logits by the sign of their gradient",
            ),
            Claim(
                f"For {unequal} additional logits of tokens do not change the final excess loss of the softmax head",
                final_excess("tokens"),
                quantity="relative excess loss",
                target=alone,
                tolerance=0.1,
                basis="the same closed form, 1 without knowledge and 0 for both positions: the token at a "
                "position does not tell whether the query attends to it",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the loss over samples for the first and the last pair of weights, and the final weights."""
        excess = unstack(trained, "excess")
        panels: list[Panel] = []
        for share in (self.shares[0], self.shares[-1]):
            curves = tuple(
                spread_curve(
                    trained["progress"].values,
                    excess.sel(head=head, share=share).transpose("replicate", "progress").values,
                    label,
                    group=group,
                )
                for group, (head, label) in enumerate(HEADS.items())
            )
            title = f"Loss with weights {share:g} and {1 - share:g}"
            shows = ("For equal weights softmax" if share == 0.5 else "the softmax head keeps",)
            panels.append(Lines(title, "samples drawn", shared.EXCESS_AXIS, curves, log_y=True, shows=shows))
        means = {name: unstack(trained, name).mean("replicate") for name in ("larger", "smaller", "found")}
        rows = tuple(
            (
                label,
                f"{share:g} / {1 - share:g}",
                *(f"{float(means[name].sel(head=head, share=share)):.3f}" for name in means),
            )
            for head, label in HEADS.items()
            for share in self.shares
        )
        table = Listing(
            "Final weights",
            ("head", "planted", "first weight", "second weight", "second positions found"),
            rows,
            note="Raw weights, means over queries and replicates; those of the linear head include noise and "
            "have a free scale.",
        )
        return (*panels, table)

    def _task(self, seed: list[int], share: float) -> BigramTask:
        """Return the task of a replicate: all cells share its transition and positions."""
        drawn = draw_bigram_task(np.random.default_rng([*seed, 3]), self.vocabulary, self.length, 2)
        return replace(drawn, weights=np.tile([share, 1 - share], (self.vocabulary, 1)))


def _train_linear(task: BigramTask, settings: StepSettings, steps: int, seed: Any) -> tuple[np.ndarray, State, float]:
    seen = record(task, initial_state(task), settings, RECORDS * (steps // RECORDS), RECORDS, seed=seed)
    return seen.excess, seen.state, 0.0


def _train_softmax(
    task: BigramTask, settings: SoftmaxSettings, steps: int, seed: Any
) -> tuple[np.ndarray, State, float]:
    init, every, losses = initial_softmax_state(task), steps // RECORDS, []

    def train(state: SoftmaxState, first_step: int) -> SoftmaxState:
        return descend_softmax(task, state, settings, every, seed=seed, first_step=first_step)

    probe = draw_step_batch(task, 2048, seed=[*seed, 1])  # independent of the samples of the steps
    zero = _estimate_excess(task, init, probe)
    for _, state in islice(trajectory(train, init, every), RECORDS + 1):
        losses.append(_estimate_excess(task, state, probe) / zero)
    return np.array(losses), as_linear(state), float(np.abs(state.tokens).max())


def _estimate_excess(task: BigramTask, state: SoftmaxState, probe: Any) -> float:
    r"""Return the mean of :math:`\tfrac12|f - \mathbb E[e_y|x,k]|^2` over contexts: there is no closed form."""
    logits = state.positions[probe.queries] + state.tokens[probe.queries[:, None], probe.tokens]
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)  # (B, T)
    size = task.vocabulary
    seen = np.stack([(weights * (probe.tokens == token)).sum(1) for token in range(size)], axis=1)
    there = np.take_along_axis(probe.tokens, task.positions[probe.queries], axis=1)  # (B, 2)
    true = np.einsum("bqn,bq->bn", task.centred.T[there], task.weights[probe.queries])
    return 0.5 * float(((seen @ state.value.T - true) ** 2).sum(1).mean())


def _first_below(losses: np.ndarray, samples: np.ndarray) -> float:
    """Return the samples at which the loss first passes `NEAR`, by linear interpolation."""
    below = np.flatnonzero(losses < NEAR)
    if not below.size:
        return float(samples[-1])
    right = int(below[0])
    span = (losses[right - 1] - NEAR) / (losses[right - 1] - losses[right])
    return float(samples[right - 1] + span * (samples[right] - samples[right - 1]))
