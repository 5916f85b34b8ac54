"""`meanfield/saddle-to-saddle`: one drop with merged key-query weights, one per eigenvector with separate ones."""

import jax
import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.errors import CertificateError
from manyheads.theory.meanfield.incontext.crossings import count_drops, half_times
from manyheads.theory.meanfield.incontext.linear_attention.heads import draw_heads, train_heads
from manyheads.theory.meanfield.incontext.linear_attention.plateau_escape import Drop, predict_drops
from manyheads.theory.meanfield.incontext.linear_attention.regression import InContextRegression

KINDS = ("separate", "merged")
TIME = "steps x learning rate"
TAIL = 12.0  # widths of the last drop for which training goes on after it


class SaddleToSaddle(st.Study):
    """Linear attention trained on sampled prompts of in-context regression, with merged and with separate weights."""

    name = "meanfield/saddle-to-saddle"
    claim = "Merged key-query weights learn in one drop, separate ones in one per eigenvector"
    source = st.Source(
        "zhang2025incontext",
        "Training Dynamics of In-Context Learning in Linear Attention",
        "Yedi Zhang and Aaditya K. Singh and Peter E. Latham and Andrew Saxe",
        2025,
        identifier="2501.16265",
        locus="abstract: one drop, saddle-to-saddle dynamics; the times from random initial weights are derived here",
    )
    revision = 3
    grid = {"attention": KINDS, "std": "stds"}

    eigenvalues: tuple[float, ...] = st.setting(
        (1.0, 0.6, 0.36), "Of the covariance of the tokens", small=(1.0, 0.5), full=(1.0, 0.7, 0.5, 0.35)
    )
    prompt_length: int = st.setting(10, "Pairs of a prompt")
    heads: int = st.setting(8, "Heads; separate keys and queries have rank one", least=1, small=4, full=12)
    stds: tuple[float, ...] = st.sweep(
        (0.1, 0.05, 0.025),
        "Standard deviations of the initial weights",
        least=1e-9,
        falling=True,
        small=(0.1, 0.05),
        full=(0.1, 0.05, 0.025, 0.0125),
    )
    batch: int = st.setting(200, "New prompts of a step", least=1, small=8, full=128)
    learning_rate: float = st.setting(0.03, "Length of a step", small=0.1)
    records: int = st.setting(800, "Recorded circuits", least=1, small=50)

    def check(self) -> None:
        if not 2 <= self.task.dim <= self.heads:
            raise st.UsageError(f"heads={self.heads}: give two eigenvalues or more, and as many heads of rank one")

    def predict(self, key: st.Key) -> st.Record:
        """Return what does not depend on the initial weights: levels of the saddles, optimum, widths of the drops."""
        task = self.task
        return {
            "level": ("saddle", task.levels, "population loss at the saddles"),
            "optimum": ("direction", task.optimum, "optimal circuit"),
            "width": ("direction", task.optimum ** (-1 / 3) / task.spectrum**2, "width of the drops", TIME),
            "growth": ((), float(np.linalg.norm(task.spectrum**2)), "growth rate of merged heads"),
        }

    def train(self, key: st.Key, attention: str, std: float) -> st.Record:
        """Train on new prompts in every step; predict the time course from the same initial weights."""
        task, (first, second) = self.task, jax.random.split(key)
        heads = draw_heads(first, task.dim, self.heads, std, rank=1 if attention == "separate" else None)
        try:
            theory = predict_drops(task, heads)
            expected = theory.half_times
        except CertificateError:  # drops overlap: data, left out where the prediction is compared
            theory, expected = None, np.full(task.dim, np.nan)
        slowest = task.optimum[-1] ** (-1 / 3) / task.spectrum[-1] ** 2
        last = 3 * slowest / std if theory is None else float(expected.max())
        duration, rate = 1.5 * last + TAIL * slowest, self.learning_rate
        found = train_heads(
            task, heads, second, duration=duration, learning_rate=rate, batch=self.batch, records=self.records
        )
        learned = np.einsum("tdd->td", found.circuits) / task.optimum
        courses = np.full_like(learned, np.nan) if theory is None else theory.learned(found.times)
        loss = task.levels[0] + (-np.diff(task.levels) * (courses**2 - 2 * courses)).sum(1)  # of diagonal circuits
        halves = np.minimum(half_times(found.times, learned), found.times[-1])
        quarter = learned[-len(learned) // 4 :].mean(0)
        return {
            "time": ("record", found.times, "time", TIME),
            "loss": ("record", found.losses, "population loss"),
            "learned": (("record", "direction"), learned, "circuit over its optimum"),
            "theory": ("record", loss, "loss predicted from the initial weights"),
            "half": ("direction", halves, "half time", TIME),
            "expected": ("direction", expected, "half time predicted from the initial weights", TIME),
            "drops": ((), float(count_drops(found.times, found.losses)), "drops of the loss"),
            "final": ("direction", quarter, "circuit over its optimum, mean of the last quarter"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        smallest, dims, logs = self.stds[-1], len(self.eigenvalues), np.log(1 / np.asarray(self.stds))
        separate, merged = (trained.sel(attention=kind) for kind in KINDS)
        width, optimum, delay = theory["width"], theory["optimum"], separate["half"] - separate["expected"]

        # Root mean square errors of the loss over that of a staircase delayed by the widths of its drops.
        delayed = float((np.diff(theory["level"]) ** 2 * np.cumsum(width.values)).sum())
        last = trained.sel(std=smallest)
        course = ((last["loss"] - last["theory"]) ** 2).mean("record") ** 0.5
        course = course / (delayed / last["time"].max("record")) ** 0.5

        drops, quantity = last["drops"], "number of drops"
        text = f"With separate rank-one keys and queries the loss falls in {dims} drops, std {smallest:g}"
        basis = "a count: half a drop on average; two drops merge where a plateau happens to be short"
        found = drops.sel(attention="separate")
        yield st.Claim(text, found, st.near(dims, 0.5), basis, quantity, resolution=0.25)
        text = f"With merged key-query weights the loss falls in one drop, std {smallest:g}"
        basis, found = "a count: half a drop", drops.sel(attention="merged")
        yield st.Claim(text, found, st.near(1, 0.5), basis, quantity, resolution=0.25)
        yield st.Claim(
            "Separate heads learn the eigenvectors in the order of decreasing eigenvalues (share of trainings)",
            (separate["half"].diff("direction") > 0).all("direction").mean("std"),
            st.near(1, 0.25),
            "exceptions need an initial weight below std^(1 - ratio of squared eigenvalues) along the larger "
            "eigenvector; more than one in four would refute the order",
            "share of trainings in that order",
            bounds=(0.0, 1.0),
            resolution=0.25 / len(self.stds),
        )
        yield st.Claim(
            f"Plateaus lie at the levels of the saddles, std {smallest:g} (distance over step, mid-plateau)",
            _plateau_gaps(theory, separate.sel(std=smallest)),
            st.near(0, 0.05),
            "mid-plateau the growing head has x = 2 width/duration, which lowers the loss by 2x^3 of a step: under "
            "0.05 for plateaus of seven widths",
            "distance over the step of the loss",
        )
        yield st.Claim(
            "The first drop is when the scalar equation says (difference in widths of the drop, mean over std)",
            (delay[..., 0].mean("std", skipna=False) / width[0]).dropna("replicate"),
            st.near(0, 0.5),
            "the prediction is matched up to terms smaller than the width; half a width for steps of finite length, "
            "which delay a drop by learning rate x ln(1/std), and for the noise of the batch",
            "delay of the drop (widths)",
        )
        yield st.Claim(
            "The loss curve follows the staircase predicted from the initial weights up to the widths of drops, "
            f"std {smallest:g} (log ratio of rms errors)",
            st.log(course.sel(attention="separate")).dropna("replicate"),
            st.below(0),
            "an inequality: smaller than the rms error of a staircase in which every drop is delayed by its width, the "
            "order of what the matching neglects, and by the widths of those before it",
            "rms error over that of the delayed staircase (ln)",
        )
        yield st.Claim(
            f"The loss curve of merged heads follows the reduced equation, std {smallest:g}",
            course.sel(attention="merged").dropna("replicate"),
            st.near(0, (np.inf, 0.25)),
            "rms error in the same unit; the reduction is exact up to powers of the initial weights, so a sixteenth of "
            "the delays is left for the noise of the batch",
            "rms error over that of the delayed curve",
        )
        offset = Drop(0, 0, divergence=0.0, width=float(width[0])).half_time
        yield st.Claim(
            "The first plateau of separate heads lasts in proportion to 1/std of the initialization (exponent)",
            st.exponent(separate["half"].isel(direction=0) - offset, "std", "the std", "divergence of the first drop"),
            st.near(-1, 0.05),
            "the divergence, which is the half time plus .85 widths, scales exactly; a third of a width, of about ten "
            "at the largest std, moves the exponent by less than this",
        )
        yield st.Claim(
            "The drop of merged heads is delayed by ln(1/std) over the growth rate (slope times rate)",
            st.slope(merged["half"].isel(direction=0), "std", logs) * float(theory["growth"]),
            st.near(1, 0.1),
            "growth is exponential until the circuit is of order std^2 from saturation; corrections of order std at "
            "the largest std",
            "slope times the growth rate",
        )
        yield st.Claim(
            "Both end at the inverse covariance regularized by the prompt length (distance over that to the inverse "
            "covariance)",
            ((trained["final"] - 1) * optimum / (1 / np.asarray(self.eigenvalues) - optimum)).mean(
                ("attention", "std", "direction")
            ),
            st.near(0, 0.1),
            "stationary noise of gradient descent averages out over the last quarter; its mean effect is of order "
            "learning rate/batch",
            "relative distance",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        note = "Dashed: predicted from the same initial weights. Grey: d largest eigenvectors known."
        for kind in KINDS:
            part = trained.sel(attention=kind, std=self.stds[-1])
            drops = part["drops"].values.astype(int)
            title = f"{kind} key-query weights, std {self.stds[-1]:g}: {drops.min()} to {drops.max()} drops"
            yield st.trajectories(f"Loss with {title}", part, "time", "loss", "theory", theory["level"], note=note)

    @property
    def task(self) -> InContextRegression:
        return InContextRegression(self.eigenvalues, self.prompt_length)


def _plateau_gaps(theory: st.Data, part: st.Data) -> xr.DataArray:
    """Return |loss - level| over the step halfway between consecutive half times, mean over plateaus, per replicate."""
    levels, times = theory["level"].values, np.sort(part["half"].values, axis=1)
    rows = zip((times[:, 1:] + times[:, :-1]) / 2, part["time"].values, part["loss"].values, strict=True)
    gaps = (np.asarray([np.interp(*row) for row in rows]) - levels[1:-1]) / (levels[:-2] - levels[1:-1])
    return xr.DataArray(np.abs(gaps).mean(1), dims="replicate")
