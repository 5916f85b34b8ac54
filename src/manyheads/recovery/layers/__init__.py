"""Attention layers to recover: evaluation, files, rotary positions, matching of heads, violated assumptions."""
