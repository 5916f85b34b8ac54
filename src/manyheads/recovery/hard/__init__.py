"""Layers that are hard to learn from examples (Chen and Li), and attacks that find them."""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub
