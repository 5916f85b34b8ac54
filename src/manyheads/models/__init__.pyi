from .attention_layers import attention_weights as attention_weights
from .checkpoints.checkpoint import open_checkpoint as open_checkpoint
from .shape import shape_from_config as shape_from_config
