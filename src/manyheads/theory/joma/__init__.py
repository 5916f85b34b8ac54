"""Joint dynamics of MLP and attention (Tian et al.): theorems 1 to 5, Scan and Snap, drop and rebound of entropy."""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub
