"""Constants of a forward pass: whether they multiply by one number, pick, turn, or differ between sequences."""

from __future__ import annotations

import math
from typing import Any

from manyheads.models.torch.lazy_torch import Tensor, torch


def find_number(x: Any, near: float = 0.0) -> float | None:
    """Return a constant that is one number, everywhere or where it is not zero; rotations of the plane are one."""
    if isinstance(x, torch.Tensor):
        x, near = (x.abs(), 1e-5) if x.is_complex() else (x * 1, near)  # a mask in numbers
        x = x[x != 0] if x.numel() > 1 else x.flatten()  # a mask leaves the others alone
        if not x.numel() or bool(((x - x[0]).abs() > near * x[0].abs()).any()):
            return None
        x = x[0].item()
    return float(x) if x and math.isfinite(x) else None


def find_picked(x: Tensor) -> float | None:
    """Return the number of a constant matrix that has at most one in each row."""
    return find_number(x) if bool(((x != 0).sum(-1) < 2).all()) else None


def find_turned(x: Tensor) -> float | None:
    """Return the number by which a constant matrix multiplies what it turns, or of which it picks entries."""
    if (number := find_picked(x)) is not None or x.dim() < 2:
        return number
    gram = x.double() @ x.double().mT
    length = gram.diagonal(dim1=-2, dim2=-1).mean()
    near = bool((gram - length * torch.eye(gram.shape[-1]).to(gram)).abs().max() <= 1e-4 * length)
    return float(length) ** 0.5 if near else None


def is_alike(tensor: Tensor) -> bool:
    """Whether a constant is the same for all sequences of the batch."""
    return tensor.dim() < 2 or len(tensor) < 2 or bool((tensor == tensor[:1]).all())


def is_fixed(x: Tensor) -> bool:
    """Whether the rows of a constant are the same for both sequences, one after the other."""
    rows = x.flatten(0, -2) if x.dim() > 1 else x
    return x.dim() < 2 or (len(rows) % 2 == 0 and is_alike(rows.unflatten(0, (2, -1))))
