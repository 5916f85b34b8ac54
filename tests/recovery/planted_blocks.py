"""Transformer blocks with known weights, and functions that are none."""

import dataclasses

import numpy as np
from scipy.special import erf
from tests.recovery.rotary_layers import planted_rotary_layer

from manyheads.recovery import evaluate_layer, gpt_layer
from manyheads.recovery.oracle.normalization import Normalization, projected


def gelu(x):
    """The Gaussian error linear unit."""
    return x * (1 + erf(x / 2**0.5)) / 2


class PlantedBlock:
    """x + A(N x) and an MLP behind a norm of its own, one after the other or in parallel; counts what it is asked."""

    def __init__(
        self,
        rng,
        dim=16,
        heads=2,
        *,
        parallel=False,
        centred=True,
        causal=True,
        rotary=False,
        epsilon=1e-5,
        mlp=1.0,
        activation=gelu,
    ):
        self.dim, self.parallel, self.rotary, self.mlp = dim, parallel, rotary, True
        self.norm = Normalization(centred, epsilon)
        self.layer = planted_rotary_layer(rng, dim, heads) if rotary else gpt_layer(rng, dim, heads)
        if not causal:
            self.layer = dataclasses.replace(self.layer, causal=False)
        self.gain = np.ones(dim) if rotary else rng.uniform(0.6, 1.6, dim)
        self.shift = np.zeros(dim) if rotary else 0.3 * rng.standard_normal(dim)
        self.second = Normalization(centred, epsilon), rng.uniform(0.6, 1.6, dim), 0.3 * rng.standard_normal(dim)
        self.up = mlp * rng.standard_normal((dim, 4 * dim)) / dim**0.5
        self.down = rng.standard_normal((4 * dim, dim)) / (4 * dim) ** 0.5
        self.activation = activation
        self.calls = 0

    def attend(self, x):
        """Return the attention of the residual stream x."""
        u = self.gain * self.norm(x) + self.shift
        return self.layer(u) if self.rotary else evaluate_layer(self.layer, u)

    def feed_forward(self, y):
        """Return the MLP of the residual stream y."""
        norm, gain, shift = self.second
        return self.activation((gain * norm(y) + shift) @ self.up + 0.1) @ self.down

    def __call__(self, x):
        self.calls += len(x)
        y = x + self.attend(x)
        return y + self.feed_forward(x if self.parallel else y)

    @property
    def truth(self):
        """The layer on normalized tokens, without the output bias, which is not identifiable."""
        if self.rotary:
            return dataclasses.replace(self.layer, bias=None)
        return dataclasses.replace(projected(self.layer, self.gain, self.shift, centred=self.norm.centred), bias=None)


def post_norm(block):
    """Return a block that normalizes its residual sums."""

    def answer(x):
        y = block.norm(x + evaluate_layer(block.layer, x))
        return block.norm(y + block.feed_forward(y))

    return answer


def no_residual(block):
    """Return a block without its residual connections."""
    return lambda x: block.feed_forward(block.attend(x))


def no_norm(block):
    """Return a block whose attention reads the residual stream itself."""

    def answer(x):
        y = x + evaluate_layer(block.layer, x)
        return y + block.feed_forward(y)

    return answer


def mixing_mlp(block):
    """Return a block whose MLP sees the token before, as a convolution does."""

    def answer(x):
        y = x + block.attend(x)
        before = np.concatenate([np.zeros_like(y[:, :1]), y[:, :-1]], axis=1)
        return y + block.feed_forward(y + 0.3 * before)

    return answer


def averaging_mlp(block):
    """Return a block whose MLP also sees the mean of all earlier normalized tokens."""

    def answer(x):
        y = x + block.attend(x)
        u = block.norm(y)
        mean = np.cumsum(u, axis=1) / np.arange(1, x.shape[1] + 1)[:, None]
        return y + block.feed_forward(y) + block.activation(u * mean)

    return answer


def two_blocks(block):
    """Return two blocks, one behind the other."""
    second = PlantedBlock(np.random.default_rng(5), block.dim, 2, causal=block.layer.causal)
    return lambda x: second(block(x))


CONTROLS = (post_norm, no_residual, no_norm, mixing_mlp, averaging_mlp, two_blocks)
