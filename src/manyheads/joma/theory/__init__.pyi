# lazy_loader reads a stub of relative imports only.
from . import invariants as invariants
from . import winners as winners
