from . import finite as finite
from . import paths as paths
from . import task as task
from . import theory as theory
