"""Lags on which the next symbol of a stream depends, by alternating least squares with one shared transition."""
