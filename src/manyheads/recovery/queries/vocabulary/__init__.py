"""Extraction from a server whose tokens are the rows of a table of embeddings."""
