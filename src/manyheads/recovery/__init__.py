"""Recovery of a multi-head attention layer: from examples (Chen, Li), and by queries; assumptions; hard instances."""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

from manyheads.recovery import hard as hard  # noqa: E402 — for `manyheads.recovery.hard.parity_layer`

del attach_stub
