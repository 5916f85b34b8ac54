"""`demo/scaling`: updates of the demo's transformer at twice its heads and depth, scaled by the table and unscaled."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.data import TextWindows
from manyheads.data.characters import read_characters
from manyheads.demo.text import TextTraining
from manyheads.scaling.checks.coordinate_check import TOLERANCE
from manyheads.scaling.checks.growth_powers import QUANTITIES, least_growth, required_growth
from manyheads.scaling.parametrization.parametrization import Parametrization
from manyheads.scaling.parametrization.power_laws import Power
from manyheads.scaling.parametrization.table import Table
from manyheads.scaling.task import Task
from manyheads.scaling.trained.transformers import Recipe, measure_updates
from manyheads.study.panels import Multiples, spread_curve
from manyheads.theory.joma.text.record import character_config
from manyheads.theory.papers import BORDELON
from manyheads.transformer.scaling import ROLES
from manyheads.transformer.shape import Shape

DRAWN = {"outputs": "the outputs", "residual": "the residual stream", "logits": "the attention logits"}
WORDS = {"the table": "scaled", "plain": "plain"}
COLUMNS = {"initial": "init std", "learning_rate": "learning rate", "epsilon": "Adam's epsilon"}


class DemoScaling(st.Study):
    """RMS updates of the demo's transformer and of one with twice its heads and depth, scaled and unscaled."""

    name = "demo/scaling"
    revision = 3
    claim = "Scaled by the table, updates keep their size at twice the heads and depth"
    source = BORDELON.at("table 1: initial standard deviations, multipliers and learning rates for Adam")
    unread_prediction = "the prediction is the table itself; the claims test the growth of the updates that it implies"

    text: Path | None = st.setting(None, "UTF-8 file; by default Python's own documentation")
    key_dim: int = st.setting(16, "Key dimension of the demo's shape, at which the learning rate is tuned")
    heads: int = st.setting(4, "Its heads")
    depth: int = st.setting(2, "Its blocks")
    length: int = st.setting(32, "Characters of a window")
    batch: int = st.setting(4, "Windows of a step")
    learning_rate: float = st.setting(3e-3, "Adam's learning rate at that shape")
    steps: tuple[int, ...] = st.setting((1, 2, 4, 8, 16), "Updates after which the RMS change is measured")

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text."""
        return TextTraining(text=self.text).inputs()

    def cells(self) -> tuple[st.Cell, ...]:
        """Return the demo's own shape and the larger one."""
        return tuple(st.Cell(heads=shape.heads, depth=shape.depth) for shape in (self.base, self.target))

    @property
    def base(self) -> Shape:
        """The demo's shape."""
        return Shape(self.key_dim, self.heads, self.depth)

    @property
    def target(self) -> Shape:
        """Twice the heads and twice the depth."""
        return Shape(self.key_dim, 2 * self.heads, 2 * self.depth)

    def table(self) -> Table:
        """Return the factors of every class of weights at the larger shape."""
        return Parametrization.complete_p(self.base).table(self.target)

    def predict(self, key: st.Key) -> st.Record:
        """Return the table of factors from the demo's shape to the larger one."""
        table = self.table()
        return {"role": ("role", list(ROLES), "weights")} | {
            name: ("role", [getattr(table[role], name) for role in ROLES], label) for name, label in COLUMNS.items()
        }

    def train(self, key: st.Key, heads: int, depth: int) -> st.Record:
        """Train one shape with and without the table, and measure the RMS updates."""
        made = {"scaled": Parametrization.complete_p(self.base), "plain": Parametrization.standard(self.base)}
        task = self._task()
        given = Shape(self.key_dim, heads, depth), Recipe(epsilon=1e-8), self.learning_rate, self.steps, key
        moved = [measure_updates(task, each, *given, fields=tuple(DRAWN)) for each in made.values()]
        found: dict[str, tuple[str | tuple[str, ...], Sequence[object] | np.ndarray, str]] = {
            "parametrization": ("parametrization", list(made), "numbers"),
            "step": ("step", list(self.steps), "step"),
        }
        for name, module in ((name, module) for name, module in QUANTITIES.items() if name in DRAWN):
            values = np.stack([getattr(each, name) for each in moved])
            found |= {name: (("parametrization", "step"), values, f"rms update of {module}")}
        return found

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        p = Parametrization.complete_p(self.base)
        required, least = required_growth(p), least_growth(p)
        # One doubling of the heads and one of the depth: the tolerances of both axes add up.
        allowed = TOLERANCE["heads"] + TOLERANCE["depth"]
        quantity = "update, larger over smaller model (log2)"
        for name, words in DRAWN.items():
            target, lowest = _doublings(required[name]), _doublings(least[name])
            below = f", or {target - lowest:g} less while random parts count" if lowest < target else ""
            yield st.Claim(
                f"Scaled by the table, the rms update of {words} is that of the smaller model",
                self._growth(trained, name, "scaled"),
                st.near(target, (target - lowest + allowed, allowed)),
                f"log2 of the ratio; powers are a half apart, so a quarter for each of two doublings{below}",
                quantity,
            )
        yield st.Claim(
            "Without the table, the rms update of the residual stream is that of the smaller model",
            self._growth(trained, "residual", "plain"),
            st.near(0, (_doublings(required["residual"]) - _doublings(least["residual"]) + allowed, allowed)),
            "the same range; at an unscaled learning rate wider and deeper models have larger updates",
            quantity,
            "refuted",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        yield _draw_table(self.table())
        yield self._draw_motions(trained)

    def _task(self) -> Task:
        vocabulary, (training, _) = read_characters(self.text)
        template = character_config(self.base, len(vocabulary), self.length)
        return Task(template, TextWindows(training, self.length, self.batch))

    def _at(self, trained: st.Data, shape: Shape, parametrization: str) -> st.Data:
        return trained.sel(heads=shape.heads, depth=shape.depth, parametrization=parametrization)

    def _growth(self, trained: st.Data, name: str, parametrization: str) -> xr.DataArray:
        """Return log2 of the RMS update at the larger shape over the demo's, at the last step, by replicate."""
        small, large = (self._at(trained, shape, parametrization)[name] for shape in (self.base, self.target))
        return st.log(large / small).isel(step=-1) / np.log(2)

    def _draw_motions(self, trained: st.Data) -> Multiples:
        large = _listed(self.target)
        drawn = {f"{_listed(self.base)}, the demo's": self._at(trained, self.base, "scaled")}
        drawn |= {f"{large}, {word}": self._at(trained, self.target, of) for word, of in WORDS.items()}
        steps, parts = trained["step"].values, list(enumerate(drawn.items()))
        curves = tuple(
            tuple(spread_curve(steps, part[name].values, label, group=group) for group, (label, part) in parts)
            for name in DRAWN
        )
        means = (self._growth(trained, "residual", name).mean() for name in ("scaled", "plain"))
        scaled, plain = (f"{float(np.exp2(mean)):.2f}" for mean in means)
        note = (
            "Root mean square change since the initialization, on a batch outside the training; bands range from the "
            "smallest to the largest seed. At the last step the update of the larger model's residual stream is "
            f"{scaled} times the demo's with the table, and {plain} times without: standard init, the demo's learning "
            "rate and epsilon for all weights, unscaled branches."
        )
        labels, shows = tuple(DRAWN.values()), ("Scaled by the table",)
        return Multiples("RMS updates", "step", "rms change", (curves,), ("",), labels, (), True, note, shows)


def _doublings(power: Power) -> float:
    """Return log2 of the growth of a power law under one doubling of the heads and one of the depth."""
    return power.heads + power.depth


def _listed(shape: Shape) -> str:
    return f"{shape.heads} heads × {shape.depth} layers"


def _draw_table(table: Table) -> st.Listing:
    """Draw the table of the larger shape, classes with equal numbers in one row."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for row in table.rows:
        laws = [" ".join(part for part in row.powers[name].split() if "γ" not in part) for name in COLUMNS]
        cells = [f"× {getattr(row, name):.4g}" for name in COLUMNS]
        shown = tuple(cell if law in ("1", "") else f"{cell}   ({law})" for cell, law in zip(cells, laws, strict=True))
        alike.setdefault(shown, []).append(row.role.replace("_", " "))
    logit = table.logit_prefactor * table.shape.key_dim**-table.logit_exponent
    note = (
        f"From {_listed(table.base)} to {_listed(table.shape)}, N = {table.shape.key_dim}; × is relative to the demo's "
        f"numbers. Logits are {logit:.3g} q·k as before, and every branch is multiplied by {table.branch:g}. Outside "
        "the theory: batch size, length of the training, momentum and Adam's betas. 'manyheads scale' prints this for "
        "any two shapes."
    )
    rows = tuple((", ".join(roles), *cells) for cells, roles in alike.items())
    return st.Listing("Factors of each weight at twice the heads and depth", ("weights", *COLUMNS.values()), rows, note)
