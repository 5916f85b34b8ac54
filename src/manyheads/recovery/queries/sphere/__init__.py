"""Extraction of a layer behind LayerNorm or RMSNorm: tokens on a sphere."""
