"""`recovery/one-step`: distance of one gradient step from the sum of projections, against the stable rank.

A single head that starts at zero attends uniformly. One gradient step of the squared loss on its projection gives the
correlation of stage one, (1/kN) sum X^T 1 1^T Y, while the gradient on its attention matrix is zero. What the step
makes of unlimited examples is measured beside its closed form: the sampling error of the inputs' covariance, which has
a known mean, is taken out, and norms come from two halves of the examples, so that noise averages to zero.
"""

import math

import numpy as np

import manyheads.study as st
from manyheads.recovery._types import Array
from manyheads.recovery.examples.stages.crude_sum import measure_moments, predict_bias
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.planted.task import equal_spectrum_layer, sequences
from manyheads.theory.papers import CHEN_LI

BLOCK = 5000  # sequences that are drawn at a time
FEW = 8  # examples for each dimension, of the step from few
WIDTH = 2  # dimensions for each unit of rank, where the dimension grows with it
FAMILIES = ("growing", "fixed", "shifted")  # dimension grows, is fixed, grows and tokens have a mean of one in norm


class OneStep(st.Study):
    """One gradient step from a head at zero finds the sum of projections up to the inverse root of the stable rank."""

    name = "recovery/one-step"
    claim = "One gradient step from zero is r^-1/2 close to the sum of projections"
    source = CHEN_LI.at("crude sum by one gradient step; power and constant derived here")
    grid = {"family": FAMILIES, "rank": "ranks"}

    ranks: tuple[int, ...] = st.sweep(
        (4, 8, 16, 32),
        "stable ranks of the attention matrices; the dimension is twice the rank, or twice the largest",
        small=(1, 2),
        full=(4, 8, 16, 32, 64, 128),
    )
    heads: int = st.setting(2, "heads m", least=1)
    tokens: int = st.setting(3, "length k", least=2)
    scale: float = st.setting(1.0, "standard deviation of the logits", above=0)
    count: int = st.setting(10_000, "sequences of each half", least=1, small=200, full=100_000)

    def predict(self, key: st.Key) -> st.Record:
        return {
            "norm": ("norm", ["operator", "frobenius"], "norm of the error", None),
            "power": ("norm", [-0.5, 0.0], "power of the rank"),
        }

    def train(self, key: st.Key, family: str, rank: int) -> st.Record:
        for_layer, for_data, for_prediction = st.generator(key).spawn(3)
        dim = WIDTH * (max(self.ranks) if family == "fixed" else rank)
        layer = equal_spectrum_layer(for_layer, dim, self.heads, rank, scale=self.scale)
        total = np.asarray(layer.projection).sum(0)
        mean = np.full(dim, (family == "shifted") / dim**0.5)
        halves = []
        for _ in range(2):
            inputs, cross, rows = np.zeros((dim, dim)), np.zeros((dim, dim)), 0
            for begin in range(0, self.count, BLOCK):
                x = mean + sequences(for_data, min(BLOCK, self.count - begin), self.tokens, dim)
                moments = measure_moments(x, evaluate_layer(layer, x))
                inputs, cross, rows = inputs + moments.inputs, cross + moments.cross, rows + moments.rows
            known = self.tokens * np.outer(mean, mean)  # of the inputs' covariance, beyond the identity
            halves.append((cross - inputs @ total) / rows + known @ total)
        x = mean + sequences(for_data, FEW * dim, self.tokens, dim)
        moments = measure_moments(x, evaluate_layer(layer, x))
        bias = np.linalg.norm(predict_bias(layer, self.tokens, for_prediction)) / np.linalg.norm(total)
        operator = _operator_norm(*halves) / np.linalg.norm(total, 2)
        frobenius = math.sqrt(max(float(np.vdot(*halves)), 1e-30)) / np.linalg.norm(total)
        few = np.linalg.norm(moments.cross / moments.rows - total, 2) / np.linalg.norm(total, 2)
        return {
            "operator": ((), float(operator), "relative error in operator norm"),
            "frobenius": ((), float(frobenius), "relative error in Frobenius norm"),
            "bias": ((), float(bias), "predicted relative error in Frobenius norm"),
            "few": ((), float(few), f"relative error in operator norm, {FEW} d examples"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        growing, fixed, shifted = (trained.sel(family=family) for family in FAMILIES)
        slack = self.scale**2 / self.ranks[0] / math.log(self.ranks[-1] / self.ranks[0])
        correction = "corrections are of relative order scale^2/r; at the least rank one moves the slope by this much"
        yield st.Claim(
            "With logits of fixed size one gradient step from zero comes as close to the sum of projections, in "
            "operator norm, as r^-1/2, r the stable rank, which grows with the dimension",
            st.exponent(growing["operator"], "rank"),
            st.near(theory["power"].sel(norm="operator"), slack),
            correction,
            "power of the stable rank",
        )
        yield st.Claim(
            "In a fixed dimension the Frobenius norm of the error does not depend on the stable rank",
            st.exponent(fixed["frobenius"], "rank"),
            st.near(theory["power"].sel(norm="frobenius"), slack),
            correction,
            "power of the stable rank",
        )
        yield st.Claim(
            "At the largest rank the error is that of the closed form sum_i c Theta_i W_i, c = 1 - E sum_j a_j^2",
            (fixed["frobenius"] / fixed["bias"]).isel(rank=-1),
            st.near(1, 2 * self.scale**2 / self.ranks[-1]),
            "corrections are of relative order scale^2/r, doubled",
            "error over that of the closed form, Frobenius norms",
        )
        flat, quantity = st.near(0, 0.25), "power of the stable rank"
        text = "Control: for tokens whose mean is not zero the error does not fall with the stable rank"
        basis = "k |mean|^2 of the projection along the mean is left whatever the rank; half of the power 1/2"
        yield st.Claim(text, st.exponent(shifted["operator"], "rank"), flat, basis, quantity)
        text = f"Control: from {FEW} examples a dimension the error does not fall with the stable rank"
        basis = "the covariance of so few inputs is off by a constant in operator norm; half of the power 1/2"
        yield st.Claim(text, st.exponent(growing["few"], "rank"), flat, basis, quantity)


def _operator_norm(one: Array, other: Array) -> float:
    """Return the operator norm of what two noisy matrices share: singular vectors of one, value in the other."""
    values = []
    for chosen, tested in ((one, other), (other, one)):
        left, _, right = np.linalg.svd(chosen)
        values.append(abs(float(left[:, 0] @ tested @ right[0])))
    return sum(values) / 2
