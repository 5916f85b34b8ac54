from .alarms import Alarm as Alarm
from .alarms import find_alarms as find_alarms
from .live.recorder import AttentionRecorder as AttentionRecorder
from .qk_clip import qk_clip_factors as qk_clip_factors
from .query_key_circuits import query_key_spectra as query_key_spectra
from .recording import AttentionRecord as AttentionRecord
from .recording import record_attention as record_attention
