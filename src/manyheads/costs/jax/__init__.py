"""Counts of JAX functions: jaxprs, the cost of primitives, the counter, and the critical path."""
