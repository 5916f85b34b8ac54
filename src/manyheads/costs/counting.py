"""Counts: a program of JAX is walked, that of PyTorch runs once; one cost under every convention that reads it."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from manyheads._extras import require
from manyheads._overview import render_table
from manyheads.costs.conventions import PRESETS, ConventionError
from manyheads.costs.cost import Cost
from manyheads.costs.tally import Tally
from manyheads.errors import UsageError


def count(
    fn: Callable[..., Any],
    *args: Any,
    trips: int | None = None,
    training: bool = False,
    loss: Callable[[Any], Any] | None = None,
    device: str | None = None,
    formulas: Mapping[Any, Callable[..., int | Tally]] | None = None,
) -> Cost:
    """Count exactly what a function of JAX, or a module or function of PyTorch, computes.

    A program of **JAX** is walked, nothing is run. Work whose result nobody uses is left out, as the compiler leaves it
    out. A `scan` costs its body times its length, a `while` its body times its trip count if known integers decide it,
    a `cond` its most expensive branch (with a note if they differ, and the branch taken if its predicate is constant),
    a `shard_map` its body times the devices, a `pallas_call` its kernel times the grid. Calls, `remat` and custom
    derivatives cost what they contain, and `vmap` and `grad` are part of the program already.

    A program of **PyTorch** runs once, and its matrix products are counted below autograd. Fused attention counts the
    pairs that its mask leaves, whatever the kernel. A module and its batch stay as they are: parameters, buffers,
    gradients, attributes, random state. With ``device="meta"`` nothing is computed and no memory is needed; what token
    ids and positions decide is known all the same.

    Parameters
    ----------
    fn
        Function that `jax.make_jaxpr` can trace, `torch.nn.Module`, or function of tensors.
    *args
        JAX: arrays, `jax.ShapeDtypeStruct`, Python numbers, pytrees of these; leaves of another kind (strings,
        functions, None) are passed as they are. An integer is an array to the program, but its value is known and may
        decide how long a loop runs. A module of PyTorch takes its arguments, or one batch: a mapping by name, a tuple
        or list by position.
    trips
        JAX: how often to take a `while` whose end is not known to run; None leaves it undetermined.
    training
        PyTorch: whether to count the backward pass too.
    loss
        PyTorch: function of the outputs whose gradient `training` takes; by default their `loss`, or else their sum.
    device
        PyTorch: ``"meta"``, or None for where the tensors are.
    formulas
        PyTorch: multiply-adds of opaque operations, by operation or name, from the result and the arguments.

    Returns
    -------
    Cost
        JAX: convention ``"executed"``; `flops` are those of `dot_general`, of `conv_general_dilated` (without products
        with padding and inserted zeros), and of LU, Cholesky and triangular solves; elementwise work counts one
        operation for each real number that is computed, a reduction one for each that is read; integers and Booleans
        count nothing. `bytes` are needed inputs, constants and results, each moved once.

        PyTorch: convention ``"exact"``, readable as ``"halved"``, ``"dense"`` and ``"mac"`` too, and as ``"executed"``
        with the products that checkpoints run again; `by_module()` names the items by module. Convolutions count
        products with padding; elementwise work and bytes are not counted.

        `unknown` names what the program does not determine: loops of unknown length, iterative decompositions, those
        that depend on the library's algorithm (`fft`, `qr`), sparse products, recurrent kernels, code outside of the
        program. Then a figure is refused, and `lower_bound()` is what is sure.

    Raises
    ------
    UsageError
        `trips` is negative; a keyword of the other library; `loss` without `training`; a formula that gives no count;
        on the meta device, trained tensors that are no arguments.
    UnknownCost
        On the meta device a number that depends on weights or data decides what runs; fused attention of nested
        tensors, or its second gradient.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> x, w = jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> count(lambda x, w: jax.lax.fori_loop(0, 10, lambda _, y: jnp.tanh(y @ w), x), x, w).flops
    655360
    """
    options = {"training": training, "loss": loss, "device": device, "formulas": formulas}
    if is_torch(fn, args):
        from manyheads.costs.torch.counter import count_run

        if trips is not None:
            raise UsageError(f"count: trips={trips} is for while loops of JAX; a PyTorch program runs: leave it out")
        return count_run(fn, args, **options)
    if named := [name for name, value in options.items() if value]:
        found = f"PyTorch, but neither the function nor its {len(args)} arguments are modules or tensors of it"
        raise UsageError(f"count: {', '.join(named)} for {found}; leave it out: a JAX function has its own gradient")
    require("jax")
    from manyheads.costs.jax.counter import count_program

    return count_program(fn, args, trips)


def is_torch(fn: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether a function or its arguments hold modules or tensors of PyTorch, without importing it."""
    if (torch := sys.modules.get("torch")) is None:
        return False
    given = (fn, getattr(fn, "__self__", None), *torch.utils._pytree.tree_leaves(args))
    return any(isinstance(each, (torch.nn.Module, torch.Tensor)) for each in given)


def compare_conventions(cost: Cost) -> dict[str, int | None]:
    """Read one cost under every preset that can read it; None where halving gives no integer."""
    counts: dict[str, int | None] = {}
    for name in PRESETS:
        no_experts = PRESETS[name].convention.experts == "all" and not any(item.unvisited for item in cost.items)
        if cost.reads(name) and not no_experts:
            try:
                counts[name] = cost.to(name).flops
            except ConventionError:
                counts[name] = None
    return counts


def render_comparison(cost: Cost) -> str:
    """Render one cost under every preset that can read it, with the ratio to the first, and who counts so."""
    counts = compare_conventions(cost)
    first, width = next(iter(counts.values())), max(map(len, counts))
    cells = [
        (name, "no integer", "") if count is None else (name, f"{count:,}", f"{count / first:.4f}" if first else "-")
        for name, count in counts.items()
    ]
    sources = "\n".join(f"{name.ljust(width)}  {PRESETS[name].source}" for name in counts)
    return f"{render_table(('convention', 'count', 'ratio'), cells)}\n\n{sources}"
