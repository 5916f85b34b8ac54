"""The theory of multi-head attention, made runnable.

Everything public loads on first use (PEP 562), so importing this package costs nothing and changes nothing.
"""

from manyheads._extras import attach_stub
from manyheads._moved import note_moved_packages

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

note_moved_packages(__name__)

del attach_stub, note_moved_packages
