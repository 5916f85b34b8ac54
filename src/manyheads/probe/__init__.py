"""Probe: attention statistics of PyTorch models of transformers, out of their own forward passes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
