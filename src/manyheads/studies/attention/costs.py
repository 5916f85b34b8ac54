"""`attention/costs`: FLOPs, sequential depth and time of attention, recurrence and pooling, counted and measured.

Counts are taken from the traced programs of the networks, independently of the closed forms. Times are measured.
"""

import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.costs import ModelShape, count, sequential_depth, transformer_cost
from manyheads.costs.formulas.depth import crossover_length
from manyheads.costs.jax.critical_path import longest_chain
from manyheads.costs.shapes import PooledShape, RecurrentShape
from manyheads.studies.attention.baseline_flops import baseline_flops
from manyheads.transformer import Shape, TransformerConfig, initialize, standard_scaling
from manyheads.transformer.baselines import BaselineConfig, initialize_pooled, initialize_recurrent
from manyheads.transformer.inputs import VectorInput

MODELS = ("transformer", "recurrent", "pooled")
GRID = ("model", "length")
FLOPS = {"flops": "FLOPs of a forward pass", "training_flops": "FLOPs of a training step"}
CHAIN = "matrix products that wait for each other"
SECONDS = {
    "seconds": "measured time of a forward pass",
    "core_seconds": "measured time of the attention core",
    "rest_seconds": "measured time of the rest of the block",
}


class Costs(st.Study):
    """Exact costs, sequential depth, measured time and crossover length of attention, recurrence and pooling."""

    name = "attention/costs"
    claim = "Exact costs, depth and crossover length of attention, an RNN and a pooled MLP"
    source = st.Source(
        "vaswani2017",
        "Attention Is All You Need",
        "Ashish Vaswani and Noam Shazeer and Niki Parmar and Jakob Uszkoreit and Llion Jones and Aidan N. Gomez and "
        "Lukasz Kaiser and Illia Polosukhin",
        2017,
        kind="inproceedings",
        venue="Advances in Neural Information Processing Systems",
        volume="30",
        identifier="1706.03762",
        locus="section 4, table 1",
    )
    grid = {"model": MODELS, "length": "lengths"}

    width: int = st.setting(64, "model dimension d, of all three models", small=8, full=768)
    heads: int = st.setting(4, "heads of the attention block", small=2, full=12)
    lengths: tuple[int, ...] = st.sweep(
        (64, 128, 256, 512, 1024),
        "sequence lengths on both sides of the crossover (2 + 4) d, which determine a quadratic",
        count=3,
        small=(4, 8, 16),
        full=(256, 1024, 2048, 4096, 8192),
    )
    batch: int = st.setting(2, "sequences at a time", full=1)

    def predict(self, key: st.Key) -> st.Record:
        places = [(model, length) for model in MODELS for length in self.lengths]

        def table(form: Callable[..., int], *options: bool) -> np.ndarray:
            values = np.asarray([form(*place, *options) for place in places], np.int64)
            return values.reshape(len(MODELS), len(self.lengths))

        edge = np.int64(crossover_length(self._shapes()["transformer"]))  # type: ignore[arg-type]
        return {
            "flops": (GRID, table(self._closed_form, False), FLOPS["flops"], "FLOP"),
            "training_flops": (GRID, table(self._closed_form, True), FLOPS["training_flops"], "FLOP"),
            "chain": (GRID, table(self._chain), CHAIN),
            "crossover": ((), edge, "length at which the attention core costs as much as the rest", "tokens"),
            "length": ("length", list(self.lengths), "sequence length", "tokens"),
        }

    def train(self, key: st.Key, model: str, length: int) -> st.Record:
        """Count the programs of one model at one length, and time its forward pass."""
        network = self._model(model, key, length)
        x = jax.random.normal(key, (self.batch, length, self.width), jnp.float32)

        def loss(weights: Any, inputs: jax.Array) -> jax.Array:
            return jnp.square(eqx.tree_at(lambda tree: tree.weights, network, weights)(inputs)).sum()

        training = count(jax.value_and_grad(loss, argnums=(0, 1)), network.weights, x)
        found: dict[str, Any] = {
            "flops": ((), np.int64(count(network, x).flops), FLOPS["flops"], "FLOP"),
            "training_flops": ((), np.int64(training.flops), FLOPS["training_flops"], "FLOP"),
            "chain": ((), np.int64(longest_chain(network, x)), CHAIN),
        }
        core, rest = self._halves(network, x) if model == "transformer" else (np.nan, np.nan)
        times = (seconds_of(_forward, network, x), core, rest)
        for (name, label), seconds in zip(SECONDS.items(), times, strict=True):
            found[name] = ((), seconds, {"long_name": label, "units": "s", "deterministic": False})
        return found

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        edge, first = float(theory["crossover"]), trained["flops"].isel(replicate=0)
        attention = first.sel(model="transformer")
        yield st.Claim(
            "The closed forms give every matrix-multiply FLOP of the three networks, forward and in training",
            max(int(abs(trained[name] - theory[name]).max()) for name in FLOPS),
            st.near(0, 0),
            "both are integers: the largest difference over models, lengths and replicates",
            "largest difference (FLOPs)",
        )
        yield st.Claim(
            "The attention core takes as many FLOPs as the rest of its block at n = (2 + r) d tokens",
            counted_crossover(self.lengths, attention.values),
            st.near(edge, 1e-6 * edge),
            "the counted FLOPs are a quadratic in n, which is solved in floating point",
            "length of equal FLOPs (tokens)",
        )
        text = "A block of attention takes more FLOPs than an Elman network of the same width at every length"
        basis = "smallest ratio of the counts; by the closed forms it is 6 or more at r = 4"
        quantity = "FLOPs of attention over those of recurrence, smallest over lengths"
        yield st.Claim(text, (attention / first.sel(model="recurrent")).min(), st.above(1), basis, quantity)
        text = "The sequential depth of attention is independent of the length, that of recurrence grows by 1 a token"
        basis = "longest chains of matrix products are integers"
        quantity = "largest difference of depths (matrix products)"
        yield st.Claim(text, int(abs(trained["chain"] - theory["chain"]).max()), st.near(0, 0), basis, quantity)
        yield st.Claim(
            "The attention core takes as much measured time as the rest of its block where their FLOPs are equal",
            meeting_points(self.lengths, trained) - np.log2(edge),
            st.near(0, 0.5),
            "log2 of the ratio of both lengths; half a doubling of the length",
            "length of equal times over that of equal FLOPs (log2)",
            expected="refuted",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        closed, *found = (
            {model: values.sel(model=model) for model in MODELS}
            for values in (theory["flops"], trained["flops"], trained["chain"], 1e3 * trained["seconds"])
        )
        counted = "Solid: counted on the program that runs. Dashed, on top: closed form. A multiply-add counts two."
        chain = "Longest chain of matrix products of which each needs the one before it."
        measured = "One thread a process, smallest of several calls; bands range over replicates."
        forms, depth = ("The closed forms give",), ("The sequential depth",)
        labels = "FLOPs of a forward pass", "length", "matrix-multiply FLOPs"
        yield st.lines(*labels, found[0], closed, log="xy", note=counted, shows=forms)
        labels = "Sequential depth", "length", "longest chain [matrix products]"
        yield st.lines(*labels, found[1], log="xy", note=chain, shows=depth)
        yield st.lines("Measured time of a forward pass", "length", "time [ms]", found[2], log="xy", note=measured)
        edge = float(theory["crossover"])
        core, rest = (1e3 * trained[f"{half}_seconds"].sel(model="transformer") for half in ("core", "rest"))
        extent = [min(core.min(), rest.min()), max(core.max(), rest.max())]
        ends = xr.DataArray(extent, {"length": [edge] * 2}, "length")
        yield st.lines(
            "Measured time of the attention core and of the rest of its block",
            "length",
            "time [ms]",
            {"attention core": core, "rest of the block": rest},
            reference={f"equal FLOPs, n = {edge:.0f}": ends},
            log="xy",
            note=_crossover_note(meeting_points(self.lengths, trained), edge),
            shows=("measured time as the rest",),
        )

    def flops(self, cell: st.Cell) -> int:
        """Return the FLOPs of four forward passes by the closed form."""
        return 4 * self._closed_form(str(cell["model"]), int(cell["length"]), training=False)

    def _shapes(self) -> dict[str, ModelShape | RecurrentShape | PooledShape]:
        plain: dict[str, Any] = {"classes": 1, "causal": False, "positions": "none", "biases": "none"}
        return {
            "transformer": ModelShape(1, self.width, self.heads, **plain),
            "recurrent": RecurrentShape(self.width, self.width, classes=1),
            "pooled": PooledShape(self.width, self.width, layers=2, classes=1),
        }

    def _closed_form(self, model: str, length: int, training: bool) -> int:
        shape = self._shapes()[model]
        if isinstance(shape, ModelShape):
            return transformer_cost(shape, length, self.batch, training=training).flops
        return baseline_flops(shape, length, self.batch, training)

    def _chain(self, model: str, length: int) -> int:
        """Return the length of the longest chain of matrix products, the read-out included."""
        if model == "recurrent":
            return sequential_depth(self._shapes()[model], length) + 1
        # Queries, logits, mixing, output, MLP in, MLP out; or two layers, and one more after the pool.
        return 1 + (6 if model == "transformer" else 3)

    def _model(self, model: str, key: st.Key, length: int) -> Any:
        inputs = VectorInput(self.width)
        if model == "transformer":
            config = TransformerConfig(
                Shape(self.width // self.heads, self.heads, 1), inputs, length, outputs=1, positions="none", gains=False
            )
            return initialize(config, standard_scaling(config.shape, inputs), key)
        baseline = BaselineConfig(inputs, 1, self.width, self.width, layers=1 if model == "recurrent" else 2)
        return (initialize_recurrent if model == "recurrent" else initialize_pooled)(baseline, key)

    def _halves(self, model: Any, x: jax.Array) -> tuple[float, float]:
        """Time the attention core alone, and the block with its core taken out."""
        record = model.record(x).layers
        block = jax.tree.map(lambda array: array[0], model.weights.blocks)
        square = block.query.reshape(self.width, self.width)
        core = (record.queries[0], record.keys[0], record.values[0])  # each (b, H, n, N)
        return seconds_of(_core, *core), seconds_of(_rest, x, square, block.mlp_in, block.mlp_out)


_forward = eqx.filter_jit(lambda model, x: model(x))


@jax.jit
def _core(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Compute attention from queries, keys and values: the part of a block that is quadratic in the length."""
    pattern = jax.nn.softmax(jnp.einsum("...qn,...kn->...qk", queries.shape[-1] ** -0.5 * queries, keys), axis=-1)
    return jnp.einsum("...qk,...kn->...qn", pattern, values)


@jax.jit
def _rest(stream: jax.Array, square: jax.Array, mlp_in: jax.Array, mlp_out: jax.Array) -> jax.Array:
    """Compute the rest of a block: four projections of d x d, and the MLP."""
    for _ in range(4):
        stream = stream @ square
    return jax.nn.gelu(stream @ mlp_in, approximate=False) @ mlp_out


def seconds_of(function: Callable[..., Any], *arguments: Any, budget: float = 0.1) -> float:
    """Measure the smallest wall time of a compiled function over five calls, or as many as fit in `budget` seconds.

    The first call compiles and is not counted. The smallest time is the one least disturbed by other processes.
    """
    jax.block_until_ready(function(*arguments))
    times: list[float] = []
    while len(times) < 5 or sum(times) < budget:
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return min(times)


def counted_crossover(lengths: tuple[int, ...], flops: np.ndarray) -> float:
    """Solve F(n) = c + a n + q n^2 for the length at which q n^2 = a n, from counts at three lengths or more."""
    quadratic, linear, _ = np.polyfit(np.asarray(lengths, float), np.asarray(flops, float), 2)
    return float(linear / quadratic)


def meeting_points(lengths: tuple[int, ...], trained: st.Data) -> np.ndarray:
    """Compute log2 of the length at which core and rest take equal measured times, (replicates,)."""
    times = trained.sel(model="transformer").transpose("replicate", "length")
    pairs = zip(times["core_seconds"].values, times["rest_seconds"].values, strict=True)
    return np.asarray([meeting_point(lengths, *pair) for pair in pairs])


def _crossover_note(doublings: np.ndarray, edge: float) -> str:
    """Compare the length of equal measured times with that of equal FLOPs."""
    low, high = (float(2**end) for end in (np.min(doublings), np.max(doublings)))
    side = "earlier than" if high < edge else "later than" if low > edge else "at about the length of"
    return f"Equal measured times at n = {low:.0f} to {high:.0f} over replicates, {side} equal FLOPs, n = {edge:.0f}."


def meeting_point(lengths: tuple[int, ...], rising: np.ndarray, other: np.ndarray) -> float:
    """Compute log2 of the length at which power laws fitted to two sets of times intersect.

    The logarithm, because laws of nearly equal exponents intersect beyond the range of floating point.

    Raises
    ------
    UsageError
        A time that is not positive, or two laws of equal exponents.
    """
    if not (np.all(rising > 0) and np.all(other > 0)):
        raise st.UsageError("measured times must be positive: expected times of calls that were run")
    slope, offset = np.polyfit(np.log2(lengths), np.log2(rising) - np.log2(other), 1)
    if slope == 0.0:
        raise st.UsageError("both times have one exponent and meet at no length: measure longer sequences")
    return float(-offset / slope)
