"""PyTorch, imported at the first use of one of its attributes, and its types for annotations."""

from typing import TYPE_CHECKING, Any

from manyheads._extras import LazyModule

if TYPE_CHECKING:
    from torch import Generator as Generator
    from torch import Tensor as Tensor
    from torch.nn import Module as Module
else:
    Generator = Module = Tensor = Any

torch: Any = LazyModule("torch")
