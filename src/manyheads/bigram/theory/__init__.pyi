from . import laws as laws
from . import noise as noise
from . import population as population
from . import signal as signal
