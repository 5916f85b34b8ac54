# lazy_loader reads a stub of relative imports only.
from . import clouds as clouds
from . import invariants as invariants
from . import rebound as rebound
from . import salient as salient
from . import trees as trees
from . import winners as winners
