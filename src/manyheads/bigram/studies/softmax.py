"""`bigram/softmax`: a softmax head starts like a linear one, and ends elsewhere unless the planted weights are tied.

The same samples train a linear head and three softmax heads: with the rate scaled by the largest weight, with Adam, and
with logits of tokens beside those of positions. Two positions count for every query, with equal or unequal weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.bigram import setups as shared
from manyheads.bigram.engines.generator import draw_at
from manyheads.bigram.task import BigramTask, draw_task
from manyheads.bigram.training.proximal_sgd import State, StepSettings, start
from manyheads.bigram.training.record import record
from manyheads.bigram.training.softmax import (
    SoftmaxSettings,
    SoftmaxState,
    as_linear,
    descend_softmax,
    predict_runner_up,
    start_softmax,
)
from manyheads.errors import UsageError
from manyheads.study import Cell, Lines, Listing, Study, Verdict, grid
from manyheads.study.reporting.panels import Panel, spread_curve

HEADS = {"linear": "linear", "softmax": "softmax", "adam": "softmax, Adam", "tokens": "softmax, tokens too"}
LOOKS = 40
NEAR = 0.9  # of the loss at the start: what still counts as near it
HALF = 0.5  # a second weight of at least half its due counts as found


@dataclass(frozen=True)
class Softmax(Study):
    """Softmax and linear heads train alike near the start; afterwards the largest weight takes all.

    Attributes
    ----------
    shares
        Weights of the first of two positions, from .5 (tied) up.
    length, vocabulary
        T and N.
    batch, steps
        Of a run.
    rate
        Growth per step of the linear model; the values of all heads have its rate.
    adam_rate
        By which Adam moves a logit in a step.
    """

    name: ClassVar[str] = "bigram/softmax"
    claim: ClassVar[str] = "softmax and linear heads train alike near the start, and end alike where weights are tied"
    source: ClassVar = shared.SOURCE

    shares: tuple[float, ...] = (0.5, 0.52, 0.62)
    length: int = 256
    vocabulary: int = 3
    batch: int = 512
    steps: int = 400
    rate: float = 0.05
    adam_rate: float = 0.03

    def __post_init__(self) -> None:
        if len(self.shares) < 2 or self.shares[0] != 0.5 or list(self.shares) != sorted(set(self.shares)):
            raise UsageError(f"shares={self.shares}: 0.5 first, then larger ones in rising order")
        if self.shares[-1] >= 0.85 or self.steps < LOOKS:
            raise UsageError(f"shares={self.shares}, steps={self.steps}: shares below .85, {LOOKS} steps or more")

    @classmethod
    def full(cls) -> Softmax:
        """Return the study at a thousand tokens with twice the batch."""
        return cls(length=1000, batch=1024, steps=2000, rate=0.02)

    @classmethod
    def small(cls) -> Softmax:
        """Return the smallest configuration in which every claim can change."""
        return cls(shares=(0.5, 0.62), length=24, batch=8, steps=40)

    def cells(self) -> tuple[Cell, ...]:
        """Return every head with every pair of weights."""
        return grid(head=tuple(HEADS), share=self.shares)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the second weight when the first has taken over, and the loss of a head that has only the first."""
        pairs = [(share, 1 - share) for share in self.shares]
        runner = [predict_runner_up(self.length, *pair) for pair in pairs]
        alone = [0.0 if larger == smaller else smaller**2 / (larger**2 + smaller**2) for larger, smaller in pairs]
        return xr.Dataset(
            {
                "runner_up": ("share", runner, {"long_name": "second weight at the takeover", "units": "1"}),
                "excess": ("share", alone, shared.EXCESS),
            },
            coords={"share": list(self.shares)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train one head and look at its loss and at its two weights."""
        seed, head, share = shared.seed_of(key), str(cell["head"]), float(cell["share"])
        task = self._task(seed, share)
        rates = self.rate / task.attention_energy, self.rate / task.transition_energy
        if head == "linear":
            looks = _look_linear(task, StepSettings(self.batch, *rates), self.steps, seed)
        else:
            rule, speed = ("adam", self.adam_rate) if head == "adam" else ("scaled", rates[1])
            settings = SoftmaxSettings(self.batch, rates[0], speed, rule, token_logits=head == "tokens")  # type: ignore[arg-type]
            looks = _look_softmax(task, settings, self.steps, seed)
        losses, state, by_token = looks
        weights = np.take_along_axis(state.attention.astype(float), task.positions, axis=1)  # (N, 2)
        order = np.argsort(-task.weights, axis=1, kind="stable")
        larger, smaller = np.take_along_axis(weights, order, axis=1).T
        if task.weights[0, 0] == task.weights[0, 1]:
            larger, smaller = np.maximum(larger, smaller), np.minimum(larger, smaller)
        due = task.weights.min(1)
        samples = np.arange(LOOKS + 1) * (self.steps // LOOKS) * self.batch
        return xr.Dataset(
            {
                "excess": ("progress", losses, shared.EXCESS),
                "reached": ((), _first_below(losses, samples), {"long_name": "samples to .9", "units": "1"}),
                "larger": ((), larger.mean(), {"long_name": "first weight", "units": "1"}),
                "smaller": ((), smaller.mean(), {"long_name": "second weight", "units": "1"}),
                "found": ((), (smaller > HALF * due).mean(), {"long_name": "second positions found", "units": "1"}),
                "by_token": ((), by_token, {"long_name": "largest logit of a token", "units": "1"}),
            },
            coords={"progress": ("progress", samples, {"long_name": "samples drawn"})},
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare heads near the start, at the end, and the second weight with the takeover."""
        reached, found = shared.unstack(trained, "reached"), shared.unstack(trained, "found")
        smaller, last = shared.unstack(trained, "smaller"), self.shares[-1]
        final = shared.unstack(trained, "excess").isel(progress=-1)
        near = np.log2(reached.sel(head="softmax", share=0.5).values / reached.sel(head="linear", share=0.5).values)
        grain = 1 / (self.vocabulary * 2)
        return (
            Verdict.from_samples(
                f"with tied weights softmax and linear heads need as many samples to lose {1 - NEAR:.0%} of the loss",
                near,
                target=0.0,
                tolerance=float(np.log2(1.25)),
                resolution=1e-6,
                basis="both obey the same equations while both weights of a row are equal and below one: a quarter is "
                "room for the finite step, of size eta ln 2, and for noise that parts the two weights",
            ),
            Verdict.from_samples(
                f"softmax attention learns what linear attention learns: the second weight of {last:g}/{1 - last:g}",
                smaller.sel(head="softmax", share=last).values / smaller.sel(head="linear", share=last).values,
                target=1.0,
                tolerance=0.5,
                expected="refuted",
                basis="half of what the linear head finds, or half more, would still count as alike",
            ),
            Verdict.from_samples(
                f"with {last:g}/{1 - last:g} the second weight stays where the takeover leaves it",
                np.log2(smaller.sel(head="softmax", share=last).values / float(predicted["runner_up"].sel(share=last))),
                target=0.0,
                tolerance=2.0,
                basis="a factor of four: the blow-up is that of constant values, the values grow meanwhile, and after "
                "it the weight creeps on at a rate of its square",
            ),
            Verdict.from_samples(
                f"with {last:g}/{1 - last:g} the softmax head is left with the loss of its first position alone",
                final.sel(head="softmax", share=last).values,
                target=float(predicted["excess"].sel(share=last)),
                tolerance=0.1,
                basis="closed form q2^2/(q1^2 + q2^2); noise of values and attention adds a few hundredths",
            ),
            Verdict.from_samples(
                "with tied weights the softmax head finds both positions",
                found.sel(head="softmax", share=0.5).values,
                target=1.0,
                tolerance=0.5,
                resolution=grain,
                basis=f"in more than half of the queries, a weight above {HALF} of its due",
            ),
            Verdict.from_samples(
                f"with {last:g}/{1 - last:g} the linear head finds both positions",
                found.sel(head="linear", share=last).values,
                target=1.0,
                tolerance=0.5,
                resolution=grain,
                basis="in more than half of the queries: its weights grow in proportion",
            ),
            Verdict.from_samples(
                f"with {last:g}/{1 - last:g} a softmax head with Adam finds both positions",
                found.sel(head="adam", share=last).values,
                target=1.0,
                tolerance=0.5,
                resolution=grain,
                basis="in more than half of the queries: Adam moves logits by the sign of their gradient, not its size",
            ),
            Verdict.from_samples(
                f"logits of tokens beside those of positions change nothing of that, with {last:g}/{1 - last:g}",
                final.sel(head="tokens", share=last).values,
                target=float(predicted["excess"].sel(share=last)),
                tolerance=0.1,
                basis="the same closed form, 1 for a head that has learned nothing and 0 for both positions: which "
                "token stands at a position does not say whether the position counts",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show the loss over samples for the first and the last pair of weights, and where the weights end."""
        excess = shared.unstack(trained, "excess")
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
            panels.append(Lines(title, "samples drawn", "excess loss, of that at the start", curves, log_y=True))
        means = {name: shared.unstack(trained, name).mean("replicate") for name in ("larger", "smaller", "found")}
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
            "Where the two weights end",
            ("head", "planted", "first weight", "second weight", "second positions found"),
            rows,
            note="Raw weights, means over queries and replicates; the linear head's rows also hold noise and their "
            "scale is free.",
        )
        return (*panels, table)

    def _task(self, seed: list[int], share: float) -> BigramTask:
        """Return the task of a replicate: all cells have its transition and positions."""
        drawn = draw_task(np.random.default_rng([*seed, 3]), self.vocabulary, self.length, 2)
        return replace(drawn, weights=np.tile([share, 1 - share], (self.vocabulary, 1)))


def _look_linear(task: BigramTask, settings: StepSettings, steps: int, seed: Any) -> tuple[np.ndarray, State, float]:
    seen = record(task, start(task), settings, LOOKS * (steps // LOOKS), LOOKS, seed=seed)
    return seen.excess, seen.state, 0.0


def _look_softmax(
    task: BigramTask, settings: SoftmaxSettings, steps: int, seed: Any
) -> tuple[np.ndarray, State, float]:
    state, every, losses = start_softmax(task), steps // LOOKS, []
    probe = draw_at(task, 2048, seed=[*seed, 1])  # other samples than those of the steps
    zero = _estimate_excess(task, state, probe)
    for look in range(LOOKS + 1):
        if look:
            state = descend_softmax(task, state, settings, every, seed=seed, first_step=(look - 1) * every)
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
    """Return the samples at which the loss first passes `NEAR`, between two looks by a straight line."""
    below = np.flatnonzero(losses < NEAR)
    if not below.size:
        return float(samples[-1])
    right = int(below[0])
    span = (losses[right - 1] - NEAR) / (losses[right - 1] - losses[right])
    return float(samples[right - 1] + span * (samples[right] - samples[right - 1]))
