"""Layers that are hard to learn from examples (Chen and Li), and attacks that find them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
