"""Claims about self-attention with 1-bit tokens."""
