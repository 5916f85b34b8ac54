"""Table of a parametrization at one shape, beside the base."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from manyheads._overview import Overview, Shown
from manyheads.errors import UsageError
from manyheads.transformer.shape import Shape

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

    from manyheads.scaling.parametrization.hyperparameters import MuonHyperparameters

COLUMNS = ("initial", "multiplier", "learning_rate", "epsilon", "weight_decay")
TRAINED_AS = (
    "batch size: the theory keeps it; a rate tuned at one batch size says nothing about another",
    "training horizon: the theory keeps the number of steps; a longer run may want another rate",
)
OUTSIDE = (*TRAINED_AS, "coupled L2 weight decay (inside the gradient), momentum, Adam's betas: the same at all sizes")
"""Settings that no table here scales, named in each of them; `TRAINED_AS` are those that rules of training change."""


@dataclass(frozen=True)
class Row:
    """Settings of one class of weights at a shape; factors are relative to the base shape, where all are one.

    That of decoupled weight decay is one over `learning_rate`, so that rate times decay, the share of a weight that a
    step takes away, stays. Derived here; the theory has no weight decay.
    """

    role: str  # the class, one of `manyheads.transformer.scaling.ROLES`
    initial: float  # factor on the initial std (on the constant at which gains start)
    multiplier: float  # factor on the forward multiplier m, the weight acting as m W; one in effective form
    learning_rate: float  # factor on the learning rate
    epsilon: float  # factor on Adam's epsilon; one for gradient descent
    weight_decay: float
    powers: dict[str, str]  # the same as powers of N, H, L and gamma0, by column
    rule: str = "adam"  # what steps the class: "adam", "sgd" or "muon"
    rate_factor: float = 1.0  # Muon's shape factor over that at the base, by which the rule multiplies the rate itself

    def at(self, learning_rate: float, epsilon: float = 1e-8, weight_decay: float = 0.0) -> dict[str, float]:
        """Return the numbers of this class, from those that were tuned at the base for its rule."""
        given = {"learning_rate": learning_rate, "epsilon": epsilon, "weight_decay": weight_decay}
        return {name: number * getattr(self, name) for name, number in given.items()}


@dataclass(frozen=True, repr=False)
class Table(Shown):
    """All rows of a parametrization at one shape, and the scales that belong to no weight.

    Logits are prefactor times N to the minus exponent times q . k; the prefactor makes the base what it was.
    """

    scheme: str
    optimizer: str
    form: str
    base: Shape
    shape: Shape
    rows: tuple[Row, ...]  # one for each class of weights
    logit_exponent: float
    logit_prefactor: float
    branch: float  # factor on what every block adds to the stream
    outside: tuple[str, ...] = OUTSIDE  # what the theory does not scale

    def __getitem__(self, role: str) -> Row:
        """Return the row of a role."""
        return {row.role: row for row in self.rows}[role]

    def at(
        self,
        learning_rate: float,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
        muon: MuonHyperparameters | None = None,
    ) -> dict[str, dict[str, float]]:
        """Return what every class needs, by role, from the numbers that were tuned at the base; Muon has its own.

        Examples
        --------
        >>> from manyheads.scaling import Parametrization
        >>> Parametrization(base=(8, 4, 2)).table((16, 4, 2)).at(learning_rate=1e-2, weight_decay=0.1)["value"]
        {'learning_rate': 0.005, 'epsilon': 5e-09, 'weight_decay': 0.2}
        """
        numbers = dict.fromkeys(("adam", "sgd"), (learning_rate, epsilon, weight_decay))
        if muon is not None:
            numbers["muon"] = (muon.learning_rate, muon.epsilon, muon.weight_decay)
        elif self.optimizer == "muon":
            raise UsageError("a table of Muon: give muon=MuonHyperparameters(learning_rate=...) beside AdamW's")
        return {row.role: row.at(*numbers[row.rule]) for row in self.rows}

    def column(self, name: str) -> dict[str, float]:
        """Return one of the columns by role, such as `"initial"`, `"multiplier"` or `"learning_rate"`."""
        return {row.role: getattr(row, name) for row in self.rows}

    def as_dict(self) -> dict[str, Any]:
        """Return the table as plain values, for JSON; sizes that a shape leaves out are left out."""
        found = asdict(self)
        for name in ("base", "shape"):
            found[name] = {size: value for size, value in found[name].items() if value is not None}
        return found

    def alike(self) -> list[list[Row]]:
        """Group the rows with equal numbers and powers, in the table's order."""
        found: dict[Any, list[Row]] = {}
        for row in self.rows:
            found.setdefault((row.rule, *_numbers(row), *row.powers.items()), []).append(row)
        return list(found.values())

    def to_dataframe(self) -> pd.DataFrame:
        """Return factors and powers as a pandas data frame, one row a class of weights."""
        powers = list(dict.fromkeys(name for row in self.rows for name in row.powers))
        columns = ("role", *COLUMNS, *(f"{name}_power" for name in powers))
        rows = [(row.role, *_numbers(row), *(row.powers.get(name) for name in powers)) for row in self.rows]
        return Overview("", columns, rows).frame()

    def plot(self) -> Figure:
        """Draw the factors as an image, one row a class of weights: powers of two above and below the base."""
        from manyheads.study.panels import Picture
        from manyheads.study.reporting.charts import draw_titled

        values = tuple(tuple(math.log2(number) for number in _numbers(row)) for row in self.rows)
        largest = max(1.0, *(abs(value) for row in values for value in row))
        return draw_titled(
            Picture(
                self._title,
                "",
                "",
                values,
                value_label="log2 of the factor on the base",
                x_ticks=("init", "mult.", "rate", "epsilon", "decay"),
                y_ticks=tuple(row.role for row in self.rows),
                limits=(-largest, largest),
                diverging=True,
            )
        )

    @property
    def _title(self) -> str:
        sizes = (f"({each.key_dim}, {each.heads}, {each.depth})" for each in (self.base, self.shape))
        return f"Factors from (N, H, L) = {' to '.join(sizes)}: {self.scheme}, {self.optimizer}, {self.form} form"

    def _overview(self) -> Overview:
        rows = [(", ".join(row.role for row in rows), *_numbers(rows[0])) for rows in self.alike()]
        notes = (f"logits: {self.logit_prefactor:.4g} N^-{self.logit_exponent:g} q.k; branches × {self.branch:.4g}",)
        return Overview(self._title, ("weights", *COLUMNS), rows, (*notes, *self.outside))


def _numbers(row: Row) -> tuple[float, ...]:
    return tuple(getattr(row, name) for name in COLUMNS)
