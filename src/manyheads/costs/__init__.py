"""What a computation costs, exactly: closed forms, a counter for any JAX function, and conventions that convert."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
