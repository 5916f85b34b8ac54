"""Extraction of layers with any attention score: biases, position terms, norms, caps, windows, sinks."""
