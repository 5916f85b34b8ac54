"""Extraction from exact answers with O(d) calls, by pairs of tokens."""
