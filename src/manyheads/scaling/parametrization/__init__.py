"""Parametrization: scaling exponents of every class of weights, targets, tables, programs."""
