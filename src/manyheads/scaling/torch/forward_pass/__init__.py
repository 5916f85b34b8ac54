"""Multipliers of a PyTorch model's forward pass, measured by function."""
