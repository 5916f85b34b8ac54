"""Source of the studies on self-attention with 1-bit tokens."""

from manyheads.study import Source

SOURCE = Source(
    "poclopez2024",
    "Dynamical Mean-Field Theory of Self-Attention Neural Networks",
    "Ángel Poc-López and Miguel Aguilera",
    2024,
    identifier="2406.07247",
    locus="abstract and public configuration; what is compared with it is derived here",
)
