"""Shapes of recorded curves: drop and rise, files of curves, and the verdict on a training."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
