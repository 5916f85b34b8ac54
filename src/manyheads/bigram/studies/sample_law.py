"""`bigram/sample-law`: how many samples training from scratch needs, in the length, the vocabulary and the noise.

Stochastic gradient descent on drawn contexts is followed at short contexts, the reduced simulator up to a hundred
million positions. Both are compared with one law, T (ln T + 1.3) over the energies and the noise, and with the system
of a few signals from which it follows. That noise also decides on which side a run comes out, and how often.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.bigram import setups as shared
from manyheads.bigram.task import BigramTask, draw_task, typical_energy
from manyheads.bigram.theory.laws import STAGE_ONE_OFFSET
from manyheads.bigram.theory.population import measure_overlaps
from manyheads.bigram.theory.signal import SignalSystem, predict_boost
from manyheads.bigram.training.proximal_sgd import Diverged, StepSettings, descend, start
from manyheads.bigram.training.reduced_model import BOOSTED, find_boost
from manyheads.errors import UsageError
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Curve, Lines, Study, Verdict
from manyheads.study.reporting.panels import Panel, spread_curve

WEIGHTS = (0.6, 0.4)  # of the two positions of every query, in drawn order: K_Q is the same in all replicates
LOOK = 0.1  # real runs are looked at ten times an e-folding
TIME = {"long_name": "boost, in e-foldings of small signals", "units": "1"}
SHARE = {"long_name": "share of boosted runs on the mirror side", "units": "1"}
BOOST = {"long_name": "share of runs that boosted", "units": "1"}
REACH = 2.5  # runs may take so many times ln T + 3 e-foldings: up to a noise of 32 all boost in half of that


@dataclass(frozen=True)
class SampleLaw(Study):
    """The boost comes after T (ln T + 1.3) / (kappa2 K_P K_Q) samples, and noise sends a known share to the mirror.

    Attributes
    ----------
    lengths
        Context lengths of real training, rising, at least two.
    longest
        Context lengths of the simulator, rising, at least two; the one in the middle serves the other comparisons.
    vocabularies
        Vocabularies N of the simulator, rising, at least two; real training takes the first.
    noises
        Ratios of noise to signal kappa2 of the simulator; real training takes `noise`.
    noise
        The ratio at which lengths and vocabularies are compared.
    batch
        Samples of a real step.
    growth
        Growth of small signals in a simulated step.
    runs, simulated
        Real and simulated runs of a replicate.
    """

    name: ClassVar[str] = "bigram/sample-law"
    claim: ClassVar[str] = (
        "training from scratch needs T ln T samples over the energies and the noise, and a known luck"
    )
    source: ClassVar = shared.SOURCE

    lengths: tuple[int, ...] = (250, 500, 1000, 2000, 4000)
    longest: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000, 100_000_000)
    vocabularies: tuple[int, ...] = (3, 10, 30)
    noises: tuple[float, ...] = (2.0, 4.0, 8.0, 16.0, 32.0)
    noise: float = 8.0
    batch: int = 16
    growth: float = 0.05
    runs: int = 16
    simulated: int = 64

    def __post_init__(self) -> None:
        for name in ("lengths", "longest", "vocabularies", "noises"):
            values = getattr(self, name)
            if len(values) < 2 or list(values) != sorted(set(values)):
                raise UsageError(f"{name}={values}: give two or more, in rising order")
        if self.noise not in self.noises or self.runs < 1 or self.simulated < 1:
            raise UsageError(f"noise={self.noise}: one of noises={self.noises}; runs and simulated from 1")
        if not 0 < self.growth <= 0.1 or self._growth(self.lengths[0]) > 0.2:
            raise UsageError(
                f"growth={self.growth}, or {self._growth(self.lengths[0]):.2g} in real training at length "
                f"{self.lengths[0]}: at most .1 and .2 a step; take a smaller batch"
            )

    @classmethod
    def full(cls) -> SampleLaw:
        """Return the study up to contexts of 8,000 in training and a hundred tokens in simulation."""
        return cls(lengths=(250, 500, 1000, 2000, 4000, 8000), vocabularies=(3, 10, 30, 100), runs=16)

    @classmethod
    def small(cls) -> SampleLaw:
        """Return the smallest configuration in which every claim can change."""
        return cls(
            lengths=(20, 40),
            longest=(50, 100),
            vocabularies=(3, 4),
            noises=(2.0, 4.0),
            noise=4.0,
            batch=4,
            growth=0.1,
            runs=1,
            simulated=4,
        )

    def cells(self) -> tuple[Cell, ...]:
        """Return real training at every length, then the simulator along its three axes."""
        first, middle = self.vocabularies[0], self._middle
        simulated = {(first, length, self.noise) for length in self.longest}
        simulated |= {(vocabulary, middle, self.noise) for vocabulary in self.vocabularies}
        simulated |= {(first, middle, noise) for noise in self.noises}
        rows = [("sgd", first, length, self.noise) for length in self.lengths]
        rows += [("reduced", *row) for row in sorted(simulated)]
        return tuple(Cell(engine=e, vocabulary=v, length=t, noise=float(r)) for e, v, t, r in rows)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return time and mirror share of every cell, from the system of signals and its kicks."""
        times, shares, laws = [], [], []
        for cell in self.cells():
            system = self._system(cell)
            times.append(self._predicted_time(system))
            shares.append(system.mirror_share)
            laws.append(np.log(int(cell["length"])) + STAGE_ONE_OFFSET)
        slugs = [cell.slug for cell in self.cells()]
        return xr.Dataset(
            {
                "time": ("setting", np.asarray(times), TIME),
                "mirrored": ("setting", np.asarray(shares), SHARE),
                "law": ("setting", np.asarray(laws), TIME),
            },
            coords={"setting": slugs},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Train until the boost, for real or reduced, and return the median time of the runs on the right side."""
        seed = shared.seed_of(key)
        task = self._task(np.random.default_rng(seed), int(cell["vocabulary"]), int(cell["length"]))
        system = self._system(cell)
        number = [candidate.slug for candidate in self.cells()].index(cell.slug)
        if cell["engine"] == "sgd":
            found = [self._boost(task, system, [*seed, number, run]) for run in range(self.runs)]
            steps, mirrored = np.array(found).T  # (runs,)
        else:
            settings = StepSettings(round(system.batch), system.value_rate, system.attention_rate)
            rng = np.random.default_rng([*seed, number])
            boost = find_boost(task, settings, self.simulated, rng, most_steps=self._most_steps(system))
            steps = np.where(boost.outcome == "boosted", boost.steps, np.inf)
            mirrored = boost.mirrored
        boosted, wrong = np.isfinite(steps), mirrored.astype(bool)
        # a run without boost counts with its budget, a lower bound; if all went to the mirror side their times do
        steps = np.minimum(steps, self._most_steps(system))
        time = float(np.median(steps[~wrong] if not wrong.all() else steps)) * np.log1p(system.growth)
        share = float(wrong[boosted].mean()) if boosted.any() else 0.0
        return xr.Dataset(
            {
                "time": ((), time, TIME),
                "samples": (
                    (),
                    time / np.log1p(system.growth) * system.batch,
                    {"long_name": "samples until the boost", "units": "samples"},
                ),
                "mirrored": ((), share, SHARE),
                "boosted": ((), float(boosted.mean()), BOOST),
            }
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare exponents in the length, the collapse over vocabularies, the noise, and the sides."""
        real, longer = self._pick(trained, "sgd"), self._pick(trained, "reduced", self.vocabularies[0], self.noise)
        at_noise = {
            noise: self._pick(trained, "reduced", self.vocabularies[0], noise, self._middle) for noise in self.noises
        }
        collapse = [self._pick(trained, "reduced", n, self.noise, self._middle)["time"] for n in self.vocabularies]
        quiet = [noise for noise in self.noises if noise <= self.noise]
        law = float(np.log(self._middle)) + STAGE_ONE_OFFSET
        loudest = at_noise[self.noises[-1]]["time"].values.ravel()
        return (
            _verdict(
                "real training: samples grow like T (ln T + 1.3)",
                _slopes(self.lengths, real["time"].values / (np.log(self.lengths) + STAGE_ONE_OFFSET)[:, None]),
                1.0,
                0.05,
                "an offset wrong by 1.5 shifts the slope by .03 over these lengths, finite steps by .01; rounded up",
                resolution=_grain(self.lengths, LOOK),
            ),
            _verdict(
                "real training: samples grow like T, without the logarithm",
                _slopes(self.lengths, real["time"].values),
                1.0,
                0.05,
                "as above; the logarithm alone makes it 1.14",
                expected="refuted",
                resolution=_grain(self.lengths, LOOK),
            ),
            _verdict(
                "reduced simulation, up to the longest context: samples grow like T (ln T + 1.3)",
                _slopes(self.longest, longer["time"].values / (np.log(self.longest) + STAGE_ONE_OFFSET)[:, None]),
                1.0,
                0.03,
                "an offset wrong by 1.5 shifts the slope by .01 over these lengths; tripled",
                resolution=_grain(self.longest, self.growth),
            ),
            _verdict(
                "the system of signals predicts the boost of the reduced simulation",
                (longer["time"].values / self._predictions(predicted, "time", self.longest)[:, None]).mean(0),
                1.0,
                0.06,
                "half an e-folding of the eight and more that a boost takes",
            ),
            _verdict(
                f"the law collapses vocabularies of {self.vocabularies[0]} and {self.vocabularies[-1]} tokens",
                (collapse[-1].values / collapse[0].values).ravel(),
                1.0,
                0.1,
                "half an e-folding of the twelve at this length, on either side",
            ),
            _verdict(
                f"the law holds for noise up to {self.noise:g}, within a fifth",
                np.mean([at_noise[noise]["time"].values.ravel() / law for noise in quiet], axis=0),
                1.0,
                0.2,
                "the offset is -.2 without noise and 1.3 at this one: 12% of the time at this length, rounded up",
            ),
            _verdict(
                f"the law holds for noise {self.noises[-1]:g} too",
                loudest / law,
                1.0,
                0.2,
                "as above: the law promises half the samples for twice the noise",
                expected="refuted",
            ),
            *self._sides(predicted, trained, at_noise),
        )

    def _sides(self, predicted: xr.Dataset, trained: xr.Dataset, at_noise: dict[float, Any]) -> tuple[Verdict, ...]:
        """Compare the shares of runs on the mirror side with the normal law of the kicks."""
        share = self._predictions(predicted, "mirrored", self.longest[:1])[0]
        real = self._pick(trained, "sgd")["mirrored"].mean("cell").values
        louder = [
            self._system(Cell(vocabulary=self.vocabularies[0], length=self._middle, noise=n)) for n in self.noises
        ]
        gaps = [
            at_noise[n]["mirrored"].values.ravel() - s.mirror_share for n, s in zip(self.noises, louder, strict=True)
        ]
        grain = 1 / (self.runs * len(self.lengths))
        return (
            _verdict(
                "the share of simulated runs on the mirror side is the normal law's, over all noises",
                np.mean(gaps, axis=0),
                0.0,
                0.05,
                "kicks after the first e-folding are weaker by the growth per step, .05",
                resolution=1 / (self.simulated * len(self.noises)),
            ),
            _verdict(
                "training from scratch comes out on the right side, whatever the noise",
                at_noise[self.noises[-1]]["mirrored"].values.ravel(),
                0.0,
                0.05,
                "the claim as a bound; the normal law says more",
                expected="refuted",
                resolution=1 / self.simulated,
            ),
            _verdict(
                "real runs land on the mirror side as often as the normal law says",
                real,
                share,
                0.1,
                "contexts of hundreds are not long, which adds kicks of order 1/ln T: a tenth",
                resolution=grain,
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show samples by length, time by vocabulary and noise, and the sides."""
        first, middle = self.vocabularies[0], self._middle
        law = float(np.log(middle)) + STAGE_ONE_OFFSET
        real, longer = self._pick(trained, "sgd"), self._pick(trained, "reduced", first, self.noise)
        by_noise = [self._pick(trained, "reduced", first, noise, middle).isel(cell=0) for noise in self.noises]
        by_vocabulary = [self._pick(trained, "reduced", n, self.noise, middle).isel(cell=0) for n in self.vocabularies]
        cells = [Cell(vocabulary=first, length=t, noise=self.noise) for t in self.longest]
        laws = tuple(self._law_samples(cell) / int(cell["length"]) for cell in cells)

        def stack(parts: list[Any], name: str) -> np.ndarray:
            return np.stack([part[name].values for part in parts], 1)  # (replicate, setting)

        system = self._times([Cell(vocabulary=first, length=middle, noise=n) for n in self.noises])
        shares = [self._system(Cell(vocabulary=first, length=middle, noise=n)).mirror_share for n in self.noises]
        flat = self._times([Cell(vocabulary=n, length=middle, noise=self.noise) for n in self.vocabularies])
        return (
            Lines(
                "Samples until the boost, over the length",
                "context length T [tokens]",
                "samples / T",
                (
                    spread_curve(self.lengths, (real["samples"] / real["length"]).values.T, "real training"),
                    spread_curve(self.longest, (longer["samples"] / longer["length"]).values.T, "reduced", group=1),
                    Curve(tuple(map(float, self.longest)), laws, "(ln T + 1.3) / (κ₂ K_P K_Q)", "predicted", 1),
                ),
                log_x=True,
                note="Median of a replicate's runs that came out on the right side; bands reach over replicates.",
            ),
            Lines(
                f"Noise, T = {middle:,}",
                "noise against signal, κ₂",
                "e-foldings until the boost",
                (
                    spread_curve(self.noises, stack(by_noise, "time"), "reduced"),
                    Curve(tuple(self.noises), system, "system of signals", "predicted", 0),
                    Curve(tuple(self.noises), (law,) * len(self.noises), "law", "reference"),
                ),
                log_x=True,
                note="Bands range over replicates; the claims are about a noise of about 9.",
            ),
            Lines(
                f"Vocabulary, T = {middle:,}",
                "vocabulary N [tokens]",
                "e-foldings until the boost",
                (
                    spread_curve(self.vocabularies, stack(by_vocabulary, "time"), "reduced"),
                    Curve(tuple(map(float, self.vocabularies)), flat, "system of signals", "predicted", 0),
                ),
                log_x=True,
                note="Samples are these times T / (κ₂ K_P K_Q).",
            ),
            Lines(
                f"Runs on the mirror side, T = {middle:,}",
                "noise against signal, κ₂",
                "share of boosted runs",
                (
                    spread_curve(self.noises, stack(by_noise, "mirrored"), "reduced"),
                    Curve(tuple(self.noises), tuple(shares), "Φ(-√(2N / κ₂K_Q))", "predicted", 0),
                ),
                log_x=True,
                note="W and the deviations of the attention both have the wrong sign; reflecting both mends it.",
            ),
        )

    @property
    def _middle(self) -> int:
        return self.longest[len(self.longest) // 2]

    def _most_steps(self, system: SignalSystem) -> int:
        return int(REACH * (np.log(system.length) + 3) / system.growth)

    def _task(self, rng: np.random.Generator, vocabulary: int, length: int) -> BigramTask:
        """Draw a task whose energies depend on the cell alone."""
        drawn = draw_task(rng, vocabulary, length, len(WEIGHTS))
        weights = np.stack([rng.permutation(WEIGHTS) for _ in range(vocabulary)])
        return BigramTask(drawn.transition, drawn.stationary, drawn.positions, weights, length)

    def _energies(self, vocabulary: int, length: int) -> tuple[float, float]:
        return typical_energy(vocabulary), sum(weight**2 for weight in WEIGHTS) - 1 / length

    def _growth(self, length: int) -> float:
        """Return the growth of a real step."""
        transition, attention = self._energies(self.vocabularies[0], length)
        return self.noise * self.batch * transition * attention / length

    def _system(self, cell: Cell) -> SignalSystem:
        """Return rates and batch of a cell: real batches are given, simulated ones follow from the growth."""
        vocabulary, length, noise = int(cell["vocabulary"]), int(cell["length"]), float(cell["noise"])
        transition, attention = self._energies(vocabulary, length)
        growth, batch = self.growth, self.growth * length / (noise * transition * attention)
        if cell.get("engine") == "sgd":
            growth, batch = self._growth(length), self.batch
        batch = max(1, round(batch))
        return SignalSystem(transition, attention, length, vocabulary, growth / attention, growth / transition, batch)

    def _law_samples(self, cell: Cell) -> float:
        system = self._system(cell)
        time = np.log(system.length) + STAGE_ONE_OFFSET
        energies = system.transition_energy * system.attention_energy
        return float(system.length * time / (system.noise_ratio * energies))

    def _times(self, cells: list[Cell]) -> tuple[float, ...]:
        return tuple(self._predicted_time(self._system(cell)) for cell in cells)

    def _predicted_time(self, system: SignalSystem) -> float:
        """Return the predicted time; without a boost the budget, as of a run."""
        return float(min(predict_boost(system, BOOSTED), self._most_steps(system)) * np.log1p(system.growth))

    def _predictions(self, predicted: xr.Dataset, name: str, lengths: tuple[int, ...]) -> np.ndarray:
        wanted = [
            Cell(engine="reduced", vocabulary=self.vocabularies[0], length=length, noise=float(self.noise)).slug
            for length in lengths
        ]
        return predicted[name].sel(setting=wanted).values

    def _pick(
        self,
        trained: xr.Dataset,
        engine: str,
        vocabulary: int | None = None,
        noise: float | None = None,
        length: int | None = None,
    ) -> xr.Dataset:
        """Return some cells in the order of their lengths."""
        chosen = trained["engine"] == engine
        for name, value in (("vocabulary", vocabulary), ("noise", noise), ("length", length)):
            if value is not None:
                chosen &= trained[name] == value
        places = np.flatnonzero(chosen.values)
        rising = places[np.argsort(trained["length"].values[places], kind="stable")]
        return trained.isel(cell=rising).transpose("cell", "replicate")

    def _boost(self, task: BigramTask, system: SignalSystem, seed: list[int]) -> tuple[float, bool]:
        """Train on drawn samples; return the step of the boost, not a number without one, and the side."""
        settings = StepSettings(round(system.batch), system.value_rate, system.attention_rate)
        pause = max(1, round(LOOK / system.growth))
        state, done, before = start(task), 0, 0.0
        while done < self._most_steps(system):
            try:
                state = descend(task, state, settings, pause, seed=seed, first_step=done)
            except Diverged:
                break
            overlaps = measure_overlaps(task, *state)
            product = overlaps.value_signal * overlaps.attention_signal
            if product > BOOSTED:
                share = np.log(BOOSTED / before) / np.log(product / before) if before > 0 else 1.0
                return done + share * pause, overlaps.value_signal < 0
            done, before = done + pause, product
        return float("inf"), False


def _slopes(lengths: tuple[int, ...], times: np.ndarray) -> np.ndarray:
    """Return the exponent of samples in the length, one a replicate; samples are length times time."""
    values = np.asarray(lengths, float) * np.asarray(times).T  # (replicate, length)
    return np.asarray(fit_exponent(lengths, values).replicate_exponents)


def _grain(lengths: tuple[int, ...], look: float) -> float:
    """Return by how much a slope changes when one time is wrong by the spacing of two looks, in e-foldings."""
    return float(look / (np.log(lengths[0]) + STAGE_ONE_OFFSET) / np.log(lengths[-1] / lengths[0]))


def _verdict(claim: str, samples: Any, target: float, tolerance: float, basis: str, **more: Any) -> Verdict:
    return Verdict.from_samples(claim, samples, target=target, tolerance=(tolerance, tolerance), basis=basis, **more)
