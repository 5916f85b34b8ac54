"""The sparse contextual bigram, part by part."""

from tests.acceptance import _bigram_kernels

FIGURES = [*_bigram_kernels.FIGURES]
