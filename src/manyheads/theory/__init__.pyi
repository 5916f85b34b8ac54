from . import bigram as bigram
from . import dmft as dmft
from . import joma as joma
from . import meanfield as meanfield
