"""Attention interface of transformers: a wrapper in the table of attention functions, for one model and a while.

Modules of transformers look their attention function up by name in a table, `ALL_ATTENTION_FUNCTIONS`. An entry of the
instance of the table goes before the entry of its class; the wrapper stands there, calls the function that it
replaces with the same arguments and returns its output. The configuration of the model is untouched, so that masks,
`generate` and saving see no difference.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from manyheads.errors import UsageError
from manyheads.models.torch.lazy_torch import Module, Tensor, torch

MEASURED = ("sdpa", "eager", "flex_attention")  # implementations of attention whose masks are read
REPLACES = "_manyheads_replaces"  # attribute of a wrapper: the function that it stands before

# Called with the implementation, the attention module, (query, key, value, mask), the keywords and the output.
Observer = Callable[[str, Module, tuple[Any, ...], dict[str, Any], Tensor], None]


class AttentionObserver:
    """Wrappers of the attention functions of one model, which are put into the table and taken out again.

    The same wrappers come back at every `observing`, so that `torch.compile` compiles twice at most, with and without
    them.

    """

    def __init__(self, model: Module, observer: Observer) -> None:
        members = {id(module) for module in model.modules()}
        configs = (getattr(module, "config", None) for module in model.modules())
        asked = {getattr(config, "_attn_implementation", None) for config in configs}
        tables, names = _tables(model), sorted(name for name in asked if name is not None)
        _check(model, tables, names)
        self._active: list[bool] = []
        self._entries = [_Entry(table, name, members, self._active, observer) for table in tables for name in names]

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Call the observer after every attention call of the modules of the model; other models pass by."""
        self._active[:] = [True]
        try:
            for entry in self._entries:
                entry.insert()
            yield
        finally:
            self._active.clear()
            for entry in reversed(self._entries):
                entry.remove()


class _Entry:
    """One wrapper, and its place in a table of attention functions."""

    def __init__(self, table: Any, name: str, members: set[int], active: list[bool], observer: Observer) -> None:
        self._table, self._name = table, name
        self._earlier: Any = None  # the instance's own entry
        self._before: list[Any] = [None]
        self._wrapper = _wrapper(name, self._before, members, active, observer)

    def insert(self) -> None:
        """Enter the wrapper before what stands in the table now."""
        now = self._table.get(self._name)
        if self._wrapper in _chain(now):  # left there by a record that ended out of order
            return
        self._earlier, self._before[0] = self._table._local_mapping.get(self._name), now
        setattr(self._wrapper, REPLACES, now)
        self._table[self._name] = self._wrapper

    def remove(self) -> None:
        """Put back what stood in the table before."""
        if self._table._local_mapping.get(self._name) is not self._wrapper:
            return  # a later entry calls this one, which is inactive by now
        if self._earlier is None:
            del self._table[self._name]
        else:
            self._table[self._name] = self._earlier


def _chain(function: Any) -> Iterator[Any]:
    """Yield an attention function and, if it is a wrapper, those that it calls."""
    while function is not None:
        yield function
        function = getattr(function, REPLACES, None)


def _wrapper(name: str, before: list[Any], members: set[int], active: list[bool], observer: Observer) -> Any:
    """Return an attention function that calls the one before it, and then the observer."""
    # Measured outside of compiled graphs: one break at each call, instead of a compilation of the statistics.
    report = torch._dynamo.disable(observer)

    def attention(module: Module, query: Tensor, key: Tensor, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        function = _eager(module) if before[0] is None else before[0]
        output = function(module, query, key, value, mask, *args, **kwargs)
        if active and id(module) in members:
            report(name, module, (query, key, value, mask, *args), kwargs, output[0])
        return output

    return attention


def _eager(module: Module) -> Callable[..., Any]:
    """Return the function of plain attention, which is no entry of the table but stands beside the module's class."""
    for kind in type(module).__mro__:
        function = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise UsageError(
        f"{type(module).__name__} has no eager_attention_forward beside it: load the model with "
        "attn_implementation='sdpa'"
    )


def _tables(model: Module) -> list[Any]:
    """Return the tables of attention functions that the classes of the model's modules use."""
    homes = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    homes.discard("transformers.modeling_utils")  # the base class of all models, with or without the interface
    tables = (getattr(sys.modules.get(home), "ALL_ATTENTION_FUNCTIONS", None) for home in homes)
    return list({id(table): table for table in tables if table is not None}.values())


def _check(model: Module, tables: list[Any], names: list[str]) -> None:
    kind = getattr(getattr(model, "config", None), "model_type", "")
    called = f"{type(model).__name__} ({kind})" if kind else type(model).__name__
    if not tables or not names:
        raise UsageError(
            f"{called} computes its attention outside the attention interface of transformers, where nothing can be "
            "recorded: give a model whose modules call ALL_ATTENTION_FUNCTIONS"
        )
    if other := [name for name in names if name not in MEASURED]:
        raise UsageError(
            f"{called} attends by {', '.join(other)}, whose masks are not read: load it with one of "
            f"{', '.join(MEASURED)}, such as attn_implementation='sdpa'"
        )
