"""Attention statistics of calls: read, measured by rows or by fused kernels, gathered by layer and head."""
