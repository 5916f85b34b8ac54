"""Checkpoints from outside: safetensors streamed in bounded memory, the families of models and the roles of weights."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
