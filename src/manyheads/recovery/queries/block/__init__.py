"""Extraction of the attention of a whole transformer block, its MLP left as an oracle."""
