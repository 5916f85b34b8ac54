"""Closed forms: the exact cost of each architecture as a function of its shape, one family a file."""
