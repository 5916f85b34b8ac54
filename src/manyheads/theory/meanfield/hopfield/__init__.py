"""Self-attention with 1-bit tokens: finite networks, their mean-field map, attractors (Poc-López and Aguilera)."""
