from .recording import AttentionRecord as AttentionRecord
from .recording import record_attention as record_attention
