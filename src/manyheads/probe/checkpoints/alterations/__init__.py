"""Detection of altered tensors in checkpoint series, their explanation, and comparison with a reference."""
