"""`recovery/noise`: squared error of layers learned from noisy labels, against the parametric rate p sigma^2 / n.

A layer is learned from labels with independent noise. Least squares on p numbers from n labels leaves, to first order
in the noise, the squared error p sigma^2 / n on fresh sequences, whatever the layer: the parametric rate, which no
unbiased method can beat. The student starts from random matrices; refinement from the truth shows what the labels
allow.
"""

import math

import numpy as np

import manyheads.study as st
from manyheads.recovery import compare_layers, evaluate_layer, planted_layer, sequences
from manyheads.recovery.examples.student import ENOUGH, StudentSettings, fit_student, free_numbers
from manyheads.recovery.fit.gauss_newton import GaussNewtonSettings, fit_gauss_newton
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.theory.papers import CHEN_LI

FRESH = 2000  # sequences on which the error is measured
HELD_OUT = 200  # sequences that choose between starts
FRESH_ERROR = "squared error on fresh sequences"
WITHIN = 1.3  # factor within which the rate must be met
REFINEMENT = GaussNewtonSettings(gain=1e-6, inner=100)


class Noise(st.Study):
    """The student reaches the parametric rate p sigma^2 / n on labels with noise sigma."""

    name = "recovery/noise"
    claim = "On noisy labels the student attains the parametric rate from random starts"
    revision = 3
    source = CHEN_LI.at("noise is not treated there; the parametric rate is classical")
    grid = {"sigma": "sigmas"}

    sigmas: tuple[float, ...] = st.sweep(
        (0.001, 0.01, 0.1, 0.5),
        "standard deviations of the noise; labels have a mean square of about one",
        above=0,
        small=(0.01, 0.1),
    )
    dim: int = st.setting(8, "token dimension", least=1, small=3, full=16)
    heads: int = st.setting(2, "heads of the layer", least=1, small=1)
    length: int = st.setting(2, "tokens of a sequence", least=2)
    count: int = st.setting(2000, "sequences to learn from", small=120, full=20_000)

    def check(self) -> None:
        if self.count * self.length < 2 * ENOUGH * self.heads * self.dim:
            raise st.UsageError(f"count={self.count}: {ENOUGH:g} labels for each of 2 d^2 numbers a head are needed")

    def predict(self, key: st.Key) -> st.Record:
        numbers, labels = self._sizes()
        return {"error": ("sigma", numbers / labels * np.square(self.sigmas), FRESH_ERROR)}

    def train(self, key: st.Key, sigma: float) -> st.Record:
        """Learn one layer from labels with noise; layer, sequences and normals are the same for all sizes."""
        for_layer, for_data, for_noise, for_student = st.generator(key).spawn(4)
        layer = planted_layer(for_layer, self.dim, self.heads)
        x, held, fresh = (sequences(for_data, n, self.length, self.dim) for n in (self.count, HELD_OUT, FRESH))
        normals = for_noise.normal(size=(self.count + HELD_OUT, *x.shape[1:]))
        noisy = (x, normals[: self.count]), (held, normals[self.count :])
        y, held_y = (evaluate_layer(layer, tokens) + sigma * noise for tokens, noise in noisy)
        examples, held_out = Examples(x, y), Examples(held, held_y)
        share = sigma**2 * held_y.size / held_out.power
        wanted = share * (1 + free_numbers(examples, self.heads) / y.size) * (1 + 5 * (2 / held_y.size) ** 0.5)
        settings = StudentSettings(refinement=REFINEMENT)
        fit = fit_student(examples, held_out, self.heads, for_student, wanted=wanted, settings=settings)
        best = fit_gauss_newton(layer, x, y, settings=REFINEMENT).layer
        truth = evaluate_layer(layer, fresh)
        errors = [float(np.mean((evaluate_layer(found, fresh) - truth) ** 2)) for found in (fit.layer, best)]
        return {
            "error": ((), errors[0], FRESH_ERROR),
            "attainable": ((), errors[1], f"{FRESH_ERROR}, refined from the truth"),
            "theta": ((), compare_layers(layer, fit.layer).theta, "relative error of Theta"),
            "restarts": ((), float(fit.restarts), "random starts"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        error, (numbers, labels) = trained["error"], self._sizes()
        weak = max((sigma for sigma in self.sigmas if sigma <= 0.1), default=self.sigmas[0])
        yield st.Claim(
            f"At noise sigma = {weak:g} in the labels the squared error is p sigma^2 / n",
            (error / theory["error"]).sel(sigma=weak),
            st.near(1, (1 - 1 / WITHIN, WITHIN - 1)),
            "a factor of 1.3 either way: the excess is sigma^2 chi^2_p / n, and p/n is small",
            "squared error, measured over predicted",
        )
        text = "The squared error scales as the square of the noise"
        basis = "the next order in the noise is felt at the largest sigma only, by 2 p/n at most, or 0.05"
        yield st.Claim(text, st.exponent(error, "sigma"), st.near(2, max(0.05, 2 * numbers / labels)), basis)
        yield st.Claim(
            "Random starts reach the error of a start at the truth",
            st.log(error / trained["attainable"]).max("sigma"),
            st.near(0, math.log(WITHIN)),
            "log of the ratio of both errors, the worst sigma of a replicate; the factor is that of the rate",
            "error over the attainable one (ln)",
            resolution=1e-3,
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        rate = theory["error"]
        found = {"student": trained["error"] / rate, "refined from the truth": trained["attainable"] / rate}
        labels, label = ("Error in units of the rate", "sigma", "error / (p sigma^2 / n)"), "noise sigma of the labels"
        note, shows = "Bands: full range of the replicates.", ("the squared error is p",)
        yield st.lines(*labels, found, {}, {"the rate": rate / rate}, x_label=label, log="x", note=note, shows=shows)

    def _sizes(self) -> tuple[int, int]:
        """Return the numbers of a layer and of all labels."""
        return 2 * self.heads * self.dim**2, self.count * self.length * self.dim
