"""`limits/learning-rate-transfer`: optimal learning rate against N, H and L (muTransfer)."""

from collections.abc import Iterator

import jax
import numpy as np

import manyheads.study as st
from manyheads.scaling.axes import LETTERS, Axis
from manyheads.scaling.checks.transfer_check import ALLOWED_DECADES, final_losses
from manyheads.scaling.trained.transformers import Recipe
from manyheads.studies.scaling.shared import optimal_rates as optima
from manyheads.studies.scaling.shared.parametrizations import CONSISTENT, Plan, choose_sizes, task_of
from manyheads.theory.papers import BORDELON
from manyheads.transformer.shape import Shape


class LearningRateTransfer(st.Study):
    """Final loss against the learning rate, and the optimal one against N, H or L, for every parametrization."""

    name = "limits/learning-rate-transfer"
    claim = "The optimal learning rate is independent of N, H, L; standard scaling shifts it"
    source = BORDELON.at("figure 2a: transfer of the learning rate over N")
    unread_prediction = "drifts are tested against half of the predicted power, by parametrization and axis"
    revision = 2

    task: str = st.setting("digits", "digits or text")
    axes: tuple[str, ...] = st.setting(("key_dim",), "which axes", full=("key_dim", "heads", "depth"))
    parametrizations: tuple[str, ...] = st.setting(
        ("limits", "half-logit", "mup", "standard"),
        "which of limits, half-logit, half-depth, mup, standard",
        small=("limits", "standard"),
    )
    base: tuple[int, int, int] = st.setting((8, 4, 2), "N, H, L at which all are one", small=(4, 2, 2))
    key_dims: tuple[int, ...] = st.setting((4, 8, 32), "key dimensions N", small=(4, 8))
    heads_counts: tuple[int, ...] = st.setting((2, 4, 16), "numbers of heads H")
    depths: tuple[int, ...] = st.setting((2, 8, 16), "numbers of blocks L")
    steps: int = st.setting(100, "updates of Adam", small=8, full=200)
    lowest: float = st.setting(4e-4, "lowest learning rate of the grid, which is widened at need", above=0, small=0.01)
    ratio: float = st.setting(2.5, "ratio of two learning rates", above=1, small=4.0)
    points: int = st.setting(6, "number of learning rates", least=3, small=3)

    def check(self) -> None:
        if "mup-half-logit" in self.parametrizations:
            raise st.UsageError("parametrization 'mup-half-logit': no law of its best rate is known; choose others")
        Recipe(self.steps)
        task_of(self.task, 1)
        self.plan()

    def cells(self) -> tuple[st.Cell, ...]:
        return self.plan().cells()

    def predict(self, key: jax.Array) -> st.Record:
        """Return the exponent of the size in the optimal learning rate: zero where a parametrization is consistent."""
        pairs = list(self.plan().pairs())
        powers = np.asarray([_power(*pair) for pair in pairs])
        names = [f"{parametrization} along {LETTERS[axis]}" for parametrization, axis in pairs]
        return {
            "power": ("parametrization", powers, "exponent of the size in the optimal learning rate"),
            "parametrization": ("parametrization", names, "parametrization and axis", None),
        }

    def train(self, key: jax.Array, parametrization: str, **sizes: int) -> st.Record:
        task, recipe = task_of(self.task, optima.BATCHES[self.task]), Recipe(self.steps, optima.EPSILON)
        network = self.plan().train_with(parametrization, **sizes)
        return optima.search_rates(
            self.learning_rates(), self.points, lambda rates: final_losses(task, *network, recipe, rates, key)
        )

    def claims(self, theory: st.Data, trained: st.Data) -> Iterator[st.Claim]:
        plan = self.plan()
        basis = f"half way from {ALLOWED_DECADES:g} to a learning rate proportional to 1/size, 0.90 decades"
        for name, axis in plan.pairs():
            power, who = _power(name, axis), f"{optima.NAMES[name]} parametrization"
            figure = optima.plan_drift(plan, trained, name, axis, power)
            if not power:
                yield optima.transfers(who, axis, figure)
            elif self.task != "text" or axis != "depth":  # no law is known for short runs of a shallow task
                yield optima.falls(who, axis, figure, optima.DRIFTS, basis)

    def pictures(self, theory: st.Data, trained: st.Data) -> Iterator[st.Panel]:
        yield optima.losses_picture(self.plan(), trained)

    def plan(self) -> Plan:
        sizes = choose_sizes(self.axes, self.key_dims, self.heads_counts, self.depths)
        return Plan(Shape(*self.base), sizes, self.parametrizations, "adam", epsilon=False)

    def learning_rates(self) -> np.ndarray:
        return optima.all_rates(self.lowest, self.ratio, self.points)


def _power(parametrization: str, axis: Axis) -> float:
    return 0.0 if parametrization in CONSISTENT or (parametrization == "mup" and axis != "depth") else -1.0
