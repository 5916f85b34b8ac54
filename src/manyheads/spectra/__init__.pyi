from .coherences import coherence as coherence
from .ranks import stable_rank as stable_rank
