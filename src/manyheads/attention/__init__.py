"""The object itself: attention layers in both forms, masks, streaming entropy, the transformer that is trained."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
