"""`recovery/passive-against-queries`: sequences, numbers and CPU time of learning from examples and by queries.

One layer of GPT's shape, with biases and a causal mask, is learned twice: by the student from random sequences, and by
queries. Both end with the layer; what differs is how many sequences they see, how many numbers they read of the
answers, and how long they compute. The student is told the number of heads, the form, and what number of sequences
suffices; the queries find out for themselves.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import numpy as np
import xarray as xr

from manyheads.errors import UsageError
from manyheads.recovery.examples.student import ENOUGH, StudentSettings, fit_student, free_numbers
from manyheads.recovery.fit.variable_projection import Examples, Form
from manyheads.recovery.layers.evaluation import evaluate_layer
from manyheads.recovery.layers.matching import compare_layers
from manyheads.recovery.planted.task import gpt_layer, sequences
from manyheads.recovery.queries.extraction import extract_layer
from manyheads.studies.recovery.cells import generator, label, of_cell
from manyheads.study import Cell, Claim, Lines, Source, Study, grid
from manyheads.study.claims import Measure
from manyheads.study.panels import Panel, spread_curve
from manyheads.theory.papers import CHEN_LI

HELD_OUT = 50  # sequences that tell the student whether to start again
RIGHT = 1e-10  # relative squared error at which it does not
EXACT = -6.0  # log10 of the relative error of matrices that are recovered: of the function's, about the square
OTHERS = ("noise", "verification")  # stages of an extraction that learn nothing of the layer
FORM = Form(key_bias=True, bias=True, causal=True)


@dataclass(frozen=True)
class PassiveAgainstQueries(Study):
    """Random sequences and queries both give the layer; queries save computing, not sequences.

    Attributes
    ----------
    dims
        Token dimensions.
    heads
        Of the layers, each of rank dim / heads.
    length
        Tokens of a random sequence.
    labels
        Numbers read for each free number of the layer that the student has to find.
    """

    name: ClassVar[str] = "recovery/passive-against-queries"
    claim: ClassVar[str] = "Random examples and queries recover the layer; queries save computation only"
    revision: ClassVar[int] = 2
    source: ClassVar[Source] = replace(
        CHEN_LI, locus="passive learning is the source's subject; the comparison with queries is made here"
    )
    unread_prediction: ClassVar[str] = (
        "the least number of sequences is a lower bound for the plot; the claims compare two learners"
    )

    dims: tuple[int, ...] = (8, 16, 32)
    heads: int = 2
    length: int = 4
    labels: float = 6.0

    def __post_init__(self) -> None:
        if not self.dims or list(self.dims) != sorted(set(self.dims)) or self.length < 2 or self.heads < 1:
            raise UsageError(f"dims={self.dims}, heads={self.heads}, length={self.length}: rising, positive, 2 or more")
        if any(dim % self.heads for dim in self.dims) or not self.labels >= ENOUGH:
            raise UsageError(
                f"dims={self.dims}, labels={self.labels}: multiples of heads={self.heads}, {ENOUGH:g} labels or more"
            )

    @classmethod
    def full(cls) -> PassiveAgainstQueries:
        """Return the study up to 64 dimensions and with four heads."""
        return cls(dims=(16, 32, 64), heads=4)

    @classmethod
    def small(cls) -> PassiveAgainstQueries:
        """Return the smallest configuration in which every claim can change."""
        return cls((4, 8), heads=1)

    def cells(self) -> tuple[Cell, ...]:
        """Return every dimension."""
        return grid(dim=self.dims)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the least number of calls: free numbers of the layer over the numbers that a call's last row has."""
        # Theta and W of rank d/m cost 2 d^2 - d^2/m numbers a head's pair of d x d/m factors, summed: 4 d^2 - 2 d^2/m.
        least = [(4 * dim**2 - 2 * dim**2 / self.heads) / dim for dim in self.dims]
        return xr.Dataset({"least": ("dim", least, label("sequences"))}, coords={"dim": list(self.dims)})

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Learn one layer from random sequences, and by queries."""
        dim = int(cell["dim"])
        for_layer, for_data, for_student, for_queries = generator(key).spawn(4)
        layer = gpt_layer(for_layer, dim, self.heads)
        free = free_numbers(Examples(np.zeros((1, 1, dim)), np.zeros((1, 1, dim)), FORM), self.heads)
        count = math.ceil(self.labels * free / (self.length * dim))
        x, held = (sequences(for_data, n, self.length, dim, distribution="gaussian") for n in (count, HELD_OUT))
        examples, held_out = (Examples(part, evaluate_layer(layer, part), FORM) for part in (x, held))
        settings = StudentSettings(labels=self.labels)
        fit = fit_student(examples, held_out, self.heads, for_student, wanted=RIGHT, settings=settings)

        begun = time.process_time()
        found = extract_layer(lambda x: evaluate_layer(layer, x), dim, seed=int(for_queries.integers(2**31)))
        seconds = time.process_time() - begun
        asked = [counts for stage, counts in found.counts.items() if stage not in OTHERS]
        errors = [compare_layers(layer, one.layer) for one in (fit, found)]
        logs = [math.log10(max(error.theta, error.projection, 1e-16)) for error in errors]
        timed = {"units": "s", "deterministic": False}
        return xr.Dataset(
            {
                "student_sequences": ((), float(count), label("sequences shown to the student")),
                "query_sequences": ((), float(sum(one.calls for one in asked)), label("sequences asked")),
                "student_numbers": ((), float(count * self.length * dim), label("numbers read by the student")),
                "query_numbers": ((), float(sum(one.numbers for one in asked)), label("numbers read by queries")),
                "student_error": ((), logs[0], label("log10 of the student's largest relative error")),
                "query_error": ((), logs[1], label("log10 of the queries' largest relative error")),
                "student_seconds": ((), fit.seconds, {"long_name": "CPU seconds of the student"} | timed),
                "query_seconds": ((), seconds, {"long_name": "CPU seconds of the queries"} | timed),
            }
        )

    def claims(self) -> tuple[Claim, ...]:
        """Ask whether both recover the layer, and which costs more."""
        largest = max(self.dims)

        def worst(name: str) -> Measure:
            return lambda predicted, trained: float(trained[name].max())

        def log_ratio(above: str, below: str) -> Measure:
            return lambda predicted, trained: np.log10(
                of_cell(trained, above, dim=largest) / of_cell(trained, below, dim=largest)
            )

        exact = "log10 of the worst relative error of Theta and W over all layers; the function's is smaller"
        return (
            Claim(
                "Random sequences determine every layer",
                worst("student_error"),
                quantity="relative error (log10), worst layer",
                target=EXACT,
                tolerance=(math.inf, 0.0),
                basis=exact,
            ),
            Claim(
                "Queries determine every layer",
                worst("query_error"),
                quantity="relative error (log10), worst layer",
                target=EXACT,
                tolerance=(math.inf, 0.0),
                basis=exact,
            ),
            Claim(
                f"At d = {largest} queries need fewer sequences than random examples",
                log_ratio("query_sequences", "student_sequences"),
                quantity="sequences of queries over those of examples (log10)",
                target=0.0,
                tolerance=(math.inf, 0.0),
                basis="log10 of the ratio, verification left out; all rows of a random sequence inform",
                expected="refuted",
                resolution=1e-3,
            ),
            Claim(
                f"At d = {largest} queries need less CPU time than random examples",
                log_ratio("student_seconds", "query_seconds"),
                quantity="CPU time of examples over that of queries (log10)",
                target=0.0,
                tolerance=(0.0, math.inf),
                basis="log10 of the ratio of CPU seconds, verification included for the queries",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show sequences, numbers and seconds by dimension."""
        table = trained.set_index(cell="dim").transpose("replicate", "cell")
        pictures = [
            ("Sequences", "sequences", "sequences", ("need fewer sequences",)),
            ("Numbers read", "numbers", "numbers in the answers", ()),
            ("Time", "seconds", "CPU time [s]", ("less CPU time",)),
        ]
        panels = []
        for title, name, y_label, shows in pictures:
            curves = [
                spread_curve(self.dims, table[f"{who}_{name}"].values, shown, group=group)
                for group, (who, shown) in enumerate((("student", "student, random sequences"), ("query", "queries")))
            ]
            if name == "sequences":
                least = predicted["least"].values[None]
                curves.append(spread_curve(self.dims, least, "free numbers / dimension", "reference"))
            counted = "counted for the queries" if name == "seconds" else "not counted"
            note = f"Bands: full range of the replicates. Verification is {counted}."
            drawn = tuple(curves)
            panels.append(Lines(title, "dimension d", y_label, drawn, log_x=True, log_y=True, note=note, shows=shows))
        return tuple(panels)
