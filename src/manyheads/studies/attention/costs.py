"""`attention/costs`: FLOPs, sequential depth and time of attention, recurrence and pooling, counted and measured.

Counts are taken from the traced programs of the networks, independently of the closed forms. Times are measured.
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
from manyheads.study import Cell, Claim, Curve, Lines, Listing, Source, Study, grid
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset, unstack
from manyheads.transformer.baselines import BaselineConfig, initialize_pooled, initialize_recurrent
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.inputs import VectorInput
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.shape import Shape
from manyheads.transformer.transformer import initialize

MODELS = {"transformer": "attention block", "recurrent": "Elman network", "pooled": "pooled MLP"}
LABELS = {
    "flops": ("FLOPs of a forward pass", "FLOP"),
    "training_flops": ("FLOPs of a training step", "FLOP"),
    "chain": ("matrix products that wait for each other",),
    "seconds": ("measured time of a forward pass", "s"),
    "core_seconds": ("measured time of the attention core", "s"),
    "rest_seconds": ("measured time of the rest of the block", "s"),
}


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
                f"lengths={self.lengths}: expected three different lengths or more, in rising order, which determine "
                "a quadratic"
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
        """Return the FLOPs of four forward passes by the closed form."""
        return 4 * self._closed_form(str(cell["model"]), int(cell["length"]), training=False)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the closed forms."""
        forms: dict[str, Callable[[str, int], int]] = {
            "flops": lambda model, length: self._closed_form(model, length, training=False),
            "training_flops": lambda model, length: self._closed_form(model, length, training=True),
            "chain": self._chain,
        }
        tables = {
            name: np.asarray([[form(model, length) for length in self.lengths] for model in MODELS], np.int64)
            for name, form in forms.items()
        }
        edge = np.int64(crossover_length(self._shapes()["transformer"]))  # type: ignore[arg-type]
        label = "length at which the attention core costs as much as the rest"
        return dataset(
            {name: (("model", "length"), table, *LABELS[name]) for name, table in tables.items()}
            | {"crossover": ((), edge, label, "tokens")},
            coords={"model": list(MODELS), "length": list(self.lengths)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Count the programs of one model at one length, and time its forward pass."""
        model = self._model(str(cell["model"]), key, int(cell["length"]))
        x = jax.random.normal(key, (self.batch, int(cell["length"]), self.width), jnp.float32)

        def loss(weights: Any, inputs: jax.Array) -> jax.Array:
            return jnp.square(eqx.tree_at(lambda tree: tree.weights, model, weights)(inputs)).sum()

        core, rest = self._halves(model, x) if cell["model"] == "transformer" else (np.nan, np.nan)
        values = {
            "flops": np.int64(count(model, x).flops),
            "training_flops": np.int64(count(jax.value_and_grad(loss, argnums=(0, 1)), model.weights, x).flops),
            "chain": np.int64(longest_chain(model, x)),
            "seconds": seconds_of(_forward, model, x),
            "core_seconds": core,
            "rest_seconds": rest,
        }
        found = dataset({name: ((), value, *LABELS[name]) for name, value in values.items()})
        for name in ("seconds", "core_seconds", "rest_seconds"):
            found[name].attrs["deterministic"] = False
        return found

    def claims(self) -> tuple[Claim, ...]:
        """Compare counts as integers, and measured times by the length at which they are equal."""

        def miscounted(predicted: xr.Dataset, trained: xr.Dataset) -> float:
            names = ("flops", "training_flops")
            return max(int(abs(unstack(trained, name) - predicted[name]).max()) for name in names)

        def crossover(predicted: xr.Dataset, trained: xr.Dataset) -> float:
            flops = unstack(trained, "flops").isel(replicate=0).sel(model="transformer")
            return counted_crossover(self.lengths, flops.values)

        def smallest_ratio(predicted: xr.Dataset, trained: xr.Dataset) -> float:
            flops = unstack(trained, "flops").isel(replicate=0)
            return float((flops.sel(model="transformer") / flops.sel(model="recurrent")).min())

        def depth_error(predicted: xr.Dataset, trained: xr.Dataset) -> float:
            return int(abs(unstack(trained, "chain") - predicted["chain"]).max())

        def doublings(predicted: xr.Dataset, trained: xr.Dataset) -> np.ndarray:
            return meeting_points(self.lengths, trained) - np.log2(float(predicted["crossover"]))

        return (
            Claim(
                "The closed forms give every matrix-multiply FLOP of the three networks, forward and in training",
                miscounted,
                quantity="largest difference (FLOPs)",
                target=0,
                tolerance=0.0,
                basis="both are integers: the largest difference over models, lengths and replicates",
            ),
            Claim(
                "The attention core takes as many FLOPs as the rest of its block at n = (2 + r) d tokens",
                crossover,
                quantity="length of equal FLOPs (tokens)",
                target=lambda predicted: float(predicted["crossover"]),
                tolerance=lambda predicted: 1e-6 * float(predicted["crossover"]),
                basis="the counted FLOPs are a quadratic in n, which is solved in floating point",
            ),
            Claim(
                "A block of attention takes more FLOPs than an Elman network of the same width at every length",
                smallest_ratio,
                quantity="FLOPs of attention over those of recurrence, smallest over lengths",
                target=1.0,
                tolerance=(0.0, float("inf")),
                basis="smallest ratio of the counts; by the closed forms it is 6 or more at r = 4",
            ),
            Claim(
                "The sequential depth of attention is independent of the length, that of recurrence grows by 1 a token",
                depth_error,
                quantity="largest difference of depths (matrix products)",
                target=0,
                tolerance=0.0,
                basis="longest chains of matrix products are integers",
            ),
            Claim(
                "The attention core takes as much measured time as the rest of its block where their FLOPs are equal",
                doublings,
                quantity="length of equal times over that of equal FLOPs (log2)",
                target=0.0,
                tolerance=0.5,
                basis="log2 of the ratio of both lengths; half a doubling of the length",
                expected="refuted",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show counts against closed forms, depth, time, and times of the attention core and the rest of its block."""
        tokens, flops, edge = self.lengths, unstack(trained, "flops"), float(predicted["crossover"])

        def curves(name: str, ending: str = "", scale: float = 1.0) -> list[Curve]:
            table = unstack(trained, name)
            return [
                spread_curve(tokens, scale * table.sel(model=model).values.T, f"{label}{ending}", group=group)
                for group, (model, label) in enumerate(MODELS.items())
            ]

        forms = [
            spread_curve(tokens, predicted["flops"].sel(model=model).values[None], "", "predicted", group)
            for group, model in enumerate(MODELS)
        ]
        counts = [curve for pair in zip(curves("flops", ", counted"), forms, strict=True) for curve in pair]
        halves = [
            spread_curve(
                tokens, 1e3 * unstack(trained, f"{half}_seconds").sel(model="transformer").values.T, label, group=group
            )
            for group, (half, label) in enumerate({"core": "attention core", "rest": "rest of the block"}.items())
        ]
        ends = [value for curve in halves for value in curve.y]
        halves.append(Curve((edge, edge), (min(ends), max(ends)), f"equal FLOPs, n = {edge:.0f}", "reference"))
        rows = tuple(
            (label, *(f"{int(flops.sel(model=m, length=n).isel(replicate=0)):,}" for n in (tokens[0], tokens[-1])))
            for m, label in MODELS.items()
        )

        def lines(title: str, y_label: str, drawn: list[Curve], note: str, *shows: str) -> Lines:
            x_label, curves = "sequence length [tokens]", tuple(drawn)
            return Lines(title, x_label, y_label, curves, log_x=True, log_y=True, note=note, shows=shows)

        return (
            lines(
                "FLOPs of a forward pass",
                "matrix-multiply FLOPs",
                counts,
                "Solid: counted on the program that runs. Dashed, on top: closed form. A multiply-add counts two.",
                "The closed forms give",
            ),
            lines(
                "Sequential depth",
                "longest chain [matrix products]",
                curves("chain"),
                "Longest chain of matrix products of which each needs the one before it.",
                "The sequential depth",
            ),
            lines(
                "Measured time of a forward pass",
                "time [ms]",
                curves("seconds", scale=1e3),
                "One thread a process, smallest of several calls; bands range over replicates.",
            ),
            lines(
                "Measured time of the attention core and of the rest of its block",
                "time [ms]",
                halves,
                _crossover_note(meeting_points(tokens, trained), edge),
                "measured time as the rest",
            ),
            Listing(
                f"FLOPs of a forward pass, d = {self.width}, {self.batch} sequences",
                ("model", f"n = {tokens[0]}", f"n = {tokens[-1]}"),
                rows,
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
        # Training differentiates the inputs too, and the pooled network has one more layer after the pool: 2 b H^2
        # forward, twice that backward.
        inputs = 2 * self.batch * length * self.width * self.width if training else 0
        if isinstance(shape, RecurrentShape):
            return rnn_cost(shape, length, self.batch, training=training).flops + inputs
        mixing = 2 * self.batch * self.width**2 * (3 if training else 1)
        return pooled_cost(shape, length, self.batch, training=training).flops + inputs + mixing

    def _chain(self, model: str, length: int) -> int:
        """Return the length of the longest chain of matrix products, the read-out included."""
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


@eqx.filter_jit
def _forward(model: Any, x: jax.Array) -> jax.Array:
    return model(x)


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


def meeting_points(lengths: tuple[int, ...], trained: xr.Dataset) -> np.ndarray:
    """Compute log2 of the length at which core and rest take equal measured times, (replicates,)."""
    halves = [unstack(trained, f"{half}_seconds").sel(model="transformer").values.T for half in ("core", "rest")]
    return np.asarray([meeting_point(lengths, core, rest) for core, rest in zip(*halves, strict=True)])


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
        raise UsageError("measured times must be positive: expected times of calls that were run")
    slope, offset = np.polyfit(np.log2(lengths), np.log2(rising) - np.log2(other), 1)
    if slope == 0.0:
        raise UsageError("both times have one exponent and meet at no length: measure longer sequences")
    return float(-offset / slope)
