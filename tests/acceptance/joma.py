"""Joint dynamics of MLP and attention: the figures of all its parts."""

from tests.acceptance import _joma_flow, _joma_judge, _joma_latents, _joma_text, _joma_theory

FIGURES = (
    *_joma_flow.FIGURES,
    *_joma_latents.FIGURES,
    *_joma_theory.FIGURES,
    *_joma_text.FIGURES,
    *_joma_judge.FIGURES,
)
