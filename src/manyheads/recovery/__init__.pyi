# lazy_loader reads a stub of relative imports only.
from . import refusals as refusals
from . import results as results
from .refusals import RecoveryRefused as RecoveryRefused
from .results import Recovery as Recovery
from .results import Stage as Stage
