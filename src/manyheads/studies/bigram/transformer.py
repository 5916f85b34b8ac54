"""`bigram/transformer`: softmax attention, MLP, LayerNorm and Adam on the task, from scratch and pretrained.

A transformer of two layers learns the embeddings of tokens and positions together with everything else. It starts from
scratch, or from weights that were pretrained on a short context: with the same transition at other positions, with
another transition, or with targets that depend on nothing. The embeddings of positions are always drawn anew.
"""

import math
from dataclasses import replace
from functools import lru_cache

import equinox as eqx
import jax
import numpy as np
import optax

import manyheads.study as st
from manyheads.theory.bigram.setups import redraw_positions, replicate_seed
from manyheads.theory.bigram.task import BigramTask, draw_bigram_task
from manyheads.theory.bigram.theorems.sample_complexity import STAGE_ONE_OFFSET
from manyheads.theory.bigram.training.transformer_training import draw_probe, initialize_transformer, measure, source_of
from manyheads.theory.papers import REN
from manyheads.transformer import Shape, Transformer, train
from manyheads.transformer.losses import cross_entropy

INITS = {
    "scratch": "from scratch",
    "same": "pretrained, same transition",
    "other": "pretrained, other transition",
    "shuffled": "pretrained on shuffled targets",
}
RECORDS = 80
PROBE = 256  # contexts on which the excess loss is measured
EARLY, HALF = 0.9, 0.5  # of the excess loss of uniform predictions
_adam = lru_cache(maxsize=4)(optax.adam)  # one object a learning rate, so that training compiles once
DIVIDED = "samples to half of the loss, over ln T + 1.3"


class BigramTransformer(st.Study):
    """Samples until a transformer leaves the plateau of a sparse contextual bigram, by length and init."""

    name = "bigram/transformer"
    claim = "A two-layer transformer with Adam learns the task in two stages, and transfers"
    source = REN.at("abstract: two stages, and transfer of pretrained values; linear attention")
    grid = {"init": INITS, "length": "lengths"}

    lengths: tuple[int, ...] = st.sweep(
        (8, 32), "context lengths T; weights are pretrained at the first", small=(4, 6), full=(8, 32, 128)
    )
    vocabulary: int = st.setting(3, "N of the task")
    sparsity: int = st.setting(2, "Q of the task")
    key_dim: int = st.setting(8, "key dimension", small=4, full=16)
    heads: int = st.setting(2, "heads of a layer")
    depth: int = st.setting(2, "layers", small=1)
    batch: int = st.setting(64, "samples of a step", small=8)
    steps: int = st.setting(320, "steps, those of the pretraining too", least=RECORDS, small=RECORDS, full=1600)
    learning_rate: float = st.setting(3e-3, "learning rate of Adam", above=0)

    def predict(self, key: st.Key) -> st.Record:
        """Return the growth of the plateau escape of linear attention, T (ln T + 1.3) up to a factor."""
        lengths = np.asarray(self.lengths, float)
        law = lengths * (np.log(lengths) + STAGE_ONE_OFFSET)
        return {
            "length": ("length", list(self.lengths), "context length", "tokens"),
            "growth": ("length", law / law[0], "samples of linear attention over those of the first length"),
        }

    def train(self, key: st.Key, init: str, length: int) -> st.Record:
        for_first, for_model, for_batches, for_probe = jax.random.split(key, 4)
        task = self._task(replicate_seed(key), length)
        model = initialize_transformer(task, self._shape, for_model)
        if init != "scratch":
            old = self._pretrain(replicate_seed(key), init, for_first)
            fresh = model.weights.positional
            model = eqx.tree_at(lambda tree: tree.weights, model, old.weights._replace(positional=fresh))
        probe = draw_probe(task, PROBE, for_probe)
        every = self.steps // RECORDS
        run = source_of(task, self.batch), _adam(self.learning_rate), RECORDS * every, for_batches
        done = train(model, cross_entropy, *run, every=every, measure=lambda seen: measure(task, seen.model, probe))
        excess, ranked = np.array([figures for _, figures in done.measured]).T  # (RECORDS + 1,)
        samples = np.arange(RECORDS + 1) * every * self.batch
        return {
            "progress": ("progress", samples, "samples drawn"),
            "excess": ("progress", excess, "excess loss / that of uniform predictions"),
            "ranked": ("progress", ranked, "share of queries whose positions rank first"),
            "early": ((), _first(excess < EARLY, samples), f"samples to {EARLY:g} of the excess", "samples"),
            "half": ((), _first(excess < HALF, samples), f"samples to {HALF:g} of the excess", "samples"),
            "ranking": ((), _first(ranked == 1, samples), "samples until all positions rank first", "samples"),
            "final": ((), excess[-RECORDS // 4 :].mean(), "excess loss of the last quarter"),
            "alone": ((), probe.first_alone, "excess loss of the first position alone"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        last, half = self.lengths[-1], trained["half"]
        scratch, at_last = trained.sel(init="scratch", length=last), half.sel(length=last)
        yield st.Claim(
            "Training from scratch has two stages: the first tenth of the loss takes more than half of the samples to "
            f"the half, at T = {last}",
            scratch["early"] / scratch["half"],
            st.near(1, 0.5),
            "under exponential growth both are .9 e-foldings apart, of the five and more before",
            "samples to .9 over samples to .5 of the excess loss",
            resolution=1 / RECORDS,
        )
        yield st.Claim(
            f"The attention ranks all positions first before the loss is halved, at T = {last} (log2 ratio)",
            np.log2(scratch["half"] / scratch["ranking"]),
            st.above(0),
            "an inequality: the log ratio is positive, as for linear attention",
            "samples to half of the loss over those to the ranking (log2)",
            resolution=1 / RECORDS,
        )
        yield st.Claim(
            "The samples of the plateau escape grow as T (ln T + 1.3), as those of linear attention under SGD "
            "(exponent after division)",
            st.exponent(half.sel(init="scratch") * half["length"] / theory["growth"], "length", "T", DIVIDED),
            st.near(1, 0.25),
            "a factor of 1.4 over these lengths",
        )
        text = f"At the end the loss is below that of the larger position alone, at T = {last} (ratio)"
        basis = "a transformer that keeps one position of each query, like softmax attention under SGD, has one or more"
        quantity = "final excess loss over that of one position"
        yield st.Claim(text, scratch["final"] / scratch["alone"], st.near(0, 1), basis, quantity)
        yield st.Claim(
            f"Weights pretrained on the same transition halve the loss from fewer samples, at T = {last} (log2 ratio)",
            np.log2(at_last.sel(init="scratch") / at_last.sel(init="same")),
            st.above(0),
            "an inequality: the log ratio is positive",
            "samples from scratch over those of pretrained weights (log2)",
            resolution=1 / RECORDS,
        )
        yield st.Claim(
            "Samples from weights pretrained on the same transition grow no faster than the logarithm of the length "
            "(exponent)",
            st.exponent(half.sel(init="same"), "length", "T"),
            st.near(np.polyfit(np.log(self.lengths), np.log(np.log(self.lengths)), 1)[0], (math.inf, 0.25)),
            "the exponent of ln T at these lengths, and a factor of 1.4 over them above",
        )
        yield st.Claim(
            f"It is the transition that transfers: another one needs more samples, at T = {last} (log2 ratio)",
            np.log2(at_last.sel(init="other") / at_last.sel(init="same")),
            st.above(0),
            "an inequality: in the theory the correlation of the values alone counts",
            "samples after another transition over those after the same (log2)",
            resolution=1 / RECORDS,
        )
        yield st.Claim(
            f"Weights pretrained on targets that depend on nothing do not help, at T = {last} (log2 ratio)",
            np.log2(at_last.sel(init="scratch") / at_last.sel(init="shuffled")),
            st.near(0, (math.inf, 0.5)),
            "negative control: a gain of more than half a doubling would not be knowledge of the task",
            "samples from scratch over those of weights of the control (log2)",
            resolution=1 / RECORDS,
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        last, half = trained.isel(length=-1), trained["half"]
        for name, title, shows in (
            ("excess", "Loss", ("Training from scratch has", "same transition halve")),
            ("ranked", "Ranking of the positions", ("ranks all positions first",)),
        ):
            found = {label: last[name].sel(init=init) for init, label in INITS.items()}
            title, what = f"{title}, {self.lengths[-1]} tokens", trained[name].attrs["long_name"]
            yield st.lines(title, "progress", what, found, note="Bands: replicates.", shows=shows)
        level = half.sel(init="scratch").isel(length=0).median("replicate", keep_attrs=True)
        found = {label: half.sel(init=init) for init, label in INITS.items()}
        law = {"linear attention, up to a factor": level * theory["growth"]}
        note = "Bands: replicates; a training that did not get there counts with its budget."
        title, shows = "Samples to half of the loss", ("plateau escape grow as",)
        yield st.lines(title, "length", "samples", found, law, log="xy", note=note, shows=shows)

    @property
    def _shape(self) -> Shape:
        return Shape(self.key_dim, self.heads, self.depth)

    def _task(self, seed: list[int], length: int) -> BigramTask:
        """Return the task of a replicate: one transition for all lengths."""
        rng = np.random.default_rng([*seed, 3])
        task = draw_bigram_task(rng, self.vocabulary, self.lengths[0], self.sparsity)
        return redraw_positions(task, length, np.random.default_rng([*seed, 4, length]))

    def _pretrain(self, seed: list[int], init: str, key: st.Key) -> Transformer:
        drawn = draw_bigram_task(np.random.default_rng([*seed, 5]), self.vocabulary, self.lengths[0], self.sparsity)
        task = drawn if init == "other" else replace(drawn, transition=self._task(seed, self.lengths[0]).transition)
        source = source_of(task, self.batch)
        if init == "shuffled":
            uniform = np.full_like(task.transition, 1 / self.vocabulary)
            source = eqx.tree_at(lambda tree: tree.transition, source, jax.numpy.asarray(uniform))
        for_model, for_batches = jax.random.split(key)
        model = initialize_transformer(task, self._shape, for_model)
        return train(model, cross_entropy, source, _adam(self.learning_rate), self.steps, for_batches).model


def _first(reached: np.ndarray, samples: np.ndarray) -> float:
    """Return the samples at the first record that is reached, the budget without one; at least those of one record."""
    return float(max(samples[int(reached.argmax()) if reached.any() else -1], samples[1]))
