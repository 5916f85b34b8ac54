"""`meanfield/saddle-escape`: time at which a missed feature is learned, against its initial size and prompt length."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import brentq

import manyheads.study as st
from manyheads.theory.meanfield import circle_task, saddle_levels
from manyheads.theory.meanfield.incontext.circle import CircleState, circle_flow, circle_loss, escape_rate
from manyheads.theory.meanfield.incontext.crossings import first_crossing
from manyheads.theory.meanfield.incontext.particles import circle_particles, particle_flow
from manyheads.theory.papers import KIM

LEARNED, FOREIGN = 0.3, 0.6  # amplitudes of the target that is learned first, and of the foreign harmonics
LEVEL = 0.25  # of the loss: half the last saddle's
ESCAPES = 4.0  # times at which the flow ends, in predicted escape times of the default foreign mass
SHORTEST = 1e-3  # in units of g n^(-1/2), from which the radius of the flat region is sought


class SaddleEscape(st.Study):
    """Escape time of particles on a quadrature grid from sizes eps, and the region that finite prompts make flat."""

    name = "meanfield/saddle-escape"
    claim = "A missed feature is learned after (g^2/kappa) ln(1/eps), g^2 its foreign mass"
    source = KIM.at(
        "abstract: saddles are escaped; basins at n pairs are of radius n^(-1/4) at most. The rate, the escape "
        "time and the radius are derived here"
    )
    grid = {"size": "sizes"}

    sizes: tuple[float, ...] = st.sweep(
        (1e-2, 1e-3, 1e-4, 1e-5),
        "initial amplitudes eps of the missed target",
        above=0,
        falling=True,
        small=(1e-1, 3e-2),
        full=(1e-2, 1e-3, 1e-4, 1e-5, 1e-6),
    )
    width: int = st.setting(2048, "particles at equidistant angles", small=64)
    nodes: int = st.setting(256, "nodes of the circle", small=16)
    lengths: tuple[int, ...] = st.sweep(
        (100, 1000, 10_000, 100_000),
        "pairs of a prompt at which the radius of the flat region is measured",
        least=2,
        small=(10, 100),
    )
    records: int = st.setting(801, "recorded times", small=41)

    def predict(self, key: st.Key) -> st.Record:
        times, rate = self._times(), escape_rate(FOREIGN**2)
        flows = [circle_flow(np.diag([LEARNED, size]), FOREIGN * np.eye(2), times).loss for size in self.sizes]
        found = [rate * first_crossing(times, loss, LEVEL) for loss in flows]
        return {
            "time": ("size", found, "escape time of the closed equations times the rate"),
            "loss": (("size", "moment"), np.stack(flows), "loss of the closed equations"),
            "levels": ("saddle", saddle_levels(np.eye(2)), "losses of the saddles"),
            "size": ("size", list(self.sizes), "initial amplitude eps"),
            "moment": ("moment", times, "time"),
        }

    def train(self, key: st.Key, size: float) -> st.Record:
        foreign = float(FOREIGN * jax.random.uniform(key, (), jnp.float64, 0.9, 1.1))
        times, rate = self._times(), escape_rate(foreign**2)
        start = circle_particles(np.diag([LEARNED, size]), foreign * np.eye(2), self.width)
        flow = particle_flow(circle_task(nodes=self.nodes), start, times, layers="outer")
        radius = "radius of the flat region: amplitude over g at which the growth is a quarter of infinite prompts'"
        return {
            "time": ((), rate * first_crossing(times, flow.loss, LEVEL), "escape time times the predicted rate"),
            "loss": ("moment", flow.loss, "loss of particles"),
            "radius": ("length", [_flat_radius(foreign, n) for n in self.lengths], radius),
            "slope": ("length", [_growth(1e-6, foreign, n) for n in self.lengths], "relative growth near zero"),
            "length": ("length", list(self.lengths), "pairs of a prompt"),
            "moment": ("moment", times, "time"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        logs = np.log(1 / np.asarray(self.sizes))
        first = trained.isel(size=0, drop=True)  # prompts do not depend on the size
        radius = st.exponent(first["radius"], "length", "n", "radius of the flat region over g")
        yield st.Claim(
            "The escape time grows as (g^2/kappa) ln(1/eps) (slope times the predicted rate)",
            st.slope(trained["time"], "size", logs),
            st.near(st.slope(theory["time"], "size", logs), 0.01),
            "corrections of relative size eps^2/g^2 at the largest eps, and the time between records",
            "slope times the predicted rate",
        )
        yield st.Claim(
            "The flat region of finite prompts, here no basin, is within the paper's bound n^(-1/4) on the radius "
            "of basins (exponent)",
            radius,
            st.below(-0.25),
            "the paper's bound on basins; here the loss falls as h^4 from h = 0, and the figure is the exponent of "
            "the radius at which the growth is a quarter of that of infinite prompts",
        )
        text = "The radius at which finite prompts quarter the growth of a missed feature scales as n^(-1/2)"
        basis = "the growth depends on h^2 n / g^2 alone, up to corrections of order 1/n"
        yield st.Claim(text, radius, st.near(-0.5, 0.02), basis)
        yield st.Claim(
            "At finite n the loss has no curvature along the amplitude h of a missed feature at h = 0 (growth "
            "rate at h = 1e-6 g over that of infinite n, largest over n)",
            first["slope"].max("length"),
            st.near(0, 1e-6),
            "the loss falls as h^4 n / 4 g^4: relative growth of order h^2 n / g^2 at h = 1e-6 g",
            "relative growth rate",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        levels = np.unique(theory["levels"].values)
        # Nothing happens after an escape.
        left = theory["loss"].where(theory["moment"] <= 1.15 * theory["time"] / escape_rate(FOREIGN**2))
        law = {f"eps = {size:g}": left.sel(size=size) for size in self.sizes}
        known = {f"level {level:g}": level + 0 * left.isel(size=-1) for level in levels}
        title = f"Staircase of the loss: saddles at {', '.join(f'{level:g}' for level in levels)}"
        label, note = "mean-field time", "Closed equations."
        yield st.lines(title, "moment", "loss", {}, law, known, x_label=label, note=note)
        curves = {"particles": trained["time"]}, {"closed equations": theory["time"]}
        title, what = "Escape time in units of g^2/kappa: ln(1/eps) + constant", "escape time times the predicted rate"
        note, shows = "Band: replicates, each with a g of its own.", ("The escape time grows",)
        yield st.lines(title, "size", what, *curves, log="x", note=note, shows=shows)

    def _times(self) -> np.ndarray:
        return np.linspace(0.0, ESCAPES + 1.25 * np.log(1 / self.sizes[-1]), self.records) / escape_rate(FOREIGN**2)


@jax.jit
def _slope_of(signal: jax.Array, foreign: jax.Array, length: jax.Array) -> jax.Array:
    """Return minus the slope of the loss in the amplitude of the missed target, over the amplitude."""

    def loss(h: jax.Array) -> jax.Array:
        learned = jnp.diag(jnp.stack([jnp.asarray(LEARNED, h.dtype), h]))
        return circle_loss(CircleState(learned, foreign * jnp.eye(2)), length)

    return -jax.grad(loss)(signal) / signal


def _growth(relative: float, foreign: float, length: int) -> float:
    """Return the growth rate of a missed target at a size in units of g, over that of infinite prompts at zero."""
    slope = _slope_of(*map(jnp.asarray, (relative * foreign, foreign, float(length))))
    return float(slope) * foreign**2


def _flat_radius(foreign: float, length: int) -> float:
    """Return the smallest amplitude, in units of g, at which the growth is a quarter of that of infinite prompts."""
    scale = length**-0.5
    end = brentq(lambda log: _growth(np.exp(log) * scale, foreign, length) - 0.25, np.log(SHORTEST), 0.0)
    return float(np.exp(end)) * scale
