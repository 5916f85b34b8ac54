from .hopfield.mean_field import mean_field_trajectory as mean_field_trajectory
from .hopfield.network import OneBitNetwork as OneBitNetwork
from .hopfield.simulation import simulate_network as simulate_network
