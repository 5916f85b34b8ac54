"""`joma/rebound`: attention entropy and stable rank fall and rise again, and in which systems they do not.

Four flows and two networks. In the flows saturating components race each other, or one after another with no end. The
networks are one layer of attention under an MLP, trained by SGD: on a regression, whose answers are finite, and on a
classification by cross-entropy, which always wants more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from scipy.special import erfinv

from manyheads.errors import UsageError
from manyheads.joma.source import SOURCE
from manyheads.joma.systems.components import DYNAMICS, Descent, relax, relax_layer, train_layer
from manyheads.joma.systems.gradient_flow import Steps, descend
from manyheads.joma.systems.layer import CrossEntropy, Network, token_weights
from manyheads.joma.task import Rule, Setting
from manyheads.joma.theory.rebound import BOUNCE, Bounce, entropy_of, final_rank_slope
from manyheads.joma.theory.salient_first import EXP, UNIFORM, Law
from manyheads.spectra import traced_stable_rank
from manyheads.study import Cell, Lines, Listing, Panel, Source, Study, Verdict, grid, spread_curve

SYSTEMS = {
    **{name: f"flow: {label}" for name, label in DYNAMICS.items()},
    "regression": "trained: regression",
    "classification": "trained: classification",
}
COMPONENTS = 19  # the largest number of components of a random vector; the smallest is two
SALIENCES = (0.5, 3.0)
SIDE = 24  # neurons and tokens of the layer
HORIZONS = {"exp": 12.0, "softmax": 60.0, "uniform": 12.0, "linear": 3.0}  # of the layer
RANDOM_HORIZONS = {"exp": 60.0, "softmax": 3000.0, "uniform": 60.0}  # of the random vectors
RECORDS = 96
CLASSES = 8
RISE = 0.05  # of the stable rank: a rise; it is about 1.3 where there is attention


@dataclass(frozen=True)
class Rebound(Study):
    """Drop and rise of entropy and stable rank in flows with and without attention, and in trained networks.

    Attributes
    ----------
    vectors
        Random vectors of targets in each replicate: 2 to 19 components, uniform in [0.5, 3].
    resolution
        Learning rate of the regression times its fastest component's final rate.
    steps
        Updates of the classification.
    """

    name: ClassVar[str] = "joma/rebound"
    claim: ClassVar[str] = (
        "attention entropy and stable rank drop and rebound, as saturating salient tokens are overtaken"
    )
    source: ClassVar[Source] = replace(SOURCE, locus="section 4, figures 4 and 7; why, and when not, is derived here")
    unread_prediction: ClassVar[str] = (
        "the sides are signs, and each claim states its own; shares and stable ranks have no prediction"
    )
    # Not vectorised: its flows and networks are compiled once for all cells and replicates.
    vectors: int = 240
    resolution: float = 0.25
    steps: int = 6000

    def __post_init__(self) -> None:
        if self.vectors < 2 or not 0 < self.resolution <= 0.5 or self.steps < RECORDS:
            raise UsageError(
                f"vectors={self.vectors}, resolution={self.resolution}, steps={self.steps}: expected 2 or more, a "
                f"number in (0, 0.5], and {RECORDS} or more"
            )

    @classmethod
    def full(cls) -> Rebound:
        """Return the study with four times the vectors, and a regression at a quarter of the learning rate."""
        return cls(vectors=960, resolution=0.0625, steps=24000)

    def cells(self) -> tuple[Cell, ...]:
        """Return the systems."""
        return grid(system=tuple(SYSTEMS))

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return what theory says of each system: from which side entropy comes to its end (-1: it has rebounded)."""
        sides = {"exp": -1, "softmax": -1, "uniform": 1, "linear": 1, "regression": -1, "classification": 1}
        attributes = {"long_name": "side from which entropy comes to its end", "units": "1"}
        return xr.Dataset(
            {"side": ("system", [sides[name] for name in SYSTEMS], attributes)}, {"system": list(SYSTEMS)}
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Let one system run: its entropy, the stable rank of its lower layer, and how often the entropy bounces."""
        system, rng = str(cell["system"]), np.random.default_rng(np.asarray(jax.random.key_data(key)))
        entropies, straight, risen, agree = np.zeros((0, RECORDS + 1)), np.nan, np.nan, np.nan
        if system in DYNAMICS:
            entropies = self._vectors(system, rng)
            wanted, start = _random_layer(rng)
            weights = relax_layer(wanted, start, _clock(HORIZONS[system]), system)  # type: ignore[arg-type]
            logits = (weights**2).sum(1) / 2
            if system == "uniform":
                passed = -np.expm1(-_clock(HORIZONS[system]))[:, None, None]
                straight = np.abs(weights - start - passed * (wanted - start)).max()
                risen, agree = _straight_layers(rng, self.vectors)
        else:
            logits, weights = self._regression(rng) if system == "regression" else self._classification(rng)
        entropy, rank = (np.asarray(curve) for curve in _curves(logits, weights))
        bounces = _bounce(entropies if len(entropies) else entropy[None])
        (drop, rise), (rank_drop, rank_rise) = (np.concatenate(_bounce(curve[None])) for curve in (entropy, rank))
        nat, one = {"units": "nat"}, {"units": "1"}
        share, size = (bounces.rise > BOUNCE).mean(), bounces.rise.mean()
        return xr.Dataset(
            {
                "entropy": ("record", entropy, {"long_name": "attention entropy", **nat}),
                "stable_rank": ("record", rank, {"long_name": "stable rank of the lower layer", **one}),
                "bounced": ((), share, {"long_name": f"share of entropies that rise by {BOUNCE:g} nat", **one}),
                "bounce": ((), size, {"long_name": "mean rise of the entropy", **nat}),
                "drop": ((), drop, {"long_name": "drop of the layer's entropy", **nat}),
                "rise": ((), rise, {"long_name": "rise of the layer's entropy", **nat}),
                "rank_drop": ((), rank_drop, {"long_name": "drop of the stable rank", **one}),
                "rank_rise": ((), rank_rise, {"long_name": "rise of the stable rank", **one}),
                "straight": ((), straight, {"long_name": "departure of weights from a straight line", **one}),
                "risen": ((), risen, {"long_name": "share of layers without attention whose stable rank rises", **one}),
                "agree": (
                    (),
                    agree,
                    {"long_name": "share of layers that rise at the end if and only if theory says so", **one},
                ),
            },
            coords={"record": ("record", np.arange(RECORDS + 1), {"long_name": "record"})},
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare shares of bounces, the sign pattern of the stable rank, and the two networks."""
        value = {name: _of(trained, name) for name in SYSTEMS}
        attended = np.concatenate([value[name]["bounced"].values for name in ("exp", "softmax")])
        held = np.concatenate([value[name]["bounced"].values for name in ("uniform", "linear")])
        ranks = {name: value[name]["rank_rise"].values for name in SYSTEMS}
        regression, classification = value["regression"], value["classification"]
        return (
            Verdict.from_samples(
                f"flows with attention: entropy rebounds by {BOUNCE:g} nat in 97% of random target vectors",
                attended[: len(attended) // 2],
                target=0.97,
                tolerance=(0.03, float("inf")),
                resolution=1e-9,
                basis="97% +- 3%: at least 94%, as no share exceeds one; all rebound unless their targets are equal, "
                "and how many by less than this was measured once",
            ),
            Verdict.exact(
                "flows without attention or saturation: no entropy rebounds",
                float(np.abs(held).max()),
                target=0.0,
                tolerance=1e-12,
                basis="entropy falls as long as larger logits climb faster: proved for both",
            ),
            Verdict.exact(
                "softmax attention and exp attention bounce in the same vectors: only the clock differs",
                float(np.abs(np.subtract(*np.split(attended, 2))).max()),
                target=0.0,
                tolerance=2.5 / self.vectors,
                basis="a record may fall to either side of the least entropy: two vectors at the edge of the level",
            ),
            Verdict.exact(
                "flows with attention: the lower layer's stable rank falls, then rises",
                float(
                    min(min(ranks[name].min(), value[name]["rank_drop"].values.min()) for name in ("exp", "softmax"))
                ),
                target=RISE,
                tolerance=(0.0, float("inf")),
                basis="a sign: the smallest drop and rise over all replicates are far from zero",
            ),
            Verdict.exact(
                "flow without attention: the lower layer goes straight from its start to its end",
                float(value["uniform"]["straight"].max()),
                target=0.0,
                tolerance=1e-6,
                basis="one rate for all weights; the integrator errs by 1e-8 a step",
            ),
            Verdict.from_samples(
                "flows without attention: the stable rank of no layer rises",
                value["uniform"]["risen"].values,
                target=0.0,
                tolerance=0.1,
                resolution=1e-9,
                expected="refuted",
                basis="theory has half of them rise at the end, as the start is as likely as its negative; a tenth of "
                "the layers is far from half",
            ),
            Verdict.exact(
                "without attention it rises at the end if the start leans more on the end's first direction than on it",
                float(value["uniform"]["agree"].min()),
                target=1.0,
                tolerance=1.5 / self.vectors,
                basis="the sign of its slope at the end of a straight line; one layer of a replicate may be too close",
            ),
            Verdict.exact(
                "network trained on a regression: entropy and stable rank fall, then rise",
                float(min(regression[part].values.min() for part in ("drop", "rise", "rank_drop", "rank_rise"))),
                target=0.02,
                tolerance=(0.0, float("inf")),
                basis="a sign, beyond what noise of the batches moves",
            ),
            Verdict.from_samples(
                "network trained on a classification: entropy rises by a tenth of its drop or more",
                classification["rise"].values / classification["drop"].values,
                target=0.1,
                tolerance=(0.0, float("inf")),
                basis="what batches move is some hundredths; a rebound as in the flows is a third or more",
                expected="refuted",
            ),
            Verdict.from_samples(
                "network trained on a classification: entropy falls by a quarter of a nat or more",
                classification["drop"].values,
                target=0.25,
                tolerance=(0.0, float("inf")),
                basis="a sign: so that the missing rise is not one of attention that never moved",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show entropies and stable ranks, and a table of drops and rises."""
        steps = np.arange(RECORDS + 1) / RECORDS
        shown: list[Panel] = []
        for title, name, label in (
            ("Attention entropy", "entropy", "entropy [nat]"),
            ("Stable rank of the lower layer", "stable_rank", "stable rank"),
        ):
            for part, systems in (("flows", tuple(DYNAMICS)), ("trained networks", ("regression", "classification"))):
                curves = tuple(
                    spread_curve(steps, _of(trained, system)[name].values, SYSTEMS[system], group=group)
                    for group, system in enumerate(systems)
                )
                axis = "record, logarithmic in time" if part == "flows" else "record"
                note = "Bands reach over replicates. Records are shares of each system's own time."
                shown.append(Lines(f"{title}: {part}", axis, label, curves, note=note))
        rows = tuple(
            (label, *(f"{float(_of(trained, system)[name].mean()):.3g}" for name in COLUMNS))
            for system, label in SYSTEMS.items()
        )
        note = "Bounced and rise of random vectors where there are any; then the layer's entropy and stable rank."
        return (
            *shown,
            Listing("Drops and rises, means over replicates", ("system", *COLUMNS.values()), rows, note=note),
        )

    def _vectors(self, system: str, rng: np.random.Generator) -> np.ndarray:
        """Return the entropy of random vectors of targets in time, (vectors, RECORDS + 1)."""
        targets = _random_targets(rng, self.vectors)
        if system == "linear":  # the erf solution: shares of the time of blow-up, up to a winner of weight five
            shares = np.concatenate([[0.0], 1 - np.geomspace(1.0, 6e-7, RECORDS)])
            reach = shares[:, None] * (targets / targets.max(-1, keepdims=True))[:, None]  # (V, T, M)
            logits = erfinv(reach) ** 2
        else:
            law = UNIFORM if system == "uniform" else EXP
            deficits = _relax_all(targets, _clock(RANDOM_HORIZONS[system]), system == "softmax", law)
            logits = (targets[:, None] * np.expm1(-np.asarray(deficits))) ** 2 / 2
        return np.asarray(_entropies(logits, targets > 0))

    def _regression(self, rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
        wanted, start = map(jnp.asarray, _random_layer(rng))
        rate = self.resolution / ((1 + 2.5**2) * float(np.exp(2.5**2)))  # the largest column has a norm of 2.2 or so
        steps = RECORDS * -(-int(8.0 / rate) // RECORDS)
        path = train_layer(wanted, start, Descent(rate, steps, 0.5, RECORDS), _fresh_key(rng))
        return path.logits, path.weights

    def _classification(self, rng: np.random.Generator) -> tuple[jax.Array, jax.Array]:
        setting = _topics(rng)
        network = Network(np.zeros((1, SIDE)), 0.1 * rng.normal(size=(SIDE + 1, SIDE)))
        upper = CrossEntropy(4 * SIDE**-0.5 * rng.normal(size=(CLASSES, SIDE)))
        steps = Steps(0.5, max(1, self.steps // RECORDS), RECORDS)
        path = descend(network, setting, upper, Rule("softmax", "relu"), steps, (_fresh_key(rng), 32)).network
        return path.logits[:, 0], token_weights(setting, np.asarray(path.weights))


COLUMNS = {
    "bounced": "bounced",
    "bounce": "mean rise",
    "drop": "entropy drop",
    "rise": "entropy rise",
    "rank_drop": "rank drop",
    "rank_rise": "rank rise",
}


@jax.jit
def _curves(logits: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return entropy and stable rank in time, of logits (T, M) and weights (T, K, M)."""
    return entropy_of(logits), traced_stable_rank(weights)


@jax.jit
def _entropies(logits: jax.Array, present: jax.Array) -> jax.Array:
    return entropy_of(logits, present[:, None])


@partial(jax.jit, static_argnames="law")
def _relax_all(targets: jax.Array, clock: jax.Array, normalised: jax.Array, law: Law) -> jax.Array:
    return jax.vmap(lambda mu: relax(mu, clock, law, normalised))(targets)


def _bounce(curves: np.ndarray) -> Bounce:
    lowest = curves.min(-1)
    return Bounce(curves[..., 0] - lowest, curves[..., -1] - lowest)


def _fresh_key(rng: np.random.Generator) -> jax.Array:
    return jax.random.key(int(rng.integers(2**62)))


def _clock(horizon: float) -> np.ndarray:
    return np.concatenate([[0.0], np.geomspace(1e-2, horizon, RECORDS)])


def _random_targets(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draw vectors of 2 to 19 uniform targets, the rest zero, shape (count, 19)."""
    sizes = rng.integers(2, COMPONENTS + 1, size=(count, 1))
    return np.where(np.arange(COMPONENTS) < sizes, rng.uniform(*SALIENCES, size=(count, COMPONENTS)), 0.0)


def _random_layer(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw what a layer wants (neuron k wants token k, with falling salience, and a little of all), and its start."""
    salience = 0.5 + 1.6 * np.exp(-np.arange(SIDE) / 4.0)
    wanted = np.diag(salience) + 0.05 * rng.normal(size=(SIDE, SIDE))
    return wanted, 0.02 * rng.normal(size=(SIDE, SIDE))


def _straight_layers(rng: np.random.Generator, count: int) -> tuple[float, float]:
    """Return shares of straight lines: whose stable rank rises, and whose last step goes as theory says."""
    passed = -np.expm1(-_clock(HORIZONS["uniform"]))[:, None, None]
    rises, ends, predicted = [], [], []
    for _ in range(count):
        wanted, start = _random_layer(rng)
        path = start + passed * (wanted - start)
        ranks = (path**2).sum((1, 2)) / np.linalg.norm(path, 2, axis=(1, 2)) ** 2
        rises.append(ranks[-1] > ranks.min())
        ends.append(ranks[-1] > ranks[-2])
        predicted.append(final_rank_slope(wanted, start) > 0)
    return float(np.mean(rises)), float(np.mean(np.equal(ends, predicted)))


def _topics(rng: np.random.Generator, count: int = 2048) -> Setting:
    """Draw contexts of random tokens and of the one that names the class, which is the rarer the later the class."""
    labels = rng.integers(CLASSES, size=count)
    noise = rng.dirichlet(np.ones(SIDE), count)
    share = (0.5 * np.exp(-labels / 4.0) * rng.uniform(0.5, 1.0, count))[:, None]
    frame = np.linalg.qr(rng.normal(size=(SIDE + 1, SIDE + 1)))[0]
    contexts = noise * (1 - share) + share * np.eye(SIDE)[labels]
    return Setting(contexts, np.zeros(count, int), labels, frame[:, :SIDE], frame[:, SIDE:])


def _of(trained: xr.Dataset, system: str) -> xr.Dataset:
    found = trained.isel(cell=int(np.flatnonzero(trained["system"].values == system)[0]))
    return found.transpose("replicate", ...)
