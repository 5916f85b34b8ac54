from . import attention as attention
from . import bigram as bigram
from . import checkpoints as checkpoints
from . import costs as costs
from . import data as data
from . import errors as errors
from . import joma as joma
from . import spectra as spectra
from . import statistics as statistics
from . import study as study
from .attention import AttentionLayer as AttentionLayer
from .attention import MultiHeadAttention as MultiHeadAttention
from .attention import Shape as Shape
from .attention import Transformer as Transformer
from .attention import TransformerConfig as TransformerConfig
from .attention import attention_entropy as attention_entropy
from .costs import Cost as Cost
from .costs import attention_cost as attention_cost
from .costs import count as count
from .costs import transformer_cost as transformer_cost
from .study import Study as Study
from .study import cite as cite
from .study import open_run as open_run
from .study import report as report
from .study import run as run

__version__: str
