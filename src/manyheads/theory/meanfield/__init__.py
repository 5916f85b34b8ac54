"""Three mean-field systems: self-attention with 1-bit tokens, in-context learning, contrastive learning."""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub
