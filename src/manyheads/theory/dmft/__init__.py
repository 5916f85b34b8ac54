"""Dynamical mean-field theory of training: limits of infinite key dimension, heads and depth (Bordelon et al.)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
