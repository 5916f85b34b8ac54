"""PyTorch modules in memory: their architecture and their attention sub-modules."""
