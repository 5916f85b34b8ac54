"""Key dimension, heads and depth as axes, part by part."""

from tests.acceptance import (
    _limits_checks,
    _limits_families,
    _limits_forecast,
    _limits_gpt,
    _limits_meanfield,
    _limits_meanfield_growth,
    _limits_meanfield_networks,
    _limits_muon,
    _limits_preflight,
    _limits_studies,
    _limits_torch,
)

FIGURES = [
    *_limits_checks.FIGURES,
    *_limits_meanfield.FIGURES,
    *_limits_meanfield_networks.FIGURES,
    *_limits_meanfield_growth.FIGURES,
    *_limits_studies.FIGURES,
    *_limits_forecast.FIGURES,
    *_limits_muon.FIGURES,
    *_limits_preflight.FIGURES,
    *_limits_families.FIGURES,
    *_limits_gpt.FIGURES,
    *_limits_torch.FIGURES,
]
