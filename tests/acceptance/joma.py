"""Joint dynamics of MLP and attention: the figures of all its parts."""

from tests.acceptance import _joma_text, _joma_theory

FIGURES = (*_joma_theory.FIGURES, *_joma_text.FIGURES)
