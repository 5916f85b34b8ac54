"""Attention interface of transformers: a wrapper in the table of attention functions, for one model and a while.

Modules of transformers look their attention function up by name in a table, `ALL_ATTENTION_FUNCTIONS`. An entry of the
instance of the table goes before the entry of its class; the wrapper stands there, calls the function that it
replaces with the same arguments and returns its output. The configuration of the model is untouched, so that masks,
`generate` and saving see no difference.

One call has queries, keys, scale, mask, bias, soft-cap and sinks, as the modules pass them:

    s_ij = cap tanh(scale q_i . k_j / cap) + bias_ij    over the allowed keys j; with no cap, scale q_i . k_j + bias_ij

Query (B, H, n, d) and key (B, G, m, d) arrive after rotary positions and query-key norms; head h reads the keys of
group h // (H / G). The mask depends on the implementation:

==============  ===============================  ======================================================================
sdpa            None, or booleans (B, 1, n, m)   None: causal if the call or the module says so and n > 1, and then the
                                                 keys beyond n are those of a cache that is not filled yet
eager           None, or numbers (B, 1, n, m)    0 or the smallest number of the dtype; other values are a bias
flex_attention  `BlockMask`                      its rule is evaluated on the rows that are measured
==============  ===============================  ======================================================================

Windows are part of the mask in all three. `position_bias`, `softcap` and `s_aux` (sinks) are keywords; sdpa ignores
sinks, and soft-caps before transformers refused them there: such a model is measured without them.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from manyheads.attention.flash_kernel import serves
from manyheads.errors import UsageError
from manyheads.models.torch.lazy_torch import Module, Tensor, torch

MEASURED = ("sdpa", "eager", "flex_attention")  # implementations of attention whose masks are read
REPLACES = "_manyheads_replaces"  # attribute of a wrapper: the function that it stands before

# Called with the implementation, the attention module, (query, key, value, mask), the keywords and the output.
Observer = Callable[[str, Module, tuple[Any, ...], dict[str, Any], Tensor], None]
# Called with the same but the output, which it returns.
Attention = Callable[[str, Module, tuple[Any, ...], dict[str, Any]], Tensor]

# Names of modules that attend to another sequence: `encoder_attn`, `crossattention`, `EncDecAttention`.
CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function."""

    query: Tensor  # (B, H, n, d)
    key: Tensor  # (B, G, m, d)
    scale: float
    causal: bool  # row i sees the keys up to i; then mask is None
    mask: Any  # booleans (B or 1, H or 1, n or 1, m), a rule of rows and keys, or None: every key is allowed
    bias: Tensor | None  # numbers that broadcast to (B, H, n, m), or None
    softcap: float | None
    sink: Tensor | None  # learned logits (H,), or None
    cross: bool  # whether keys belong to another sequence than queries

    @property
    def fusable(self) -> bool:
        """Whether fused kernels can give the statistics: no rule for a mask; on the CPU neither soft-cap nor bias."""
        plain = self.query.device.type == "cpu" and self.softcap is None and self.bias is None
        return not callable(self.mask) and (plain or serves(self.query))

    def allowed(self, rows: Tensor) -> Tensor:
        """Return which keys the rows may see: booleans (B or 1, H or 1, r, m)."""
        columns = torch.arange(self.key.shape[2], device=self.key.device)
        if self.causal:
            return (columns[None] <= rows[:, None])[None, None]
        if self.mask is None:
            return torch.ones(1, 1, len(rows), len(columns), dtype=torch.bool, device=self.key.device)
        if callable(self.mask):
            batch = torch.arange(self.query.shape[0], device=self.key.device)[:, None, None, None]
            found = self.mask(batch, torch.zeros_like(batch), rows[None, None, :, None], columns[None, None, None])
            return found.expand(len(batch), 1, len(rows), len(columns))
        return self.mask[:, :, rows] if self.mask.shape[2] > 1 else self.mask.expand(-1, -1, len(rows), -1)

    def own_column(self, rows: Tensor) -> Tensor | None:
        """Return the column of each row's own key; None where keys belong to another sequence.

        n queries are the last n of the m keys, except while a cache of fixed size is filled: then the last key that
        any of them may see is the last query's own.
        """
        n, m = self.query.shape[2], self.key.shape[2]
        if self.cross:
            return None
        offset = m - n
        if offset > 0 and self.mask is not None and not callable(self.mask):
            last = int(self.mask.flatten(0, 2).any(0).nonzero().max()) if bool(self.mask.any()) else m - 1
            offset = min(max(last - (n - 1), 0), offset)
        return rows + offset


def read_call(
    implementation: str, name: str, module: Module, arguments: tuple[Any, ...], keywords: Any
) -> AttentionCall:
    """Read one call of an attention function.

    `implementation` is "sdpa", "eager" or "flex_attention", `name` that of the module in the model; arguments are
    (query, key, value, mask, ...). Of the keywords `scaling`, `is_causal`, `position_bias`, `softcap` and `s_aux` are
    read; "sdpa" computes attention without the last two, whatever the module passes.
    """
    query, key, _, mask = (value.detach() if hasattr(value, "detach") else value for value in arguments[:4])
    n, m = query.shape[2], key.shape[2]
    scale, causal = keywords.get("scaling"), keywords.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    causal = causal and n > 1 and mask is None and implementation != "eager"
    if causal:
        key, m = key[:, :, :n], min(n, m)
    allowed, bias = getattr(mask, "mask_mod", mask), None
    if hasattr(allowed, "dtype"):
        allowed = mask = mask[..., :m]
        if mask.dtype != torch.bool:
            allowed = mask > torch.finfo(mask.dtype).min / 2
            bias = torch.where(allowed, mask, 0.0)
            bias = bias if bool(bias.any()) else None
    position = keywords.get("position_bias")
    if position is not None:
        position = position.detach()[..., :m]
        bias = position if bias is None else bias + position
    softcap, sink = (None if implementation == "sdpa" else keywords.get(name) for name in ("softcap", "s_aux"))
    return AttentionCall(
        query=query,
        key=key,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        causal=causal,
        mask=allowed,
        bias=bias,
        softcap=softcap,
        sink=None if sink is None else sink.detach(),
        cross=bool(CROSS.search(name)) or m < n,
    )


class AttentionObserver:
    """Wrappers of the attention functions of one model, which are put into the table and taken out again.

    The same wrappers come back at every `observing`, so that `torch.compile` compiles twice at most, with and without
    them. With `attention`, that takes the place of the model's own function, and nothing is observed.
    """

    def __init__(self, model: Module, observer: Observer, attention: Attention | None = None) -> None:
        members = {id(module) for module in model.modules()}
        configs = (getattr(module, "config", None) for module in model.modules())
        asked = {getattr(config, "_attn_implementation", None) for config in configs}
        tables, names = _tables(model), sorted(name for name in asked if name is not None)
        _check(model, tables, names)
        self._active: list[bool] = []
        told = members, self._active, observer, attention
        self._entries = [_Entry(table, name, *told) for table in tables for name in names]

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

    def __init__(
        self,
        table: Any,
        name: str,
        members: set[int],
        active: list[bool],
        observer: Observer,
        attention: Attention | None,
    ) -> None:
        self._table, self._name = table, name
        self._earlier: Any = None  # the instance's own entry
        self._before: list[Any] = [None]
        self._wrapper = _wrapper(name, self._before, members, active, observer, attention)

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


def _wrapper(
    name: str,
    before: list[Any],
    members: set[int],
    active: list[bool],
    observer: Observer,
    replacement: Attention | None,
) -> Any:
    """Return an attention function that calls the one before it, and then the observer, or its replacement."""
    # Measured outside of compiled graphs: one break at each call, instead of a compilation of the statistics.
    report = torch._dynamo.disable(observer)
    replace = None if replacement is None else torch._dynamo.disable(replacement)

    def attention(module: Module, query: Tensor, key: Tensor, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
        if replace is not None and active and id(module) in members:
            return replace(name, module, (query, key, value, mask, *args), kwargs), None
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
