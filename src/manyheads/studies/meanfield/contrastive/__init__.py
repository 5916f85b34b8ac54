"""Claims about contrastive learning in high dimension, each beside SGD in n dimensions."""
