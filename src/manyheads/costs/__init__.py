"""Exact costs: closed forms, a counter for any JAX function, and conventions of counting."""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub
