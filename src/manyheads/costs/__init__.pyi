from .cost import Cost as Cost
from .counting import count as count
from .formulas.attention import attention_cost as attention_cost
from .formulas.decoding import generation_cost as generation_cost
from .formulas.decoding import kv_cache_bytes as kv_cache_bytes
from .formulas.depth import sequential_depth as sequential_depth
from .formulas.model import transformer_cost as transformer_cost
from .shapes import ModelShape as ModelShape
