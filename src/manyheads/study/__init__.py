"""Studies, verdicts, the store, executors and reports. It imports no theory."""

from manyheads._extras import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)

del attach_stub
