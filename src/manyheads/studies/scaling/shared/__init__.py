"""Shared by the studies of scaling: parametrizations, optimal learning rates, curves."""
