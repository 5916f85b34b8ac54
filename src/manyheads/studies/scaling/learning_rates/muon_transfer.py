"""`limits/muon-transfer`: optimal learning rate of Muon against N, H and L, beside common recipes."""

import numpy as np

import manyheads.study as st
from manyheads.scaling.axes import Axis
from manyheads.scaling.checks.transfer_check import ALLOWED_DECADES, final_losses
from manyheads.scaling.trained.transformers import Recipe
from manyheads.studies.scaling.shared import optimal_rates as optima
from manyheads.studies.scaling.shared.parametrizations import MUON_EPSILON, TASKS, Plan, axes_of, plan_of, task_of
from manyheads.theory.papers import JORDAN

TABLES = ("muon", "muon-half-logit", "muon-half-depth", "muon-heads")
RECIPES_SWEPT = ("moonlight", "keller", "heads-none", "heads-keller")
DRIFTS: dict[tuple[str, Axis], float] = {
    ("moonlight", "key_dim"): -0.5,
    ("moonlight", "heads"): -0.5,
    ("keller", "depth"): -1.0,
    ("heads-none", "heads"): -0.5,
    ("heads-keller", "heads"): -0.5,
    ("mup", "depth"): -1.0,
    ("standard", "key_dim"): -1.0,
    ("standard", "heads"): -1.0,
}
"""Recipe and axis → the power of the size in the optimal learning rate of its groups: that of what the table gives over
what the recipe gives. W_O of Keller Jordan's factor per head asks for H^-1, the other head blocks for H^-1/2."""


class MuonTransfer(st.Study):
    """Final loss against the learning rate of Muon, and the optimal one against N, H or L, beside common recipes.

    AdamW's part keeps one consistent rate; only Muon's is swept. ``"mup"`` and ``"standard"`` train all weights by
    AdamW, whose learning rate is then the one that is swept.
    """

    name = "limits/muon-transfer"
    claim = "Muon's optimal learning rate is independent of N, H, L; common recipes shift it"
    source = JORDAN
    unread_prediction = "drifts are tested against what still counts as transfer, by recipe and axis"

    task: str = st.setting("digits", "digits or text", choices=TASKS)
    axes: tuple[str, ...] = st.setting(("key_dim", "heads", "depth"), "which axes", small=("heads",))
    parametrizations: tuple[str, ...] = st.setting(
        (*TABLES, *RECIPES_SWEPT), "which scalings of Muon, mup or standard", small=("muon", "moonlight")
    )
    base: tuple[int, int, int] = st.setting((8, 4, 2), "N, H, L at which recipes of a split are one", small=(4, 2, 2))
    key_dims: tuple[int, ...] = st.setting((4, 8, 32), "key dimensions N")
    heads_counts: tuple[int, ...] = st.setting((2, 4, 16), "numbers of heads H", small=(2, 4))
    depths: tuple[int, ...] = st.setting((2, 4, 16), "numbers of blocks L")
    steps: int = st.setting(50, "updates", small=8, full=200)
    lowest: float = st.setting(2.5e-3, "lowest of Muon's learning rates, widened at need", above=0, small=0.01)
    ratio: float = st.setting(2.0, "ratio of two learning rates", above=1, small=4.0)
    points: int = st.setting(7, "number of learning rates", least=3, small=3)
    adam_learning_rate: float = st.setting(3e-3, "AdamW's learning rate at the base")

    def check(self) -> None:
        Recipe(self.steps, adam_learning_rate=self.adam_learning_rate)
        self.plan()

    def cells(self) -> tuple[st.Cell, ...]:
        return self.plan().cells()

    def predict(self, key: st.Key) -> st.Record:
        """Return the exponent of the size in the optimal learning rate: zero where the table is followed."""
        return optima.predicted_powers(self.plan(), lambda *pair: DRIFTS.get(pair, 0.0), "recipe and axis")

    def train(self, key: st.Key, parametrization: str, **sizes: int) -> st.Record:
        task = task_of(self.task, optima.BATCHES[self.task])
        recipe = Recipe(self.steps, MUON_EPSILON, self.adam_learning_rate)
        network = self.plan().train_with(parametrization, **sizes)
        rates = optima.all_rates(self.lowest, self.ratio, self.points)
        return optima.search_rates(rates, self.points, lambda rates: final_losses(task, *network, recipe, rates, key))

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        plan = self.plan()
        for name, axis in plan.pairs():
            power, who = DRIFTS.get((name, axis), 0.0), f"{optima.NAMES[name]} parametrization"
            figure = optima.plan_drift(plan, trained, name, axis, power)
            if power:
                basis = f"what still counts as transfer; {-power * np.log10(8):.2f} decades are derived"
                yield optima.falls(who, axis, figure, ALLOWED_DECADES, basis)
            else:
                yield optima.transfers(who, axis, figure)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        yield optima.losses_picture(self.plan(), trained)

    def plan(self) -> Plan:
        return plan_of(self, "muon", epsilon=False, axes_of=axes_of(DRIFTS))
