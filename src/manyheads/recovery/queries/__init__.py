"""Extraction of a layer by queries: what each stage asks, and what its answers determine."""
