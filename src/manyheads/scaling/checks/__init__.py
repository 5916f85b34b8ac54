"""Checks of a parametrization: coordinate check, learning-rate transfer, audit."""
