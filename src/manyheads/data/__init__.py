"""Data sets: texts and their characters, digits, and a recall task that needs order."""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub
