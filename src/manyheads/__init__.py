"""The theory of multi-head attention, made runnable.

Everything public loads on first use (PEP 562), so importing this package costs nothing and changes nothing.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
