r"""`attention/vanishing-gradients`: gradients of a recurrent network by length, depth of its cell and gain at init.

With Gaussian weights of variance :math:`g^2/H` and independent inputs, layer j of the cell has, at token t,
pre-activations of variance :math:`q_{tj}`, which follow from each other, and the squared gradient of the output changes
by

.. math:: \chi_{tj} = g^2\,\mathbb E[\tanh'(\sqrt{q_{tj}}\,z)^2]

a layer and token: the mean-field theory of signal propagation, applied to a cell. At finite width the logarithm of a
product of random matrices is smaller by about :math:`(3\,\mathbb E[\tanh'^4]/\mathbb E[\tanh'^2]^2 - 1)/2H` a factor.
One block of attention at init stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from manyheads.errors import UsageError, check_rising
from manyheads.statistics import fit_exponent
from manyheads.study import Cell, Claim, Curve, Lines, Source, Study
from manyheads.study.panels import Panel, spread_curve
from manyheads.study.tables import dataset
from manyheads.transformer.baselines import BaselineConfig, initialize_recurrent
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.inputs import VectorInput
from manyheads.transformer.scaling import standard_scaling
from manyheads.transformer.shape import Shape
from manyheads.transformer.transformer import initialize

KEY_DIM = 16
NODES = 80  # of the Gauss-Hermite quadrature
GRADIENT = "squared gradient of the output, by the token"


@dataclass(frozen=True)
class VanishingGradients(Study):
    """Gradient of the output with respect to each token, in recurrent networks and in attention at init.

    Attributes
    ----------
    gains
        Standard deviations of the recurrent and deeper weights, in units of 1/sqrt(width); 1 is the library's init.
    layers
        Layers of the cell, from 1 up.
    tokens
        Length of the sequence of the recurrent network.
    lengths
        Lengths of the sequences of the attention block.
    width
        Width H of the recurrent state, and model dimension of the attention block.
    drive
        Variance of the inputs of the recurrent network.
    batch
        Sequences over which the squared gradient is averaged.
    """

    name: ClassVar[str] = "attention/vanishing-gradients"
    claim: ClassVar[str] = "Gradients of an RNN vanish or explode with length and depth; in attention not"
    source: ClassVar[Source] = Source(
        "pascanu2013",
        "On the difficulty of training recurrent neural networks",
        "Razvan Pascanu and Tomas Mikolov and Yoshua Bengio",
        2013,
        kind="inproceedings",
        venue="International Conference on Machine Learning",
        identifier="1211.5063",
        locus="section 2: vanishing and exploding gradients; the exponents by mean-field theory are derived here",
    )

    gains: tuple[float, ...] = (0.7, 1.0, 1.5, 2.5)
    layers: tuple[int, ...] = (1, 2, 4)
    tokens: int = 32
    lengths: tuple[int, ...] = (16, 32, 64, 128)
    width: int = 128
    drive: float = 0.25
    batch: int = 8

    def __post_init__(self) -> None:
        check_rising("lengths", self.lengths)
        if 1.0 not in self.gains or self.layers[0] != 1 or len(self.layers) < 2:
            raise UsageError(
                f"gains={self.gains}, layers={self.layers}: give 1.0 among the gains, and layers from 1 up"
            )
        if self.tokens < 8 or self.width % KEY_DIM or not self.drive > 0:
            raise UsageError(
                f"tokens={self.tokens}, width={self.width}, drive={self.drive}: give 8 tokens or more, a multiple of "
                f"{KEY_DIM} and a positive variance"
            )

    @classmethod
    def full(cls) -> VanishingGradients:
        """Return the study at four times the width and up to 512 tokens."""
        return cls(tokens=64, lengths=(16, 64, 256, 512), width=512)

    @classmethod
    def small(cls) -> VanishingGradients:
        """Return the smallest configuration in which every claim can change."""
        return cls(gains=(1.0,), layers=(1, 2), tokens=8, lengths=(4, 8), width=KEY_DIM, batch=2)

    def cells(self) -> tuple[Cell, ...]:
        """Return every gain with every number of layers, and attention at every length."""
        recurrent = [
            Cell(network="recurrent", gain=gain, layers=layers, length=self.tokens)
            for gain in self.gains
            for layers in self.layers
        ]
        attention = [Cell(network="attention", gain=1.0, layers=1, length=length) for length in self.lengths]
        return (*recurrent, *attention)

    def predict(self, key: jax.Array) -> xr.Dataset:
        """Return the squared gradients of the mean-field theory, and their exponent per token."""
        curves = np.array([[self._theory(gain, layers) for layers in self.layers] for gain in self.gains])
        return dataset(
            {
                "gradient": (("gain", "layers", "token"), curves, GRADIENT),
                "exponent": (("gain", "layers"), self._exponent(curves), "exponent of the squared gradient", "1/token"),
            },
            coords={"gain": list(self.gains), "layers": list(self.layers), "token": np.arange(self.tokens)},
        )

    def train(self, key: jax.Array, cell: Cell) -> xr.Dataset:
        """Initialize one network and differentiate its output with respect to every token."""
        if cell["network"] == "attention":
            curve, exponent, level = np.full(self.tokens, np.nan), np.nan, self._attention(key, int(cell["length"]))
        else:
            curve = self._recurrent(key, float(cell["gain"]), int(cell["layers"]))
            exponent, level = self._exponent(curve), np.nan
        return dataset(
            {
                "gradient": ("token", curve, GRADIENT),
                "exponent": ((), exponent, "exponent of the squared gradient", "1/token"),
                "level": ((), level, "squared gradient of the output of attention, by one of the tokens"),
            },
            coords={"token": np.arange(self.tokens)},
        )

    def claims(self) -> tuple[Claim, ...]:
        """Compare exponents with the theory, with the edge of chaos, with depth times length, and with attention."""
        deepest = self.layers[-1]

        def exponents(trained: xr.Dataset) -> np.ndarray:
            found = trained["exponent"].transpose("replicate", "cell").values
            places = np.flatnonzero(trained["network"].values == "recurrent")
            return found[:, places].reshape(-1, len(self.gains), len(self.layers))

        def gap(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return ((exponents(trained) - predicted["exponent"].values) / np.array(self.layers)).mean((1, 2))

        def at_init(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            return exponents(trained)[:, self.gains.index(1.0), 0]

        def by_depth(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            found = exponents(trained)[:, self.gains.index(1.0)]
            return found[:, -1] / found[:, 0]

        def power(predicted: xr.Dataset, trained: xr.Dataset) -> Any:
            chosen = trained.isel(cell=np.flatnonzero(trained["network"].values == "attention"))
            fit = fit_exponent(np.asarray(self.lengths, float), chosen["level"].transpose("replicate", "cell").values)
            return fit.exponent, fit.interval

        return (
            Claim(
                "The squared gradient of a tanh recurrent network at init changes by the factor chi of mean-field "
                "theory per token and layer of its cell (difference of exponents)",
                gap,
                quantity="exponent, measured less predicted (1/token and layer)",
                target=0.0,
                tolerance=6 / self.width,
                basis="the logarithm of a product of random matrices of this width is smaller by up to 3/H a factor at "
                "these gains; doubled",
            ),
            Claim(
                "With weights of variance 1/H an Elman network with inputs keeps its gradients (exponent)",
                at_init,
                quantity="exponent of the squared gradient (1/token)",
                target=0.0,
                tolerance=6 / self.width,
                expected="refuted",
                basis="chi = 1 holds without inputs; with them the units saturate and chi is below one",
            ),
            Claim(
                f"Depth acts like length: a cell of {deepest} layers has {deepest} times the exponent of one layer "
                "(ratio)",
                by_depth,
                quantity="exponent of the deepest cell over that of one layer",
                target=float(deepest),
                tolerance=0.1 * deepest,
                expected="refuted",
                basis="a tenth; only the first layer of the cell sees the inputs, the others saturate less",
            ),
            Claim(
                "In one block of attention at init the squared gradient by a token falls as n^-2, a power of the "
                "length (log-log slope)",
                power,
                quantity="exponent of n",
                target=-2.0,
                tolerance=0.25,
                basis="a token has the weight 1/n; with logits of variance one corrections are of relative size e^4/n",
            ),
        )

    def panels(self, predicted: xr.Dataset, trained: xr.Dataset) -> tuple[Panel, ...]:
        """Show squared gradients by distance from the end, and those of attention by length."""
        distance = np.arange(self.tokens)[::-1]
        panels: list[Panel] = []
        for layers, shows in ((self.layers[0], "the factor chi"), (self.layers[-1], "Depth acts like length")):
            curves: list[Curve] = []
            for group, gain in enumerate(self.gains):
                place = list(self.cells()).index(
                    Cell(network="recurrent", gain=gain, layers=layers, length=self.tokens)
                )
                rows = trained["gradient"].isel(cell=place).transpose("replicate", "token").values
                curves.append(spread_curve(distance, rows, f"gain {gain:g}", group=group))
                theory = predicted["gradient"].sel(gain=gain, layers=layers).values
                curves.append(spread_curve(distance, theory[None], "", "predicted", group))
            panels.append(
                Lines(
                    f"Recurrent network, {layers} layer{'s' * (layers > 1)} in the cell",
                    "tokens before the last",
                    "squared gradient",
                    tuple(curves),
                    log_y=True,
                    note="Bands: replicates. Dashed: mean-field theory.",
                    shows=(shows,),
                )
            )
        chosen = trained.isel(cell=np.flatnonzero(trained["network"].values == "attention"))
        rows = chosen["level"].transpose("replicate", "cell").values
        attention = spread_curve(self.lengths, rows, "one block of attention")
        return (
            *panels,
            Lines(
                "Attention at init",
                "sequence length [tokens]",
                "squared gradient by a token",
                (attention,),
                log_x=True,
                log_y=True,
                note="Bands: replicates.",
                shows=("In one block of attention",),
            ),
        )

    def _theory(self, gain: float, layers: int) -> np.ndarray:
        """Return the squared gradient by each token, (T,)."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
        second, slopes = 0.0, np.zeros((self.tokens, layers))
        for token in range(self.tokens):
            for layer in range(layers):
                variance = gain**2 * second + (self.drive if layer == 0 else 0.0)
                states = np.tanh(variance**0.5 * nodes)
                second = float(weights @ states**2 / weights.sum())
                slopes[token, layer] = weights @ (1 - states**2) ** 2 / weights.sum()
        factors = gain**2 * slopes
        below = np.cumprod(factors.prod(1)[::-1])[::-1]  # of the token itself and all after it
        return below / gain**2  # the last matrix is that of the read-out

    def _exponent(self, curve: np.ndarray) -> Any:
        """Return the slope of the logarithm in the distance from the end, without the first and last quarter."""
        inner = slice(self.tokens // 4, self.tokens - self.tokens // 4)
        logs = np.log(curve)[..., inner]
        distance = -np.arange(logs.shape[-1], dtype=float)
        distance -= distance.mean()
        return (logs * distance).sum(-1) / (distance**2).sum()

    def _recurrent(self, key: jax.Array, gain: float, layers: int) -> np.ndarray:
        """Return the squared gradient by each token, averaged over sequences, (T,)."""
        for_model, for_inputs = jax.random.split(key)
        config = BaselineConfig(VectorInput(self.width), 1, self.width, self.width, layers)
        model = initialize_recurrent(config, for_model, jnp.float64)
        scaled = jax.tree.map(lambda weights: gain * weights, (model.weights.recurrent, model.weights.deeper))
        model = eqx.tree_at(
            lambda tree: (tree.weights.recurrent, tree.weights.deeper), model, scaled, is_leaf=lambda node: node is None
        )
        shape = (self.batch, self.tokens, self.width)
        inputs = self.drive**0.5 * jax.random.normal(for_inputs, shape, jnp.float64)
        return np.asarray(_squared_gradients(model, inputs).mean(0))

    def _attention(self, key: jax.Array, length: int) -> float:
        """Return the squared gradient of the last token's output by one of the others, averaged over them."""
        for_model, for_inputs = jax.random.split(key)
        shape, inputs = Shape(KEY_DIM, self.width // KEY_DIM, 1), VectorInput(self.width)
        config = TransformerConfig(shape, inputs, length, 1, read_out="last", positions="none", mlp_ratio=0)
        model = initialize(config, standard_scaling(shape, inputs, 0), for_model, jnp.float64)
        x = jax.random.normal(for_inputs, (self.batch, length, self.width), jnp.float64)
        return float(_squared_gradients(model, x)[:, :-1].mean())


@jax.jit
def _squared_gradients(model: Any, x: jax.Array) -> jax.Array:
    """Return |d output / d x_t|^2, (sequences, T)."""
    return jnp.square(jax.grad(lambda inputs: model(inputs).sum())(x)).sum(-1)
