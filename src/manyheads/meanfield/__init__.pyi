<<<<<<< HEAD
from .contrastive.ode import overlap_trajectory as overlap_trajectory
from .contrastive.particles import simulate_particles as simulate_particles
from .contrastive.sgd import train_overlaps as train_overlaps
from .contrastive.sgd import train_weights as train_weights
from .contrastive.stability import find_basins as find_basins
from .contrastive.stability import stationary_states as stationary_states
from .contrastive.task import ContrastiveTask as ContrastiveTask
=======
from .hopfield.attractors import classify_attractors as classify_attractors
from .hopfield.bifurcation import bifurcation_scan as bifurcation_scan
from .hopfield.lyapunov import lyapunov_spectrum as lyapunov_spectrum
>>>>>>> 1841868 (Lyapunov spectra, attractors and bifurcation scans of 1-bit self-attention)
from .hopfield.mean_field import mean_field_trajectory as mean_field_trajectory
from .hopfield.network import OneBitNetwork as OneBitNetwork
from .hopfield.simulation import simulate_network as simulate_network
from .incontext.landscape import saddle_levels as saddle_levels
from .incontext.linear_attention.heads import train_heads as train_heads
from .incontext.linear_attention.regression import InContextRegression as InContextRegression
from .incontext.linear_attention.time_course import predict_drops as predict_drops
from .incontext.particles import particle_flow as particle_flow
from .incontext.prompt_length import prompt_loss as prompt_loss
from .incontext.task import circle_task as circle_task
