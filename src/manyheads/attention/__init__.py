"""Attention layers in merged and factored form, masks, and streaming attention entropy."""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub
