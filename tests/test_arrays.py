"""The entrance of arrays, in every function: big-endian equals native to the bit, masks and complex are refused."""

import dataclasses
import functools
import importlib
import inspect
import re
import types
from pathlib import Path
from unittest.mock import patch

import equinox as eqx
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.array_rows import EXEMPT, EXPENSIVE, ROWS, TAKES_LABELS

import manyheads
from manyheads import _arrays
from manyheads._arrays import as_integers, as_native, check_arrays
from manyheads.costs.jax.critical_path import longest_chain
from manyheads.data.characters import Vocabulary
from manyheads.data.ngrams import ngram_losses
from manyheads.errors import ShapeError, UsageError
from manyheads.recovery.oracle.oracle import Oracle, OracleError
from manyheads.statistics import mean_interval

ARRAYS = re.compile(
    r"\b(Array|Floats|Matrix|PyTree|ArrayLike|ndarray|NDArray|Any|MaskLike|\w*State|Batch|Mixture|RowCoefficients)\b"
)
WITHOUT_STUB = {"curves.drop_and_rise", "theory.joma.theorems", "theory.bigram.theorems"}


def takes_arrays(function):
    parameters = list(inspect.signature(function).parameters.values())
    return any(ARRAYS.search(str(p.annotation)) for p in parameters if p.name not in {"self", "key", "keys"})


def is_checked(cls):
    """Tell whether a class looks at what it is made of; one that does not is a container of results."""
    written = re.search(r"def (__init__|__post_init__|__check_init__)\(", inspect.getsource(cls))
    return bool(written) and not issubclass(cls, BaseException) and not inspect.isabstract(cls)


def elsewhere(package, name):
    """Tell whether a public name is listed under the module that it comes from."""
    module = getattr(getattr(package, name), "__module__", "").removeprefix("manyheads.")
    return any(module == listed or module.startswith(f"{listed}.") for listed in WITHOUT_STUB)


def modules():
    """Yield the public namespaces: what the stubs list, and modules of functions where there is no stub."""
    root = Path(manyheads.__file__).parent
    for stub in sorted(root.rglob("*/__init__.pyi")):
        package = importlib.import_module(".".join(("manyheads", *stub.parent.relative_to(root).parts)))
        yield (
            package.__name__.removeprefix("manyheads."),
            [name for name in package.__all__ if not elsewhere(package, name)],
        )
    for name in WITHOUT_STUB:
        path = root / name.replace(".", "/")
        inner = [f"{name}.{file.stem}" for file in sorted(path.glob("[!_]*.py"))] if path.is_dir() else [name]
        for full in inner:
            module = importlib.import_module(f"manyheads.{full}")
            own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
            yield full, [key for key in own if not key.startswith("_")]


def public_functions():
    """Return the names of all public functions, classes and methods with an argument that may hold arrays."""
    found = set()
    for wing, names in modules():
        for name in names:
            value = getattr(importlib.import_module(f"manyheads.{wing}"), name)
            ours = getattr(value, "__module__", "").startswith("manyheads") and not isinstance(
                value, types.GenericAlias
            )
            if isinstance(value, types.ModuleType) or not callable(value) or not ours:
                continue
            if not inspect.isclass(value):
                found |= {f"{wing}.{name}"} if takes_arrays(value) else set()
                continue
            if is_checked(value) and takes_arrays(value):
                found.add(f"{wing}.{name}")
            for key, method in vars(value).items():
                plain = getattr(method, "__func__", method)
                public = inspect.isfunction(plain) and (key == "__call__" or not key.startswith("_"))
                if public and takes_arrays(plain):
                    found.add(f"{wing}.{name}.{key}")
    return found


def test_every_public_function_that_takes_arrays_has_a_row():
    rows = set(ROWS) | set(EXEMPT)
    assert not set(ROWS) & set(EXEMPT)
    assert public_functions() - rows == set(), "give each a row in tests/array_rows.py, or a reason in EXEMPT"
    assert set(EXEMPT) - public_functions() == set(), "these reasons are about nothing"


def call(name, arrays):
    others = ROWS[name][1]()
    value = manyheads
    for part in name.split("."):
        if isinstance(value, types.ModuleType) and not hasattr(value, part):
            importlib.import_module(f"{value.__name__}.{part}")
        value = getattr(value, part)
    instance = others.pop("on", None)
    return functools.partial(value, instance)(**arrays, **others) if instance is not None else value(**arrays, **others)


@functools.cache
def drawn(name):
    """Return a row's arrays and what the function makes of them as they are."""
    rng = np.random.default_rng(list(name.encode()))
    arrays = {key: draw(rng) for key, draw in ROWS[name][0].items()}
    return arrays, leaves(result_of(name, arrays))


class Entered(Exception):
    """A function would start now, with these arguments."""


def result_of(name, arrays):
    """Return what a function makes of its arrays or, where that is expensive, what it starts from."""
    if name not in EXPENSIVE:
        return call(name, arrays)

    def stop(*given):
        raise Entered(entrance(*given))

    entrance = _arrays._check_all
    with patch.object(_arrays, "_check_all", stop), pytest.raises(Entered) as caught:
        call(name, arrays)
    return caught.value.args[0]


def leaves(result):
    """Return all numbers and texts of a result, in order."""
    if isinstance(result, jax.Array) and jax.dtypes.issubdtype(result.dtype, jax.dtypes.prng_key):
        return [np.asarray(jax.random.key_data(result))]
    if isinstance(result, np.ndarray | np.generic | jax.Array):
        return [np.asarray(result)]
    if isinstance(result, eqx.Module):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(result) if not callable(leaf)]
    if isinstance(result, dict):
        return [leaf for value in result.values() for leaf in leaves(value)]
    if isinstance(result, list | tuple):
        return [leaf for value in result for leaf in leaves(value)]
    if dataclasses.is_dataclass(result):
        names = [field.name for field in dataclasses.fields(result) if "seconds" not in field.name]
        return [leaf for name in names for leaf in leaves(getattr(result, name))]
    return [np.asarray(result)] if isinstance(result, int | float | str) else []


def swapped(value):
    """Return the same numbers in the other byte order."""
    if isinstance(value, np.ndarray):
        return value.astype(value.dtype.newbyteorder("S"))
    if isinstance(value, eqx.Module):
        return jax.tree.map(swapped, value)
    if isinstance(value, tuple):
        items = [swapped(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def first_replaced(value, change):
    """Return the value with its first array changed."""
    if isinstance(value, np.ndarray):
        return change(value)
    items, structure = jax.tree.flatten(value)
    place = next(place for place, item in enumerate(items) if isinstance(item, np.ndarray))
    items[place] = change(items[place])
    return jax.tree.unflatten(structure, items)


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=2)
@given(data=st.data())
def test_the_byte_order_of_an_array_changes_no_bit(name, data):
    arrays, expected = drawn(name)
    chosen = data.draw(st.sets(st.sampled_from(sorted(arrays)), min_size=1))
    given_now = {key: swapped(value) if key in chosen else value for key, value in arrays.items()}
    result = leaves(result_of(name, given_now))
    assert len(result) == len(expected) > 0
    for ours, theirs in zip(result, expected, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("change", [np.ma.masked_array, lambda a: a.astype(complex), lambda a: a.astype(object)])
@pytest.mark.parametrize("name", ROWS)
def test_masked_complex_and_object_arrays_are_refused(name, change):
    arrays, _ = drawn(name)
    if name in TAKES_LABELS and change(np.zeros(1)).dtype.kind != "c":  # masked: missing labels
        return
    for key, value in arrays.items():
        with pytest.raises(ShapeError, match=r"mask|complex|object|real|dtype"):
            call(name, arrays | {key: first_replaced(value, change)})


def test_counting_reads_arrays_of_any_byte_order():
    x = np.ones((3, 4), ">f4")
    assert manyheads.count(lambda x: x @ x.T, x).flops == manyheads.count(lambda x: x @ x.T, np.float32(x)).flops
    assert longest_chain(lambda x: x @ x.T, x) == 1


def test_answers_of_an_oracle_are_arrays_from_outside():
    x = np.ones((2, 3, 4))
    assert Oracle(lambda x: (2 * x).astype(">f4"), 4)(x, "all").tolist() == (2 * x).tolist()
    with pytest.raises(OracleError, match="mask"):
        Oracle(lambda x: np.ma.masked_array(x, x > 0), 4)(x)


@pytest.mark.parametrize("broken", [np.nan, np.inf, 0.5, 2.0**63])
def test_what_is_no_whole_number_becomes_no_token(broken):
    tokens = np.array([0.0, 1.0, broken, 0.0, 1.0])
    with pytest.raises(UsageError, match=r"tokens holds .* at \(2,\)"):
        as_integers(tokens, "tokens")
    with pytest.raises(UsageError, match="train holds"):
        ngram_losses(tokens, np.array([0, 1, 0]), 2, context=1)
    with pytest.raises(UsageError, match="tokens holds"):
        Vocabulary(("\ufffd", "a")).decode(tokens)


def test_whole_numbers_may_come_as_floats():
    assert as_integers(np.array([1.0, -2.0]), "tokens").tolist() == [1, -2]
    assert as_integers([1, 2], "tokens").dtype == np.int64
    assert as_integers(np.zeros(0), "tokens").dtype == np.int64
    with pytest.raises(ShapeError, match="bool"):
        as_integers(np.array([True]), "tokens")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("text", "dtype"),
        ([1.0, "2"], "dtype"),
        ([[1.0], [1.0, 2.0]], "unequal lengths"),
        (1j, "complex"),
        (None, "dtype"),
    ],
)
def test_what_is_no_number_is_named(value, problem):
    with pytest.raises(ShapeError, match=f"beta.*{problem}"):
        _arrays.as_floats(value, "beta")


def test_times_are_finite_and_increasing_from_zero_on():
    assert _arrays.check_times([0, 1, 3]).dtype == np.float64
    for wrong in ([], 1.0, [[0.0]]):
        with pytest.raises(ShapeError, match="times of shape"):
            _arrays.check_times(wrong)
    for wrong in ([-1.0], [0.0, 0.0], [1.0, 0.5], [0.0, np.nan], [np.inf]):
        with pytest.raises(UsageError, match="finite, increasing times"):
            _arrays.check_times(wrong)


@_arrays.takes_arrays
def takes_arrays_of_rows(rows, fail=False):
    if fail:
        raise ValueError("an inhomogeneous shape of mine")
    return np.asarray(rows).sum()


@_arrays.follows_caller
def follows_rows(rows, fail=False):
    if fail:
        raise ValueError("an inhomogeneous shape of mine")
    return jax.numpy.asarray(rows).sum()


@pytest.mark.torch
def test_tensors_of_pytorch_are_copied_exactly_or_refused():
    import torch

    q = torch.arange(6.0).reshape(2, 3) / 8
    assert as_native(q, "q").tolist() == as_native(q.to(torch.bfloat16), "q").tolist() == q.tolist()
    with pytest.raises(ShapeError, match=r"q is a tensor that requires a gradient.*`q.detach\(\)`"):
        as_native(q.clone().requires_grad_(), "q")
    for narrow in (torch.float8_e4m3fn, torch.float8_e5m2):
        found = as_native(q.to(narrow), "q")
        assert (found.dtype, found.tolist()) == (np.float32, q.to(narrow).float().tolist())
    assert as_native(torch.complex(q, q).conj().imag, "q").tolist() == (-q).tolist()
    for tensor, remedy in (
        (q.to_sparse(), "`q.to_dense()`"),
        (q.to("meta"), "load them first"),
        (q.to(torch.float8_e8m0fnu).view(torch.float4_e2m1fn_x2), "give its values as floats or integers"),
    ):
        with pytest.raises(ShapeError, match=rf"^q is a .*: .*{re.escape(remedy)}"):
            as_native(tensor, "q")


@pytest.mark.parametrize("call", [takes_arrays_of_rows, follows_rows])
def test_lists_of_unequal_lengths_are_refused_by_the_name_of_the_argument(call):
    with pytest.raises(ShapeError, match=r"^rows holds lists of unequal lengths: give"):
        call([[1.0, 2.0], [3.0]])
    with pytest.raises(ShapeError, match=r"^rows holds lists of unequal lengths"):
        call(rows=[np.ones(2), np.ones(3)])
    with pytest.raises(ValueError, match="inhomogeneous shape of mine"):
        call([[1.0]], fail=True)


@pytest.mark.parametrize("call", [takes_arrays_of_rows, follows_rows])
def test_complex_numbers_in_lists_are_refused_as_complex_arrays_are(call):
    for rows in ([1.0, 2j], [[1.0], (2.0, 1 + 0j)]):
        with pytest.raises(ShapeError, match=r"^rows\[1\].* is complex: this function is real"):
            call(rows)


def test_labelled_arrays_are_taken_by_their_values():
    xarray = pytest.importorskip("xarray")
    values = xarray.DataArray([1.0, 2.0, 4.0], dims="replicate")
    assert mean_interval(values) == mean_interval([1.0, 2.0, 4.0])


def test_what_holds_no_array_stays_the_same_object():
    for value in ([1, 2.0, None], ("a", [1.0, "b"]), {1, 2}, np.float64, np.float32(1.5), len, "text"):
        assert check_arrays(value) is value
    array = np.arange(3.0)
    assert as_native(array) is array
    with pytest.raises(ShapeError, match=r"streams\[1\] is a masked array"):
        check_arrays([array, np.ma.masked_array(array)], "streams")
    for text in (np.array(["a"]), np.array(["2026-01-01"], "M8[D]"), np.zeros(2, [("a", float)])):
        with pytest.raises(ShapeError, match=r"^x of dtype .*: give"):
            as_native(text, "x")
    assert as_native(np.ones(2, np.longdouble)).dtype == np.float64


class Interface:
    """An array that is known by its interface alone, as images are."""

    def __init__(self, array):
        self.array, self.__array_interface__ = array, array.__array_interface__


@pytest.mark.parametrize("wrap", [memoryview, Interface])
def test_views_of_memory_keep_their_byte_order(wrap):
    numbers = np.arange(6, dtype=">f8").reshape(2, 3)
    native = as_native(wrap(numbers))
    assert native.dtype.isnative
    assert np.array_equal(native, numbers)
    assert np.array_equal(check_arrays([wrap(numbers)])[0], numbers)
