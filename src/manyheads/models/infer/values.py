"""Abstract values of a forward pass: the weights, attention cores and gains each one is made of; None is a constant."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

UNKNOWN = float("nan")  # a multiplier that is not one number, as where the terms of a sum have several


@dataclass(frozen=True, order=True)
class Source:
    """A product with a weight, an attention core, the stream or an input, from which no other product separates."""

    kind: str  # "weight", "core", "stream" or "input"
    name: str = ""
    part: tuple[Any, ...] = ()  # slices taken of the weight before the product
    cut: tuple[Any, ...] = ()  # slices taken of the product
    bent: bool = False  # whether a nonlinearity followed


@dataclass(frozen=True)
class Value:
    """What a tensor is made of."""

    sources: frozenset[Source] = frozenset()
    stream: bool = False
    starts: frozenset[int] = frozenset()  # embeddings that the stream began with
    wrote: frozenset[str] = frozenset()  # weights that wrote to the stream last
    gains: frozenset[str] = frozenset()  # since the last product or residual sum
    normed: bool = False
    last: tuple[str, str] | None = None  # ("product" | "gain" | "table", parameter): tells biases from shifts
    scores: tuple[Value, Value] | None = None  # the factors of a product of activations
    size: int = 0  # how many numbers that product sums over
    axis: int = -1  # its axis of the second factor's rows
    pattern: bool = False  # whether exp or a softmax was taken of it
    over: int = 0  # the axis, from the end, over which it sums to one
    shares: bool = False  # whether it sums to one, as behind a softmax
    warped: bool = False  # whether a nonlinearity or a product followed the last product with a weight
    weighted: bool = False  # whether a router weighted it
    added: bool = False  # whether it is a sum of products with different weights
    beside: frozenset[tuple[str, float]] = frozenset()  # added parameters, with their multiplier over its own
    statistic: bool = False  # a sum over features, as in a norm
    parameters: frozenset[str] = frozenset()  # of which alone it is made
    part: tuple[Any, ...] = ()  # slices taken of them
    offset: float = 0.0  # added to them
    computed: bool = False  # whether they are more than sliced, scaled and shifted
    chosen: bool = False  # whether it was sorted: weights of experts
    own: float = 1.0  # constants multiplied since the last product with a weight, norm, nonlinearity or sum
    taken: float = 1.0  # those before that product, since the last norm ...; of a pattern, before the softmax
    degree: float = 1.0  # power of what a statistic is made of

    @property
    def scale(self) -> float:
        """Constants multiplied since the last norm, nonlinearity or sum."""
        return self.own * self.taken

    @property
    def multiplier(self) -> float:
        """Constants by which a parameter was multiplied."""
        return UNKNOWN if self.computed else self.scale

    @property
    def weights(self) -> frozenset[str]:
        """Names of the weights among the sources."""
        return frozenset(each.name for each in self.sources if each.kind == "weight")

    @property
    def core(self) -> bool:
        """Whether an attention core is among the sources."""
        return any(each.kind == "core" for each in self.sources)

    def curved(self) -> Value:
        """Return it behind a nonlinearity."""
        return replace(self, sources=frozenset(replace(each, bent=True) for each in self.sources))

    def plain(self) -> frozenset[Source]:
        """Return the sources without the nonlinearity."""
        return frozenset(replace(each, bent=False) for each in self.sources)

    def whole(self) -> frozenset[Source]:
        """Return the sources without slices taken of them."""
        return frozenset(replace(each, cut=()) for each in self.sources)


INPUT = Value(sources=frozenset([Source("input")]))
STREAM = frozenset([Source("stream")])


class Product(NamedTuple):
    """A product of a weight with an activation."""

    weight: str
    part: tuple[Any, ...]
    x: Value
    fan_in: int


class Core(NamedTuple):
    """An attention core: softmax of q . k, times v."""

    query: Value
    key: Value
    value: Value
    key_dim: int
    value_dim: int
