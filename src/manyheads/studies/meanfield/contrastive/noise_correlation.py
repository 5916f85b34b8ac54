"""`meanfield/noise-correlation`: correlation of the augmentation noise of two views against the learned cosine.

The correlation rho enters twice: through the variance of a step, tau^2 D, which a negative rho reduces, and through the
drift, where it changes the norm of the weights.
"""

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.theory.meanfield import stationary_states, train_overlaps
from manyheads.theory.meanfield.contrastive.quadrature import Nodes
from manyheads.theory.meanfield.contrastive.task import ContrastiveTask, sparse_feature
from manyheads.theory.papers import MENG

START, NODES = (0.6, 0.6), Nodes(32, 12, 32)  # Q and q at the start


class NoiseCorrelation(st.Study):
    """Stationary cosine of weights and feature by the correlation of the augmentation noise, in two regimes."""

    name = "meanfield/noise-correlation"
    claim = "Negatively correlated augmentation noise helps if it is moderate, hurts if strong"
    source = MENG.at("abstract: negatively correlated noise yields better performance; the regimes are derived here")
    revision = 2

    moderate: tuple[float, float] = st.setting((0.5, 2.0), "std of moderate augmentation noise, and learning rate")
    strong: tuple[float, float] = st.setting((1.0, 0.5), "std of strong augmentation noise, and learning rate")
    dimension: int = st.setting(1000, "dimension n", least=3, small=40)
    runs: int = st.setting(16, "runs of a replicate", least=1, small=2)
    burn_in: float = st.setting(40.0, "time from which the cosine is averaged", least=0, below="horizon", small=1.0)
    horizon: float = st.setting(140.0, "time up to which it is averaged", small=3.0)

    def cells(self) -> tuple[st.Cell, ...]:
        """Return no augmentation noise, and independent and negatively correlated noise in both regimes."""
        std, rate = self.moderate
        settings = [(0.0, rate, 0.0), *((std, rate, rho) for rho in (-0.9, -0.5, 0.0, 0.5))]
        settings += [(self.strong[0], self.strong[1], rho) for rho in (-0.9, 0.0)]
        return tuple(st.Cell(noise=noise, learning_rate=rate, correlation=rho) for noise, rate, rho in settings)

    def predict(self, key: st.Key) -> st.Record:
        cosines = [stationary_cosine(one_feature(*map(float, cell.values()))) for cell in self.cells()]
        std, rate = self.moderate
        scales = np.array([0.25, 0.5, 1.0])
        table = [[stationary_cosine(one_feature(std, rate * s, rho)) for rho in (-0.9, 0.0)] for s in scales]
        return {
            "cosine": ("setting", cosines, "stationary cosine"),
            "benefit": ("learning_rate", -np.diff(table)[:, 0], "gain in cosine by a correlation of -0.9"),
            "learning_rate": ("learning_rate", rate * scales, "learning rate"),
            "setting": ("setting", [cell.slug for cell in self.cells()], "cell"),
        }

    def train(self, key: st.Key, noise: float, learning_rate: float, correlation: float) -> st.Record:
        """Train by SGD and average the cosine over time and runs; all cells see the same random numbers."""
        task, times = one_feature(noise, learning_rate, correlation), np.linspace(self.burn_in, self.horizon, 101)
        path = train_overlaps(task, np.tile(START, (self.runs, 1)), self.dimension, times, st.generator(key))
        cosine = np.abs(path[..., 0]) / np.sqrt(path[..., 1])
        return {"cosine": ((), cosine.mean(), "stationary cosine")}

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        (std, rate), (large, slow) = self.moderate, self.strong
        regimes, cosine = (self.moderate, self.strong), trained["cosine"]
        moderate, strong = (cosine.sel(noise=noise, learning_rate=step) for noise, step in regimes)
        clean = cosine.sel(noise=0.0, learning_rate=rate, correlation=0.0)
        helped, hurt = (each.sel(correlation=-0.9) - each.sel(correlation=0.0) for each in (moderate, strong))
        both = ([self._predicted(theory, *regime, rho) for rho in (-0.9, 0.0)] for regime in regimes)
        gain, loss = (float(one - other) for one, other in both)
        better = "Negatively correlated augmentation noise gives a larger cosine than independent noise"
        half = "half the predicted effect: corrections of order 1/n cancel in the difference of paired runs"
        abstract, quantity = "the abstract's statement: the gain is positive", "gain of the cosine"
        text = f"Independent augmentation noise of {std:g} lowers the stationary cosine (decrease)"
        basis, decrease = "an inequality: the decrease is positive", clean - moderate.sel(correlation=0.0)
        yield st.Claim(text, decrease, st.above(0), basis, "decrease of the cosine")
        text = f"{better}: gain by rho = -0.9 at noise {std:g}, learning rate {rate:g}"
        yield st.Claim(text, helped, st.near(gain, abs(gain) / 2), half, quantity)
        text = f"{better}: gain by rho = -0.9 at noise {large:g}, learning rate {slow:g}"
        yield st.Claim(text, hurt, st.above(0), abstract, quantity, "refuted")
        text = f"At noise {large:g} and learning rate {slow:g} negative correlation lowers the cosine by as much as"
        yield st.Claim(f"{text} the ODE says", hurt, st.near(loss, abs(loss) / 2), half, quantity)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        std, rate = self.moderate
        rho = sorted(trained["correlation"].values.tolist())
        ode = xr.concat([self._predicted(theory, std, rate, each) for each in rho], "correlation")
        found = {f"SGD, n = {self.dimension}": trained["cosine"].sel(noise=std, learning_rate=rate, correlation=rho)}
        law, label = {"ODE": ode.assign_coords(correlation=rho)}, "correlation rho of the augmentation noise"
        title = f"Stationary cosine of weights and feature, noise {std:g}, learning rate {rate:g}"
        what, note = "stationary cosine", "Band: replicates."
        yield st.lines(title, "correlation", what, found, law, x_label=label, note=note)
        benefit = theory["benefit"]
        curves = {"ODE": benefit}, {"square": benefit[-1] * (benefit["learning_rate"] / rate) ** 2}
        title = f"Gain by rho = -0.9 instead of 0: {float(benefit[-1]):.4f} at learning rate {rate:g}"
        log = "xy" if (benefit > 0).all() else "x"
        note = "Grey: the law of the variance of a step, through the last point."
        yield st.lines(title, "learning_rate", "gain in cosine", {}, *curves, log=log, note=note)

    def _predicted(self, theory: st.Data, noise: float, learning_rate: float, correlation: float) -> xr.DataArray:
        cell = st.Cell(noise=noise, learning_rate=learning_rate, correlation=correlation)
        return theory["cosine"].sel(setting=cell.slug, drop=True)


def one_feature(noise: float, learning_rate: float, correlation: float) -> ContrastiveTask:
    """Return the task of one feature, a sign."""
    feature = (sparse_feature(),)
    return ContrastiveTask(feature, augmentation_std=noise, correlation=correlation, learning_rate=learning_rate)


def stationary_cosine(task: ContrastiveTask, nodes: Nodes = NODES) -> float:
    """Return the cosine of the stable stationary state that has learned the feature; 0 if there is none."""
    for start in ((0.9, 0.95), START, (0.4, 0.3)):
        found = stationary_states(task, [start], nodes)
        if learned := [abs(state.cosines[0]) for state in found if state.stable and abs(state.overlaps[0]) > 0.01]:
            return max(learned)
    return 0.0
