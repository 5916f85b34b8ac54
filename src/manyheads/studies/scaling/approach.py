"""`limits/approach`: convergence of transformers trained with Adam to the largest one along N, H and L.

Convergence in size: distance to training at the largest size, as a power of the size.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike
from scipy.optimize import brentq

import manyheads.study as st
from manyheads._arrays import takes_arrays
from manyheads.errors import ShapeError, check_rising
from manyheads.scaling.axes import LETTERS, WORDS, Axis
from manyheads.scaling.trained.trajectories import follow_networks
from manyheads.scaling.trained.transformers import Recipe
from manyheads.statistics import Interval, fit_exponent, mean_interval
from manyheads.statistics.distances import noise_of_mean
from manyheads.studies.scaling.shared.parametrizations import CONSISTENT, LABELS, TASKS, Plan, plan_of, task_of
from manyheads.study.panels import spread_curve
from manyheads.theory.papers import BORDELON

LARGEST_ERROR = 1 / 3  # relative, of the sum of squared distances: beyond it there is no distance to speak of
STEEPEST = 8.0  # powers beyond it are those of a single distance that stands out, and none
LEVEL = 0.99


class SizeDistances(NamedTuple):
    r"""Squared distances of every size but the largest to it, each (replicates, sizes - 1).

    With :math:`d_i` the difference of network i at a size and network i at the largest size,

    .. math::
        \text{mean} = |\bar d|^2 - \text{scatter}/S, \qquad \text{scatter} = \frac{1}{S-1}\sum_i |d_i - \bar d|^2,

    where :math:`|\cdot|^2` is the mean square of the entries: unbiased estimates of the squared distance between
    expectations, negative where that is below the noise, and of the variance of one difference.
    """

    mean: np.ndarray
    scatter: np.ndarray


class Fall(NamedTuple):
    """The power of the size in a distance."""

    power: float  # the figure; 0 where the distance does not stand out from the noise
    interval: Interval  # at 99%; infinite where the distance does not stand out from the noise
    samples: np.ndarray | None  # (replicates,) linearized, with the power as their mean; None where nothing stands out

    @property
    def measured(self) -> np.ndarray | tuple[float, Interval]:
        """Measure of a claim: the samples, or the figure and its interval where there are none."""
        return (self.power, self.interval) if self.samples is None else self.samples


@takes_arrays
def distances_to_largest(values: Float[ArrayLike, "replicates sizes networks *entries"]) -> SizeDistances:
    """Return how far networks are from those of the largest size, in expectation and one by one."""
    array = np.asarray(values, np.float64)
    if array.ndim < 4 or array.shape[1] < 2 or array.shape[2] < 2:
        raise ShapeError(
            f"values of shape {array.shape}: expected (replicates, sizes, networks, ...), "
            "with two or more sizes and two or more networks"
        )
    gaps = (array[:, :-1] - array[:, -1:]).reshape(*(array.shape[0], array.shape[1] - 1, array.shape[2], -1))
    return SizeDistances((gaps.mean(2) ** 2).mean(-1) - noise_of_mean(gaps), gaps.var(2, ddof=1).mean(-1))


def effective_sizes(sizes: Sequence[int], scatter: bool = False) -> np.ndarray:
    r"""Return the sizes of which distances to a *finite* largest size are plain powers.

    A mean that is b/n from its limit is :math:`b\,(1/n - 1/m)` from the mean at the largest size m, the power -1 of
    :math:`(1/n - 1/m)^{-1}`. Independent networks that scatter by :math:`(v/n)^{1/2}` differ by
    :math:`(v/n + v/m)^{1/2}`, the power -1/2 of :math:`(1/n + 1/m)^{-1}`.

    Examples
    --------
    >>> effective_sizes((4, 8, 16)).tolist(), effective_sizes((4, 12), scatter=True).tolist()
    ([5.333333333333333, 16.0], [3.0])
    """
    check_rising("sizes", sizes)
    small, largest = 1 / np.asarray(sizes[:-1], np.float64), 1 / sizes[-1]
    return 1 / (small + largest if scatter else small - largest)


def power_of_drift(sizes: Sequence[int]) -> float:
    r"""Return the power that `fall_of_mean` finds in a drift without end, :math:`\log(m/n)`.

    Distances to the largest size fall with the size even where there is no limit. What grows like a power of the size
    has a power above this one, what has a limit one below it.

    Examples
    --------
    >>> round(power_of_drift((4, 8, 16, 64)), 2), round(power_of_drift((4, 8, 16, 1024)), 2)
    (-0.42, -0.2)
    """
    squares = np.log(sizes[-1] / np.asarray(sizes[:-1], np.float64)) ** 2
    return fall_of_mean(sizes, np.stack([squares, squares])).power


def fall_of_mean(sizes: Sequence[int], squares: Float[np.ndarray, "replicates distances"]) -> Fall:
    r"""Fit a power of the effective size to the distances of means, which may be below the noise.

    The power p and a prefactor solve :math:`\sum_n (y_n - c\,s_n^{2p})(1, \log s_n) = 0` for the mean over replicates
    y of the squared distances (the score of a Poisson regression, which asks of y only that its mean is a power: no
    logarithm of a noisy number is taken). The interval is Student's for the replicates' shares in the score.

    References
    ----------
    Santos Silva, Tenreyro, "The log of gravity", Review of Economics and Statistics 88, 2006.
    """
    logs = np.log(effective_sizes(sizes))
    middle = squares.mean(0)
    total = float(middle.sum())
    nothing = Interval(-np.inf, np.inf, LEVEL)
    error = float(np.std(squares.sum(1), ddof=1)) / np.sqrt(len(squares)) if len(squares) > 1 else np.inf
    if len(logs) < 2 or not np.isfinite(total) or total <= 0 or error > LARGEST_ERROR * total:
        return Fall(0.0, nothing, None)
    wanted = float(middle @ logs) / total  # mean logarithm of the size, weighted by the squared distances

    def tilted(power: float) -> tuple[float, float]:
        weights = np.exp(2 * power * (logs - logs.mean()))
        weights /= weights.sum()
        mean = float(weights @ logs)
        return mean, float(weights @ (logs - mean) ** 2)

    ends = [tilted(power)[0] - wanted for power in (-STEEPEST, STEEPEST)]
    if ends[0] >= 0 or ends[1] <= 0:  # beyond the steepest: nothing but the first or the last distance is there
        return Fall(0.0, nothing, None)
    power = float(brentq(lambda p: tilted(p)[0] - wanted, -STEEPEST, STEEPEST))
    samples = power + squares @ (logs - wanted) / (2 * tilted(power)[1] * total)
    return Fall(power, mean_interval(samples, LEVEL), samples)


def fall_of_scatter(sizes: Sequence[int], squares: Float[np.ndarray, "replicates distances"]) -> Fall:
    """Fit a power of the effective size to the scatter of single networks."""
    if not np.isfinite(squares).all() or not (squares > 0).all():
        return Fall(0.0, Interval(-np.inf, np.inf, LEVEL), None)
    fit = fit_exponent(effective_sizes(sizes, scatter=True), np.sqrt(squares), level=LEVEL)
    return Fall(fit.exponent, fit.interval, np.asarray(fit.replicate_exponents))


BATCHES = {"digits": 16, "text": 8}
QUANTITIES = {"loss": "loss curve", "kernel": "kernel of the stream", "pattern": "attention pattern"}
WHEN = {0: "before training", -1: "after training"}
DRIFT = "at these sizes a drift like log {0} would have this power, and one like a power of {0} a higher one"
ROOT, HALF_WAY = -0.5, 0.25  # independent parts average out; half way from there to no fall at all
FLAT = {("half-logit", "key_dim"): "pattern", ("half-depth", "depth"): "kernel"}
"""Quantities that stay random in the limit: logits of every head at the logit exponent 1/2, the stream at the depth
exponent 1/2, where it adds up random blocks like a Brownian motion."""


class Approach(st.Study):
    """Distance of loss curves and kernels to those of the largest N, H and L, of means and of single networks."""

    name = "limits/approach"
    revision = 2
    claim = "Loss curves and kernels converge as N, H, L grow, except under standard scaling"
    source = BORDELON.at("figures 6 to 12: training converges as N, H, L grow; powers are derived here")
    unread_prediction = "the limit has no closed form: distances are to the largest network"

    task: str = st.setting("digits", "digits or text", choices=TASKS)
    axes: tuple[str, ...] = st.setting(("key_dim", "heads", "depth"), "which axes", small=("key_dim",))
    parametrizations: tuple[str, ...] = st.setting(
        ("limits", "half-logit", "half-depth", "standard"),
        "which of limits, half-logit, half-depth, mup, mup-half-logit, standard",
        small=("limits", "standard"),
    )
    # Heads and replicates enough that at the smallest size distances stand out from the noise, and claims can change.
    base: tuple[int, int, int] = st.setting(
        (2, 4, 2), "N, H, L at which all are one; initial logits are (N of the base / N)^(1/2)", small=(2, 8, 1)
    )
    key_dims: tuple[int, ...] = st.setting(
        (4, 8, 16, 32), "N; others are compared with the last", small=(1, 2, 4), full=(4, 8, 16, 32, 64)
    )
    heads_counts: tuple[int, ...] = st.setting((4, 8, 16, 32), "numbers of heads H", full=(4, 8, 16, 32, 64))
    depths: tuple[int, ...] = st.setting((2, 4, 8, 16), "numbers of blocks L", full=(2, 4, 8, 16, 32))
    steps: int = st.setting(40, "updates of Adam", least=2, small=3, full=80)
    learning_rate: float = st.setting(0.003, "its learning rate at the base", above=0)
    networks: int = st.setting(8, "networks of a replicate, on the same batches", least=2, small=2, full=32)

    def check(self) -> None:
        if any(len(sizes) < 3 for _, sizes in self.plan().sizes):
            raise st.UsageError("a power of the distance to the largest size needs two below it: give three or more")

    def cells(self) -> tuple[st.Cell, ...]:
        return self.plan().cells()

    def predict(self, key: st.Key) -> st.Record:
        r"""Return the powers of the size: -1 for means, -1/2 for single networks, and what a drift without end shows.

        A network of size n computes averages over n independent parts (entries of a head, heads, blocks). They
        fluctuate by :math:`n^{-1/2}`, and so does everything computed of them; the mean over networks keeps what is of
        second order, :math:`n^{-1}`. Where the limit itself is random (`FLAT`) single networks do not converge.
        """
        pairs = list(self.plan().pairs())
        sizes = dict(self.plan().sizes)
        mean = [-1.0 if name in CONSISTENT else power_of_drift(sizes[axis]) for name, axis in pairs]
        single = [
            [ROOT if name in CONSISTENT and FLAT.get((name, axis)) != q else 0.0 for q in QUANTITIES]
            for name, axis in pairs
        ]
        places = [f"{name} along {LETTERS[axis]}" for name, axis in pairs]
        return {
            "mean": ("parametrization", mean, "power of the size in a distance of means"),
            "scatter": (("parametrization", "quantity"), single, "power of a scatter"),
            "parametrization": ("parametrization", places, "parametrization and axis", None),
            "quantity": ("quantity", list(QUANTITIES), "quantity", None),
        }

    def train(self, key: st.Key, parametrization: str, **sizes: int) -> st.Record:
        task, records = task_of(self.task, BATCHES[self.task]), tuple(sorted({0, self.steps // 4, self.steps}))
        network, recipe = self.plan().train_with(parametrization, **sizes), Recipe(self.steps)
        loss, kernel, pattern, logits = follow_networks(
            task, *network, recipe, self.learning_rate, records, networks=self.networks, key=key
        )
        return {
            "loss": (("network", "step"), loss, QUANTITIES["loss"], "nat"),
            "kernel": (("network", "record", "token", "token_too"), kernel, QUANTITIES["kernel"]),
            "pattern": (("network", "record", "token", "place"), pattern, QUANTITIES["pattern"]),
            "logits": (("network", "record"), logits, "root mean square of the attention logits"),
            "step": ("step", np.arange(self.steps), "updates"),
            "record": ("record", np.asarray(records), "updates"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        for name, axis in self.plan().pairs():
            if name in CONSISTENT:
                yield from self._means(trained, name, axis)
                yield from self._scatters(trained, name, axis)
            elif name == "standard":
                yield from self._divergence(trained, axis)

    def distances(self, trained: st.Data, name: str, axis: Axis, quantity: str, place: int = -1) -> SizeDistances:
        """Return the distances of one quantity, at one of the records unless it is the loss curve."""
        values = self.plan().along(trained, quantity, name, axis)  # (replicates, sizes, networks, ...)
        return distances_to_largest((values if quantity == "loss" else values.isel(record=place)).values)

    def _means(self, trained: st.Data, name: str, axis: Axis) -> st.Claims:
        sizes, letter = dict(self.plan().sizes)[axis], LETTERS[axis]
        drift, who = power_of_drift(sizes), f"{LABELS[name]} parametrization"
        measured = fall_of_mean(sizes, self.distances(trained, name, axis, "loss").mean).measured
        text = f"{who}: the mean loss curve converges as {letter} grows (exponent of its distance)"
        quantity = "exponent of the size"
        yield st.Claim(text, measured, st.below(drift), DRIFT.format(letter), quantity)
        text = f"{who}: the distance of the mean loss curve to its limit scales as {letter}^-1"
        basis = f"half way from {letter}^-1 to a drift like log {letter}, which has no limit"
        yield st.Claim(text, measured, st.near(-1, (1 + drift) / 2), basis, "exponent of the size")

    def _scatters(self, trained: st.Data, name: str, axis: Axis) -> st.Claims:
        sizes, letter = dict(self.plan().sizes)[axis], LETTERS[axis]
        flat = FLAT.get((name, axis))
        law = f"is independent of {letter}" if flat else f"scales as {letter}^-1/2"
        for quantity in (flat,) if flat else QUANTITIES:
            for place, when in WHEN.items() if quantity != "loss" else ((-1, ""),):
                scatter = self.distances(trained, name, axis, quantity, place).scatter
                yield st.Claim(
                    f"{LABELS[name]} parametrization: the std over networks of the "
                    f"{' '.join(filter(None, (QUANTITIES[quantity], when, law)))}",
                    fall_of_scatter(sizes, scatter).measured,
                    st.near(0 if flat else ROOT, HALF_WAY),
                    "half way between parts that average out, -1/2, and parts that do not, 0",
                    "exponent of the size",
                )

    def _divergence(self, trained: st.Data, axis: Axis) -> st.Claims:
        """Test that the standard parametrization has no limit."""
        sizes, letter = dict(self.plan().sizes)[axis], LETTERS[axis]
        # L blocks add a variance of order one each to the stream, before any training; N and H matter through Adam.
        place = 0 if axis == "depth" else -1
        yield st.Claim(
            f"standard parametrization: the mean kernel of the stream {WHEN[place]} converges as {letter} grows "
            "(exponent of its distance)",
            fall_of_mean(sizes, self.distances(trained, "standard", axis, "kernel", place).mean).measured,
            st.below(power_of_drift(sizes)),
            DRIFT.format(letter),
            "exponent of the size",
            "refuted",
        )
        if "limits" in self.parametrizations:
            one, other = (self.distances(trained, name, axis, "loss").mean[:, -1] for name in ("standard", "limits"))
            diverged = not np.isfinite(one - other).all()
            yield st.Claim(
                f"From {letter}={sizes[-2]} to {sizes[-1]} the mean loss curve changes more under standard scaling",
                (0.0, Interval(-math.inf, math.inf)) if diverged else one - other,
                st.above(0),
                "positive where the first distance is the larger one, both free of the noise of the means",
                "difference of squared distances",
            )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        plan = self.plan()

        def plot(name: str, axis: Axis) -> tuple[st.Curve, ...]:
            rows = plan.along(trained, "loss", name, axis).mean(("replicate", "network")).values  # (sizes, steps)
            steps = range(self.steps)
            names = [f"size {n + 1} of {len(rows)}" for n in range(len(rows))]
            return tuple(spread_curve(steps, row, names[n], group=n) for n, row in enumerate(rows))

        note = "Means over all networks of all replicates, on the same batches in every plot."
        yield plan.multiples("Mean loss curves by size", "updates", "loss on the batch [nat]", plot, note)
        for axis, _ in plan.sizes:
            yield self._means_picture(trained, axis)
        for axis, _ in plan.sizes:
            yield self._scatters_picture(trained, axis)

    def plan(self) -> Plan:
        return plan_of(self, "adam")

    def _means_picture(self, trained: st.Data, axis: Axis) -> st.Panel:
        sizes, letter = dict(self.plan().sizes)[axis], LETTERS[axis]
        x, curves = tuple(map(float, sizes[:-1])), list[st.Curve]()
        for name in [name for name, other in self.plan().pairs() if other == axis]:
            found = self.distances(trained, name, axis, "loss")
            middle, count = found.mean.mean(0), len(found.mean)
            error = found.mean.std(0, ddof=1) / math.sqrt(count) if count > 1 else 0 * middle
            seen = (middle > 0) & np.isfinite(middle)
            squares = (np.maximum(middle + sign * error, 0.01 * np.abs(middle)) for sign in (0, -1, 1))
            y, low, high = (tuple(np.sqrt(np.where(seen, each, np.nan)).tolist()) for each in squares)
            group = list(LABELS).index(name)
            curves.append(st.Curve(x, y, LABELS[name], group=group, low=low, high=high))
            if name == "limits":
                floor = np.sqrt(found.scatter.mean(0) / (self.networks * count))
                curves.append(spread_curve(x, floor, "subtracted noise", "predicted", group))
                guide = effective_sizes(sizes)[0] / effective_sizes(sizes)
                guide = guide * (math.sqrt(middle[0]) if middle[0] > 0 else 1.0)
                curves.append(spread_curve(x, guide, f"1/{letter} - 1/{sizes[-1]}", "reference"))
        return st.Lines(
            f"Distance of the mean loss curve to that of {letter}={sizes[-1]}",
            WORDS[axis],
            "root mean square over updates [nat]",
            tuple(curves),
            log_x=True,
            log_y=True,
            note="The noise of the means is subtracted from the squares; bands are one standard error over replicates; "
            "squares below zero are not shown.",
            shows=(f"mean loss curve converges as {letter}",),
        )

    def _scatters_picture(self, trained: st.Data, axis: Axis) -> st.Panel:
        sizes, letter = dict(self.plan().sizes)[axis], LETTERS[axis]
        x, curves = sizes[:-1], list[st.Curve]()
        for name in [name for name, other in self.plan().pairs() if other == axis and name in CONSISTENT]:
            for quantity, text in QUANTITIES.items():
                scatter = np.sqrt(self.distances(trained, name, axis, quantity).scatter)  # (replicates, sizes - 1)
                relative = scatter / scatter[:, :1]
                curves.append(spread_curve(x, relative, f"{text}, {LABELS[name]}", group=len(curves)))
        effective = effective_sizes(sizes, scatter=True)
        for power, label in ((ROOT, f"(1/{letter} + 1/{sizes[-1]})^(1/2)"), (0.0, "")):
            curves.append(spread_curve(x, (effective / effective[0]) ** power, label, "reference"))
        return st.Lines(
            f"Std over networks along {letter}, after training",
            WORDS[axis],
            f"relative to {letter}={sizes[0]}",
            tuple(curves),
            log_x=True,
            log_y=True,
            note=f"Of the difference between a network and the one of {letter}={sizes[-1]} with the same seed. Means "
            "over replicates; bands range over all.",
            shows=(f"is independent of {letter}", f"scales as {letter}^-1/2"),
        )
