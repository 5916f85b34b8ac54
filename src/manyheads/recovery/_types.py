"""Types of arrays and functions that signatures of the wing share."""

from collections.abc import Callable

import numpy as np
from numpy.random import Generator as Generator
from numpy.typing import NDArray

Array = NDArray[np.floating]
Indices = NDArray[np.intp]
Figures = dict[str, float]  # of a stage
Ask = Callable[..., Array]  # ask(x, read="last"): an oracle
ArrayFunction = Callable[[Array], Array]
