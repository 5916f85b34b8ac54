"""Probe: attention and weights of PyTorch transformers, in a forward pass, over a training, or from checkpoints."""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub
