"""Small studies that the tests of `study` run: vectorized, sampled, ragged, failing."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from manyheads.study import Cell, Claim, Source, Study, Verdict, exponent, generator, grid, lines, near

SOURCE = Source("bernoulli1713", "Ars Conjectandi", "Jacob Bernoulli", 1713, venue="Basel")
RMS = {"long_name": "rms error", "units": "1"}


@partial(jax.jit, static_argnums=(1, 2))
def rms_error(key, repeats, size):
    draws = jax.random.normal(key, (repeats, size), jnp.float64)
    return jnp.sqrt(jnp.mean(draws.mean(1) ** 2))


class Averages(Study):
    """The error of an average of n draws falls as n**-1/2."""

    name = "toy/averages"
    claim = "the error of an average of n draws falls as the square root of n"
    source = SOURCE

    sizes: tuple[int, ...] = (4, 16, 64)
    repeats: int = 50

    def cells(self):
        return grid(size=self.sizes)

    def predict(self, key):
        error = np.asarray(self.sizes, float) ** -0.5
        return xr.Dataset({"error": ("size", error, RMS)}, coords={"size": list(self.sizes)})

    def train(self, key, size):
        return xr.Dataset({"error": ((), rms_error(key, self.repeats, size), RMS)})

    def claims(self, theory, trained):
        low, high = (theory.isel(size=place) for place in (0, -1))
        law = float(np.log(high["error"] / low["error"]) / np.log(high["size"] / low["size"]))
        figure = exponent(trained["error"], "size", predicted=theory["error"])
        yield Claim("the slope is -1/2", figure, near(law, 0.2), "chosen wide for a test")


class VectorizedAverages(Averages):
    """The same, several replicates at a time."""

    name = "toy/vectorized-averages"
    vectorized = True
    chunk = 3


class Walk(Study):
    """A random walk, its prediction sampled, with text, booleans, labels that differ between cells, and a time."""

    name = "toy/walk"
    claim = "the mean square distance of a random walk grows by one a step"
    source = SOURCE
    predictions = 3

    walkers: int = 64
    steps: tuple[int, ...] = (3, 5)
    fail_at: int = -1

    def cells(self):
        return grid(steps=self.steps)

    def predict(self, key):
        rate = np.mean(generator(key).normal(size=4096) ** 2)
        return xr.Dataset({"rate": ((), rate, {"long_name": "growth a step", "units": "1"})})

    def train(self, key, steps):
        draws = generator(key).normal(size=(self.walkers, steps))
        if self.fail_at >= 0 and bool((jax.random.key_data(key) == jax.random.key_data(self._doomed())).all()):
            raise ArithmeticError("the walk ran into a wall")
        square = (draws.cumsum(1) ** 2).mean(0)
        return xr.Dataset(
            {
                "square": ("step", square, {"long_name": "mean square distance", "units": "1"}),
                "rate": ((), square[-1] / steps, {"long_name": "growth a step", "units": "1"}),
                "outcome": ((), "far" if square[-1] > steps else "near", {"long_name": "where it ended"}),
                "grows": ((), bool(square[-1] > square[0]), {"long_name": "whether it moved away"}),
            },
            coords={"step": ("step", np.arange(1, steps + 1), {"long_name": "step"})},
        )

    def compare(self, predicted, trained, claims=None):
        rates = trained["rate"].mean("cell").values
        error = float(predicted["rate"].std("prediction", ddof=1)) / 3**0.5
        mean = float(predicted["rate"].mean())
        basis = "chosen wide for a test"
        return (
            Verdict.from_samples("one a step", rates, target=mean, tolerance=0.5, basis=basis, prediction_error=error),
            Verdict.exact("moves away", float(trained["grows"].mean()), target=1.0, tolerance=(0.5, 0.0), basis=basis),
            Verdict.exact(
                "ends near or far",
                float(trained["outcome"].isin(["near", "far"]).mean()),
                target=1.0,
                tolerance=0.0,
                basis="no other outcome exists",
            ),
        )

    def pictures(self, theory, trained):
        rates = {"trained": trained["rate"]}, {"predicted": theory["rate"].expand_dims(steps=trained["steps"].values)}
        yield lines("growth", "steps", "growth a step", *rates)

    def _doomed(self):
        return jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), self.fail_at)


class Still(Study):
    """Broken on purpose in the ways that tests ask for."""

    name = "toy/still"
    claim = "nothing moves"
    source = SOURCE

    fault: str = "none"
    size: int = 3

    def cells(self):
        return (Cell(a=1), Cell(b=2)) if self.fault == "cells" else (Cell(),)

    def predict(self, key):
        value = generator(key).normal() if self.fault == "prediction" else 0.0
        return xr.Dataset({"x": ((), value, {"long_name": "place", "units": "m"})})

    def train(self, key, **cell):
        x = generator(key).normal(size=self.size)
        if self.fault == "purity":
            x = np.random.default_rng().normal(size=self.size)
        attributes = {"long_name": "place", "units": "m"} if self.fault != "labels" else {}
        dims = "replicate" if self.fault == "reserved" else "i"
        values = np.array([object()] * self.size) if self.fault == "objects" else x
        return {"x": x} if self.fault == "type" else xr.Dataset({"x": (dims, values, attributes)})

    def compare(self, predicted, trained, claims=None):
        place = 0.0 if self.fault == "unread" else predicted["x"]
        figure = 0.0 * place if self.fault == "falsifiable" else float(abs(trained["x"] - place).mean())
        verdict = Verdict.exact("it stays", figure, target=0.0, tolerance=2.0, basis="a test")
        return () if self.fault == "verdicts" else (verdict,) * (2 if self.fault == "twice" else 1)

    def panels(self, predicted, trained, claims=None):
        from manyheads.study import Listing

        moved = "earlier" if self.fault == "caption" else f"at {float(trained['x'].mean()):g}, no later"
        note = f"It stops {moved}. Dashed: it would stop later."
        return () if self.fault == "panels" else (Listing("places", ("i",), (("0",),), note),)
