"""`joma/rebound`: attention entropy and stable rank fall and rise again, and in which systems they do not.

Four flows and two networks. In the flows saturating components race each other, or one after another with no end. The
networks are one layer of attention under an MLP, trained by SGD: on a regression, whose answers are finite, and on a
classification by cross-entropy, which always wants more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.joma.finite import CrossEntropy, Network
from manyheads.joma.paths import Steps, descend
from manyheads.joma.relaxation import DYNAMICS, Descent, relax, relax_layer, train_layer
from manyheads.joma.task import Rule, Setting
from manyheads.joma.theory.rebound import BOUNCE, entropy_of, measure_bounce
from manyheads.joma.theory.salient import EXP, UNIFORM
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
RISES = (
    0.02,
    0.05,
)  # of the stable rank: below, it does not rise; above, it does; the rise is about 1.3 where it is one


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
    source: ClassVar[Source] = Source(
        "tian2024joma",
        "JoMA: Demystifying Multilayer Transformers via JOint Dynamics of MLP and Attention",
        "Yuandong Tian and Yiping Wang and Zhenyu Zhang and Beidi Chen and Simon Du",
        2024,
        venue="ICLR",
        identifier="2310.00535",
        locus="section 4, figures 4 and 7; why, and when not, is derived here",
    )
    vectorised: ClassVar[bool] = True

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
        system = str(cell["system"])
        if system in DYNAMICS:
            entropy, rank, share, size = self._flow(system, key)
        else:
            entropy, rank = self._regression(key) if system == "regression" else self._classification(key)
            bounce = measure_bounce(entropy)
            share, size = (bounce.rise > BOUNCE).astype(float), bounce.rise
        drop, rise = measure_bounce(entropy)
        rank_drop, rank_rise = measure_bounce(rank)
        nat, one = {"units": "nat"}, {"units": "1"}
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
                tolerance=0.03,
                resolution=1e-9,
                basis="all rebound unless their targets are equal; how many by less than this was measured once",
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
                target=RISES[1],
                tolerance=(0.0, float("inf")),
                basis="a sign: the smallest drop and rise over all replicates are far from zero",
            ),
            Verdict.exact(
                "flows without attention or saturation: the stable rank rises by less than a tenth of that",
                float(max(ranks["uniform"].max(), ranks["linear"].max()) / ranks["exp"].min()),
                target=0.0,
                tolerance=(0.0, RISES[0]),
                basis="W goes straight from its start to its end; a rise is second order in the start over the end",
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

    def _flow(self, system: str, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        for_vectors, for_layer = jax.random.split(key)
        targets = _random_targets(for_vectors, self.vectors)
        present = targets > 0
        if system == "linear":  # the erf solution: shares of the time of blow-up, up to a winner of weight five
            shares = jnp.concatenate([jnp.zeros(1), 1 - jnp.geomspace(1.0, 6e-7, RECORDS)])
            reach = shares[:, None] * (targets / targets.max(-1, keepdims=True))[:, None]  # (V, T, M)
            logits = jax.scipy.special.erfinv(reach) ** 2
        else:
            clock = _clock(RANDOM_HORIZONS[system])
            law = UNIFORM if system == "uniform" else EXP
            deficits = jax.vmap(lambda mu: relax(mu, clock, law, normalised=system == "softmax"))(targets)
            logits = (targets[:, None] * jnp.expm1(-deficits)) ** 2 / 2
        bounce = measure_bounce(entropy_of(logits, present[:, None]))
        wanted, start = _random_layer(for_layer)
        path = relax_layer(wanted, start, _clock(HORIZONS[system]), system)  # type: ignore[arg-type]
        entropy = entropy_of((path**2).sum(1) / 2)
        return entropy, traced_stable_rank(path), (bounce.rise > BOUNCE).mean(), bounce.rise.mean()

    def _regression(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        for_layer, for_training = jax.random.split(key)
        wanted, start = _random_layer(for_layer)
        rate = self.resolution / ((1 + 2.5**2) * float(np.exp(2.5**2)))  # the largest column has a norm of 2.2 or so
        steps = RECORDS * -(-int(8.0 / rate) // RECORDS)
        path = train_layer(wanted, start, Descent(rate, steps, 0.5, RECORDS), for_training)
        return entropy_of(path.logits), traced_stable_rank(path.weights)

    def _classification(self, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        for_data, for_weights, for_upper, for_batches = jax.random.split(key, 4)
        setting = _topics(for_data)
        weights = 0.1 * jax.random.normal(for_weights, (SIDE + 1, SIDE), jnp.float64)
        network = Network(jnp.zeros((1, SIDE), jnp.float64), weights)
        upper = CrossEntropy(4 * SIDE**-0.5 * jax.random.normal(for_upper, (CLASSES, SIDE), jnp.float64))
        steps = Steps(0.5, max(1, self.steps // RECORDS), RECORDS)
        path = descend(network, setting, upper, Rule("softmax", "relu"), steps, (for_batches, 32)).network
        read = jnp.einsum("dm,tdk->tkm", setting.token_embeddings, path.weights)
        return entropy_of(path.logits[:, 0]), traced_stable_rank(read)


COLUMNS = {
    "bounced": "bounced",
    "bounce": "mean rise",
    "drop": "entropy drop",
    "rise": "entropy rise",
    "rank_drop": "rank drop",
    "rank_rise": "rank rise",
}


def _clock(horizon: float) -> jax.Array:
    return jnp.concatenate([jnp.zeros(1), jnp.geomspace(1e-2, horizon, RECORDS)])


def _random_targets(key: jax.Array, count: int) -> jax.Array:
    """Draw vectors of 2 to 19 uniform targets, the rest zero, shape (count, 19)."""
    for_sizes, for_values = jax.random.split(key)
    sizes = jax.random.randint(for_sizes, (count, 1), 2, COMPONENTS + 1)
    values = jax.random.uniform(for_values, (count, COMPONENTS), jnp.float64, *SALIENCES)
    return jnp.where(jnp.arange(COMPONENTS) < sizes, values, 0.0)


def _random_layer(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draw what a layer wants (neuron k wants token k, with falling salience, and a little of all), and its start."""
    for_wanted, for_start = jax.random.split(key)
    salience = 0.5 + 1.6 * jnp.exp(-jnp.arange(SIDE) / 4.0)
    wanted = jnp.diag(salience) + 0.05 * jax.random.normal(for_wanted, (SIDE, SIDE), jnp.float64)
    return wanted, 0.02 * jax.random.normal(for_start, (SIDE, SIDE), jnp.float64)


def _topics(key: jax.Array, count: int = 2048) -> Setting:
    """Draw contexts of random tokens and of the one that names the class, which is the rarer the later the class."""
    for_labels, for_noise, for_share, for_frame = jax.random.split(key, 4)
    labels = jax.random.randint(for_labels, (count,), 0, CLASSES)
    noise = jax.random.dirichlet(for_noise, jnp.ones(SIDE, jnp.float64), (count,), jnp.float64)
    share = 0.5 * jnp.exp(-labels / 4.0) * jax.random.uniform(for_share, (count,), jnp.float64, 0.5, 1.0)
    contexts = noise * (1 - share)[:, None] + share[:, None] * jax.nn.one_hot(labels, SIDE, dtype=jnp.float64)
    frame = jnp.linalg.qr(jax.random.normal(for_frame, (SIDE + 1, SIDE + 1), jnp.float64))[0]
    return Setting(contexts, jnp.zeros(count, int), labels, frame[:, :SIDE], frame[:, SIDE:])


def _of(trained: xr.Dataset, system: str) -> xr.Dataset:
    found = trained.isel(cell=int(np.flatnonzero(trained["system"].values == system)[0]))
    return found.transpose("replicate", ...)
