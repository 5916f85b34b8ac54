"""Shapes of recorded curves: drop and rise, files of curves, and the verdict on a training."""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub
