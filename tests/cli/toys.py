"""Studies for the command line: slow ones, and ones that fail where no unit is to blame."""

import os
import time
from dataclasses import replace
from pathlib import Path

import xarray as xr

from manyheads.study import Source, Study, Verdict, grid

PLACE = {"long_name": "place", "units": "m"}


class Patient(Study):
    """Does next to nothing, as slowly as the environment's PATIENCE asks, or fails when it compares."""

    name = "toy/patient"
    claim = "what is counted is what is there"
    source = Source("peano1889", "Arithmetices principia", "Giuseppe Peano", 1889, venue="Turin")

    units: int = 12
    target: float = 1.0
    fault: str = "none"

    def cells(self):
        return grid(place=tuple(range(self.units)))

    def predict(self, key):
        return xr.Dataset({"x": ((), 1.0, PLACE)})

    def train(self, key, place):
        time.sleep(float(os.environ.get("PATIENCE", "0")))
        return xr.Dataset({"x": ((), 1.0, PLACE)})

    def compare(self, predicted, trained, claims=None):
        if self.fault == "compare":
            raise ZeroDivisionError("nothing\nto divide by")
        mean = float(trained["x"].mean())
        verdict = Verdict.exact("all are one", mean, target=self.target, tolerance=0.1, basis="counting")
        return (replace(verdict, derived=True),)


class Demanding(Patient):
    """Has a field without a default, which the command line cannot fill."""

    name = "toy/demanding"
    text: Path = Path("absent.txt")

    @classmethod
    def full(cls):
        return cls(fault="none")

    def __post_init__(self):
        if self.fault == "none":
            raise TypeError("missing 1 required positional argument: 'text'")
