"""Input arrays: checked, made native, and computed in the precision that they came in.

Every public function that takes arrays carries one of these decorators. They pass each array among the arguments
(also inside lists, tuples, dictionaries and modules) through `as_native`:

* `takes_arrays`, for functions written in NumPy: whatever NumPy's error state, it computes under the default one;
  `takes_labels` does the same and admits text and objects;
* `follows_arrays`, for functions written once for NumPy, PyTorch and JAX: with an array of JAX among the arguments they
  compute in JAX as the caller has set it up; else, with a tensor, in PyTorch on its device, NumPy arrays being moved
  there; else in NumPy;
* `follows_caller`, for functions written once in `jax.numpy`. If all arrays are NumPy arrays or Python numbers, it
  runs in double precision whatever JAX's configuration, and its arrays come back as NumPy arrays. If one of them is
  a JAX array or a tracer, it runs as the caller has set JAX up, and differentiates and compiles there.

What happens to an array:

====================================  ==================================================================
NumPy, pandas, xarray, PyTorch        an `ndarray` of native byte order; extended precision becomes float64
PyTorch on a device, narrow floats    copied to the host; bfloat16 and float8 become float32, which holds them exactly
JAX                                   unchanged
masked, complex, objects, text, time  refused, unless the function says that it takes them; complex numbers in lists too
PyTorch that requires a gradient      refused: the result would not pass the gradient on (kept by `follows_arrays`)
PyTorch, sparse, quantized, nested    refused, with the call that makes an ordinary tensor of it
lists of unequal lengths              refused where the function needs an array of them
====================================  ==================================================================
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np

from manyheads._namespaces import Array, DType, Floats, is_a, is_jax, is_torch, like
from manyheads._settings import default_numpy_errors, double_precision
from manyheads._trees import Tree, leaves_of, map_leaves, register_trees
from manyheads.errors import ShapeError, UsageError

P = ParamSpec("P")
R = TypeVar("R")

REAL = "biuf"
COMPLEX = "biufc"
LABELS = "biufOSUT"
PLAIN = frozenset({int, float, bool, str, type(None)})
RAGGED = "give an array, with rows cut or padded to one length"
REMEDIES = {
    "c": "this function is real: give `.real`, or the absolute value",
    "O": "give numbers, such as `.astype(float)`",
    "S": "give numbers, not text",
    "U": "give numbers, not text",
    "M": "give numbers, such as the time since the first one in seconds",
    "m": "give numbers, such as the time in seconds",
    "V": "give one array for each of its fields",
}


def as_native(value: Any, name: str = "an array", kinds: str = REAL, *, tensors: bool = False) -> Any:
    """Return an array that NumPy and JAX compute with as it stands; anything that is no array is returned unchanged.

    Arrays are what has `__array__` or `__array_interface__`, and memory views; `kinds` of NumPy dtypes are admitted.
    With `tensors` those of PyTorch stay tensors, but for floats of 8 bits and less. `ShapeError` if a mask, a dtype of
    another kind, or a gradient would be lost.
    """
    if type(value) in PLAIN or isinstance(value, type):
        return value
    if isinstance(value, complex) and "c" not in kinds:
        raise ShapeError(f"{name} is complex: {REMEDIES['c']}")
    if not hasattr(value, "__array__") and not hasattr(value, "__array_interface__"):
        return as_native(np.asarray(value), name, kinds) if isinstance(value, memoryview) else value
    if is_jax(value) or isinstance(value, np.generic):
        _check_kind(value.dtype, name, kinds)
        return value
    if isinstance(value, np.ma.MaskedArray):
        if kinds == LABELS:
            return np.where(np.ma.getmaskarray(value), np.array(None), value.data.astype(object))
        raise ShapeError(f"{name} is a masked array: drop the masked entries, or replace them by `.filled(value)`")
    if is_torch(value):
        _check_tensor(value, name, kinds)
        if tensors and (value.dtype.itemsize > 1 or not value.is_floating_point()):
            return value
        value = _from_torch(value, name)
    array = np.asarray(value)
    _check_kind(array.dtype, name, kinds)
    if array.dtype.kind == "f" and array.dtype.itemsize > 8:
        return array.astype(np.float64)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def as_integers(value: object, name: str) -> np.ndarray:
    """Return an array of integers as it is, one of whole floating-point numbers as int64, and refuse others."""
    array = np.asarray(as_native(value, name))
    if array.dtype.kind in "iu":
        return array
    if array.dtype.kind != "f":
        raise ShapeError(f"{name} of dtype {array.dtype}: give integers")
    whole = np.isfinite(array) & (np.abs(array) < 2.0**63)
    whole &= array == np.trunc(np.where(whole, array, 0))
    if not whole.all():
        where = tuple(int(index) for index in np.argwhere(~whole)[0])
        raise UsageError(f"{name} holds {array[where]} at {where}: give integers")
    return array.astype(np.int64)


def as_floats(value: object, name: str) -> Floats:
    """Return real numbers, also in lists, as a float64 array on the host; `ShapeError` for anything else."""
    value = as_native(value, name)
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise ShapeError(f"{name} holds lists of unequal lengths: {RAGGED}") from error
    _check_kind(array.dtype, name, REAL)
    return array.astype(np.float64, copy=False)


def check_times(times: object, name: str = "times") -> Floats:
    """Return times as a float64 array, finite and increasing from 0 on, and refuse others."""
    array = as_floats(times, name)
    if array.ndim != 1 or not array.size:
        raise ShapeError(f"{name} of shape {array.shape}: expected a vector of one time or more")
    if not np.isfinite(array).all() or array[0] < 0 or (np.diff(array) <= 0).any():
        raise UsageError(f"{name}={array}: expected finite, increasing times from 0 on")
    return array


def check_generator(rng: object) -> np.random.Generator:
    """Return a generator of NumPy, or refuse anything else."""
    if not isinstance(rng, np.random.Generator):
        raise UsageError(f"rng={rng!r}: expected a generator, such as numpy.random.default_rng(0)")
    return rng


def check_arrays(value: Any, name: str = "an array", kinds: str = REAL, *, tensors: bool = False) -> Any:
    """Pass every array in `value` through `as_native`; what holds none is returned as the same object."""
    if type(value) in PLAIN:
        return value
    if isinstance(value, list | tuple):
        if all(type(item) in PLAIN for item in value):
            return value
        items = [check_arrays(item, f"{name}[{place}]", kinds, tensors=tensors) for place, item in enumerate(value)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: check_arrays(item, f"{name}[{key!r}]", kinds, tensors=tensors) for key, item in value.items()}
    if isinstance(value, Tree):
        return map_leaves(lambda leaf: as_native(leaf, f"a part of {name}", kinds, tensors=tensors), value)
    if is_a(value, "equinox", "Module"):
        import jax

        leaves, structure = jax.tree.flatten(value)
        checked = [as_native(leaf, f"a part of {name}", kinds) for leaf in leaves]
        same = all(new is old for new, old in zip(checked, leaves, strict=True))
        return value if same else jax.tree.unflatten(structure, checked)
    return as_native(value, name, kinds, tensors=tensors)


def takes_arrays(function: Callable[P, R], kinds: str = REAL) -> Callable[P, R]:
    """Check the arrays among the arguments of a function written in NumPy, and compute under NumPy's defaults."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs = _check_all(function, args, kwargs, kinds)
        with default_numpy_errors(), _name_ragged(function, args, kwargs):
            return function(*args, **kwargs)

    return wrapper


def takes_labels(function: Callable[P, R]) -> Callable[P, R]:
    """Do the same for a function whose arrays may also hold text or objects, as labels."""
    return takes_arrays(function, LABELS)


def follows_arrays(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` on arguments, `self` included, whose arrays have the same namespace."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        register_trees()
        args, kwargs = _check_all(function, args, kwargs, REAL, tensors=True)
        arrays = list(leaves_of((args, kwargs)))
        if tensors := list(filter(is_torch, arrays)):
            move = as_native if any(map(is_jax, arrays)) else functools.partial(like, tensors[0])
            args, kwargs = map_leaves(move, (args, kwargs))
        with np.errstate(all="ignore"), _name_ragged(function, args, kwargs):
            return function(*args, **kwargs)

    return wrapper


def follows_caller(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` in double precision on NumPy arrays and in the caller's precision on JAX arrays.

    `self` of a method counts as an argument: a layer that holds NumPy weights is on the host.
    """

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        args, kwargs = _check_all(function, args, kwargs, REAL)
        with _name_ragged(function, args, kwargs):
            if not on_host(args, kwargs):
                return function(*args, **kwargs)
            import jax

            # Evaluated now even while a caller's function is traced: NumPy arrays are constants there, and a program
            # traced in double precision within one in single precision runs in neither.
            with jax.ensure_compile_time_eval(), double_precision():
                return to_numpy(function(*args, **kwargs))

    return wrapper


def on_host(*trees: object) -> bool:
    """Tell whether no leaf of `trees` is a JAX array or tracer."""
    import jax

    return not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(trees))


def to_numpy(tree: R) -> R:
    """Replace every JAX array in a pytree by the NumPy array it holds."""
    import jax

    return jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def _check_all(function: Callable[P, R], args: Any, kwargs: Any, kinds: str, tensors: bool = False) -> tuple[Any, Any]:
    args = tuple(check_arrays(value, name, kinds, tensors=tensors) for name, value in _named(function, args))
    return args, {name: check_arrays(value, name, kinds, tensors=tensors) for name, value in kwargs.items()}


def _named(function: Callable[P, R], args: Sequence[object]) -> list[tuple[str, object]]:
    """Return positional arguments with their names."""
    code = inspect.unwrap(function).__code__
    names = (*code.co_varnames[: code.co_argcount], *[f"argument {place}" for place in range(len(args))])
    return list(zip(names, args, strict=False))


@contextmanager
def _name_ragged(function: Callable[P, R], args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[None]:
    """Name the argument if NumPy fails to make an array of a list whose items differ in length."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, UsageError) or "inhomogeneous shape" not in str(error):
            raise
        for name, value in (*_named(function, args), *kwargs.items()):
            if isinstance(value, list | tuple):
                try:
                    np.asarray(value)
                except ValueError:
                    raise ShapeError(f"{name} holds lists of unequal lengths: {RAGGED}") from error
        raise


def _check_kind(dtype: DType, name: str, kinds: str) -> None:
    kind = getattr(dtype, "kind", "")
    if kind in kinds or not isinstance(dtype, np.dtype):  # the keys of JAX have dtypes of their own
        return
    if kind == "V" and dtype.names is None and dtype.type.__module__ == "ml_dtypes":  # bfloat16 and narrower
        return
    raise ShapeError(f"{name} of dtype {dtype}: {REMEDIES.get(kind, 'give numbers')}")


def _check_tensor(tensor: Array, name: str, kinds: str) -> None:
    import torch

    if tensor.is_meta:
        raise ShapeError(f"{name} is a meta tensor, which holds no values: load them first")
    for kind, holds, remedy in (
        ("nested", tensor.is_nested, "to_padded_tensor(0.0)"),
        ("quantized", tensor.is_quantized, "dequantize()"),
        ("sparse", tensor.layout != torch.strided, "to_dense()"),
    ):
        if holds:
            raise ShapeError(f"{name} is a {kind} tensor, which is no NumPy array: give `{name}.{remedy}`")
    if tensor.is_complex() and "c" not in kinds:
        raise ShapeError(f"{name} of dtype {tensor.dtype}: {REMEDIES['c']}")


def _from_torch(tensor: Array, name: str) -> np.ndarray:
    import torch

    if tensor.requires_grad:
        raise ShapeError(f"{name} is a tensor that requires a gradient, which would stop here: give `{name}.detach()`")
    try:
        if tensor.is_floating_point() and tensor.dtype.itemsize < 4 and tensor.dtype != torch.float16:
            tensor = tensor.float()
        return tensor.cpu().resolve_conj().resolve_neg().numpy()
    except (TypeError, RuntimeError) as error:  # dtypes that NumPy lacks
        given = f"{name} is a tensor of {tensor.dtype}, which is no NumPy array"
        raise ShapeError(f"{given}: give its values as floats or integers") from error
