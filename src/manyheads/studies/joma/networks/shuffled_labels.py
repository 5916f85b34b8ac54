"""`joma/shuffled-labels`: simple patterns first, and what the rank becomes, on real and on shuffled labels.

Vision transformers learn handwritten digits with their labels, and with the same labels in random order, which can
only be learned by heart. The images and both kinds of labels are the same for all networks.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.curves.drop_and_rise import replicated_drop_and_rise
from manyheads.spectra.levels import expected_stable_rank
from manyheads.statistics.rank_correlation import spearman
from manyheads.theory.joma.systems.networks import label_order as images
from manyheads.theory.joma.text.record import train_by_adam
from manyheads.theory.papers import TIAN
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.transformer import Transformer

LABELS = ("real", "shuffled")
RANKS = {"lower_rank": "stable rank of the lower MLP matrix", "upper_rank": "stable rank of the upper MLP matrix"}
CLEAR, NEGLIGIBLE = 0.3, 0.1  # rank correlations: clearly there, and negligible
CLEAR_CHANGE = 0.1  # nat
GROUPS = ("largest margin", "second", "third", "smallest margin")  # quarters of the images in the picture


class ShuffledLabels(st.Study):
    """Order in which vision transformers learn images, and the ranks of their MLPs, on real and shuffled labels."""

    name = "joma/shuffled-labels"
    claim = "Images that class means decide are learned first, with shuffled labels too"
    source = TIAN.at("the authors' reply to reviewers; the statistics are this study's")
    grid = {"labels": LABELS}

    samples: int = st.setting(256, "images", least=4 * images.CLASSES, most=1797, small=40, full=1024)
    width: int = st.setting(32, "width of the transformer", multiple="heads", small=8, full=64)
    heads: int = st.setting(4, "its heads", least=1, small=2)
    depth: int = st.setting(2, "its layers", least=1)
    batch: int = st.setting(32, "images of a step", least=1, small=16)
    steps: int = st.setting(720, "updates of Adam", multiple="snapshots", least="snapshots", small=60, full=4000)
    snapshots: int = st.setting(180, "how often the statistics are recorded", least=2, small=6, full=200)
    learning_rate: float = st.setting(3e-3, "learning rate of Adam", above=0, small=0.01, full=1e-3)

    def predict(self, key: st.Key) -> st.Record:
        data = (images.labelled_digits(self.samples, kind == "shuffled") for kind in LABELS)
        margins = [images.class_mean_margins(*each) for each in data]
        uniform = float(np.log(images.digit_config(self.width, self.heads, 1).length))
        return {
            "image": ("image", np.arange(self.samples), "image"),
            "margin": (("labels", "image"), margins, "margin under the means of the classes"),
            "uniform": ((), uniform, "uniform entropy", "nat"),
            "random_rank": ((), expected_stable_rank(4 * self.width, self.width), "stable rank of a random matrix"),
        }

    def train(self, key: st.Key, labels: str) -> st.Record:
        data = tuple(map(jnp.asarray, images.labelled_digits(self.samples, labels == "shuffled")))
        config = images.digit_config(self.width, self.heads, self.depth)
        source = images.LabelledImages(data[0], data[1], self.batch)
        training, keys = (self.learning_rate, self.steps, self.snapshots), tuple(jax.random.split(key))

        def measure(model: Transformer) -> dict[str, jax.Array]:
            return images.image_statistics(model, *data)

        steps, values = train_by_adam(config, cross_entropy, source, measure, *training, keys)
        right, every = values["right"].astype(np.float64), self.steps // self.snapshots
        return {
            "step": ("step", steps, "update"),
            "image": ("image", np.arange(self.samples), "image"),
            "layer": ("layer", np.arange(self.depth), "layer, from the bottom"),
            "accuracy": ("step", right.mean(1), "accuracy on the images that are trained on"),
            "time": ("image", every * (1 - right).sum(0), "updates for which an image is classified wrongly"),
            "entropy": (("step", "layer"), values["entropy"], "attention entropy", "nat"),
            **{name: (("step", "layer"), values[name], words) for name, words in RANKS.items()},
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        real, shuffled = (trained.sel(labels=kind) for kind in LABELS)
        for kind, part in zip(LABELS, (real, shuffled), strict=True):
            yield st.Claim(
                f"The networks fit the {kind} labels",
                part["accuracy"].isel(step=-1),
                st.near(1, (0.05, 0.01)),
                "nineteen of twenty images: times of learning exist for nearly all",
                "accuracy",
                bounds=(0.0, 1.0),
                resolution=1 / self.samples,
            )
        text = "Real labels are fit to nine tenths in less than half the updates of shuffled ones"
        basis = "an inequality, paired by seed"
        yield st.Claim(text, _reach(shuffled) / _reach(real), st.above(2), basis, "ratio of updates", resolution=0.1)
        clear, negligible = st.above(CLEAR), st.near(0, NEGLIGIBLE)
        margins, up_to = theory["margin"], f"correlations up to {NEGLIGIBLE} are negligible"
        rank: dict[str, Any] = {"quantity": "rank correlation", "bounds": (-1.0, 1.0), "resolution": 1e-3}
        text = "With real labels images of a large margin under the class means are learned first"
        basis = f"an inequality: from {CLEAR} on the order is clearly there. Sign: early with a large margin"
        yield st.Claim(text, -_correlations(real, margins.sel(labels="real")), clear, basis, **rank)
        text = "With shuffled labels the margin does not tell when an image is learned"
        correlations = -_correlations(shuffled, margins.sel(labels="shuffled"))
        basis = f"the control: {up_to}"
        yield st.Claim(text, correlations, negligible, basis, expected="refuted", **rank)
        text = "With real labels independent networks learn the images in one order"
        basis = "an inequality; each network beside the mean of the others"
        yield st.Claim(text, _correlations(real), clear, basis, **rank)
        text = "With shuffled labels independent networks share no order"
        yield st.Claim(text, _correlations(shuffled), negligible, f"the same; {up_to}", expected="refuted", **rank)
        ranks, level = trained[list(RANKS)].mean("layer"), float(theory["random_rank"])
        ends = ranks["lower_rank"].isel(step=-1)
        text = "Shuffled labels end at a higher stable rank of the lower MLP matrix than real ones"
        figure = (ends.sel(labels="shuffled") - ends.sel(labels="real")) / level
        basis = "an inequality, paired by seed"
        quantity = "difference of stable ranks (of the random level)"
        yield st.Claim(text, figure, st.above(0), basis, quantity, "refuted", resolution=1e-5)
        for name, words in RANKS.items():
            curves = ranks[name].sel(labels="real")
            text = f"From a start of high rank training on real labels ends at half the {words}"
            figure = (curves.isel(step=0) - curves.isel(step=-1)) / level
            basis = "an inequality; a random matrix has the level one. Mean over layers"
            quantity = "fall of the stable rank (of the random level)"
            yield st.Claim(text, figure, st.above(0.5), basis, quantity, "refuted", resolution=1e-5)
        for layer, words in ((0, "bottom layer"), (-1, "top layer")):
            found = replicated_drop_and_rise(real["entropy"].isel(layer=layer).values)
            for verb, change, expected in (("drops", found.drop, "holds"), ("rebounds", found.rise, "refuted")):
                yield st.Claim(
                    f"In a vision transformer the attention entropy of the {words} {verb} by a tenth of a nat",
                    change,
                    st.above(CLEAR_CHANGE),
                    "an inequality; a tenth of a nat is a third of the rebound in published runs on text. Minimum "
                    "and rise are located on the other seeds",
                    "drop or rise (nat)",
                    expected,
                    resolution=1e-5,
                )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        note = "Bands range over replicates."
        accuracy = {f"{kind} labels": trained["accuracy"].sel(labels=kind) for kind in LABELS}
        yield st.lines("Accuracy on the images", "step", "accuracy", accuracy, note=note, shows=("Real labels are",))
        times = {f"{kind} labels": _by_quarter(trained["time"].sel(labels=kind), theory["margin"]) for kind in LABELS}
        yield st.lines(
            "Updates until an image is learned, by its margin under the class means",
            "quarter",
            "updates classified wrongly",
            times,
            x_label="images, a quarter each",
            note=note,
            shows=("large margin under the class means are learned first",),
            x_ticks=GROUPS,
        )
        for name, label, level, words, claim in (
            ("entropy", "attention entropy [nat]", "uniform", "uniform attention", "of the bottom layer drops"),
            ("lower_rank", RANKS["lower_rank"], "random_rank", "random matrix", "Shuffled labels end"),
            ("upper_rank", RANKS["upper_rank"], "random_rank", "random matrix", "half the stable rank of the upper"),
        ):
            layers = {
                f"{kind}, layer {layer}": trained[name].sel(labels=kind, layer=layer)
                for kind in LABELS
                for layer in range(self.depth)
            }
            title, flat = label[0].upper() + label[1:], {words: theory[level] + 0.0 * trained["step"]}
            yield st.lines(title, "step", label, layers, reference=flat, note=note, shows=(claim,))


def _reach(part: st.Data) -> xr.DataArray:
    """Return the updates after which nine tenths are classified rightly; the last one where they never are."""
    found = part["accuracy"].values >= 0.9
    steps = part["step"].values[np.where(found.any(1), found.argmax(1), -1)]
    return xr.DataArray(steps.astype(float), dims="replicate")


def _correlations(part: st.Data, margins: xr.DataArray | None = None) -> np.ndarray:
    """Return the rank correlations of the times of each network with margins, or with the times of the others.

    They are 0 where one side is constant.
    """
    times = part["time"].values
    if margins is None and len(times) < 2:
        raise st.UsageError("one replicate: the order of independent networks needs two or more")
    pairs = [(each, times.sum(0) - each if margins is None else margins.values) for each in times]
    return np.array([spearman(*pair).value if min(map(np.ptp, pair)) > 0 else 0.0 for pair in pairs])


def _by_quarter(times: xr.DataArray, margin: xr.DataArray) -> xr.DataArray:
    """Return the mean time of images by the quarter of their margin."""
    order = np.argsort(-margin.sel(labels=times["labels"]).values)
    means = [times.isel(image=part).mean("image") for part in np.array_split(order, len(GROUPS))]
    return xr.concat(means, "quarter").assign_coords(quarter=range(len(GROUPS)))
