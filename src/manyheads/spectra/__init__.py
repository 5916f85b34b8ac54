"""Stable rank with a certificate, Lanczos, coherence, and reference levels of random matrices.

Dense linear algebra in float64 on the host; `traced_stable_rank` is the twin for use under `jax.jit`.
"""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub
