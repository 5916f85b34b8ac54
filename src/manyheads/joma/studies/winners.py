"""`joma/winners`: a linear activation and a constant gradient, one token takes all; which, when, and where others stop.

The flow of logits and weights is integrated as it stands and held against the erf law, its blow-up time and its limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from scipy.special import erf, erfc

from manyheads.errors import UsageError
from manyheads.joma.source import SOURCE
from manyheads.joma.systems.gradient_flow import Adaptive, flow_adaptively
from manyheads.joma.systems.layer import ConstantPull, Network, attend, token_weights
from manyheads.joma.task import Rule, Sizes, draw_setting
from manyheads.joma.theory.winner_take_all import (
    blowup_time,
    common_ratio,
    linear_attention_at,
    reaching_time,
    weights_at,
)
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Panel, Source, Study, grid
from manyheads.study.claims import Measure

EXACT = 1e-10
SHARE = 0.98  # of the blow-up time: that far paths are compared
LONGEST = 400.0  # blow-up times: softmax attention takes that long to the level


@dataclass(frozen=True)
class Winners(Study):
    """Exp attention follows the erf law to its blow-up; linear and softmax attention follow others.

    Attributes
    ----------
    tokens, contexts
        Size of the task; softmax attention sees one context.
    records
        States that are kept of a path.
    level
        A path ends where its largest weight gets here.
    """

    name: ClassVar[str] = "joma/winners"
    claim: ClassVar[str] = "with a linear activation one token takes all: which, when, and where the others stop"
    source: ClassVar[Source] = replace(
        SOURCE, locus="theorem 2; the blow-up time, the limits and the solution for linear attention are derived here"
    )
    # Not vectorised: one program for each attention then serves both of its paths and all replicates.
    tokens: int = 12
    contexts: int = 40
    records: int = 40
    level: float = 6.0

    def __post_init__(self) -> None:
        if self.tokens < 2 or self.records < 2 or not 2.5 < self.level <= 7:
            raise UsageError(
                f"tokens={self.tokens}, records={self.records}, level={self.level}: two or more of the first, and a "
                f"level in (2.5, 7]: below, a path ends before {SHARE} of the blow-up time; beyond, the time left to "
                "it is below the rounding of the time itself"
            )

    @classmethod
    def full(cls) -> Winners:
        """Return the study with more tokens."""
        return cls(tokens=40, contexts=200)

    def cells(self) -> tuple[Cell, ...]:
        """Return the three kinds of attention."""
        return grid(attention=("exp", "linear", "softmax"))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return what is left of the blow-up time, as a share of it, when the winner gets to the level."""
        attributes = {"long_name": "share of the blow-up time that is left at the level", "units": "1"}
        return xr.Dataset({"left": ((), float(erfc(self.level * 0.5**0.5)), attributes)})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Follow one layer to just before the blow-up time of exp attention, and from the start to the level."""
        rule = Rule(str(cell["attention"]), "identity")  # type: ignore[arg-type]
        contexts = 1 if rule.attention == "softmax" else self.contexts
        rng = np.random.default_rng(np.asarray(jax.random.key_data(key)))
        sizes = Sizes(self.tokens, contexts=contexts, neurons=1, width=self.tokens + 1)
        setting = draw_setting(sizes, rng)
        pulls = 0.5 + rng.normal(size=(contexts, 1))
        gains = (pulls * setting.contexts).mean(0)  # (M,)
        # Time is counted in units of the blow-up time, which the pulls' scale sets: every path ends at the same times.
        loss = ConstantPull(pulls * (np.pi / 2) ** 0.5 / np.abs(gains).max())
        begun = np.full((1, self.tokens), float(rule.attention == "linear"))
        start = Network(begun, np.zeros((sizes.width, 1)))
        near, last = (
            flow_adaptively(start, setting, loss, rule, Adaptive(horizon, self.records, 1e-12, 1e-14, limit=self.level))
            for horizon in (SHARE, LONGEST)
        )
        end = token_weights(setting, last.network.weights[-1])[:, 0]
        attention = np.asarray(attend(rule, jnp.asarray(last.network.logits[-1]), jnp.asarray(setting.contexts))).mean(
            0
        )
        observed = {
            "gain": ("token", gains / np.abs(gains).max() * (np.pi / 2) ** 0.5),
            "weights": (("time", "token"), token_weights(setting, near.network.weights)[..., 0]),
            "end": ("token", end),
            "end_time": ((), last.times[-1]),
            "reached": ((), last.stopped),
            "shares": ("token", attention / attention.sum()),
        }
        return xr.Dataset(
            {name: (dims, value, ATTRIBUTES[name]) for name, (dims, value) in observed.items()},
            coords={
                "time": ("time", np.linspace(0, SHARE, self.records + 1), {"long_name": "time over blow-up time"}),
                "token": ("token", np.arange(self.tokens), {"long_name": "token"}),
            },
        )

    def claims(self) -> tuple[Claim, ...]:
        """Hold what is an equality to the integrator's error, and what is none to a tenth."""
        integrator = "an equality: the integrator's error, 1e-12 a step, summed over the path"
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
                "the erf law gives every weight of exp attention until .98 of the blow-up",
                _worst("exp", lambda path: np.abs(path["weights"] - weights_at(path["gain"], _times(path))).max()),
                **equality,
            ),
            Claim(
                "erf(v/sqrt 2)/gain is one number for all tokens",
                _worst("exp", lambda path: common_ratio(path["gain"], path["weights"][-1], 0.5**0.5)),
                **equality,
            ),
            Claim(
                "erf(v/2)/gain is one number for all tokens",
                _each("exp", lambda path: common_ratio(path["gain"], path["weights"][-1], 0.5)),
                **no_constant,
            ),
            Claim(
                f"the winner's weight gets to {self.level:g} when the law says",
                _worst("exp", lambda path: abs(path["end_time"] / reaching_time(path["gain"], self.level) - 1)),
                **equality,
            ),
            Claim(
                "the losers stop where erf(v/sqrt 2) is their gain over the winner's",
                _worst("exp", lambda path: np.abs(erf(path["end"] * 0.5**0.5) - path["gain"] / _top(path)).max()),
                target=0.0,
                tolerance=lambda predicted: float(predicted["left"]) + EXACT,
                basis="what the law leaves of the blow-up time at the level where the path ends, and the integrator",
            ),
            Claim(
                "exp attention ends on the token of the largest gain alone",
                _least("exp", _winner),
                target=1.0,
                tolerance=0.01,
                basis="losers stay finite: their share is exp(-level²/2) times what ties of gains within 1e-6 leave",
            ),
            Claim(
                "under linear attention weights are sinh(gain t): no blow-up, and nobody stops",
                _worst("linear", _sinh_error),
                **equality,
            ),
            Claim(
                "under softmax attention, with one context, erf(v/sqrt 2)/gain is one number too",
                _each("softmax", lambda path: common_ratio(path["gain"], path["end"], 0.5**0.5)),
                **no_constant,
            ),
            Claim(
                "under softmax attention, with one context, the token of the largest gain still has the largest weight",
                _least("softmax", lambda path: abs(path["end"][np.abs(path["gain"]).argmax()]) / self.level),
                target=1.0,
                tolerance=EXACT,
                basis="a path ends where its largest weight is at the level: this one's over it, worst replicate",
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
            curves.append(_curve(times, path["weights"][:, token], label, "trained", group))
            curves.append(_curve(times, law[:, token], "", "predicted", group))
        return Lines(
            f"{attention} attention: weights of four tokens",
            "time over the blow-up time of exp attention",
            "token weight v",
            tuple(curves),
            note=f"First replicate. Dashed: {'sinh(gain t)' if attention == 'linear' else 'the erf law'}."
            + (" It is none for softmax attention." if attention == "softmax" else ""),
        )


ATTRIBUTES = {
    "gain": {"long_name": "gain, in units that put the blow-up at time 1", "units": "1"},
    "weights": {"long_name": "token weights", "units": "1"},
    "end": {"long_name": "token weights where the path ends", "units": "1"},
    "end_time": {"long_name": "time at which the path ends, over the blow-up time", "units": "1"},
    "reached": {"long_name": "whether the path ends at the level"},
    "shares": {"long_name": "share of attention where the path ends", "units": "1"},
}


def _paths(trained: xr.Dataset, attention: str) -> list[dict[str, Any]]:
    """Return the variables of one kind of attention, a dictionary a replicate."""
    cell = trained.isel(cell=int(np.flatnonzero(trained["attention"].values == attention)[0]))
    return [
        {name: cell[name].isel(replicate=number).values for name in ATTRIBUTES} | {"time": cell["time"].values}
        for number in range(cell.sizes["replicate"])
    ]


def _times(path: dict[str, Any]) -> np.ndarray:
    """Return the times of a path, kept below the blow-up of its gains."""
    return np.minimum(path["time"], 0.999 * blowup_time(path["gain"]))


def _top(path: dict[str, Any]) -> float:
    return float(np.abs(path["gain"]).max())


def _sinh_error(path: dict[str, Any]) -> float:
    return float(np.abs(path["weights"] - linear_attention_at(path["gain"], path["time"])[0]).max())


def _winner(path: dict[str, Any]) -> float:
    """Return the share of attention of the token with the largest gain."""
    return float(path["shares"][np.abs(path["gain"]).argmax()])


def _each(attention: str, figure: Callable[[dict[str, Any]], float]) -> Measure:
    """Return the measure of one figure a replicate under one kind of attention."""
    return lambda predicted, trained: [figure(path) for path in _paths(trained, attention)]


def _worst(attention: str, figure: Callable[[dict[str, Any]], float]) -> Measure:
    return lambda predicted, trained: max(figure(path) for path in _paths(trained, attention))


def _least(attention: str, figure: Callable[[dict[str, Any]], float]) -> Measure:
    return lambda predicted, trained: min(figure(path) for path in _paths(trained, attention))


def _curve(x: Any, y: Any, label: str, role: Any, group: int) -> Curve:
    return Curve(tuple(map(float, x)), tuple(map(float, y)), label, role, group)


def _figures(trained: xr.Dataset) -> Panel:
    rows = []
    for attention in ("exp", "linear", "softmax"):
        paths = _paths(trained, attention)
        ratios = [common_ratio(path["gain"], path["end"], 0.5**0.5) for path in paths]
        ends = [float(path["end_time"]) for path in paths]
        shares = [_winner(path) for path in paths]
        rows.append((attention, *(f"{min(of):.4g} to {max(of):.4g}" for of in (ends, shares, ratios))))
    return Listing(
        "Where the paths end",
        ("attention", "time over blow-up time", "attention of the largest gain", "spread of erf(v/√2)/gain"),
        tuple(rows),
        note="Smallest and largest of all replicates, where the largest weight gets to the level.",
    )
