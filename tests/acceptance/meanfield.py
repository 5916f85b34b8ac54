"""The three mean-field systems, part by part."""

from tests.acceptance import (
    _meanfield_contrastive,
    _meanfield_hopfield,
    _meanfield_incontext,
    _meanfield_incontext_heads,
)

FIGURES = [
    *_meanfield_hopfield.FIGURES,
    *_meanfield_incontext.FIGURES,
    *_meanfield_incontext_heads.FIGURES,
    *_meanfield_contrastive.FIGURES,
]
