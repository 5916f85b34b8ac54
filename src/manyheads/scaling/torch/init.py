"""Initial std of a PyTorch tensor."""

from __future__ import annotations

import math
from typing import Any

from manyheads._extras import require


def measure_init(tensor: Any, start: str, padding: int | None = None, offset: float = 0.0) -> dict[str, Any]:
    """Return the root mean square of a parameter and its count; of gains, the entry farthest from their mean.

    Nothing is returned for a tensor without numbers: on the device `meta`, or an empty share of a parameter. A module
    makes a gain of its parameter by adding `offset`.
    """
    torch = require("torch")
    if tensor.is_meta or not tensor.numel():
        return {}
    values, count = tensor.detach(), tensor.numel()
    if start == "one":
        flat = values.double().flatten()
        std = offset + float(flat[(flat - flat.mean()).abs().argmax()])
    else:
        if padding is not None and not bool(values[padding].any()):  # a row that is zero by design
            count -= values[padding].numel()
        # Summed in double precision without a copy of the table in it.
        std = float(torch.linalg.vector_norm(values, dtype=torch.float64)) / math.sqrt(max(count, 1))
    return {"std": std, "count": count, "rounding": float(torch.finfo(values.dtype).eps)}
