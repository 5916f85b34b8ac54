"""Probe: attention and weights of PyTorch transformers, in a forward pass, over a training, or from checkpoints."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
