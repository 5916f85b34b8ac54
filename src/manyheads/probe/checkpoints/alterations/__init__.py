"""Altered tensors: changes along a series, transformations that explain them, comparison with a named source."""
