from . import costs as costs
from . import errors as errors
from . import probe as probe
from . import recovery as recovery
from . import scaling as scaling
from . import theory as theory
from .attention import AttentionLayer as AttentionLayer
from .attention import MultiHeadAttention as MultiHeadAttention
from .attention import attention_entropy as attention_entropy
from .costs import Cost as Cost
from .costs import attention_cost as attention_cost
from .costs import count as count
from .costs import transformer_cost as transformer_cost
from .recovery import extract_layer as extract_layer
from .recovery import learn_layer as learn_layer
from .scaling import Parametrization as Parametrization
from .scaling import coordinate_check as coordinate_check
from .scaling import transfer_check as transfer_check
from .study import Study as Study
from .study import cite as cite
from .study import open_run as open_run
from .study import report as report
from .study import run as run
from .transformer import Shape as Shape
from .transformer import Transformer as Transformer
from .transformer import TransformerConfig as TransformerConfig

__version__: str
