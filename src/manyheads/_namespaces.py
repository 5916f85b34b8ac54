"""NumPy, PyTorch or JAX: the namespace of some arrays, and the few functions that differ between the three.

Formulas are written with `@`, `reshape`, `swapaxes` and what the three namespaces share: `where`, `exp`, `log`, `sum`,
`any`, `frexp`, `concat`, `promote_types`, with `axis` and `keepdims`.
"""

import functools
import math
import sys
from types import ModuleType
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from manyheads._trees import leaves_of, map_leaves

Array: TypeAlias = Any  # of NumPy, PyTorch or JAX
DType: TypeAlias = Any  # of one of the three
Floats = NDArray[np.float64]
KINDS = {"float": "f", "int": "i", "bool": "b", "complex": "c"}


def is_a(value: object, module: str, name: str) -> bool:
    """Tell whether a value is of a class of a module, without importing the module."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(value, getattr(loaded, name, ()))


def is_jax(value: object) -> bool:
    """Tell whether a value is an array or a tracer of JAX."""
    return is_a(value, "jax", "Array")


def is_traced(value: object) -> bool:
    """Tell whether a value is a tracer of JAX, which has no numbers."""
    return is_a(value, "jax.core", "Tracer")


def is_torch(value: object) -> bool:
    """Tell whether a value is a tensor of PyTorch."""
    return is_a(value, "torch", "Tensor")


def namespace(*trees: object) -> ModuleType:
    """Return `jax.numpy` if an array of JAX is among the leaves, `torch` if a tensor is, NumPy otherwise."""
    leaves = list(leaves_of(trees))
    if any(map(is_jax, leaves)):
        return sys.modules["jax"].numpy
    return sys.modules["torch"] if any(map(is_torch, leaves)) else np


def like(reference: Array, value: Any) -> Array:
    """Move an array of NumPy to the namespace and the device of a reference; anything else stays as it is."""
    if not isinstance(value, np.ndarray | np.generic) or not (is_jax(reference) or is_torch(reference)):
        return value
    if is_jax(reference):
        return namespace(reference).asarray(value)
    torch = namespace(reference)
    if value.dtype.kind == "V":  # bfloat16 and narrower
        return torch.as_tensor(value.astype(np.float32), device=reference.device).to(getattr(torch, value.dtype.name))
    owned = value.flags.writeable and min(value.strides, default=0) >= 0
    return torch.as_tensor(value if owned else np.array(value), device=reference.device)


def kind(array: Array) -> str:
    """Return NumPy's letter for the dtype of an array: b, i, u, f or c; f also for bfloat16 and narrower floats."""
    dtype = array.dtype
    if not is_torch(array) and dtype.kind != "V":
        return dtype.kind
    name = str(dtype)  # such as bfloat16, torch.float32
    return next((letter for word, letter in KINDS.items() if word in name), "V")


def lowest(dtype: DType) -> float:
    """Return the lowest finite number of a floating dtype."""
    return float(ml_dtypes.finfo(dtype).min if isinstance(dtype, np.dtype) else sys.modules["torch"].finfo(dtype).min)


def cast(value: Array, dtype: DType) -> Array:
    """Return an array in another dtype; what is no array stays as it is, and everything if there is no dtype."""
    if dtype is None or not hasattr(value, "dtype") or value.dtype == dtype:
        return value
    return value.to(dtype) if is_torch(value) else value.astype(dtype)


def in_common_dtype(*trees: Any) -> tuple[Any, DType]:
    """Return trees with the common floating dtype of their arrays, and that dtype.

    NumPy computes bfloat16 and float16 in float32: the trees then have float32. Arrays of JAX are left to its rules.
    """
    arrays = [leaf for leaf in leaves_of(trees) if hasattr(leaf, "dtype")]
    xp = namespace(arrays)
    if xp is not np and not any(map(is_torch, arrays)):
        return trees, None
    dtypes = {array.dtype for array in arrays if kind(array) == "f"} or {xp.float64}
    if len(dtypes) > 1 and xp is np:
        dtypes = {np.promote_types(dtype, np.float32) for dtype in dtypes}
    dtype = functools.reduce(xp.promote_types, dtypes)
    computed = np.promote_types(dtype, np.float32) if xp is np else dtype
    return map_leaves(functools.partial(cast, dtype=computed), trees), dtype


def without_gradient(value: Array) -> Array:
    """Stop the derivative, where there is one."""
    if is_jax(value):
        return sys.modules["jax"].lax.stop_gradient(value)
    return value.detach() if is_torch(value) else value


def row_maximum(array: Array) -> Array:
    """Return the largest number of every row (..., 1), -inf of an empty one."""
    if is_torch(array) and array.shape[-1]:
        return array.amax(-1, keepdim=True)
    return namespace(array).max(array, axis=-1, keepdims=True, initial=-math.inf)
