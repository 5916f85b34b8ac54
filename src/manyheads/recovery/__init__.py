"""Recovery of a multi-head attention layer: from examples (Chen, Li), and by queries; assumptions; hard instances."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

from manyheads.recovery import hard  # noqa: E402 — for `manyheads.recovery.hard.parity_layer`

del lazy_loader
