"""Weights of the heads of a model: circuits and their spectra, QK-clip factors, dormant heads."""
