"""Token kernels: the compiled engine, its JAX reference, their common random numbers."""
