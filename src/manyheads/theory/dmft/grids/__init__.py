"""Grids of the DMFT solver: coarse steps in time, midpoint cells in depth."""
