"""Joint dynamics of MLP and attention: conserved relations, who wins, entropy and rank, latent trees (Tian et al.)."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

del lazy_loader
