from .curve_files import read_curves as read_curves
from .judge import judge_curves as judge_curves
