"""Recovery of a multi-head attention layer: from examples (Chen, Li), and by queries; assumptions; hard instances."""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub
