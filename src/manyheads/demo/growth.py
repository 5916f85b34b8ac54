"""`demo/growth`: training of attention blocks of growing key dimension, beside its infinite limit."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import xarray as xr
from scipy.special import softmax

import manyheads.study as st
from manyheads.data import load_text
from manyheads.data.characters import UNKNOWN, build_vocabulary
from manyheads.demo.text import TextTraining, mark_whitespace
from manyheads.scaling.checks.coordinate_check import finite_size_bias
from manyheads.studies.dmft.shared.mean_field import solve_blocks
from manyheads.study.panels import Multiples, spread_curve
from manyheads.theory.dmft import Network, Problem, infinite_key_dim, train_networks
from manyheads.theory.dmft.finite.problems import text_problem
from manyheads.theory.papers import BORDELON

MEASURED = (("output", ("step", "read_out", "class"), "1"), ("loss", ("step",), "nat"))
TRAJECTORIES = {"": "predicted", "_without": "predicted without response functions"}
RARER = "□"  # stands for every rarer character
_problem = lru_cache(maxsize=4)(text_problem)


class DemoGrowth(st.Study):
    """Blocks of causal attention trained on a few pieces of text, and their infinite limit."""

    name = "demo/growth"
    revision = 2
    claim = "Trained attention blocks approach the infinite-key-dimension limit as N^(-1/2)"
    source = BORDELON.at("the limit of infinite key dimension; its solution is derived here")
    grid = {"key_dim": "key_dims"}

    text: Path | None = st.setting(None, "UTF-8 file; by default Python's own documentation")
    key_dims: tuple[int, ...] = st.sweep((4, 16, 64), "Sizes N at which blocks are trained")
    heads: int = st.setting(4, "Heads of every block; the prediction does not depend on them", least=1)
    pieces: int = st.setting(3, "Pieces of the text")
    length: int = st.setting(8, "Characters of each")
    vocabulary: int = st.setting(16, "Most frequent characters; all others are replaced by one")
    steps: int = st.setting(28, "Steps of gradient descent")
    learning_rate: float = st.setting(0.75, "Its learning rate")
    richness: float = st.setting(0.75, "Richness of the training")
    blocks: int = st.setting(16, "Blocks of one size in a replicate", least=2)

    def inputs(self) -> dict[str, str]:
        """Return the digest of the text; refuse a text or a size that is out of range."""
        digests = TextTraining(text=self.text).inputs()
        self.problem()
        return digests

    def problem(self) -> Problem:
        """Return the training problem of the limit and of the blocks."""
        windows = self.pieces, self.length, self.vocabulary, self.text
        training = {name: getattr(self, name) for name in ("steps", "learning_rate", "richness")}
        return _problem(*windows, **training, norm=True)

    def predict(self, key: st.Key) -> st.Record:
        """Solve the limit, and the same equations without their response functions; nothing is trained or fitted."""
        problem = self.problem()
        solved, without = infinite_key_dim(problem), solve_blocks(problem, responses=False)
        found = {"": (solved.output.values, solved.loss.values), "_without": (without.outputs, without.losses)}
        before, after = self._signs()
        logits = solved.logits.values[-1][..., problem.attention_mask()]
        numbers = {
            f"{name}{trajectory}": (dims, value, f"{name}, {TRAJECTORIES[trajectory]}", unit)
            for trajectory, values in found.items()
            for (name, dims, unit), value in zip(MEASURED, values, strict=True)
        }
        return numbers | {
            "step": ("step", np.arange(self.steps), "updates"),
            "moved": ((), np.sqrt(np.mean(logits**2)), "rms of the attention logits"),
            "before": ("read_out", before, "what has been seen of a piece", None),
            "after": ("read_out", after, "what comes next", None),
        }

    def train(self, key: st.Key, key_dim: int) -> st.Record:
        """Train some blocks of one size from independent weights."""
        seeds = st.generator(key).integers(0, 2**31, self.blocks).tolist()
        trained = train_networks(self.problem(), Network(key_dim, self.heads), seeds, chunk=self.blocks)
        return {"step": ("step", np.arange(self.steps), "updates")} | {
            name: (("network", *dims), trained[name].values, name, unit) for name, dims, unit in MEASURED
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        bias, (single, near, far) = -finite_size_bias(self.key_dims), self.gaps(theory, trained)
        basis = f"a correction 1 + N^(-1/2) changes the power by {bias:.2f} over these sizes"
        yield st.Claim(
            "The rms distance of the outputs of single blocks from the limit scales as N^(-1/2)",
            st.exponent(single, "key_dim", "N").value,
            st.near(-0.5, bias),
            basis,
            "exponent of N",
        )
        yield st.Claim(
            f"At N = {self.key_dims[-1]} the mean block is closer to the limit than to that without response functions",
            st.log_ratio(near.isel(key_dim=-1), far.isel(key_dim=-1)),
            st.below(0),
            "the logarithm of a ratio of distances is negative if the first is the smaller one",
            "distance over that without responses (ln)",
        )
        yield st.Claim(
            "The distance of the mean block from the limit without response functions scales as N^(-1/2) or faster",
            st.exponent(far, "key_dim", "N").value,
            st.near(-0.5, (np.inf, bias)),
            basis + "; a distance from another limit converges to that of the two limits",
            "exponent of N",
            "refuted",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        yield self._losses(theory, trained)
        yield self._distances(*self.gaps(theory, trained))
        yield self._table(theory, trained)

    def gaps(self, theory: st.Data, trained: st.Data) -> tuple[xr.DataArray, xr.DataArray, xr.DataArray]:
        """Compute rms distances over all updates, each (replicate, key_dim).

        From the limit, of single blocks and of their mean; and of their mean from the limit without response functions.
        """
        own, output = MEASURED[0][1], trained["output"]
        wanted, without = (theory[f"output{trajectory}"] for trajectory in TRAJECTORIES)
        mean = output.mean("network")
        single = st.distance(output, wanted, ("network", *own))
        return single, st.distance(mean, wanted, own), st.distance(mean, without, own)

    def _signs(self) -> tuple[list[str], list[str]]:
        """Return the characters up to every read-out, and the next one."""
        problem = self.problem()
        symbols = build_vocabulary(load_text(self.text).content, self.vocabulary).symbols
        signs = np.array([RARER if symbol == UNKNOWN else mark_whitespace(symbol) for symbol in symbols])
        seen = signs[problem.inputs[..., : problem.classes].argmax(-1)]  # (pieces, length)
        before = ["".join(piece[: place + 1]) for piece in seen for place in range(self.length)]
        return before, signs[problem.flat_targets.argmax(-1)].tolist()

    def _losses(self, theory: st.Data, trained: st.Data) -> Multiples:
        steps = theory["step"].values
        every = trained["loss"].transpose("key_dim", "replicate", "network", "step").values
        loss, without = (tuple(theory[f"loss{trajectory}"].values.tolist()) for trajectory in TRAJECTORIES)
        plain = tuple(map(float, steps))
        trajectories = (
            st.Curve(plain, loss, TRAJECTORIES[""], "predicted", 1),
            st.Curve(plain, without, TRAJECTORIES["_without"], "reference", 2),
        )
        blocks = [spread_curve(steps, each.reshape(-1, self.steps), "trained blocks") for each in every]
        note = (
            f"Mean of {every.shape[1] * every.shape[2]} blocks of a size, bands range over all of them. The prediction "
            "is computed without training and without fit, and is independent of N and of the number of heads. "
            "Response functions: how fields react to earlier changes, in mean-field theory."
        )
        plots = (tuple((curve, *trajectories) for curve in blocks),)
        labels = tuple(f"key dimension N = {size}" for size in self.key_dims)
        return Multiples(
            "Training loss", "updates", "cross-entropy [nat/character]", plots, ("",), labels, (), True, note
        )

    def _distances(self, single: xr.DataArray, near: xr.DataArray, far: xr.DataArray) -> st.Lines:
        sizes, mean = single["key_dim"], f"mean of {self.blocks} blocks"
        guide = float(single.isel(key_dim=0).mean()) * (sizes / sizes[0]) ** -0.5
        return st.lines(
            "Distance of the outputs from the prediction",
            "key_dim",
            "root mean square distance",
            {"one block": single, mean: near, f"{mean}, from the prediction without response functions": far},
            reference={"falls like N^(-1/2)": guide},
            log="xy",
            x_label="key dimension N",
            note=f"Over all updates and characters; bands range over replicates. From N = {self.key_dims[0]} to "
            f"{self.key_dims[-1]} the distance of one block is multiplied by {_ratio(single)}, that of the mean by "
            f"{_ratio(near)}, and that of the mean to the prediction without response functions by {_ratio(far)}.",
            shows=("outputs of single blocks",),
        )

    def _table(self, theory: st.Data, trained: st.Data) -> st.Listing:
        """Show the final probability of the next character at every position of the first piece."""
        right = self.problem().flat_targets.argmax(-1)[: self.length]
        places = np.arange(self.length)
        last = trained["output"].isel(step=-1, read_out=slice(self.length))
        logits = last.transpose("replicate", "key_dim", "network", "read_out", "class").values
        drawn = softmax(logits, axis=-1)[..., places, right]
        expected = softmax(theory["output"].values[-1, : self.length], axis=-1)[places, right]
        rows = []
        for place in places:
            blocks = np.moveaxis(drawn[..., place], 1, 0)  # (key_dim, replicate, network)
            signs = (str(theory[name].values[place]) for name in ("before", "after"))
            rows.append((*signs, f"{expected[place]:.2f}", *(f"{one.mean():.2f} ± {one.std():.2f}" for one in blocks)))
        return st.Listing(
            "Probability of the next character",
            ("context", "next", "predicted", *(f"blocks, N = {size}" for size in self.key_dims)),
            tuple(rows),
            note=f"First piece, after {self.steps - 1} updates; ± is the standard deviation over blocks. · is a space, "
            f"¶ a line end, {RARER} a rarer character. The predicted rms of the attention logits grows from zero to "
            f"{float(theory['moved']):.2f}.",
        )


def _ratio(distances: xr.DataArray) -> str:
    """Return the last size's distance over the first's, means over replicates."""
    means = distances.mean("replicate")
    return f"{float(means[-1] / means[0]):.2f}"
