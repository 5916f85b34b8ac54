"""Data sets: texts and their characters, digits, and a recall task that needs order."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
