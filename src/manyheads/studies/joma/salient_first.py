"""`joma/salient-first`: order and times in which components of different salience are learned (theorem 4).

One neuron and its attention are trained by SGD. With the loss whose gradient flow is that of theorem 4, times and rates
are those of the theorem; with the squared loss the order is the same, at the rates of its own law.
"""

import jax
import jax.numpy as jnp
import numpy as np

import manyheads.study as st
from manyheads.study.panels import Curve
from manyheads.theory.joma.systems.components import LOSSES, train_components
from manyheads.theory.joma.systems.recording import SGDOptions
from manyheads.theory.joma.theorems import salient_first as theorem
from manyheads.theory.papers import TIAN

LAWS = {"matched": theorem.EXP, "squared": theorem.REGRESSION}
EARLY, LATE = 6.0, 12.0  # log deficits between which the slope is measured: deficits of 2e-3 and 6e-6
TOKEN_PROBABILITY = 0.9  # that a token is in a batch
RECORDS = 1024
LEVELS = np.linspace(0.25, LATE, 32)
RATIO = "ratio of the log deficits of the two largest targets"
PAIRED = 3.0  # log deficit of the second component at which the ratio with the third is measured


class SalientFirst(st.Study):
    """Times, rates and order in which trained components converge, beside theorem 4."""

    name = "joma/salient-first"
    claim = "Salient components are learned first: ln(1/delta) = exp(mu^2/2) t - B(mu)"
    source = TIAN.at("theorem 4; exact time, offset and the law of the squared loss are derived here")
    vectorized = True
    grid = {"loss": LOSSES}

    targets: tuple[float, float, float] = st.setting(
        (1.0, 2.0, 2.5), "mu of the three components under the matched loss", above=0, most=4, order="rising"
    )
    # Rates grow as exp(mu^2) there, so these are smaller.
    squared_targets: tuple[float, float, float] = st.setting(
        (1.0, 1.5, 2.0), "mu under the squared loss", above=0, most=4, order="rising"
    )
    resolution: float = st.setting(
        0.004, "fastest decrease of deficits per step", above=0, most=0.2, small=0.2, full=0.001
    )

    def predict(self, key: st.Key) -> st.Record:
        """Return exact times, final rates and offsets of every component under both losses."""
        mu = {loss: np.asarray(self._targets(loss)) for loss in LOSSES}
        times = [theorem.exact_time(mu[loss], LEVELS[:, None], LAWS[loss]).T for loss in LOSSES]  # (component, level)
        _, middle, largest = mu["matched"]
        laws = theorem.final_rate, theorem.affine_offset
        rates, offsets = (np.stack([of(mu[loss], LAWS[loss]) for loss in LOSSES]) for of in laws)
        limit = float(theorem.final_rate(largest) / theorem.final_rate(middle))
        return {
            "level": ("level", LEVELS, "log deficit ln(1/δ)"),
            "time": (("loss", "component", "level"), np.stack(times), "time"),
            "rate": (("loss", "component"), rates, "slope of the affine law"),
            "offset": (("loss", "component"), offsets, "offset of the affine law"),
            "ratio": ((), float(theorem.deficit_ratio(largest, middle, PAIRED)), RATIO),
            "ratio_limit": ((), limit, "its limit"),
        }

    def train(self, key: st.Key, loss: str) -> st.Record:
        """Train one neuron with its attention, and measure when its components reach each log deficit."""
        training = self._training(loss)
        targets = jnp.asarray(self._targets(loss), jnp.float64)
        found = train_components(targets, loss, training, TOKEN_PROBABILITY, key)
        clock = jnp.linspace(0.0, training.learning_rate * training.steps, RECORDS + 1)
        # Deficits decrease; the fastest reaches rounding, beyond all levels, and is held there.
        deficits = jax.lax.cummax(jnp.where(jnp.isfinite(found), found, 30.0), axis=0)
        times = jax.vmap(lambda column: jnp.interp(LEVELS, column, clock), 1)(deficits)  # (component, level)
        early, late = (jax.vmap(lambda c, at=at: jnp.interp(at, c, clock), 1)(deficits) for at in (EARLY, LATE))
        moment = jnp.interp(PAIRED, deficits[:, 1], clock)
        ratio = jnp.interp(moment, clock, deficits[:, 2]) / PAIRED
        return {
            "level": ("level", LEVELS, "log deficit ln(1/δ)"),
            "time": (("component", "level"), times, "time"),
            "slope": ("component", (LATE - EARLY) / (late - early), "slope of ln(1/δ) in time"),
            "late_time": ("component", late, f"time of ln(1/δ) = {LATE:g}"),
            "ratio": ((), ratio, RATIO),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        steps = self.resolution / TOKEN_PROBABILITY
        bias = f"a step takes ln(1 - x) for x, x up to {steps:.2g}; 2% for chance and the remainder of the affine law"
        slack, rate = steps + 0.02, "rate, measured over predicted"
        for loss in LOSSES:
            for which in (0, 2):
                slope, law = (data.sel(loss=loss).isel(component=which) for data in (trained["slope"], theory["rate"]))
                yield st.Claim(
                    f"Under the {loss} loss ln(1/delta) of target {self._targets(loss)[which]:g} grows at the "
                    "final rate r(mu) of its law",
                    slope / law,
                    st.near(1, slack),
                    bias,
                    rate,
                )
        matched, squared = (trained.sel(loss=loss) for loss in ("matched", "squared"))
        middle = theory.sel(loss="matched").isel(component=1)
        yield st.Claim(
            "Under the matched loss the offset of ln(1/delta) of the middle target is B(mu)",
            (matched["late_time"].isel(component=1) * middle["rate"] - LATE) / middle["offset"],
            st.near(1, slack * (1 + LATE / float(middle["offset"]))),
            f"{bias}; relative to B, an error of the whole time counts (B + L)/B times",
            "offset, measured over predicted",
        )
        text = "Under the squared loss ln(1/delta) of the largest target grows at rate exp(mu^2/2) of theorem 4"
        figure = squared["slope"].isel(component=2) / np.exp(self.squared_targets[2] ** 2 / 2)
        basis = f"{bias}; the rate of this loss is (1 + mu^2) exp(mu^2)"
        yield st.Claim(text, figure, st.near(1, slack), basis, rate, "refuted")
        yield st.Claim(
            "Under the squared loss components are learned in the order of their salience",
            (-st.log(squared["late_time"])).diff("component").min("component"),
            st.above(0.1),
            "an inequality: each converges a tenth earlier at least than the next less salient one",
            "relative lead of the earlier component",
        )
        yield st.Claim(
            "Under the matched loss the ratio of log deficits is bounded by its limit exp((mu_j^2 - mu_k^2)/2)",
            matched["ratio"],
            st.below(theory["ratio_limit"]),
            "an inequality; in theory the ratio exceeds its limit if the waiting time of the larger target is the "
            "shorter one",
            "ratio of log deficits",
            "refuted",
        )
        yield st.Claim(
            "Under the matched loss the ratio of log deficits is that of the exact learning times",
            matched["ratio"],
            st.near(theory["ratio"], 2 * slack * float(theory["ratio"])),
            f"{bias}; two times are compared",
            "ratio of log deficits",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        levels, rows = tuple(LEVELS.tolist()), []
        for loss in LOSSES:
            measured, law = (data.sel(loss=loss) for data in (trained, theory))
            curves = []
            for which, target in enumerate(self._targets(loss)):
                part, expected = measured.isel(component=which), law.isel(component=which)
                # Times are measured, so a band would lie along the axis: every replicate is drawn.
                for number, row in enumerate(part["time"].values.tolist()):
                    curves.append(Curve(tuple(row), levels, "" if number else f"μ = {target:g}", group=which))
                exact = tuple(expected["time"].values.tolist())
                curves.append(Curve(exact, levels, f"μ = {target:g}, theory", "predicted", which))
                figures = {"slope, trained": part["slope"].mean(), "slope, theory": expected["rate"]}
                figures |= {"e^(μ²/2)": np.exp(target**2 / 2), "offset B, theory": expected["offset"]}
                texts = {name: f"{float(value):.4g}" for name, value in figures.items()}
                rows.append({"loss": loss, "μ": f"{target:g}"} | texts)
            yield st.Lines(
                f"{loss.capitalize()} loss: log deficits",
                "time [steps × learning rate]",
                "ln(1/δ)",
                tuple(curves),
                log_x=True,
                note="One solid line per replicate; dashed, exact times of theory.",
                shows=(f"Under the {loss} loss",),
            )
        yield st.table("Rates of the affine law", rows, f"Slopes between ln(1/δ) = {EARLY:g} and {LATE:g}.")

    def _targets(self, loss: str) -> tuple[float, float, float]:
        return self.targets if loss == "matched" else self.squared_targets

    def _training(self, loss: str) -> SGDOptions:
        mu, law = self._targets(loss), LAWS[loss]
        rate = self.resolution / float(theorem.final_rate(mu[2], law))
        horizon = 1.1 * float(theorem.exact_time(mu[0], LATE, law))
        return SGDOptions(rate, RECORDS * -(-int(horizon / rate) // RECORDS), RECORDS)
