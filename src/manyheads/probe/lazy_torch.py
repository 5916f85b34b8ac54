"""PyTorch, imported at the first use of one of its attributes."""

from typing import Any

from manyheads._extras import require


class _Module:
    def __getattr__(self, name: str) -> Any:
        return getattr(require("torch"), name)


torch: Any = _Module()
