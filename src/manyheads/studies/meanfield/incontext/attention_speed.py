"""`meanfield/attention-speed`: finite learning rate of the attention matrix against the two-timescale limit."""

import jax
import jax.numpy as jnp
import numpy as np

import manyheads.study as st
from manyheads.theory.meanfield.incontext.circle import circle_flow
from manyheads.theory.papers import KIM

SIGNAL, FOREIGN, SCATTER = np.diag([0.3, 0.03]), 0.6 * np.eye(2), 0.01
FAST, SLOW = 1e3, 1e2  # the law is claimed from FAST on, and denied up to SLOW


class AttentionSpeed(st.Study):
    """RMS error of the loss trajectory of a joint flow, whose attention learns r times as fast as the particles."""

    name = "meanfield/attention-speed"
    claim = "The two-timescale limit errs as 1/r at attention speed r, but only from r = 1000"
    source = KIM.at("two-timescale limit; the error at finite speed is derived here")
    revision = 2
    grid = {"speed": "speeds"}

    speeds: tuple[float, ...] = st.sweep(
        (1.0, 10.0, 100.0, 1e3, 1e4, 1e5),
        "learning rate r of the attention matrix over that of the particles",
        above=0,
        small=(10.0, 100.0, 1e3, 1e4),
        full=(1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1e3, 3e3, 1e4, 3e4, 1e5),
    )
    duration: float = st.setting(150.0, "last time", small=2.0)
    records: int = st.setting(300, "recorded times", small=4)

    def check(self) -> None:
        if min(map(len, self._sides())) < 2:
            raise st.UsageError(f"speeds={self.speeds}: expected two up to {SLOW:g} and two from {FAST:g} on")

    def predict(self, key: st.Key) -> st.Record:
        return {
            "order": ((), -1.0, "exponent of r of the error"),
            "speed": ("speed", list(self.speeds), "attention speed r"),
        }

    def train(self, key: st.Key, speed: float) -> st.Record:
        times = np.linspace(0.0, self.duration, self.records + 1)[1:]
        drawn = SCATTER * np.asarray(jax.random.normal(key, (2, 2, 2), jnp.float64))
        start = SIGNAL + drawn[0], FOREIGN + drawn[1]
        limit = circle_flow(*start, times)
        found = circle_flow(*start, times, attention_speed=speed, tolerance=1e-8)
        error = float(np.sqrt(np.mean((found.loss - limit.loss) ** 2)))
        return {
            "error": ((), error, "root mean square error of the loss"),
            "loss": ("moment", found.loss, "loss of the joint flow"),
            "limit": ("moment", limit.loss, "loss of the two-timescale limit from the same start"),
            "moment": ("moment", times, "time"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        fast, slow = (st.exponent(trained["error"].sel(speed=side), "speed", "r") for side in self._sides())
        text = f"The error of the two-timescale limit decreases as 1/r for attention speeds r from {FAST:g} on"
        basis = "the next order: at r = 1000 it is a tenth of the first"
        yield st.Claim(text, fast, st.near(theory["order"], 0.1), basis)
        text = f"The error of the two-timescale limit decreases as 1/r for speeds up to {SLOW:g} already"
        basis = "the same tolerance; near a saddle the curvature of the loss in W is small, and W lags"
        yield st.Claim(text, slow, st.near(-1, 0.1), basis, expected="refuted")

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        first = trained.isel(replicate=0)
        curves = {f"r = {speed:g}": first["loss"].sel(speed=speed) for speed in self.speeds}
        limit, title = {"limit": first["limit"].isel(speed=0)}, "Loss at finite attention speed r"
        yield st.lines(title, "moment", "loss", curves, reference=limit, note="One start.")

    def _sides(self) -> tuple[list[float], list[float]]:
        """Return the speeds from FAST on, and those up to SLOW."""
        return [speed for speed in self.speeds if speed >= FAST], [speed for speed in self.speeds if speed <= SLOW]
