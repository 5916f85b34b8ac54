"""Subspace method: extraction from exact answers with O(d) calls, by the output subspaces of the heads."""
