"""PyTorch, imported at the first use of one of its attributes, and its types for annotations."""

from typing import TYPE_CHECKING, Any

from manyheads._extras import require

if TYPE_CHECKING:
    from torch import Generator as Generator
    from torch import Tensor as Tensor
    from torch.nn import Module as Module
else:
    Generator = Module = Tensor = Any


class _LazyTorch:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by whoever inspects the module that holds it
            raise AttributeError(name)
        return getattr(require("torch"), name)


torch: Any = _LazyTorch()
