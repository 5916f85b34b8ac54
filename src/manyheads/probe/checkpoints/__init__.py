"""Checkpoints without the model: spectra of their weights, and verification of a series."""
