"""`limits/approach`: convergence of transformers trained with Adam to the largest one along N, H and L."""

import math
from collections.abc import Iterator

import jax
import numpy as np

import manyheads.study as st
from manyheads.scaling.axes import LETTERS, WORDS, Axis
from manyheads.scaling.trained.trajectories import follow_networks
from manyheads.scaling.trained.transformers import Recipe
from manyheads.statistics import Interval
from manyheads.studies.scaling.shared import convergence
from manyheads.studies.scaling.shared.parametrizations import CONSISTENT, LABELS, Plan, choose_sizes, task_of
from manyheads.study.panels import spread_curve
from manyheads.theory.papers import BORDELON
from manyheads.transformer.shape import Shape

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

    task: str = st.setting("digits", "digits or text")
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
        task_of(self.task, 1)
        if any(len(sizes) < 3 for _, sizes in self.plan().sizes):
            raise st.UsageError("a power of the distance to the largest size needs two below it: give three or more")

    def cells(self) -> tuple[st.Cell, ...]:
        return self.plan().cells()

    def predict(self, key: jax.Array) -> st.Record:
        r"""Return the powers of the size: -1 for means, -1/2 for single networks, and what a drift without end shows.

        A network of size n computes averages over n independent parts (entries of a head, heads, blocks). They
        fluctuate by :math:`n^{-1/2}`, and so does everything computed of them; the mean over networks keeps what is of
        second order, :math:`n^{-1}`. Where the limit itself is random (`FLAT`) single networks do not converge.
        """
        pairs = list(self.plan().pairs())
        sizes = dict(self.plan().sizes)
        mean = [-1.0 if name in CONSISTENT else convergence.power_of_drift(sizes[axis]) for name, axis in pairs]
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

    def train(self, key: jax.Array, parametrization: str, **sizes: int) -> st.Record:
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

    def claims(self, theory: st.Data, trained: st.Data) -> Iterator[st.Claim]:
        for name, axis in self.plan().pairs():
            if name in CONSISTENT:
                yield from self._means(trained, name, axis)
                yield from self._scatters(trained, name, axis)
            elif name == "standard":
                yield from self._divergence(trained, axis)

    def distances(
        self, trained: st.Data, name: str, axis: Axis, quantity: str, place: int = -1
    ) -> convergence.SizeDistances:
        """Return the distances of one quantity, at one of the records unless it is the loss curve."""
        values = self.plan().along(trained, quantity, name, axis)  # (replicates, sizes, networks, ...)
        return convergence.distances_to_largest((values if quantity == "loss" else values.isel(record=place)).values)

    def _means(self, trained: st.Data, name: str, axis: Axis) -> Iterator[st.Claim]:
        sizes, letter = dict(self.plan().sizes)[axis], LETTERS[axis]
        drift, who = convergence.power_of_drift(sizes), f"{LABELS[name]} parametrization"
        measured = convergence.fall_of_mean(sizes, self.distances(trained, name, axis, "loss").mean).measured
        yield st.Claim(
            f"{who}: the mean loss curve converges as {letter} grows (exponent of its distance)",
            measured,
            st.below(drift),
            DRIFT.format(letter),
            "exponent of the size",
        )
        text = f"{who}: the distance of the mean loss curve to its limit scales as {letter}^-1"
        basis = f"half way from {letter}^-1 to a drift like log {letter}, which has no limit"
        yield st.Claim(text, measured, st.near(-1, (1 + drift) / 2), basis, "exponent of the size")

    def _scatters(self, trained: st.Data, name: str, axis: Axis) -> Iterator[st.Claim]:
        sizes, letter = dict(self.plan().sizes)[axis], LETTERS[axis]
        flat = FLAT.get((name, axis))
        law = f"is independent of {letter}" if flat else f"scales as {letter}^-1/2"
        for quantity in (flat,) if flat else QUANTITIES:
            for place, when in WHEN.items() if quantity != "loss" else ((-1, ""),):
                scatter = self.distances(trained, name, axis, quantity, place).scatter
                yield st.Claim(
                    f"{LABELS[name]} parametrization: the std over networks of the "
                    f"{' '.join(filter(None, (QUANTITIES[quantity], when, law)))}",
                    convergence.fall_of_scatter(sizes, scatter).measured,
                    st.near(0 if flat else ROOT, HALF_WAY),
                    "half way between parts that average out, -1/2, and parts that do not, 0",
                    "exponent of the size",
                )

    def _divergence(self, trained: st.Data, axis: Axis) -> Iterator[st.Claim]:
        """Test that the standard parametrization has no limit."""
        sizes, letter = dict(self.plan().sizes)[axis], LETTERS[axis]
        # L blocks add a variance of order one each to the stream, before any training; N and H matter through Adam.
        place = 0 if axis == "depth" else -1
        yield st.Claim(
            f"standard parametrization: the mean kernel of the stream {WHEN[place]} converges as {letter} grows "
            "(exponent of its distance)",
            convergence.fall_of_mean(sizes, self.distances(trained, "standard", axis, "kernel", place).mean).measured,
            st.below(convergence.power_of_drift(sizes)),
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

    def pictures(self, theory: st.Data, trained: st.Data) -> Iterator[st.Panel]:
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
        sizes = choose_sizes(self.axes, self.key_dims, self.heads_counts, self.depths)
        return Plan(Shape(*self.base), sizes, self.parametrizations, "adam")

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
                guide = convergence.effective_sizes(sizes)[0] / convergence.effective_sizes(sizes)
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
        effective = convergence.effective_sizes(sizes, scatter=True)
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
