"""Key dimension, heads and depth as three axes: parametrization, coordinate and transfer checks (Bordelon et al.)."""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub
