"""`joma/neurons`: correlation of hidden neurons with the latents of hierarchical data (Table 1), with controls.

The correlation of each latent with its best hidden neuron is compared with that before training, after training on
random labels, with the latents of another label, and in the other layers.
"""

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.theory.joma.systems.hidden_neurons import LatentTask, train_and_score
from manyheads.theory.joma.systems.token_hierarchy import HierarchyShape
from manyheads.theory.papers import TIAN

SCORES = {
    "trained": "trained",
    "untrained": "untrained",
    "shuffled": "trained on random labels",
    "permuted": "latents of another label",
    "other_layers": "other layers, trained",
}
CLAIMS = {  # the control, and whether the claim holds
    "Training raises the correlation of neurons of the {ordinal} layer with latents of level {level}": (
        ("untrained", "refuted")
    ),
    "Training on the labels, not on random ones, raises the correlation with level {level}": ("shuffled", "refuted"),
    "Before training the correlation with level {level} is the same to a tenth": ("untrained", "holds"),
    "The correlation with latents of level {level} exceeds that with the latents of another label": (
        ("permuted", "holds")
    ),
    "The {ordinal} layer correlates with level {level} more than the other layers do": ("other_layers", "refuted"),
}
LAYERS = ("first", "second")
RISE = 0.1  # the smallest difference that a table of two digits with standard deviations up to 0.05 can show


class Neurons(st.Study):
    """Statistic of Table 1 after training, with its controls."""

    name = "joma/neurons"
    claim = "Training does not raise the correlation of hidden neurons with latents (Table 1)"
    source = TIAN.at("table 1; its controls are added here")
    revision = 3

    lower: tuple[int, ...] = st.setting((10, 20), "latents of the lowest level, one entry per hierarchy", small=(8,))
    upper: tuple[int, ...] = st.setting((20, 30), "latents of the next level", small=(8,))
    labels: int = st.setting(20, "labels", small=6)
    parts: int = st.setting(2, "parts of a token", full=3)
    leaves: int = st.setting(39, "tokens of the data", small=9)
    # Those below one are applied to the first hierarchy.
    keeps: tuple[float, ...] = st.setting((1.0, 0.8), "transition probabilities of an edge", small=(1.0,))
    width: int = st.setting(32, "width of the transformer", small=8, full=1024)
    layers: int = st.setting(3, "layers of the transformer", small=2)
    steps: int = st.setting(200, "updates of Adam", small=150, full=5000)
    batch: int = st.setting(32, "sequences of an update", small=12, full=128)
    learning_rate: float = st.setting(1e-3, "learning rate of Adam", small=0.01, full=1e-4)
    tested: int = st.setting(480, "sequences on which the correlations are measured", small=12, full=1280)

    def check(self) -> None:
        if len(self.lower) != len(self.upper):
            raise st.UsageError(f"lower={self.lower}, upper={self.upper}: expected one entry per hierarchy in both")
        if self.keeps[0] != 1.0:
            raise st.UsageError(f"keeps={self.keeps}: expected 1 first, as in the published data")
        for place in self._places():
            self._task(*place)  # checks the sizes

    def cells(self) -> tuple[st.Cell, ...]:
        return tuple(st.Cell(hierarchy=hierarchy, keep=keep) for hierarchy, keep in self._places())

    def predict(self, key: st.Key) -> st.Record:
        return {"rise": ((), RISE, "smallest rise by training that the table can show")}

    def train(self, key: st.Key, hierarchy: int, keep: float) -> st.Record:
        scores = train_and_score(self._task(hierarchy, keep), key)
        values = {name: ("level", np.asarray(getattr(scores, name), np.float64), text) for name, text in SCORES.items()}
        accuracy = {"accuracy": ((), float(scores.accuracy), "accuracy")}
        return {"level": ("level", [0, 1], "level of latents")} | values | accuracy

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        rise, cells = float(theory["rise"]), ("hierarchy", "keep")
        yield st.Claim(
            "The networks learn the published task",
            trained["accuracy"].sel(keep=1.0).mean("hierarchy"),
            st.near(1, (0.2, 1 / self.labels)),
            f"four labels of five, where chance is one of {self.labels}: the effects of training are present",
            "accuracy",
            bounds=(0.0, 1.0),
            resolution=1 / (self.labels * len(self.lower)),
        )
        shown = "a table of two digits with standard deviations up to 0.05 shows differences from a tenth on"
        equal = st.near(0, rise), "the smallest difference that the table can show, either way"
        above = st.above(0), "an inequality, replicate by replicate: both are maxima over the same neurons"
        for text, (control, expected) in CLAIMS.items():
            region = above if control == "permuted" else equal if expected == "holds" else (st.above(rise), shown)
            for level in (1,) if control == "other_layers" else (0, 1):
                yield st.Claim(
                    text.format(ordinal=LAYERS[level], level=level),
                    (trained["trained"] - trained[control]).sel(level=level).mean(cells),
                    *region,
                    "difference of correlations",
                    expected,
                    bounds=(-2.0, 2.0),
                )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        places = self._places()
        hierarchies, keeps = (xr.DataArray(list(of), dims="place") for of in zip(*places, strict=True))
        found = trained.sel(hierarchy=hierarchies, keep=keeps).assign_coords(place=range(len(places)))
        ticks = tuple(f"{self.lower[h]}, {self.upper[h]}; keep {keep:g}" for h, keep in places)
        for level, ordinal in enumerate(LAYERS):
            part = found.sel(level=level)
            yield st.lines(
                f"Neurons of the {ordinal} layer",
                "place",
                "correlation with the best neuron",
                {label: part[name] for name, label in SCORES.items()},
                x_label="latents of the levels, and share that is kept",
                note=f"Latents of level {level}. Bars range over replicates.",
                shows=(f"Training raises the correlation of neurons of the {ordinal} layer",),
                x_ticks=ticks,
            )
            columns = {"accuracy": "accuracy"} | SCORES
            yield st.table(
                f"Correlation of latents of level {level} with their best neuron",
                [
                    {"latents and share that is kept": tick}
                    | {label: _mean_and_std(part[name].isel(place=place)) for name, label in columns.items()}
                    for place, tick in enumerate(ticks)
                ],
                f"Layer {level} of {self.layers}, {4 * self.width} neurons; mean and standard deviation over "
                "replicates. The published table has the column of trained networks.",
            )

    def _places(self) -> list[tuple[int, float]]:
        """Return every hierarchy, and the first one with transition probabilities below one."""
        return [(hierarchy, 1.0) for hierarchy in range(len(self.lower))] + [(0, keep) for keep in self.keeps[1:]]

    def _task(self, hierarchy: int, keep: float) -> LatentTask:
        sizes = (self.lower[hierarchy], self.upper[hierarchy], self.labels)
        shape = HierarchyShape(sizes, self.parts, self.leaves, keep=keep)
        return LatentTask(
            shape, self.width, self.layers, self.steps, self.batch, learning_rate=self.learning_rate, tested=self.tested
        )


def _mean_and_std(values: xr.DataArray) -> str:
    std = float(values.std("replicate", ddof=1)) if values.sizes["replicate"] > 1 else 0.0
    return f"{float(values.mean('replicate')):.2f} ± {std:.2f}"
