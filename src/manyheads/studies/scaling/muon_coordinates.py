"""`limits/muon-coordinates`: RMS update of every module under Muon against N, H, L and D, beside common recipes."""

import numpy as np

import manyheads.study as st
from manyheads.scaling.axes import LETTERS, Axis
from manyheads.scaling.checks.coordinate_check import TOLERANCE, check_growth
from manyheads.scaling.checks.growth_powers import least_growth, required_growth
from manyheads.scaling.trained.transformers import BY_WEIGHTS, Recipe, measure_updates
from manyheads.statistics import Interval
from manyheads.statistics.exponents import ExponentFit
from manyheads.studies.scaling.shared import parametrizations as scalings
from manyheads.studies.scaling.shared.updates import beyond, exponents_table, update_exponent, updates_picture, worst_of
from manyheads.theory.papers import JORDAN
from manyheads.transformer.shape import Shape

OWN_WEIGHTS = tuple(name for name in BY_WEIGHTS if not name.startswith("output"))
"""Updates by the weights alone whose inputs are normalized; those of W_O shrink where attention flattens."""
FOLLOWED = {"outputs": "outputs", "residual": "stream after the last block", "logits": "attention logits"}
FOLLOWED |= {name: f"{name.split('_by')[0].replace('_', ' ')} by its own weights" for name in BY_WEIGHTS}
FINITE_SIZE = 0.15
"""Allowed deviation of an update by weights: what a correction 1 + n^(-1/2) makes over the default sizes."""


# Recipes that go wrong along an axis: what grows, after the first or the last checkpoint, by which power, and why.
BREAKS: dict[tuple[str, Axis], tuple[str, int, float, str]] = {
    ("moonlight", "key_dim"): ("query_by_weights", -1, 0.5, "the factor grows as D^(1/2)"),
    ("moonlight", "heads"): ("query_by_weights", -1, 0.5, "the factor grows as D^(1/2)"),
    ("keller", "depth"): ("residual", -1, 1.0, "L blocks move the stream, each as much as one"),
    ("none", "stream"): ("query_by_weights", -1, 0.5, "a matrix of N H rows has singular values one whatever D"),
    ("heads-none", "heads"): ("query_by_weights", 0, 0.5, "a head's block takes up inputs of RMS one, H^(1/2)"),
    ("heads-keller", "heads"): ("output_by_weights", 0, 1.0, "a factor (D/N)^(1/2) on blocks that are summed"),
    ("heads-spectral", "heads"): ("output_by_weights", 0, 1.0, "the sum over heads is forgotten"),
}


class MuonCoordinates(st.Study):
    """Updates of every module under Muon against size: the table, and the recipes in use.

    AdamW's part (embeddings, gains, read-out) keeps its consistent rates in all of them, so that the matrices alone
    differ.
    """

    name = "limits/muon-coordinates"
    claim = "Under Muon, updates are independent of N, H, L, D; common recipes break"
    source = JORDAN
    unread_prediction = "targets follow from parametrization and axis of each claim; the prediction tabulates them"

    task: str = st.setting("digits", "digits or text")
    axes: tuple[str, ...] = st.setting(("key_dim", "heads", "depth", "stream"), "which axes", small=("heads",))
    parametrizations: tuple[str, ...] = st.setting(
        tuple(scalings.MUON_LABELS), "which scalings of Muon", choices=scalings.MUON_LABELS, small=("muon", "moonlight")
    )
    base: tuple[int, ...] = st.setting(
        (8, 4, 2), "N, H, L, and as a fourth number D, if it stays while N or H grow", small=(4, 2, 2)
    )
    key_dims: tuple[int, ...] = st.setting((4, 8, 32), "key dimensions N", full=(4, 8, 32, 64))
    heads_counts: tuple[int, ...] = st.setting((2, 4, 16), "numbers of heads H", small=(2, 4), full=(2, 4, 16, 32))
    depths: tuple[int, ...] = st.setting((2, 8, 16), "numbers of blocks L", full=(2, 8, 16, 32))
    streams: tuple[int, ...] = st.setting((16, 32, 128), "widths of the stream D", full=(16, 32, 128, 256))
    checkpoints: tuple[int, ...] = st.sweep((1, 25), "numbers of updates", count=1, small=(1, 2))
    learning_rate: float = st.setting(0.01, "Muon's learning rate at the base")
    adam_learning_rate: float = st.setting(3e-3, "AdamW's learning rate at the base")
    batch: int = st.setting(16, "sequences of a step")

    def check(self) -> None:
        Recipe(adam_learning_rate=self.adam_learning_rate)
        scalings.task_of(self.task, self.batch)
        self.plan()

    def cells(self) -> tuple[st.Cell, ...]:
        return self.plan().cells()

    def predict(self, key: st.Key) -> st.Record:
        stated = [[_prescribed(name, axis) for axis in self.axes] for name in self.parametrizations]
        exponents = [[[powers[q] for q in BY_WEIGHTS] for powers in row] for row in stated]
        return {
            "required": (("parametrization", "axis", "quantity"), exponents, "prescribed exponent"),
            "parametrization": ("parametrization", list(self.parametrizations), "scaling", None),
            "axis": ("axis", list(self.axes), "axis", None),
            "quantity": ("quantity", list(BY_WEIGHTS), "quantity", None),
        }

    def train(self, key: st.Key, parametrization: str, **sizes: int) -> st.Record:
        recipe = Recipe(epsilon=scalings.MUON_EPSILON, adam_learning_rate=self.adam_learning_rate)
        found = measure_updates(
            scalings.task_of(self.task, self.batch),
            *self.plan().train_with(parametrization, **sizes),
            recipe,
            self.learning_rate,
            self.checkpoints,
            key,
            fields=(*FOLLOWED, "loss"),
        )
        return {name: ("step", getattr(found, name), f"update of {text}") for name, text in FOLLOWED.items()} | {
            "loss": ("step", found.loss, "loss on the probe batch", "nat"),
            "step": ("step", np.asarray(self.checkpoints), "updates"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        for name, axis in self.plan().pairs():
            if (name, axis) in BREAKS:
                yield self._breaks(trained, name, axis)
            elif name not in scalings.RECIPES:
                yield self._by_weights(trained, name, axis)
                yield self._modules(trained, name, axis)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        columns = {name: name.replace("_by_weights", " by W").replace("_", " ") for name in FOLLOWED}
        note = "A recipe is shown only along axes where its networks differ from those of others."
        yield updates_picture(self.plan(), trained, columns, note, ("updates by the matrices", "updates of outputs"))
        yield exponents_table(self.plan(), trained, columns)

    def plan(self) -> scalings.Plan:
        return scalings.plan_of(self, "muon", epsilon=False, axes_of=scalings.axes_of(BREAKS))

    def exponent(self, trained: st.Data, name: str, axis: Axis, quantity: str, place: int = -1) -> ExponentFit:
        return update_exponent(self.plan(), trained, quantity, name, axis, place)

    def _by_weights(self, trained: st.Data, name: str, axis: Axis) -> st.Claim:
        """Claim that what the weights of a block move follows the table; per head its power of H is bounded only."""
        prescribed = _prescribed(name, axis)
        below = 0.5 if name == "muon-heads" and axis == "heads" else 0.0
        fits = [(self.exponent(trained, name, axis, q), prescribed[q]) for q in OWN_WEIGHTS]
        fit, wanted = max(fits, key=lambda pair: abs(pair[0].exponent - pair[1] + below / 2))
        interval = Interval(fit.interval.low - wanted, fit.interval.high - wanted, fit.interval.level)
        text = "scale" if not below else "scale by H^-1/2 to one times"
        return st.Claim(
            f"{scalings.MUON_LABELS[name]}: updates by the matrices of the blocks {text} with {LETTERS[axis]} as "
            "prescribed (worst deviation of an exponent)",
            (fit.exponent - wanted, interval),
            st.near(0, (below + FINITE_SIZE, FINITE_SIZE)),
            "a correction 1 + n^(-1/2) over these sizes"
            + ("; a head's block takes up the share N/n of inputs in n directions" if below else ""),
            "deviation of an exponent",
        )

    def _modules(self, trained: st.Data, name: str, axis: Axis) -> st.Claim:
        """Claim that stream and outputs are constant, as far as random parts at finite size let them be."""
        parametrization, growths = scalings.parametrization_of(name, Shape.of(self.base), "muon"), []
        required, least = required_growth(parametrization), least_growth(parametrization)
        for quantity in ("outputs", "residual"):
            values = self.plan().along(trained, quantity, name, axis).isel(step=-1)
            wanted, low = (getattr(powers[quantity], axis) for powers in (required, least))
            sizes = values[axis].values.tolist()
            growths.append(check_growth(quantity, axis, sizes, values.values, wanted, TOLERANCE[axis], least=low))
        return st.Claim(
            f"{scalings.MUON_LABELS[name]}: the updates of outputs and stream do not depend on {LETTERS[axis]} "
            "(worst deviation of an exponent)",
            beyond(worst_of(growths)),
            st.near(0, TOLERANCE[axis]),
            "half of the distance between two exponents of the theory; a deviation is counted from where finite size "
            "lets a consistent exponent lie",
            "deviation of an exponent",
        )

    def _breaks(self, trained: st.Data, name: str, axis: Axis) -> st.Claim:
        """Claim that a quantity grows by half of the power that is derived, at least."""
        quantity, place, power, because = BREAKS[name, axis]
        return st.Claim(
            f"{scalings.MUON_LABELS[name]}: the update of {FOLLOWED[quantity]} after {self.checkpoints[place]} steps "
            f"grows at least as {LETTERS[axis]}^{power / 2:g}",
            self.exponent(trained, name, axis, quantity, place),
            st.above(power / 2),
            f"half of the power that is derived, {power:g}: {because}",
            "exponent of the size",
        )


def _prescribed(name: str, axis: str) -> dict[str, float]:
    """Return the exponents of updates by weights in a consistent scaling of this logit and depth exponent."""
    required = required_growth(scalings.parametrization_of(name, Shape(1, 1, 1), "muon"))
    query, value = (getattr(required[f"{role}_by_weights"], axis) for role in ("query", "value"))
    return dict.fromkeys(BY_WEIGHTS, value) | dict.fromkeys(("query_by_weights", "key_by_weights"), query)
