"""Key dimension, heads and depth as axes, part by part."""

from tests.acceptance import _limits_checks, _limits_meanfield, _limits_torch

FIGURES = [*_limits_checks.FIGURES, *_limits_meanfield.FIGURES, *_limits_torch.FIGURES]
