"""`joma/nearly-orthogonal`: theorem 1 for embeddings with the cosines of trained models.

One layer is trained by gradient flow on orthonormal embeddings, on random directions in several dimensions, on
embeddings with a common direction, and on more tokens than dimensions.
"""

from functools import partial

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.spectra.levels import random_coherence
from manyheads.theory.joma.systems.gradient_flow import FixedSteps, gradient_flow
from manyheads.theory.joma.systems.layer import draw_parameters, draw_upper
from manyheads.theory.joma.task import Attention, Sizes, UpdateRule, draw_joma_task
from manyheads.theory.joma.theorems import nearly_orthogonal
from manyheads.theory.papers import TIAN

ATTENTIONS: tuple[Attention, ...] = ("linear", "exp")
EXACT, SIMPSON = 1e-10, 1e-6
CLOSE = 0.1  # of the change of the logits


class NearlyOrthogonal(st.Study):
    """Drift of the quantity of theorem 1 when token embeddings are not orthogonal."""

    name = "joma/nearly-orthogonal"
    claim = "Theorem 1 drifts as the cosines of the embeddings, as their couplings predict"
    source = TIAN.at("theorem 1, and the measured cosines in the reply to reviewers; drift and bound are derived here")
    # Not vectorized: one program per attention serves all cells and replicates.
    # The third one also gives the cosine of embeddings with a common direction.
    dimensions: tuple[int, ...] = st.sweep(
        (1600, 256, 64, 24),
        "in which the embeddings are random directions",
        least=2,
        count=3,
        falling=True,
        small=(64, 16, 8),
        full=(6400, 1600, 256, 64, 24),
    )
    crowded: int = st.setting(8, "a dimension below the number of tokens", least=1, below="tokens", small=2, full=16)
    tokens: int = st.setting(12, "tokens", small=3, full=32)
    contexts: int = st.setting(40, "contexts", least=1, small=4, full=120)
    neurons: int = st.setting(24, "hidden neurons", least=1, small=2)
    horizon: float = st.setting(40.0, "end time", above=0, small=2.0)
    step: float = st.setting(0.05, "step length", above=0, small=0.25)
    records: int = st.setting(200, "number of states kept", least=1, small=8)

    def cells(self) -> tuple[st.Cell, ...]:
        """Return every kind of embeddings, with its dimension, for linear and for exp attention."""
        frames = [("orthonormal", 0), *(("random", d) for d in (*self.dimensions, self.crowded))]
        frames.append(("common", self.dimensions[2]))
        return tuple(st.Cell(attention=a, frame=frame, dimension=d) for a in ATTENTIONS for frame, d in frames)

    def predict(self, key: st.Key) -> st.Record:
        levels = [random_coherence(d) for d in self.dimensions]
        return {
            "dimension": ("dimension", list(self.dimensions), "dimension of the embeddings"),
            "exponent": ((), -0.5, "exponent of the drift in the dimension"),
            "level": ("dimension", levels, "mean absolute cosine of random directions"),
        }

    def train(self, key: st.Key, attention: Attention, frame: str, dimension: int) -> st.Record:
        rule = UpdateRule(attention, "gelu")
        sizes = Sizes(self.tokens, 1, self.contexts, neurons=self.neurons, width=self.tokens + 1)
        streams = st.generator(key).spawn(3 + len(self.cells()))
        place = self.cells().index(st.Cell(attention=attention, frame=frame, dimension=dimension))
        gram = self._gram(frame, dimension, streams[3 + place])
        task, loss = nearly_orthogonal.with_gram(draw_joma_task(sizes, streams[0]), gram), draw_upper(sizes, streams[2])
        init = draw_parameters(sizes, rule, streams[1])
        path = gradient_flow(init, task, loss, rule, FixedSteps.until(self.horizon, self.step, self.records))
        couplings, lengths = nearly_orthogonal.integrate_couplings(path, task, loss, rule)
        logits, weights = np.asarray(path.network.logits), np.asarray(path.network.weights)
        powers = logits[:, 0] ** 2 if attention == "linear" else logits[:, 0]  # (S, M)
        squares = ((task.token_embeddings.T @ weights) ** 2).sum(-1)
        relation = powers - squares / (1 if attention == "linear" else 2)
        total = nearly_orthogonal.token_sum(rule, logits, weights, task.query_embeddings[:, 0])
        pair = ("token", "other")
        return {
            "token": ("token", np.arange(self.tokens), "token"),
            "other": ("other", np.arange(self.tokens), "other token"),
            "gram": (pair, gram, "cosines of the embeddings"),
            "couplings": (pair, couplings[-1], "couplings of tokens at the end"),
            "drift": ("token", relation[-1] - relation[0], "drift of the quantity of theorem 1"),
            "change": ("token", powers[-1] - powers[0], "change of the logits' side of theorem 1"),
            "bound": ("token", nearly_orthogonal.drift_bound(rule, gram, lengths), "bound on the absolute drift"),
            "sum_drift": ((), np.abs(total - total[0]).max(), "largest drift of the sum over tokens"),
        }

    def _gram(self, frame: str, dimension: int, rng: np.random.Generator) -> np.ndarray:
        if frame == "random":
            return nearly_orthogonal.random_gram(self.tokens, dimension, rng)
        cosine = random_coherence(dimension) if frame == "common" else 0.0
        return (1 - cosine) * np.eye(self.tokens) + cosine

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        few, middle, many = self.dimensions[:3]
        text = "Summed over the tokens, theorem 1 is exact for any embeddings, more tokens than dimensions included"
        basis = "an equality: rounding, and the fourth power of the step, leave less"
        yield st.Claim(text, trained["sum_drift"].max(), st.near(0, EXACT), basis, "drift")
        yield st.Claim(
            "The drift is that of the couplings of tokens times the cosines of their embeddings",
            max(_identity_error(trained.sel(attention=name), UpdateRule(name, "gelu")) for name in ATTENTIONS),
            st.near(0, SIMPSON),
            "an equality along each trajectory, up to Simpson's rule between the states kept",
            "largest error (relative)",
        )
        apart = trained.sel(frame=["random", "common"])  # the bound of orthonormal embeddings is zero
        text = "The drift stays below the coherence times the lengths of the couplings"
        basis, quantity = "a bound: the largest cosine for each, and no cancellation", "largest drift over its bound"
        yield st.Claim(text, (abs(apart["drift"]) / apart["bound"]).max(), st.near(0, (0.0, 1.0)), basis, quantity)
        drift, law = _rms(trained.sel(frame="random", drop=True)["drift"]), self._law(trained)
        scaled = (drift / law.sel(dimension=few)).mean("attention")  # so that both kinds of attention have one line
        yield st.Claim(
            "The drift falls as the root of the dimension of random embeddings",
            st.exponent(scaled.sel(dimension=list(self.dimensions)), "dimension", "the dimension", "scaled drift"),
            st.near(theory["exponent"], 0.15),
            "the second order adds sqrt(M/d) relative to the first at the smallest dimension, in quadrature, "
            "over a range of dimensions of more than sixty",
        )
        yield st.Claim(
            "The couplings of orthonormal embeddings predict the root mean square of the drift of random ones",
            ((drift / law).sel(dimension=[few, middle]) ** 2).mean(("attention", "dimension")) ** 0.5,
            st.near(1, 0.3),
            f"the second order, sqrt(M/d), of {(self.tokens / middle) ** 0.5:.1g} at {middle} dimensions, "
            "either way, rounded up",
            "drift over its prediction",
            bounds=(0.0, np.inf),
        )
        for dimension, expected in ((few, "holds"), (many, "refuted")):
            part = trained.sel(frame="random", dimension=dimension)
            yield st.Claim(
                f"With embeddings of mean absolute cosine {random_coherence(dimension):.2f} theorem 1 gives the "
                "changes of the logits to a tenth",
                (_rms(part["drift"]) / _rms(part["change"])).mean("attention"),
                st.near(0, CLOSE),
                f"a tenth of the changes, mean over both kinds of attention, in {dimension} dimensions",
                "root mean square error over that of the changes",
                expected,
                resolution=SIMPSON,
                bounds=(0.0, np.inf),
            )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        plain = trained.sel(frame="orthonormal", dimension=0)
        law = (self._law(trained) / _rms(plain["change"])).mean("replicate")
        random = trained.sel(frame="random", dimension=list(self.dimensions))
        error = _rms(random["drift"]) / _rms(random["change"])
        yield st.lines(
            "Error of theorem 1 for embeddings in random directions",
            "dimension",
            "error over the change of the logits",
            *({f"{name} attention": each.sel(attention=name) for name in ATTENTIONS} for each in (error, law)),
            log="xy",
            x_label="dimension of the embeddings",
            note="Root mean squares over tokens; bands range over replicates. Dashed: from the couplings of "
            "orthonormal embeddings.",
            shows=("falls as the root", "predict the root mean square"),
        )

        def row(cell: st.Cell) -> dict[str, str]:
            here = trained.sel(dict(cell))
            off = np.abs(here["gram"].values[:, ~np.eye(self.tokens, dtype=bool)])
            relative = (_rms(here["drift"]) / _rms(here["change"])).values
            return {
                "attention": str(cell["attention"]),
                "embeddings": str(cell["frame"]),
                "dimension": str(cell["dimension"] or ""),
                "mean cosine": f"{off.mean():.3f}",
                "largest": f"{off.max():.2f}",
                "relative error": f"{relative.mean():.3f} ({relative.min():.3f} to {relative.max():.3f})",
            }

        yield st.table(
            "Error of theorem 1 by embeddings",
            map(row, self.cells()),
            "Absolute cosines. Relative error: root mean square over tokens, over that of the changes of the logits; "
            "mean and range over replicates.",
        )

    def _law(self, trained: st.Data) -> xr.DataArray:
        """Return the root mean square of the drift over tokens and directions, predicted without any."""
        couplings = trained["couplings"].sel(frame="orthonormal", dimension=0)
        drifts = [
            nearly_orthogonal.random_drift(UpdateRule(a, "gelu"), 1, couplings.sel(attention=a).values)
            for a in ATTENTIONS
        ]
        one = _rms(xr.DataArray(drifts, {"attention": list(ATTENTIONS)}, ("attention", "replicate", "token")))
        dimensions = list(self.dimensions)
        return one / xr.DataArray(dimensions, {"dimension": dimensions}, "dimension") ** 0.5


def _rms(values: xr.DataArray) -> xr.DataArray:
    return (values**2).mean("token") ** 0.5


def _identity_error(part: st.Data, rule: UpdateRule) -> float:
    """Return the largest distance of a drift from that of its own couplings, over the change of the logits."""
    of, pair, own = partial(nearly_orthogonal.drift_from_couplings, rule), ["token", "other"], [["token"]]
    grams = part["gram"], part["couplings"]
    law = xr.apply_ufunc(of, *grams, input_core_dims=[pair, pair], output_core_dims=own, vectorize=True)
    return float((abs(part["drift"] - law).max("token") / abs(part["change"]).max("token")).max())
