"""Joint dynamics of MLP and attention (Tian et al.): theorems 1 to 5, Scan and Snap, drop and rebound of entropy."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
