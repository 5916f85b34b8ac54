r"""`attention/vanishing-gradients`: gradients of a recurrent network by length, depth of its cell and gain at init.

With Gaussian weights of variance :math:`g^2/H` and independent inputs, layer j of the cell has, at token t,
pre-activations of variance :math:`q_{tj}`, which follow from each other, and the squared gradient of the output changes
by

.. math:: \chi_{tj} = g^2\,\mathbb E[\tanh'(\sqrt{q_{tj}}\,z)^2]

a layer and token: the mean-field theory of signal propagation, applied to a cell. At finite width the logarithm of a
product of random matrices is smaller by about :math:`(3\,\mathbb E[\tanh'^4]/\mathbb E[\tanh'^2]^2 - 1)/2H` a factor.
One block of attention at init stands beside it.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import manyheads.study as st
from manyheads.transformer import Shape, TransformerConfig, initialize, standard_scaling
from manyheads.transformer.baselines import BaselineConfig, initialize_recurrent
from manyheads.transformer.inputs import VectorInput

KEY_DIM = 16
NODES = 80  # of the Gauss-Hermite quadrature
GRADIENT = "squared gradient of the output, by the token"
EXPONENT = ("exponent of the squared gradient", "1/token")


class VanishingGradients(st.Study):
    """Gradient of the output with respect to each token, in recurrent networks and in attention at init."""

    name = "attention/vanishing-gradients"
    claim = "Gradients of an RNN vanish or explode with length and depth; in attention not"
    source = st.Source(
        "pascanu2013",
        "On the difficulty of training recurrent neural networks",
        "Razvan Pascanu and Tomas Mikolov and Yoshua Bengio",
        2013,
        kind="inproceedings",
        venue="International Conference on Machine Learning",
        identifier="1211.5063",
        locus="section 2: vanishing and exploding gradients; the exponents by mean-field theory are derived here",
    )

    gains: tuple[float, ...] = st.setting(
        (0.7, 1.0, 1.5, 2.5),
        "standard deviations of the recurrent and deeper weights, in units of 1/sqrt(width); 1 is the library's init",
        small=(1.0,),
    )
    layers: tuple[int, ...] = st.sweep((1, 2, 4), "layers of the cell, from 1 up", small=(1, 2))
    tokens: int = st.setting(32, "length of the sequence of the recurrent network", least=8, small=8, full=64)
    lengths: tuple[int, ...] = st.sweep(
        (16, 32, 64, 128), "lengths of the sequences of the attention block", small=(4, 8), full=(16, 64, 256, 512)
    )
    width: int = st.setting(
        128,
        "width H of the recurrent state, and model dimension of the attention block",
        multiple=KEY_DIM,
        small=KEY_DIM,
        full=512,
    )
    drive: float = st.setting(0.25, "variance of the inputs of the recurrent network", above=0)
    batch: int = st.setting(8, "sequences over which the squared gradient is averaged", small=2)

    def check(self) -> None:
        if 1.0 not in self.gains or self.layers[0] != 1:
            given = f"gains={self.gains}, layers={self.layers}"
            raise st.UsageError(f"{given}: give 1.0 among the gains, and layers from 1 up")

    def cells(self) -> tuple[st.Cell, ...]:
        recurrent = st.grid(network=("recurrent",), gain=self.gains, layers=self.layers, length=(self.tokens,))
        return recurrent + st.grid(network=("attention",), gain=(1.0,), layers=(1,), length=self.lengths)

    def predict(self, key: st.Key) -> st.Record:
        """Return the squared gradients of the mean-field theory, and their exponent per token."""
        curves = np.array([[self._theory(gain, layers) for layers in self.layers] for gain in self.gains])
        return {
            "gradient": (("gain", "layers", "token"), curves, GRADIENT),
            "exponent": (("gain", "layers"), self._exponent(curves), *EXPONENT),
            "gain": ("gain", list(self.gains), "gain"),
            "layers": ("layers", list(self.layers), "layers of the cell"),
            "length": ("length", list(self.lengths), "sequence length", "tokens"),
            "token": ("token", np.arange(self.tokens), "token"),
        }

    def train(self, key: st.Key, network: str, gain: float, layers: int, length: int) -> st.Record:
        if network == "attention":
            curve, exponent, level = np.full(self.tokens, np.nan), np.nan, self._attention(key, length)
        else:
            curve = self._recurrent(key, gain, layers)
            exponent, level = self._exponent(curve), np.nan
        return {
            "gradient": ("token", curve, GRADIENT),
            "exponent": ((), exponent, *EXPONENT),
            "level": ((), level, "squared gradient of the output of attention, by one of the tokens"),
            "token": ("token", np.arange(self.tokens), "token"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        deepest = self.layers[-1]
        exponent = trained["exponent"].sel(network="recurrent", length=self.tokens)
        init = exponent.sel(gain=1.0)
        level = trained["level"].sel(network="attention", gain=1.0, layers=1, length=list(self.lengths))
        yield st.Claim(
            "The squared gradient of a tanh recurrent network at init changes by the factor chi of mean-field "
            "theory per token and layer of its cell (difference of exponents)",
            ((exponent - theory["exponent"]) / exponent["layers"]).mean(("gain", "layers")),
            st.near(0, 6 / self.width),
            "the logarithm of a product of random matrices of this width is smaller by up to 3/H a factor at "
            "these gains; doubled",
            "exponent, measured less predicted (1/token and layer)",
        )
        text = "With weights of variance 1/H an Elman network with inputs keeps its gradients (exponent)"
        basis = "chi = 1 holds without inputs; with them the units saturate and chi is below one"
        quantity = "exponent of the squared gradient (1/token)"
        yield st.Claim(text, init.sel(layers=1), st.near(0, 6 / self.width), basis, quantity, expected="refuted")
        yield st.Claim(
            f"Depth acts like length: a cell of {deepest} layers has {deepest} times the exponent of one layer (ratio)",
            init.sel(layers=deepest) / init.sel(layers=1),
            st.near(deepest, 0.1 * deepest),
            "a tenth; only the first layer of the cell sees the inputs, the others saturate less",
            "exponent of the deepest cell over that of one layer",
            expected="refuted",
        )
        yield st.Claim(
            "In one block of attention at init the squared gradient by a token falls as n^-2, a power of the "
            "length (log-log slope)",
            st.exponent(level, "length", "n", "squared gradient by a token, one block of attention"),
            st.near(-2, 0.25),
            "a token has the weight 1/n; with logits of variance one corrections are of relative size e^4/n",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        gradient = trained["gradient"].sel(network="recurrent", length=self.tokens)
        for layers, shows in ((self.layers[0], "the factor chi"), (self.layers[-1], "Depth acts like length")):
            recurrent, law = (
                {f"gain {gain:g}": data.sel(gain=gain, layers=layers) for gain in self.gains}
                for data in (gradient, theory["gradient"])
            )
            title = f"Recurrent network, {layers} layer{'s' * (layers > 1)} in the cell"
            note = "Bands: replicates. Dashed: mean-field theory."
            yield st.lines(title, "token", "squared gradient", recurrent, law, log="y", note=note, shows=(shows,))

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

    def _recurrent(self, key: st.Key, gain: float, layers: int) -> np.ndarray:
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

    def _attention(self, key: st.Key, length: int) -> float:
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
