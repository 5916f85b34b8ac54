from .hopfield.mean_field import mean_field_trajectory as mean_field_trajectory
from .hopfield.network import OneBitNetwork as OneBitNetwork
from .hopfield.simulation import simulate_network as simulate_network
from .incontext.landscape import saddle_levels as saddle_levels
from .incontext.particles import particle_flow as particle_flow
from .incontext.prompt_length import prompt_loss as prompt_loss
from .incontext.task import circle_task as circle_task
