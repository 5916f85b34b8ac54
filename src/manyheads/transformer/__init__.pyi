# lazy_loader reads a stub of relative imports only.
from .baselines import BaselineConfig as BaselineConfig
from .baselines import match_hidden as match_hidden
from .config import TransformerConfig as TransformerConfig
from .inputs import PatchInput as PatchInput
from .inputs import TokenInput as TokenInput
from .inputs import VectorInput as VectorInput
from .scaling import Scaling as Scaling
from .scaling import standard_scaling as standard_scaling
from .shape import Shape as Shape
from .training import train as train
from .training import train_ensemble as train_ensemble
from .transformer import Record as Record
from .transformer import Transformer as Transformer
from .transformer import initialise as initialise
from .weights import roles as roles
