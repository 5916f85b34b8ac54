"""Models from outside: families, configurations, safetensors files, and the roles of parameters."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
