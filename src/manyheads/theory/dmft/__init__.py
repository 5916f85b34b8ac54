"""Dynamical mean-field theory of training: limits of infinite key dimension, heads and depth (Bordelon et al.)."""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub
