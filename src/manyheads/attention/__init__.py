"""Attention layers in merged and factored form, masks, and streaming attention entropy."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
