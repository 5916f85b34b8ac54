from .exponents import fit_exponent as fit_exponent
from .intervals import Interval as Interval
from .intervals import mean_interval as mean_interval
from .verdicts import decide as decide
