# lazy_loader reads a stub of relative imports only.
from .entropy import attention_entropy as attention_entropy
from .masks import causal as causal
from .masks import padding as padding
from .masks import sliding_window as sliding_window
from .multihead import AttentionLayer as AttentionLayer
from .multihead import MultiHeadAttention as MultiHeadAttention
from .softmax import masked_softmax as masked_softmax
