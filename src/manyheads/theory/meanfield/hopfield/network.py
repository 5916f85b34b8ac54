"""Self-attention network with 1-bit tokens and weights, by types of neurons (Poc-López and Aguilera, arXiv 2406.07247).

A token x_t = (s_t, p_t) has N semantic bits s_i = ±1 and P positional bits, the binary code (±1) of t mod L with
L = 2^P. The weights of feature c = 1..M are ±1 as well, for the output o, the query q, the key k and the value v:

    m^a_{c,t} = (1 - eps) <W^a_c s_t> + eps <W^a_c p_t>_P,     a = q, k, v,
    A_{c,t}   = sum_tau softmax_tau( gamma / sqrt(M) m^q_t . m^k_tau ) m^v_{c,tau},     tau = t, ..., max(0, t - L + 1),
    P(s_{i,t+1} = +1) = (1 + tanh( beta sum_c W^o_{c,i} A_{c,t} )) / 2,     independently over i.

<.> is the mean over neurons. Neurons with equal columns of (W^o, W^q, W^k, W^v) are of one type; with a share pi_k of
neurons of type k every mean over neurons is sum_k pi_k (.), which holds for finite and infinite N.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from manyheads._arrays import as_floats, check_generator
from manyheads._constraints import Constraint, check_fields, constrained
from manyheads._extras import Float
from manyheads._overview import ArraysAsShapes
from manyheads.errors import ShapeError, UsageError, check_integer

Correlations = Literal["limit", "quenched"]

# Signs of the authors' configuration: a row for each feature, three equal segments of neurons | two positional bits.
PUBLISHED = {
    "output": ("-++|--", "-+-|+-", "+++|++"),
    "query": ("+--|+-", "---|++", "+-+|--"),
    "key": ("---|--", "--+|--", "-+-|-+"),
    "value": ("-+-|--", "--+|+-", "-++|-+"),
}


@dataclass(frozen=True, eq=False, repr=False)
class OneBitNetwork(ArraysAsShapes):
    """Weights of a self-attention network with 1-bit tokens, by types of neurons.

    Parameters
    ----------
    output, query, key, value
        Weights W^o, W^q, W^k, W^v of each type of neurons, shape (features M, types C), entries ±1.
    positional
        Weights of the positional bits for query, key and value, shape (3, M, P), entries ±1; the context holds
        L = 2^P tokens.
    fractions
        Share of the neurons of each type, shape (C,); equal shares if None. They are the law of the weights, or the
        composition of one network (`with_neurons`).
    positional_weight
        eps, from 0 to 1. At 0 the dynamics is odd: every attractor is its own mirror image or one of a pair.
    gain
        gamma, the inverse temperature of attention.

    Raises
    ------
    ShapeError
        Arrays that do not fit together.
    UsageError
        Weights other than ±1, fractions that are no distribution, a positional weight outside [0, 1], or a gain that is
        negative or not finite.

    Examples
    --------
    >>> network = OneBitNetwork.published()
    >>> network.features, network.types, network.context
    (3, 3, 4)
    """

    output: Float[np.ndarray, "feature type"]
    query: Float[np.ndarray, "feature type"]
    key: Float[np.ndarray, "feature type"]
    value: Float[np.ndarray, "feature type"]
    positional: Float[np.ndarray, "3 feature bit"]
    fractions: Float[np.ndarray, " type"] = None  # type: ignore[assignment]  # an array after __post_init__
    positional_weight: float = constrained(0.02, Constraint(least=0, most=1))
    gain: float = constrained(220.0, Constraint(least=0))

    def __post_init__(self) -> None:
        names = tuple(PUBLISHED)
        for name in (*names, "positional"):
            weights = as_floats(getattr(self, name), name).copy()
            if not (np.abs(weights) == 1).all():
                raise UsageError(f"{name}: expected weights of -1 and +1")
            object.__setattr__(self, name, weights)
        shape = self.output.shape
        if len(shape) != 2 or 0 in shape or any(getattr(self, name).shape != shape for name in names):
            shapes = ", ".join(f"{name} {getattr(self, name).shape}" for name in names)
            raise ShapeError(f"{shapes}: expected the same (features, types)")
        if self.positional.ndim != 3 or self.positional.shape[:2] != (3, shape[0]) or self.positional.shape[2] > 8:
            raise ShapeError(
                f"positional {self.positional.shape}: expected (3, {shape[0]}, bits) for query, key and value, "
                "with at most 8 bits"
            )
        equal = self.fractions is None
        fractions = np.full(shape[1], 1 / shape[1]) if equal else as_floats(self.fractions, "fractions").copy()
        if fractions.shape != shape[1:] or not (fractions >= 0).all() or abs(fractions.sum() - 1) > 1e-9:
            raise UsageError(f"fractions: expected {shape[1]} shares that sum to 1, got {fractions}")
        object.__setattr__(self, "fractions", fractions)
        check_fields(self)
        if not self.positional.shape[2] and self.positional_weight:
            raise UsageError("without positional bits positional_weight is 0")

    @classmethod
    def published(cls) -> OneBitNetwork:
        """Return the published configuration: M = 3, L = 4, three equal types of neurons, eps = 0.02, gamma = 220.

        Source: the authors' public code.
        """
        signs = {
            name: np.array([[1.0 if sign == "+" else -1.0 for sign in row.replace("|", "")] for row in rows])
            for name, rows in PUBLISHED.items()
        }
        output, query, key, value = (signs[name][:, :3] for name in PUBLISHED)
        return cls(output, query, key, value, np.stack([signs[name][:, 3:] for name in ("query", "key", "value")]))

    @classmethod
    def random(cls, rng: np.random.Generator, features: int, types: int, positional_bits: int = 2) -> OneBitNetwork:
        """Draw M features of C equally frequent types and P positional bits, each sign with probability 1/2.

        With `types` equal to the number of neurons every neuron has weights of its own: correlations of order
        1/sqrt(N) between features are then those of this draw (quenched). Few types give correlations of order one.
        Other settings are changed by `dataclasses.replace`.
        """
        features, types = check_integer("features", features), check_integer("types", types)
        bits, rng = check_integer("positional_bits", positional_bits, 0, 8), check_generator(rng)
        output, query, key, value = 2.0 * rng.integers(0, 2, (4, features, types)) - 1
        positional = 2.0 * rng.integers(0, 2, (3, features, bits)) - 1
        return cls(output, query, key, value, positional, positional_weight=cls.positional_weight if bits else 0.0)

    def with_neurons(
        self, neurons: int, correlations: Correlations, rng: np.random.Generator | None = None
    ) -> OneBitNetwork:
        """Return the network of `neurons` neurons: its fractions are whole numbers of neurons.

        Parameters
        ----------
        neurons
            N.
        correlations
            "limit": the shares stay what they are, so correlations between weights are those of N = infinity.
            "quenched": the type of each neuron is drawn from the shares, so correlations differ by O(1/sqrt(N)). The
            mean field of the returned network has the correlations of that network.
        rng
            Source of the types of neurons; needed for "quenched".

        Raises
        ------
        UsageError
            Shares that are no whole numbers of neurons ("limit"), or no `rng` ("quenched").
        """
        neurons = check_integer("neurons", neurons)
        if correlations == "limit":
            self.counts(neurons)
            return self
        if correlations != "quenched":
            raise UsageError(f'correlations={correlations!r}: expected "limit" or "quenched"')
        if rng is None:
            raise UsageError('correlations="quenched" draws the types of neurons: give rng')
        return replace(self, fractions=check_generator(rng).multinomial(neurons, self.fractions) / neurons)

    def counts(self, neurons: int) -> np.ndarray:
        """Return the number of neurons of each type, shape (C,).

        Raises `UsageError`: shares that are no whole numbers of neurons.
        """
        exact = self.fractions * neurons
        counts = np.rint(exact).astype(np.int64)
        rounding = 1e-9 + 2e-15 * neurons  # of shares in double precision, and of their products
        if np.abs(exact - counts).max() > rounding or counts.sum() != neurons:
            raise UsageError(
                f"{neurons} neurons: the shares {np.round(self.fractions, 6)} are no whole numbers of neurons; choose "
                'a multiple, or draw a network by with_neurons(neurons, "quenched", rng)'
            )
        return counts

    @property
    def features(self) -> int:
        """Number of features M."""
        return int(self.output.shape[0])

    @property
    def types(self) -> int:
        """Number of types of neurons C."""
        return int(self.output.shape[1])

    @property
    def context(self) -> int:
        """Number of tokens in the full context, L = 2^P, which is the period of the positional drive."""
        return 1 << int(self.positional.shape[2])

    def position_overlaps(self) -> Float[np.ndarray, "position 3 feature"]:
        """Return the positional part of the overlaps of query, key and value at each position, shape (L, 3, M)."""
        bits = self.positional.shape[2]
        places = np.arange(self.context)[:, None] >> np.arange(bits)[::-1] & 1  # (L, P), highest bit first
        return self.positional_weight * np.einsum("acj,tj->tac", self.positional, 2.0 * places - 1) / max(bits, 1)
