"""`attention/costs`: what a block of attention costs beside recurrence and pooling, counted and measured.

The counts are made on the networks that the library really runs, by walking their programs; the closed forms know
nothing of those programs. Time is measured too, because FLOPs are not time: the last claim says by how much.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from manyheads.costs import ModelShape, count, crossover_length, longest_chain, sequential_depth, transformer_cost
from manyheads.costs.formulas.recurrent import pooled_cost, rnn_cost
from manyheads.costs.shapes import PooledShape, RecurrentShape
from manyheads.errors import UsageError
from manyheads.study import Cell, Curve, Lines, Listing, Source, Study, Verdict, grid
from manyheads.study.reporting.panels import Panel, spread_curve
from manyheads.transformer.baselines import BaselineConfig, initialise_pooled, initialise_recurrent
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.inputs import VectorInput
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.shape import Shape
from manyheads.transformer.transformer import initialise

MODELS = {"transformer": "attention block", "recurrent": "Elman network", "pooled": "pooled MLP"}
FLOPS = {"long_name": "FLOPs of a forward pass", "units": "FLOP"}
TRAINING = {"long_name": "FLOPs of a training step", "units": "FLOP"}
SECONDS = {"long_name": "measured time of a forward pass", "units": "s", "deterministic": False}
CHAIN = {"long_name": "matrix products that wait for each other", "units": "1"}


@dataclass(frozen=True)
class Costs(Study):
    """Exact costs, sequential depth, measured time and crossover length of attention, recurrence and pooling.

    Attributes
    ----------
    width
        Model dimension d, of all three models.
    heads
        Heads of the attention block.
    lengths
        Sequence lengths, at least three, on both sides of the crossover (2 + 4) d.
    batch
        Sequences at a time.
    """

    name: ClassVar[str] = "attention/costs"
    claim: ClassVar[str] = "Exact costs, depth and crossover length of attention, an RNN and a pooled MLP"
    source: ClassVar[Source] = Source(
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

    width: int = 64
    heads: int = 4
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    batch: int = 2

    def __post_init__(self) -> None:
        if len(self.lengths) < 3 or list(self.lengths) != sorted(set(self.lengths)):
            raise UsageError(
                f"lengths={self.lengths}: a quadratic is fixed by three different lengths, give at least those, "
                "in rising order"
            )

    @classmethod
    def full(cls) -> Costs:
        """Return the study at the width of GPT-2."""
        return cls(width=768, heads=12, lengths=(256, 1024, 2048, 4096, 8192), batch=1)

    @classmethod
    def small(cls) -> Costs:
        """Return the smallest configuration in which every claim can change."""
        return cls(width=8, heads=2, lengths=(4, 8, 16))

    def cells(self) -> tuple[Cell, ...]:
        """Return every model at every length."""
        return grid(model=tuple(MODELS), length=self.lengths)

    def flops(self, cell: Cell) -> int:
        """Return the closed form of the forward pass, which is run a few times."""
        return 4 * self._closed_form(str(cell["model"]), int(cell["length"]), training=False)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the closed forms."""

        def table(value: Callable[[str, int], int]) -> tuple[tuple[str, str], np.ndarray]:
            rows = [[value(model, length) for length in self.lengths] for model in MODELS]
            return ("model", "length"), np.asarray(rows, dtype=np.int64)

        shapes = self._shapes()
        return xr.Dataset(
            {
                "flops": (*table(lambda model, n: self._closed_form(model, n, training=False)), FLOPS),
                "training_flops": (*table(lambda model, n: self._closed_form(model, n, training=True)), TRAINING),
                "chain": (*table(self._chain), CHAIN),
                "crossover": (
                    (),
                    np.int64(crossover_length(shapes["transformer"])),  # type: ignore[arg-type]
                    {"long_name": "length at which the attention core costs as much as the rest", "units": "tokens"},
                ),
            },
            coords={"model": list(MODELS), "length": list(self.lengths)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Count the programs of one model at one length, and time its forward pass."""
        model = self._model(str(cell["model"]), key, int(cell["length"]))
        shape = (self.batch, int(cell["length"]), self.width)
        x = jax.random.normal(key, shape, jnp.float32)

        def loss(weights: Any, inputs: jax.Array) -> jax.Array:
            return jnp.square(eqx.tree_at(lambda tree: tree.weights, model, weights)(inputs)).sum()

        core, rest = np.nan, np.nan
        if cell["model"] == "transformer":
            core, rest = self._halves(model, x)
        return xr.Dataset(
            {
                "flops": ((), np.int64(count(model, x).flops), FLOPS),
                "training_flops": (
                    (),
                    np.int64(count(jax.value_and_grad(loss, argnums=(0, 1)), model.weights, x).flops),
                    TRAINING,
                ),
                "chain": ((), np.int64(longest_chain(model, x)), CHAIN),
                "seconds": ((), seconds_of(_forward, model, x), SECONDS),
                "core_seconds": ((), core, SECONDS | {"long_name": "measured time of the attention core"}),
                "rest_seconds": ((), rest, SECONDS | {"long_name": "measured time of the rest of the block"}),
            }
        )

    def compare(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Verdict, ...]:
        """Compare counts as integers, and times by their exponents and their crossover."""
        differences = [int(abs(counted(trained, name) - predicted[name]).max()) for name in ("flops", "training_flops")]
        forward = counted(trained, "flops").isel(replicate=0)
        attention, recurrent = (forward.sel(model=model).values for model in ("transformer", "recurrent"))
        doublings = meeting_points(self.lengths, trained)
        target = float(predicted["crossover"])
        return (
            Verdict.exact(
                "the closed forms count every FLOP of the networks that run, forward and in training",
                max(differences),
                target=0,
                tolerance=0.0,
                basis="both are integers",
            ),
            Verdict.exact(
                "the attention core costs as much as the rest of its block at n = (2 + r) d",
                counted_crossover(self.lengths, attention),
                target=target,
                tolerance=1e-6 * target,
                basis="the counted FLOPs are a quadratic in n; solving it in floating point costs 1e-6 at most",
            ),
            Verdict.exact(
                "a block of attention takes more FLOPs than a recurrent step of the same width, at every length",
                float((attention / recurrent).min()),
                target=1.0,
                tolerance=(0.0, float("inf")),
                basis="a ratio above one; the closed forms give at least 6 at r = 4",
            ),
            Verdict.exact(
                "a block of attention is as deep at every length, recurrence grows deeper by one with every token",
                int(abs(counted(trained, "chain") - predicted["chain"]).max()),
                target=0,
                tolerance=0.0,
                basis="longest chains of matrix products are integers",
            ),
            Verdict.from_samples(
                "a FLOP of the attention core takes as long as any other: measured and counted crossover agree",
                np.asarray(doublings) - np.log2(target),
                target=0.0,
                tolerance=0.5,
                basis="half a doubling of the length, in powers of two",
                expected="refuted",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show counts against closed forms, depth, time, and where attention overtakes the rest of its block."""
        tokens = self.lengths
        flops, seconds = counted(trained, "flops"), counted(trained, "seconds")
        counts, times, depths = [], [], []
        for group, (model, label) in enumerate(MODELS.items()):
            counts.append(spread_curve(tokens, flops.sel(model=model).values.T, f"{label}, counted", group=group))
            forms = predicted["flops"].sel(model=model).values[None]
            counts.append(spread_curve(tokens, forms, "", "predicted", group))
            times.append(spread_curve(tokens, 1e3 * seconds.sel(model=model).values.T, label, group=group))
            chains = counted(trained, "chain").sel(model=model).values.T
            depths.append(spread_curve(tokens, chains, label, group=group))
        halves = [
            spread_curve(
                tokens, 1e3 * counted(trained, f"{half}_seconds").sel(model="transformer").values.T, label, group=g
            )
            for g, (half, label) in enumerate({"core": "attention core", "rest": "rest of the block"}.items())
        ]
        edge = float(predicted["crossover"])
        ends = [value for curve in halves for value in curve.y]
        halves.append(Curve((edge, edge), (min(ends), max(ends)), f"equal FLOPs, n = {edge:.0f}", "reference"))
        labels = {"x_label": "sequence length [tokens]", "log_x": True, "log_y": True}
        rows = [
            (label, *(f"{int(flops.sel(model=m, length=n).isel(replicate=0)):,}" for n in (tokens[0], tokens[-1])))
            for m, label in MODELS.items()
        ]
        return (
            Lines(
                "FLOPs of a forward pass",
                y_label="matrix-multiply FLOPs",
                curves=tuple(counts),
                note="Solid: counted on the program that runs. Dashed, on top: closed form. A multiply-add counts two.",
                **labels,  # type: ignore[arg-type]
            ),
            Lines(
                "Matrix products that wait for each other",
                y_label="longest chain",
                curves=tuple(depths),
                note="Longest chain of matrix products of which each needs the one before it.",
                **labels,  # type: ignore[arg-type]
            ),
            Lines(
                "Measured time of a forward pass",
                y_label="milliseconds",
                curves=tuple(times),
                note="One thread a process, smallest of several calls; bands reach over replicates.",
                **labels,  # type: ignore[arg-type]
            ),
            Lines(
                "Measured time of the attention core and of the rest of its block",
                y_label="milliseconds",
                curves=tuple(halves),
                note=_crossover_note(meeting_points(self.lengths, trained), edge),
                **labels,  # type: ignore[arg-type]
            ),
            Listing(
                f"FLOPs of a forward pass, d = {self.width}, {self.batch} sequences",
                ("model", f"n = {tokens[0]}", f"n = {tokens[-1]}"),
                tuple(rows),
            ),
        )

    def _shapes(self) -> dict[str, ModelShape | RecurrentShape | PooledShape]:
        return {
            "transformer": ModelShape(
                1, self.width, self.heads, classes=1, causal=False, positions="none", biases="none"
            ),
            "recurrent": RecurrentShape(self.width, self.width, classes=1),
            "pooled": PooledShape(self.width, self.width, layers=2, classes=1),
        }

    def _closed_form(self, model: str, length: int, training: bool) -> int:
        """Return the FLOPs of one pass; training takes gradients of weights and inputs."""
        shape = self._shapes()[model]
        if isinstance(shape, ModelShape):
            return transformer_cost(shape, length, self.batch, training=training).flops
        # The library's recurrent and pooled networks hand gradients to their inputs here, and the pooled one mixes
        # once more after the pool: 2 b H^2 forward, twice that backward.
        inputs = 2 * self.batch * length * self.width * self.width if training else 0
        if isinstance(shape, RecurrentShape):
            return rnn_cost(shape, length, self.batch, training=training).flops + inputs
        mixing = 2 * self.batch * self.width**2 * (3 if training else 1)
        return pooled_cost(shape, length, self.batch, training=training).flops + inputs + mixing

    def _chain(self, model: str, length: int) -> int:
        """Return how many matrix products wait for each other, the head included."""
        if model == "recurrent":
            return sequential_depth(self._shapes()[model], length) + 1
        # Queries, logits, mixing, output, MLP in, MLP out; or two layers, and one more after the pool.
        return 1 + (6 if model == "transformer" else 3)

    def _model(self, model: str, key: jax.Array, length: int) -> Any:
        inputs = VectorInput(self.width)
        if model == "transformer":
            config = TransformerConfig(
                Shape(self.width // self.heads, self.heads, 1), inputs, length, outputs=1, positions="none", gains=False
            )
            return initialise(config, standard_scaling(config.shape, inputs), key)
        baseline = BaselineConfig(inputs, 1, self.width, self.width, layers=1 if model == "recurrent" else 2)
        return (initialise_recurrent if model == "recurrent" else initialise_pooled)(baseline, key)

    def _halves(self, model: Any, x: jax.Array) -> tuple[float, float]:
        """Time the attention core alone, and the block with its core taken out."""
        record = model.record(x).layers
        block = jax.tree.map(lambda array: array[0], model.weights.blocks)
        square = block.query.reshape(self.width, self.width)
        core = (record.queries[0], record.keys[0], record.values[0])  # each (b, H, n, N)
        return seconds_of(_core, *core), seconds_of(_rest, x, square, block.mlp_in, block.mlp_out)


@eqx.filter_jit
def _forward(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


@jax.jit
def _core(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
    """Attend: what a block does that grows with the square of the length."""
    pattern = jax.nn.softmax(jnp.einsum("...qn,...kn->...qk", queries.shape[-1] ** -0.5 * queries, keys), axis=-1)
    return jnp.einsum("...qk,...kn->...qn", pattern, values)


@jax.jit
def _rest(stream: jax.Array, square: jax.Array, mlp_in: jax.Array, mlp_out: jax.Array) -> jax.Array:
    """Do the work of a block without its core: four projections of d x d, and the MLP."""
    for _ in range(4):
        stream = stream @ square
    return jax.nn.gelu(stream @ mlp_in, approximate=False) @ mlp_out


def counted(trained: xr.Dataset, name: str) -> xr.DataArray:
    """Return a variable over (model, length, replicate) instead of over cells, models in the order of `MODELS`."""
    table = trained[name].set_index(cell=["model", "length"]).unstack("cell").sel(model=list(MODELS))
    return table.transpose("model", "length", "replicate")


def seconds_of(function: Callable[..., Any], *arguments: Any, budget: float = 0.1) -> float:
    """Return the smallest wall time of a compiled function over five calls, or as many as fit in `budget` seconds.

    The first call compiles and is not counted. The smallest time is the one that other processes disturbed least.
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


def meeting_points(lengths: tuple[int, ...], trained: xr.Dataset) -> np.ndarray:
    """Return log2 of the length at which core and rest take equal measured times, one a replicate."""
    halves = [counted(trained, f"{half}_seconds").sel(model="transformer").values.T for half in ("core", "rest")]
    return np.asarray([meeting_point(lengths, core, rest) for core, rest in zip(*halves, strict=True)])


def _crossover_note(doublings: np.ndarray, edge: float) -> str:
    """Say where the measured curves meet, and on which side of equal FLOPs."""
    low, high = (float(2**end) for end in (np.min(doublings), np.max(doublings)))
    side = "earlier than" if high < edge else "later than" if low > edge else "at about the length of"
    return f"Equal measured times at n = {low:.0f} to {high:.0f} over replicates, {side} equal FLOPs, n = {edge:.0f}."


def meeting_point(lengths: tuple[int, ...], rising: np.ndarray, other: np.ndarray) -> float:
    """Return the base-2 logarithm of the length at which two power laws, fitted to the points, meet.

    The logarithm, because laws that grow almost alike meet at lengths that no number holds.

    Raises
    ------
    UsageError
        A value that is not positive: no time, and no power law. Or two laws that grow alike and meet nowhere.
    """
    if not (np.all(rising > 0) and np.all(other > 0)):
        raise UsageError("measured times must be positive")
    slope, offset = np.polyfit(np.log2(lengths), np.log2(rising) - np.log2(other), 1)
    if slope == 0.0:
        raise UsageError("both times grow alike and meet at no length: measure longer sequences")
    return float(-offset / slope)
