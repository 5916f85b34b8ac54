"""PyTorch: parameter groups, initialization and audits."""
