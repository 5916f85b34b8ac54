"""Exact costs: closed forms, a counter for any JAX function, and conventions of counting."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
