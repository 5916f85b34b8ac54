"""`recovery/acceptance`: acceptance rate of certificates, its exponent (k-1)(m-1) and its small-threshold limit."""

from itertools import product

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.recovery import evaluate_layer, planted_layer, sequences
from manyheads.recovery.examples.stages import acceptance_rate as rate
from manyheads.recovery.examples.stages.agreement import fit_simplex
from manyheads.theory.papers import CHEN_LI

SMALL = (0.001, 0.002, 0.004, 0.008)  # thresholds near the limit, for two heads and two tokens
SHARE = "share of rows that are certified"


class Acceptance(st.Study):
    """Rows are certified as often as independent softmax vectors agree."""

    name = "recovery/acceptance"
    claim = "Rows are certified as often as the softmax vectors of all heads agree"
    source = CHEN_LI
    predictions = 4
    grid = {"tokens": "tokens", "heads": "heads", "dim": "dims"}

    tokens: tuple[int, ...] = st.setting((2, 3, 4), "lengths k, paired with all numbers of heads", least=2, small=(2,))
    heads: tuple[int, ...] = st.setting((2, 3), "numbers of heads m", least=2, small=(2,), full=(2, 3, 4))
    dims: tuple[int, ...] = st.sweep(
        (16, 96), "token dimensions; the law is for large ones", count=1, small=(4, 6), full=(16, 96, 256)
    )
    thresholds: tuple[float, ...] = st.sweep(
        (0.04, 0.08, 0.16), "misfits with which the stages work", above=0, small=(0.1, 0.2)
    )
    layers: int = st.setting(4, "layers of a replicate", least=1, small=1, full=8)
    count: int = st.setting(6000, "sequences that each layer sees", least=1, small=200, full=20_000)
    scale: float = st.setting(2.0, "standard deviation of the logits", above=0)

    def check(self) -> None:
        if 2 not in self.tokens or 2 not in self.heads:
            raise st.UsageError(f"tokens={self.tokens}, heads={self.heads}: expected 2 among both")

    def predict(self, key: st.Key) -> st.Record:
        rng = st.generator(key)
        table = [
            [rate.predict_acceptance(rng, length, heads, self.thresholds, self.scale) for heads in self.heads]
            for length in self.tokens
        ]
        return {
            "threshold": ("threshold", list(self.thresholds), "misfit"),
            "accepted": (("tokens", "heads", "threshold"), np.asarray(table), SHARE),
        }

    def train(self, key: st.Key, tokens: int, heads: int, dim: int) -> st.Record:
        """Plant layers, label sequences with them, and fit every row with the true sum of projections."""
        rng, fitted = st.generator(key), []
        for _ in range(self.layers):
            layer = planted_layer(rng, dim, heads, scale=self.scale)
            x = sequences(rng, self.count, tokens, dim)
            fitted.append(fit_simplex(x, evaluate_layer(layer, x), layer.projection.sum(0))[1])
        misfit = np.sort(np.concatenate(fitted, axis=None))
        share = [np.searchsorted(misfit, limits) / misfit.size for limits in (self.thresholds, SMALL)]
        return {
            "accepted": ("threshold", share[0], SHARE),
            "accepted_small": ("small_threshold", share[1], SHARE),
            "threshold": ("threshold", list(self.thresholds), "misfit"),
            "small_threshold": ("small_threshold", list(SMALL), "misfit"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        largest, pairs = max(self.dims), ["tokens", "heads"]
        law, shares = theory["accepted"].mean("prediction"), self._shares(trained["accepted"]).sel(dim=largest)
        small = self._shares(trained["accepted_small"]).sel(tokens=2, heads=2)
        corrections = [
            rate.dimension_correction(float(slope), int(slope["tokens"]), largest)
            for slope in _slope(law).stack(pair=pairs)
        ]
        drawn = st.log(theory["accepted"]).mean([*pairs, "threshold"])
        yield st.Claim(
            f"At d = {largest} rows are certified as often as independent softmax vectors agree",
            st.log_ratio(shares, law),
            st.near(0, 2 * float(np.mean(corrections))),
            "mean logarithm of measured over predicted, over all pairs and thresholds; twice the leading correction in "
            "1/d",
            "share of rows, measured over predicted (ln)",
            prediction_error=float(drawn.std(ddof=1)) / drawn.size**0.5,
            prediction_dof=drawn.size - 1,
        )
        yield st.Claim(
            "In the range of use, the acceptance rate scales as the power (k-1)(m-1) of the threshold",
            (_slope(shares) / ((shares["tokens"] - 1) * (shares["heads"] - 1))).mean(pairs),
            st.near(1, 0.1),
            "slope over (k-1)(m-1), mean over pairs; at power four, a tenth changes the examples that an eight times "
            "smaller misfit needs by a factor of about two",
            "exponent over (k-1)(m-1)",
            "refuted",
        )
        text = "For two heads and two tokens the acceptance rate is linear in small thresholds"
        basis = "half of the distance from 1 to the power .77 that the law has in the range of use"
        quantity = "exponent of the threshold"
        yield st.Claim(text, _slope(small, "small_threshold").mean("dim"), st.near(1, 0.12), basis, quantity)
        last = small.isel(small_threshold=slice(-2, None))
        yield st.Claim(
            "The slope of the acceptance at threshold zero is 2 sqrt 2 (1 + exp(beta^2/2)) / (beta sqrt(2 pi))",
            (last / last["small_threshold"]).mean(["dim", "small_threshold"])
            / rate.predict_small_threshold(self.scale),
            st.near(1, 2 * rate.dimension_correction(1.0, 2, min(self.dims))),
            "the correction in 1/d at the smallest dimension, doubled for the approach to the limit",
            "slope, measured over predicted",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        law, shares = theory["accepted"].mean("prediction"), self._shares(trained["accepted"])
        pairs = {f"{k} tokens, {m} heads": {"tokens": k, "heads": m} for k, m in product(self.tokens, self.heads)}
        yield st.lines(
            f"Rows that are certified, d = {max(self.dims)}",
            "threshold",
            "share of rows",
            {words: shares.sel(pair).sel(dim=max(self.dims)) for words, pair in pairs.items()},
            {f"{words}, predicted": law.sel(pair) for words, pair in pairs.items()},
            log="xy",
            note="Dashed: independent softmax vectors in large dimension, nothing fitted. Bands reach over replicates.",
            shows=("rows are certified as often",),
        )
        means = {f"d = {dim}": shares.sel(dim=dim).mean("replicate") for dim in self.dims}
        slopes = {name: _slope(values) for name, values in ({"law": law} | means).items()}
        yield st.table(
            "Power of the misfit",
            (
                {"": words, "(k-1)(m-1)": f"{(pair['tokens'] - 1) * (pair['heads'] - 1)}"}
                | {name: f"{float(slope.sel(pair)):.2f}" for name, slope in slopes.items()}
                for words, pair in pairs.items()
            ),
            "Fitted power of the misfit in the acceptance, and the predicted limiting power.",
        )

    def _shares(self, shares: xr.DataArray) -> xr.DataArray:
        """Return shares of rows; none counts as half a row."""
        least = 0.5 / (self.layers * self.count * shares["tokens"])
        return shares.where(shares > least, least)


def _slope(shares: xr.DataArray, along: str = "threshold") -> xr.DataArray:
    return st.slope(st.log(shares), along, st.log(shares[along]))
