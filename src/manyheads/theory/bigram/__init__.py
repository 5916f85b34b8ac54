"""Sparse contextual bigrams: the task, its exact population loss, training, transfer, screening (Ren, Wang, Lee)."""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub
