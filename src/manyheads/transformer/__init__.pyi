# lazy_loader reads a stub of relative imports only.
from .config import TransformerConfig as TransformerConfig
from .inputs import TokenInput as TokenInput
from .scaling import standard_scaling as standard_scaling
from .shape import Shape as Shape
from .training import train as train
from .transformer import Transformer as Transformer
from .transformer import initialize as initialize
