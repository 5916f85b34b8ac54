from . import finite as finite
from . import mixtures as mixtures
from . import nonlinearities as nonlinearities
from . import paths as paths
from . import relaxation as relaxation
from . import task as task
from . import theory as theory
