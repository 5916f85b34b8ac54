"""`limits/weight-decay`: optimal learning rate of AdamW against H: no, coupled and independent weight decay."""

from typing import Literal

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.scaling.checks.transfer_check import ALLOWED_DECADES, LAST, PIECE
from manyheads.scaling.trained.transformers import Recipe
from manyheads.scaling.trained.weight_decay import train_with_decay
from manyheads.studies.scaling.shared import optimal_rates as optimal
from manyheads.studies.scaling.shared.parametrizations import parametrization_of, task_of
from manyheads.transformer.shape import Shape

EARLY = 20  # relative updates are measured after this part of the steps, and at the end
HALF_ROOT = 0.25  # half of the exponent 1/2 by which relative updates grow with H under one rate

LABELS: dict[str, str] = {
    "table": "rates by the table, no decay",
    "table-coupled": "rates by the table, coupled decay",
    "table-independent": "rates by the table, independent decay",
    "one-rate": "one rate, no decay",
    "one-rate-decay": "one rate with decay",
}
"""Settings of AdamW in cells → label in plots. Under one rate coupled and independent decay are one."""


class WeightDecay(st.Study):
    """Final loss against the learning rate over H, with weight decay or without, by the table's rates or one rate.

    Decay takes the share s = (learning rate) (weight decay) of the matrices of the blocks in every step. Independent
    decay keeps s at every size, coupled decay keeps the weight decay, so that s falls with the rate of each matrix.
    While the learning rate is scanned the share s is kept, or the weight decay, for which s is proportional to the rate
    and as stated at the middle of the first grid.
    """

    name = "limits/weight-decay"
    claim = "The table's learning rate transfers with independent decay; decay does not make one rate do"
    source = st.Source(
        "kosson2025decay",
        "Weight Decay may matter more than muP for Learning Rate Transfer in Practice",
        "Atli Kosson and Jeremy Welborn and Yang Liu and Martin Jaggi and Xi Chen",
        2025,
        identifier="2510.19093",
        locus="independent weight decay; relative updates",
    )
    unread_prediction = "targets follow from the setting of each claim; the prediction tabulates them"

    task: str = st.setting("digits", "digits or text")
    base: tuple[int, int, int] = st.setting((8, 4, 1), "N, H, L at which all settings are one", small=(4, 2, 1))
    heads_counts: tuple[int, ...] = st.sweep((2, 4, 16), "numbers of heads H", small=(2, 4))
    total_decays: tuple[float, ...] = st.setting(
        (2.0,),
        "T s at the base, in e-folds over the training; none is always there",
        above=0,
        order="rising",
        full=(0.3, 1.0, 4.0),
    )
    steps: int = st.setting(300, "updates T", least=EARLY, small=20, full=600)
    scan: Literal["share", "decay"] = st.setting("share", "what is kept while the learning rate is scanned")
    batch: int = st.setting(16, "sequences of a step")
    lowest: float = st.setting(5e-4, "lowest learning rate of the grid, which is widened at need", above=0, small=0.01)
    ratio: float = st.setting(2.0, "ratio of two learning rates", above=1, small=4.0)
    points: int = st.setting(6, "number of learning rates", least=3, small=3)

    def check(self) -> None:
        Shape.of(self.base, "base")
        task_of(self.task, self.batch)

    def cells(self) -> tuple[st.Cell, ...]:
        """Return every network once, small ones first: at the base all settings with one T s are one."""
        cells = {self.cell(*setting, heads) for heads in self.heads_counts for setting in self.settings()}
        return tuple(sorted(cells, key=lambda cell: (cell["heads"], cell["total_decay"], cell["setting"])))

    def predict(self, key: st.Key) -> st.Record:
        """Return the exponents of H that are derived: of the optimal rate, and of relative updates early and late."""
        names = list(LABELS)
        one = np.array([name.startswith("one-rate") for name in names])
        forgotten = np.array([name in ("table-independent", "one-rate-decay") for name in names])
        early, late = np.where(one, 0.5, -0.5), np.where(forgotten, 0.0, np.nan)
        return {
            "optimum": ("setting", np.where(one, -1.0, 0.0), "exponent of H in the optimal learning rate"),
            "early": ("setting", early, "exponent of H in the first relative updates"),
            "late": ("setting", late, "exponent of H once the start is forgotten"),
            "setting": ("setting", names, "setting", None),
        }

    def train(self, key: st.Key, setting: str, total_decay: float, heads: int) -> st.Record:
        """Train a network for each learning rate, from the same start on the same batches, and find the optimum."""
        shape = Shape(self.base[0], heads, self.base[2])
        parametrization = parametrization_of("limits", Shape(*self.base), "adam")
        task, recipe = task_of(self.task, self.batch), Recipe(self.steps, optimal.EPSILON)
        grid = optimal.all_rates(self.lowest, self.ratio, self.points)
        middle = (len(grid) - self.points) // 2 + (self.points - 1) // 2
        early, late = (np.full(len(grid), np.nan) for _ in range(2))
        last, one = max(1, self.steps // LAST), setting.startswith("one-rate")
        around = slice(max(1, self.steps // (2 * EARLY)), 3 * self.steps // (2 * EARLY) + 1)

        def train(learning_rates: np.ndarray) -> np.ndarray:
            share = total_decay / self.steps
            shares = share * (learning_rates / grid[middle] if self.scan == "decay" else np.ones(len(learning_rates)))
            places, losses = optimal.places_of(learning_rates, grid), np.full(len(learning_rates), np.nan)
            for part in range(0, len(places), PIECE):  # one compiled program serves all grids
                chosen = np.arange(part, part + PIECE).clip(max=len(places) - 1)
                rates, coupled = learning_rates[chosen], setting == "table-coupled"
                network = task, parametrization, shape, recipe, rates, shares[chosen], key
                found = train_with_decay(*network, one_rate=one, coupled=coupled)
                losses[chosen] = found.losses[:, -last:].mean(1)
                late[places[chosen]] = found.relative_updates[:, -last:].mean(1)
                early[places[chosen]] = found.relative_updates[:, around].mean(1)
            return losses

        return optimal.search_rates(grid, self.points, train) | {
            "early": ((), early[middle], f"relative update after 1/{EARLY} of the steps"),
            "late": ((), late[middle], "relative update at the end"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        yield from (self._optimum(trained, setting, 0.0) for setting in ("table", "one-rate"))
        yield from (self._updates(trained, "early", setting, 0.0) for setting in ("table", "one-rate"))
        decays = "table-independent", "one-rate-decay"
        for total in self.total_decays:
            yield from (self._optimum(trained, setting, total) for setting in decays)
            yield from (self._updates(trained, "late", setting, total) for setting in decays)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        optima, late, loss = (
            {_named(*setting): self._along(trained, name, *setting) for setting in self.settings()}
            for name in ("optimal_learning_rate", "late", "loss")
        )
        note, what = "Means over replicates; bands range over all.", "optimal learning rate of the base shape"
        transfer, shows = f"{note} A horizontal line is transfer.", ("the optimal learning rate",)
        yield st.lines("Optimal learning rate along H", "heads", what, optima, log="xy", note=transfer, shows=shows)
        title = f"Final loss against the learning rate at H = {self.heads_counts[-1]}"
        largest = {name: values.isel(heads=-1).dropna("learning_rate") for name, values in loss.items()}
        yield st.lines(title, "learning_rate", "final training loss [nat]", largest, log="xy", note=note)
        title, what = "Relative update of the values' weights at the end", "relative update at the end"
        note = "Norm of an update over that of the weight, at the middle of the first grid of learning rates."
        yield st.lines(title, "heads", what, late, log="xy", note=note, shows=("at the end",))

    def settings(self) -> tuple[tuple[str, float], ...]:
        decays = [(name, total) for total in self.total_decays for name in LABELS if name not in ("table", "one-rate")]
        return (("table", 0.0), ("one-rate", 0.0), *decays)

    def cell(self, setting: str, total: float, heads: int) -> st.Cell:
        if heads == self.base[1]:
            setting = "table-independent" if total else "table"
        return st.Cell(setting=setting, total_decay=total, heads=heads)

    def _along(self, trained: st.Data, name: str, setting: str, total: float) -> xr.DataArray:
        cells = [self.cell(setting, total, heads) for heads in self.heads_counts]
        picked = [trained[name].sel(cell, drop=True) for cell in cells]
        return xr.concat(picked, xr.Variable("heads", list(self.heads_counts)))

    def _optimum(self, trained: st.Data, setting: str, total: float) -> st.Claim:
        """Claim that the optimum stays, or, under one rate without decay, that it falls."""
        optima, outcomes = (self._along(trained, name, setting, total) for name in ("optimal_learning_rate", "outcome"))
        who = _named(setting, total)
        figure = optimal.drift(who, optima, "heads", -1.0 if setting.startswith("one-rate") else 0.0, outcomes)
        if setting == "one-rate":
            basis = f"half way from {ALLOWED_DECADES:g} to a learning rate proportional to 1/H, 0.90 decades"
            return optimal.falls(who, "heads", figure, optimal.DRIFTS, basis)
        return optimal.transfers(who, "heads", figure, "refuted" if setting == "one-rate-decay" else "holds")

    def _updates(self, trained: st.Data, when: str, setting: str, total: float) -> st.Claim:
        """Claim the exponent of H in relative updates, at the middle of the first grid."""
        target = 0.0 if when == "late" else 0.5 if setting == "one-rate" else -0.5
        power = {0.5: "grow as H^1/2", -0.5: "fall as H^-1/2", 0.0: "do not depend on H"}[target]
        where = "at the end" if when == "late" else f"after 1/{EARLY} of the steps"
        values = self._along(trained, when, setting, total)
        return st.Claim(
            f"{_named(setting, total)}: relative updates of the values' weights {power} {where}",
            st.exponent(values.assign_coords(setting=_named(setting, total)), "heads", "H"),
            st.near(target, HALF_ROOT),
            "half of the exponent 1/2 that separates the laws; once the start is forgotten s alone sets the size of "
            "uncorrelated updates, not of correlated ones",
            "exponent of H in relative updates",
            "refuted" if when == "late" and setting == "one-rate-decay" else "holds",
        )


def _named(setting: str, total: float) -> str:
    return f"{LABELS[setting]}, T s = {total:g}" if total else LABELS[setting]
