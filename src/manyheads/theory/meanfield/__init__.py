"""Three mean-field systems: self-attention with 1-bit tokens, in-context learning, contrastive learning."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
