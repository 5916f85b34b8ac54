"""Residual branches in the limit: attention and MLP."""
