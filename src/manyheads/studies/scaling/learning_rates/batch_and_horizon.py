"""`limits/batch-and-horizon`: optimal learning rate of Adam against the batch size and the number of steps."""

import math
from dataclasses import replace

import manyheads.study as st
from manyheads.scaling.checks.transfer_check import final_losses
from manyheads.scaling.trained.transformers import Recipe
from manyheads.studies.scaling.shared.optimal_rates import EPSILON, all_rates, search_rates
from manyheads.studies.scaling.shared.parametrizations import parametrization_of, task_of
from manyheads.transformer.shape import Shape

POWERS = {"batch": 0.5, "steps": -0.32}
"""Power of each size in the optimal learning rate, by the rules that are tested."""
TOLERANCE = 0.16  # half of the smaller power: nearer to the rule than to no dependence
NAMES = {"batch": "batch size", "steps": "number of steps"}
CHANGES = {"batch": "grows as the root of the batch size", "steps": "falls as the number of steps to the power -0.32"}
RULES = {
    "batch": "the square-root rule of Malladi et al., 2022, whose momenta are adapted as well; here they are kept",
    "steps": "measured on language models by Bjorck et al., 2025",
}


class BatchAndHorizon(st.Study):
    """Final loss against the learning rate, and the optimal one against the batch size and the number of steps.

    No table gives these powers: how the noise of gradients and the distance to the optimum enter is not derived. Along
    each axis the other size stays at its middle.
    """

    name = "limits/batch-and-horizon"
    claim = "Adam's optimal learning rate grows as the root of the batch, falls as steps^-0.32"
    source = st.Source(
        "bjorck2025horizons",
        "Scaling Optimal LR Across Token Horizons",
        "Johan Bjorck and Alon Benhaim and Vishrav Chaudhary and Furu Wei and Xia Song",
        2025,
        identifier="2409.19913",
        locus="the power of the token horizon; the batch size by the square-root rule of arXiv:2205.10287",
    )
    unread_prediction = "both powers are constants of the rules that are tested; the prediction holds them"

    task: str = st.setting("digits", "digits or text")
    shape: tuple[int, int, int] = st.setting((8, 4, 1), "N, H, L", small=(4, 2, 1))
    batches: tuple[int, ...] = st.sweep((4, 16, 64), "batch sizes", small=(2, 4), full=(4, 8, 16, 32, 64))
    steps: tuple[int, ...] = st.sweep((75, 300, 1200), "steps", small=(16, 32), full=(75, 150, 300, 600, 1200))
    lowest: float = st.setting(1e-3, "lowest learning rate of the grid, widened at need", above=0, small=2.5e-3)
    ratio: float = st.setting(2.0, "ratio of two learning rates", above=1, small=4.0)
    points: int = st.setting(6, "number of learning rates", least=3, small=4)

    def check(self) -> None:
        Shape.of(self.shape, "shape")
        task_of(self.task, self.batches[0])

    def cells(self) -> tuple[st.Cell, ...]:
        """Return every training once."""
        return tuple(dict.fromkeys(cell for axis in POWERS for cell in self.along(axis)))

    def predict(self, key: st.Key) -> st.Record:
        return {
            "power": ("axis", list(POWERS.values()), "power in the optimal learning rate"),
            "axis": ("axis", list(POWERS), "axis", None),
        }

    def train(self, key: st.Key, batch: int, steps: int) -> st.Record:
        shape = Shape(*self.shape)
        parametrization = parametrization_of("limits", shape, "adam")
        task, recipe = task_of(self.task, batch), Recipe(steps, EPSILON)
        return search_rates(
            all_rates(self.lowest, self.ratio, self.points),
            self.points,
            lambda rates: final_losses(task, parametrization, shape, recipe, rates, key),
        )

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        for axis, power in POWERS.items():
            found = self._along(trained, axis)
            optima = found["optimal_learning_rate"]
            law = optima.isel({axis: 0}, drop=True).mean("replicate") * (optima[axis] / optima[axis][0].values) ** power
            figure = st.exponent(optima, axis, predicted=law)
            if not (found["outcome"] == "inside").all() and hasattr(figure.value, "interval"):
                fit = figure.value
                figure = replace(figure, value=(fit.exponent, fit.interval.widened(math.inf)))
            yield st.Claim(
                f"The optimal learning rate of Adam {CHANGES[axis]}",
                figure,
                st.near(power, TOLERANCE),
                f"nearer to the rule than to no dependence; {RULES[axis]}",
                f"power of the {NAMES[axis]} in the optimal learning rate",
                "refuted" if axis == "batch" else "holds",
            )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        for axis, words in NAMES.items():
            loss, title = self._along(trained, axis)["loss"], f"Final loss against the learning rate, by {words}"
            found = {f"{size:,}": loss.sel({axis: size}).dropna("learning_rate") for size in loss[axis].values}
            what, note = "final training loss [nat]", "Means over replicates; bands range over all."
            yield st.lines(title, "learning_rate", what, found, log="xy", note=note)

    def along(self, axis: str) -> tuple[st.Cell, ...]:
        batch, steps = (each[len(each) // 2] for each in (self.batches, self.steps))
        if axis == "batch":
            return tuple(st.Cell(batch=size, steps=steps) for size in self.batches)
        return tuple(st.Cell(batch=batch, steps=size) for size in self.steps)

    def _along(self, trained: st.Data, axis: str) -> st.Data:
        (other,) = set(POWERS) - {axis}
        first = self.along(axis)[0]
        sizes = [cell[axis] for cell in self.along(axis)]
        return trained.sel({other: first[other], axis: sizes}).drop_vars(other)
