"""`joma/hierarchical-prior`: patterns that several labels share, and whether they speed training.

A pattern a that three labels contain is learned from three times the examples. In the layer of theorem 2 this is a law;
in transformers the whole training, with latents that labels share, is compared with the same leaves without latents.
"""

import equinox as eqx
import jax
import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.theory.joma.systems.hidden_neurons import LatentTask, masked_cross_entropy
from manyheads.theory.joma.systems.networks import shared_patterns as patterns
from manyheads.theory.joma.systems.networks.wide_layer import WideTraining
from manyheads.theory.joma.systems.token_hierarchy import HierarchyBatch, HierarchyShape
from manyheads.theory.joma.text.record import train_by_adam
from manyheads.theory.joma.theorems.winner_take_all import reaching_time
from manyheads.theory.papers import TIAN
from manyheads.transformer.transformer import Transformer

LABELS = 6  # of the layer: divided by each number of labels that share a pattern
SHARED = (1, 2, 3)
LEVEL = 3.0  # of a weight whose token is won
REACHED = 0.9  # of what Bayes' rule reaches
PRIORS = {"hierarchical": "labels that share latents", "flat": "labels of as many random leaves"}
TIMES = {"shared_time": "time until a shared pattern is won", "own_time": "time until a pattern of one label is won"}


class HierarchicalPrior(st.Study):
    """Times at which shared patterns are won, and updates of transformers on labels with and without latents."""

    name = "joma/hierarchical-prior"
    claim = "A pattern that c labels share is won c times sooner in the layer of theorem 2"
    source = TIAN.at("theorem 2 and the authors' reply to reviewers; the reading, that labels share a, is this study's")

    learning_rate: float = st.setting(0.02, "of SGD in the layer", above=0, most=0.2, small=0.1, full=0.005)
    batch: int = st.setting(16, "contexts of an update of the layer", least=1)
    latents: tuple[int, ...] = st.setting(
        (10, 20, 20), "latents of each level, and labels", count=2, small=(5, 6), full=(20, 40, 40)
    )
    leaves: int = st.setting(39, "observed tokens", small=9, full=80)
    keep: float = st.setting(0.8, "probability with which a leaf of a label is shown", above=0, below=1)
    width: int = st.setting(32, "width of the transformer of three blocks", small=8, full=128)
    steps: int = st.setting(300, "its updates", multiple="snapshots", least="snapshots", small=60, full=600)
    snapshots: int = st.setting(60, "how often it is tested", least=2, small=12)
    adam: float = st.setting(1e-3, "learning rate of Adam", above=0, small=0.01)
    tested: int = st.setting(800, "sequences of a test", small=60, full=4000)

    def check(self) -> None:
        shape = HierarchyShape(self.latents, 2, self.leaves)
        LatentTask(shape, self.width, 3, self.steps, self.batch, tested=self.tested)  # checks the sizes

    def cells(self) -> tuple[st.Cell, ...]:
        """Return the numbers of labels that share a pattern, and both priors of the transformer."""
        return (*st.grid(system=("layer",), shared=SHARED), *(st.Cell(system=prior, shared=0) for prior in PRIORS))

    def predict(self, key: st.Key) -> st.Record:
        shared = [reaching_time(np.array([count / (2 * LABELS)]), LEVEL) for count in SHARED]
        return {
            "shared": ("shared", list(SHARED), "labels that share a pattern"),
            "shared_time": ("shared", shared, TIMES["shared_time"]),
            "own_time": ((), reaching_time(np.array([1 / (2 * LABELS)]), LEVEL), TIMES["own_time"]),
        }

    def train(self, key: st.Key, system: str, shared: int) -> st.Record:
        accuracy, own, common, bayes = np.full(self.snapshots + 1, np.nan), np.nan, np.nan, np.nan
        if system == "layer":
            steps = round(1.5 * reaching_time(np.array([1 / (2 * LABELS)]), LEVEL) / self.learning_rate)
            training = WideTraining(self.learning_rate, steps, self.batch, LEVEL)
            own, common = map(float, patterns.winning_times(LABELS, shared, training, key))
        else:
            accuracy, bayes = self._transformer(key, system == "flat")
        return {
            "step": ("step", np.linspace(0, self.steps, self.snapshots + 1), "update"),
            "shared_time": ((), common, TIMES["shared_time"]),
            "own_time": ((), own, TIMES["own_time"]),
            "accuracy": ("step", accuracy, "accuracy on new sequences"),
            "bayes": ((), bayes, "accuracy of Bayes' rule"),
        }

    def _transformer(self, key: st.Key, flat: bool) -> tuple[np.ndarray, float]:
        """Train on labels with latents or without and return the accuracies, and that of Bayes' rule."""
        for_leaves, for_model, for_batches, for_test = jax.random.split(key, 4)
        shape = HierarchyShape(self.latents, 2, self.leaves)
        leaves = patterns.reached_leaves(shape, for_leaves, flat)
        source = patterns.LeafSource.of(leaves, self.keep, shape.places)
        test = source.hierarchy.draw(for_test, self.tested)
        config = LatentTask(shape, self.width, 3).config
        training, keys = (self.adam, self.steps, self.snapshots), (for_model, for_batches)

        def measure(model: Transformer) -> dict[str, jax.Array]:
            return {"accuracy": _accuracy(model, test)}

        _, values = train_by_adam(config, masked_cross_entropy, source, measure, *training, keys)
        bayes = patterns.bayes_accuracy(np.asarray(leaves), self.keep, 4 * self.tested, st.generator(key))
        return values["accuracy"].astype(float), bayes

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        layer, time = trained.sel(system="layer", shared=list(SHARED), drop=True), "time until a pattern is won"
        hierarchical, flat = (trained.sel(system=prior, shared=0) for prior in PRIORS)
        own = theory["own_time"] + 0 * theory["shared_time"]
        yield st.Claim(
            "In a layer a pattern that c labels share is won after a time that scales as 1/c",
            st.exponent(layer["shared_time"].rename("shared pattern"), "shared", "", time, theory["shared_time"]),
            st.near(-1, 0.1),
            "gains are probabilities; finite steps of SGD and contexts that are sampled leave a few percent",
            "exponent of the time in c",
        )
        yield st.Claim(
            "In the same layer a pattern of one label is won at the same time whatever the others share",
            st.exponent(layer["own_time"].rename("of one label"), "shared", what=time, predicted=own),
            st.near(0, 0.1),
            "the control: its gain does not change",
            "exponent of the time in c",
        )
        yield st.Claim(
            "Shared patterns are won at the time of theorem 2",
            (layer["shared_time"] / theory["shared_time"]).mean("shared"),
            st.near(1, 0.1),
            "an equality of the flow; finite steps and sampled contexts leave a few percent",
            "measured over predicted time",
        )
        yield st.Claim(
            "A transformer learns labels whose latents are shared in fewer updates than labels of as many random "
            "leaves",
            _updates(flat) / _updates(hierarchical),
            st.above(1),
            f"an inequality, paired by seed; updates until {REACHED:g} of what Bayes' rule reaches",
            "updates without latents over updates with them",
            "refuted",
            resolution=0.05,
        )
        text = "Labels whose latents are shared are as easy for Bayes' rule as labels of as many random leaves"
        figure = hierarchical["bayes"] - flat["bayes"]
        basis = "fifty sequences; labels that share latents have leaves in common"
        quantity = "difference of accuracies"
        yield st.Claim(text, figure, st.near(0, 0.02), basis, quantity, "refuted", bounds=(-1.0, 1.0), resolution=1e-3)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        transformers = trained.sel(shared=0)
        title = "Accuracy of a transformer over that of Bayes' rule"
        note = "New sequences. Bands range over replicates."
        shares = {words: _share(transformers.sel(system=prior)) for prior, words in PRIORS.items()}
        what, shows = "share of what Bayes' rule reaches", ("A transformer learns labels",)
        yield st.lines(title, "step", what, shares, note=note, shows=shows)


@eqx.filter_jit
def _accuracy(model: Transformer, batch: HierarchyBatch) -> jax.Array:
    return (model(batch.tokens, batch.padding_mask).argmax(-1) == batch.answers).mean()


def _share(part: st.Data) -> xr.DataArray:
    return part["accuracy"] / part["bayes"]


def _updates(part: st.Data) -> xr.DataArray:
    """Return the updates to a share of Bayes' accuracy; the last one where it is not reached."""
    found, steps = (_share(part) >= REACHED).values, part["step"].values
    first = np.where(found.any(1), found.argmax(1), -1)
    return xr.DataArray(np.maximum(steps[first], steps[1]), dims="replicate")
