"""The sparse contextual bigram, part by part."""

from tests.acceptance import _bigram_kernels, _bigram_theory, _bigram_tools, _bigram_training

FIGURES = [*_bigram_theory.FIGURES, *_bigram_kernels.FIGURES, *_bigram_tools.FIGURES, *_bigram_training.FIGURES]
