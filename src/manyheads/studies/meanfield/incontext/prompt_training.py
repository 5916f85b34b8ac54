"""`meanfield/prompt-training`: an MLP and attention trained by SGD on drawn prompts, beside the mean-field flow."""

import numpy as np

import manyheads.study as st
from manyheads.errors import CertificateError
from manyheads.theory.meanfield.incontext import crossings, particles, prompt_length
from manyheads.theory.meanfield.incontext import prompt_training as system
from manyheads.theory.meanfield.incontext.task import FeatureTask, gaussian_points, ridge_task
from manyheads.theory.papers import KIM

FOREIGN, SIGNAL = 0.5, 0.2  # g, and the overlap of every target with its slot at the start, relative to g
LARGEST_DIFFERENCE = 0.05  # of two mean-field flows: over the initial loss, and at the end over the final one


class PromptTraining(st.Study):
    """Loss of 500 sigmoid neurons and linear attention, trained on 10,000 prompts of 1000 pairs."""

    name = "meanfield/prompt-training"
    claim = "SGD on 10,000 prompts waits at the saddle level and escapes as the mean field says"
    source = KIM.at(
        "sizes of the numerical experiment: d = 20, k = 5, 500 sigmoid neurons, 10,000 prompts of 1000 pairs; "
        "features, initial weights and all predictions are derived here"
    )
    revision = 4

    dim: int = st.setting(20, "dimension of the inputs", small=4)
    nodes: int = st.setting(512, "inputs that pairs are drawn from", small=32)
    eigenvalues: tuple[float, ...] = st.setting(
        (1.0, 1.0, 0.1, 0.1, 0.1),
        "of the covariance of the target features: a leading group of equal ones, then a second group",
        small=(1.0, 0.4),
    )
    width: int = st.setting(500, "neurons", least=1, small=16)
    prompts: int = st.setting(10_000, "prompts trained on", least=1, small=400)
    length: int = st.setting(1000, "pairs of a prompt", least=1, small=200)
    batch: int = st.setting(1000, "prompts of a step", least=1, small=100)
    learning_rate: float = st.setting(0.00125, "step of SGD in mean-field time", small=0.005)
    attention_speed: float = st.setting(4000.0, "speed of the attention relative to the neurons", small=100.0)
    records: int = st.setting(100, "recorded times", least=1, small=5)
    record_every: int = st.setting(16, "steps between recorded times", least=1, small=128)
    reference: int = st.setting(512, "neurons of the mean-field flow, of low discrepancy, a power of two", small=128)
    step: float = st.setting(0.005, "largest Runge-Kutta step of the flow", small=0.05)

    def check(self) -> None:
        values = self.eigenvalues
        if len(set(values)) != 2 or list(values) != sorted(values, reverse=True):
            raise st.UsageError(f"eigenvalues={values}: expected two different numbers, the larger ones first")

    def predict(self, key: st.Key) -> st.Record:
        """Return growth rates, and flows at finite and at infinite attention speed: means of two sets of neurons.

        Raises
        ------
        CertificateError
            Losses of the two flows that differ by more than a twentieth of the initial loss at any time, or by more
            than a twentieth of the final loss at the last one.
        """
        task, times = self._task(), self._times()
        flows, limits, rates = [], [], []
        for seed in (0, 1):
            points = gaussian_points(self.dim, self.reference, np.random.default_rng(seed))
            start = system.saddle_start(task, points / self.dim**0.5, FOREIGN, SIGNAL)
            rates.append(system.missed_growth_rates(task, start))
            flows.append(
                system.joint_flow(
                    task, start, times, length=self.length, attention_speed=self.attention_speed, step=self.step
                )
            )
            neurons = particles.particle_flow(
                task, start[:2], times, activation=system.ACTIVATION, layers="both", length=self.length, step=self.step
            )
            limits.append(neurons.loss)
        first, second = (flow.loss for flow in flows)
        discrepancy = float(np.abs(first - second).max() / first[0])
        final = float(abs(first[-1] - second[-1]) / min(first[-1], second[-1]))
        if not max(discrepancy, final) <= LARGEST_DIFFERENCE:
            raise CertificateError(
                f"two mean-field flows of {self.reference} neurons differ too much; raise reference",
                measured=max(discrepancy, final),
                threshold=LARGEST_DIFFERENCE,
            )
        share = prompt_length.length_coefficient(task, task.targets, np.linalg.inv(task.covariance))
        overlap = np.mean([np.diagonal(flow.cross, axis1=1, axis2=2) for flow in flows], 0)
        return {
            "loss": ("time", np.mean([flow.loss for flow in flows], 0), "loss of the mean-field flow"),
            "explained": (("time", "feature"), np.mean([flow.explained for flow in flows], 0), "explained share"),
            "overlap": (("time", "feature"), overlap, "overlap with its slot"),
            "fast": ("time", np.mean(limits, 0), "loss of the two-timescale flow"),
            "rate": ("feature", np.mean(rates, 0), "growth rate of a missed feature", "1/time"),
            "discrepancy": ((), discrepancy, "largest difference of two flows, over the initial loss"),
            "final_discrepancy": ((), final, "difference of the final losses of two flows, relative"),
            "coefficient": ((), share, "n times the excess of finite prompts where all features are learned"),
            "time": ("time", times, "mean-field time"),
            "feature": ("feature", list(range(1, task.features + 1)), "feature"),
        }

    def train(self, key: st.Key) -> st.Record:
        rng, task = st.generator(key), self._task()
        inner = rng.standard_normal((self.width, self.dim)) / self.dim**0.5
        start = system.saddle_start(task, inner, FOREIGN, SIGNAL)
        drawn = system.draw_prompts(task, self.prompts, self.length, rng)
        names = "length", "attention_speed", "learning_rate", "batch", "records", "record_every"
        found = system.train_on_prompts(task, start, drawn, rng, **{name: getattr(self, name) for name in names})
        return {
            "loss": ("time", found.loss, "loss over all tasks, prompts and queries"),
            "limit_loss": ("time", found.limit_loss, "loss of the same weights at infinite prompts"),
            "sample_loss": ("time", found.sample_loss, "loss on the prompts trained on"),
            "explained": (("time", "feature"), found.explained, "explained share"),
            "overlap": (("time", "feature"), np.diagonal(found.cross, axis1=1, axis2=2), "overlap with its slot"),
            "time": ("time", self._times(), "mean-field time"),
            "feature": ("feature", list(range(1, task.features + 1)), "feature"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        times, leading, (initial, level) = self._times(), self._leading(), self._levels()
        losses = trained["loss"].transpose("replicate", "time").values
        shares, overlap = (
            trained[name].transpose("replicate", "time", "feature").values for name in ("explained", "overlap")
        )
        middles = ((initial + level) / 2, level / 2)  # of the two drops
        drops = [[self._crossing(loss, middle) for middle in middles] for loss in losses]
        plateaus = [crossings.plateau_level(times, *row) for row in zip(losses, drops, strict=True)]
        half, expected = (
            np.minimum([crossings.half_times(times, share) for share in each], times[-1])
            for each in (shares, theory["explained"].values[None])
        )
        groups = (leading, ~leading)
        escapes, predicted = (np.stack([each[:, g].mean(1) for g in groups], 1) for each in (half, expected))
        growth = np.log(np.maximum(overlap[:, 1, leading] / overlap[:, 0, leading], 1e-6))
        law = theory["overlap"].values[:, leading]
        last = trained.isel(time=-1)
        width = f"relative fluctuations N^(-1/2) of the growth rates of {self.width} drawn neurons"
        text = "The loss pauses at the level of the saddle that knows the leading features (distance over the level)"
        basis = "a hundredth of the learned features is not linear and learned late; the others grow meanwhile"
        quantity = "relative distance from the level"
        yield st.Claim(text, np.array(plateaus, losses.dtype) / level - 1, st.near(0, 0.1), basis, quantity)
        text = "Features are learned in the order of the eigenvalues (share of trainings)"
        figure = (half[:, leading].max(1) < half[:, ~leading].min(1)).astype(float)
        basis = "rates in the ratio of the eigenvalues, from the same relative overlap"
        quantity = "share of trainings in that order"
        yield st.Claim(text, figure, st.near(1, 0.1), basis, quantity, bounds=(0.0, 1.0), resolution=0.1)
        text = "Missed features grow at first as in the mean-field flow (ratio of logarithms, leading features)"
        basis = f"steps of finite size lower a rate by half of its product with the step, 0.02; {width}"
        quantity = "growth (ln), measured over predicted"
        yield st.Claim(text, (growth / np.log(law[1] / law[0])).mean(1), st.near(1, 0.1), basis, quantity)
        text = "Both groups are learned when the mean-field flow says (ratio of times, mean)"
        basis = f"{width}, and the weakest of the drawn features, which sets the time; noise of batches"
        yield st.Claim(text, (escapes / predicted).mean(1), st.near(1, 0.15), basis, "time, measured over predicted")
        text = "The final loss is that of the mean-field flow (ratio)"
        basis = f"{width}; noise of the attention under SGD; two flows differ by a third of it at most"
        quantity = "loss, measured over predicted"
        yield st.Claim(text, last["loss"] / float(theory["loss"][-1]), st.near(1, 0.15), basis, quantity)
        yield st.Claim(
            f"The final excess of prompts of {self.length} pairs over infinite ones is c/n with c of the target "
            "features (ratio)",
            self.length * (last["loss"] - last["limit_loss"]) / float(theory["coefficient"]),
            st.near(1, 0.15),
            "c belongs to perfectly learned features; what is still missed changes it in the same proportion",
            "excess, measured over predicted",
        )
        yield st.Claim(
            f"The two-timescale limit gives the time at which the second group is learned at attention speed "
            f"{self.attention_speed:g} (ratio)",
            np.array([drop for _, drop in drops]) / self._crossing(theory["fast"].values, level / 2),
            st.near(1, 0.15),
            f"{width}, and corrections of order 1/r",
            "time, measured over predicted",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        losses = {
            f"{self.length} pairs": trained["loss"],
            f"the {self.prompts} prompts trained on": trained["sample_loss"],
            "infinite prompts, same weights": trained["limit_loss"],
        }
        saddles = {f"saddle, {level:g}": level + 0 * theory["fast"] for level in self._levels()}
        yield st.lines(
            f"Loss on prompts of {self.length} pairs, and cost of finite prompts",
            "time",
            "loss",
            losses,
            {"two-timescale flow": theory["fast"]},
            saddles,
            log="y",
            note=f"Bands: replicates. The cost c/n is {float(theory['coefficient']) / self.length:.3g}. Flows of "
            f"{self.reference} neurons differ by {float(theory['discrepancy']):.2g} of the initial loss, at the end by "
            f"{float(theory['final_discrepancy']):.2g} of the final one.",
        )
        labels = [f"{at}: eigenvalue {value:g}" for at, value in enumerate(self.eigenvalues, 1)]
        explained, law = (
            {label: data["explained"].isel(feature=at) for at, label in enumerate(labels)} for data in (trained, theory)
        )
        yield st.lines(
            "Share of every target feature that is explained",
            "time",
            "explained share",
            explained,
            law,
            note="Bands: replicates of SGD. Dashed: mean-field flow. Growth rates of missed features at infinite "
            f"prompts: {', '.join(f'{rate:.3g}' for rate in theory['rate'].values)}.",
            shows=("Features are learned in the order",),
        )

    def _task(self) -> FeatureTask:
        return ridge_task(self.dim, self.eigenvalues, self.nodes, np.random.default_rng(0))

    def _times(self) -> np.ndarray:
        return self.learning_rate * self.record_every * np.arange(self.records + 1)

    def _leading(self) -> np.ndarray:
        return np.asarray(self.eigenvalues) == self.eigenvalues[0]

    def _levels(self) -> tuple[float, float]:
        """Return the loss at which all features are missed, and that of the saddle which knows the leading group."""
        values = np.asarray(self.eigenvalues)
        return 0.5 * float(values.sum()), 0.5 * float(values[~self._leading()].sum())

    def _crossing(self, losses: np.ndarray, level: float) -> float:
        """Return the first time at which losses fall to a level; the last time if never."""
        times = self._times()
        return min(crossings.first_crossing(times, losses, level), float(times[-1]))
