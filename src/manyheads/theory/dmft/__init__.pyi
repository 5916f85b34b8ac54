from .finite.ensembles import Network as Network
from .finite.ensembles import train_networks as train_networks
from .finite.forecast import forecast_loss as forecast_loss
from .problem import Problem as Problem
from .solutions import Sampling as Sampling
from .solutions import infinite_depth as infinite_depth
from .solutions import infinite_heads as infinite_heads
from .solutions import infinite_key_dim as infinite_key_dim
