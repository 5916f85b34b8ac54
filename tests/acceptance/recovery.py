"""Recovery of attention layers, part by part."""

from tests.acceptance import (
    _recovery_block_mlp,
    _recovery_blocks,
    _recovery_bounded,
    _recovery_calls,
    _recovery_campaign,
    _recovery_certificates,
    _recovery_families,
    _recovery_hard,
    _recovery_passive,
    _recovery_scores,
    _recovery_servers,
    _recovery_sphere,
    _recovery_student,
    _recovery_subspaces,
    _recovery_theory,
    _recovery_trained,
)

FIGURES = [
    *_recovery_blocks.FIGURES,
    *_recovery_block_mlp.FIGURES,
    *_recovery_bounded.FIGURES,
    *_recovery_calls.FIGURES,
    *_recovery_campaign.FIGURES,
    *_recovery_certificates.FIGURES,
    *_recovery_families.FIGURES,
    *_recovery_hard.FIGURES,
    *_recovery_passive.FIGURES,
    *_recovery_scores.FIGURES,
    *_recovery_servers.FIGURES,
    *_recovery_subspaces.FIGURES,
    *_recovery_sphere.FIGURES,
    *_recovery_student.FIGURES,
    *_recovery_theory.FIGURES,
    *_recovery_trained.FIGURES,
]
