from .curve_files import read_curves as read_curves
from .drop_and_rise import replicated_drop_and_rise as replicated_drop_and_rise
from .judge import judge_curves as judge_curves
