# lazy_loader reads a stub of relative imports only.
from . import matching as matching
from . import refusals as refusals
from . import results as results
from . import task as task
from .matching import LayerErrors as LayerErrors
from .matching import compare_layers as compare_layers
from .matching import function_error as function_error
from .matching import match_heads as match_heads
from .refusals import RecoveryRefused as RecoveryRefused
from .results import Recovery as Recovery
from .results import Stage as Stage
from .task import gpt_layer as gpt_layer
from .task import planted_layer as planted_layer
from .task import sequences as sequences
