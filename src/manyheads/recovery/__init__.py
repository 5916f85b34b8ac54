"""Recovery of a multi-head attention layer: from examples (Chen, Li), and by queries; assumptions; hard instances."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
