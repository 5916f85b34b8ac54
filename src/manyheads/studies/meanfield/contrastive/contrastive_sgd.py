"""`meanfield/contrastive-sgd`: SGD in n dimensions against the overlap ODE, from exact and from random overlaps."""

import numpy as np

import manyheads.study as st
from manyheads.theory.meanfield import ContrastiveTask, overlap_trajectory, train_overlaps
from manyheads.theory.meanfield.contrastive.sgd_covariance import sgd_covariance
from manyheads.theory.meanfield.contrastive.stationary_states import growth_rates, norms_without_features
from manyheads.theory.papers import MENG

START = (0.15, 0.1, 0.5)  # Q_1, Q_2, q
ESCAPE = 0.3  # cosine at which a feature counts as found
ORDER = ("Q1", "Q2", "q")
UNIT = "samples per dimension"


class ContrastiveSgd(st.Study):
    """Distance of SGD from the ODE by dimension, and the time to find a feature from random weights."""

    name = "meanfield/contrastive-sgd"
    claim = "SGD for contrastive learning follows the overlap ODE with error n^(-1/2)"
    source = MENG.at("abstract: limit of high dimension; loss, ODE, fluctuations and escape time are derived here")
    revision = 2
    grid = {"dimension": "dimensions"}

    dimensions: tuple[int, ...] = st.sweep(
        (50, 100, 200, 400, 800, 1600, 3200),
        "dimensions n",
        least=8,
        small=(16, 32),
        full=(50, 100, 200, 400, 800, 1600, 3200, 6400, 12_800),
    )
    horizon: float = st.setting(30.0, "end time in samples per dimension", above=0, small=3.0)
    records: int = st.setting(50, "times at which SGD and ODE are compared", least=1, small=3)
    runs: int = st.setting(
        16, "runs of a replicate from exact initial overlaps, and as many from random weights", least=1, small=2
    )
    escape_horizon: float = st.setting(
        40.0, "end time of runs from random weights, and time of those that find no feature", above=0, small=4.0
    )

    def predict(self, key: st.Key) -> st.Record:
        """Return the trajectory of the ODE, deviations by linear response, and the slope of the escape time in ln n."""
        task = ContrastiveTask()
        path = overlap_trajectory(task, START, self._times())
        variances = np.einsum("tii->ti", sgd_covariance(task, START, self._times()))
        rates = growth_rates(task, (0.0, 0.0, norms_without_features(task)[-1]))
        return {
            "trajectory": (("time", "order"), path, "overlaps and squared norm"),
            "fluctuation": ((), variances.mean() ** 0.5, "sqrt n times the rms distance, by linear response"),
            "escape_slope": ((), 1 / (2 * rates.max()), "escape time per ln n", UNIT),
            "time": ("time", self._times(), "time", UNIT),
            "order": ("order", list(ORDER), "order parameter"),
            "dimension": ("dimension", list(self.dimensions), "dimension n"),
        }

    def train(self, key: st.Key, dimension: int) -> st.Record:
        task = ContrastiveTask()
        rng = st.generator(key, dimension)
        path = train_overlaps(task, np.tile(START, (self.runs, 1)), dimension, self._times(), rng)
        norm = norms_without_features(task)[-1]
        start = np.full((self.runs, 3), norm)
        start[:, :2] = rng.standard_normal((self.runs, 2)) * np.sqrt(norm / dimension)
        times = np.linspace(0, self.escape_horizon, 161)
        random = train_overlaps(task, start, dimension, times, rng)
        found = np.abs(random[..., :2]).max(-1) > ESCAPE * np.sqrt(random[..., 2])  # (times, runs)
        escape = np.where(found.any(0), times[found.argmax(0)], self.escape_horizon)
        return {
            "trajectory": (("time", "run", "order"), path, "overlaps and squared norm"),
            "escape": ((), np.median(escape), "median time to find a feature", UNIT),
            "time": ("time", self._times(), "time", UNIT),
            "order": ("order", list(ORDER), "order parameter"),
        }

    def _times(self) -> np.ndarray:
        return np.linspace(0, self.horizon, self.records + 1)[1:]

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        largest, escape = self.dimensions[-1], float(theory["escape_slope"])
        errors = st.distance(trained["trajectory"], theory["trajectory"], over=("time", "run", "order"))
        response = theory["fluctuation"] / trained["dimension"] ** 0.5
        yield st.Claim(
            "The rms distance between SGD in n dimensions and the overlap ODE scales as n^(-1/2)",
            st.exponent(errors, "dimension", "n", "rms distance over Q1, Q2, q", response),
            st.near(-0.5, (0.25, 0.1)),
            "fluctuations of a mean over n coordinates; corrections of order 1/n make the slope steeper at the "
            "smallest dimensions",
        )
        yield st.Claim(
            f"At n = {largest} the rms distance is that of linear response to the noise of the samples (ratio)",
            errors.sel(dimension=largest) * largest**0.5 / float(theory["fluctuation"]),
            st.near(1, 0.25),
            "the squared distance of a run has a standard deviation of 1.2 means, so that a replicate of 16 runs has "
            "0.15 of the root; corrections are of relative order 1/n",
            "distance, measured over predicted",
        )
        yield st.Claim(
            "From random weights the time to find a feature grows as ln(n) / (2 rate), rate the growth rate at Q = 0",
            st.slope(trained["escape"], "dimension", np.log(self.dimensions)),
            st.near(escape, 0.25 * escape),
            "initial overlaps of size n^(-1/2) grow exponentially; a quarter for the smallest dimensions, whose "
            "initial overlaps are no longer small",
            "growth of the time per unit of ln n",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        first = trained["trajectory"].isel(replicate=0, run=0)
        small, large = (first.sel(dimension=size) for size in (self.dimensions[0], self.dimensions[-1]))
        curves = {f"n = {self.dimensions[-1]}": large}, {"ODE": theory["trajectory"]}
        title, what = "Overlaps and squared norm: ODE and one run of SGD", "overlaps Q1, Q2 and squared norm q"
        yield st.lines(title, "time", what, *curves, {f"n = {self.dimensions[0]}": small})
        logs, escape = st.log(trained["dimension"]), trained["escape"]
        law = {"ln(n) / (2 rate)": theory["escape_slope"] * (logs - logs.mean()) + escape.mean()}
        what, note = f"median time [{UNIT}]", "Band: replicates. Dashed: the predicted slope, through the mean."
        title, shows = "Time to find a feature from random weights", ("From random weights",)
        yield st.lines(title, "dimension", what, {"SGD": escape}, law, log="x", note=note, shows=shows)
