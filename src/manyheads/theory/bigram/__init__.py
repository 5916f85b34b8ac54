"""Sparse contextual bigrams: the task, its exact population loss, training, transfer, screening (Ren, Wang, Lee)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
