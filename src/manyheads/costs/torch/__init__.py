"""Counts of PyTorch modules: the products that one pass runs, on any device."""
