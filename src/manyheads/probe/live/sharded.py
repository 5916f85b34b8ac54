"""Norms and Gram matrices of tensors over all of their shards."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads.models.torch.lazy_torch import Tensor, torch


def squared_norm(tensor: Tensor) -> float:
    """Return the squared Frobenius norm of a tensor, over all its shards if it is a DTensor."""
    return float(over_shards(tensor, local(tensor).double().square().sum()))


def gram(matrix: Tensor) -> NDArray[np.float64]:
    """Return the Gram matrix of a matrix's shorter side, or of its columns if rows are sharded."""
    shard = local(matrix).double()
    sharded = shard is not matrix and tuple(shard.shape) != tuple(matrix.shape)
    shard = shard if sharded or matrix.shape[0] >= matrix.shape[1] else shard.T
    return over_shards(matrix, shard.T @ shard).cpu().numpy()


def local(tensor: Tensor) -> Any:
    """Return the shard of this process, or the tensor if it is whole."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def over_shards(tensor: Any, found: Tensor) -> Any:
    """Sum a tensor computed from the shard of this process over all processes."""
    if not hasattr(tensor, "device_mesh"):
        return found
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_shard():
            torch.distributed.all_reduce(found, group=tensor.device_mesh.get_group(dimension))
    return found
