"""Critical path of a program: the longest chain of matrix products, each needing the one before."""

from collections.abc import Callable, Sequence

import jax
from jax.extend import core

from manyheads._arrays import COMPLEX, check_arrays
from manyheads._trees import PyTree
from manyheads.costs.cost import UnknownCost
from manyheads.costs.jax import primitives
from manyheads.costs.jax.jaxpr import (
    LONGEST_SIMULATION,
    Equation,
    Variable,
    called_program,
    inner_programs,
    scan_layout,
)

PRODUCTS = (
    "dot_general", "conv_general_dilated", "ragged_dot_general", "scaled_dot", "scaled_matmul_wrapper",
    "bcoo_dot_general", "bcoo_spdot_general", "bcsr_dot_general", "coo_matmat", "coo_matvec",
    "csr_matmat", "csr_matvec",
)  # fmt: skip


def longest_chain(fn: Callable[..., object], *args: PyTree) -> int:
    """Return the length of the longest chain of matrix products in a JAX function, each needing the one before.

    With any number of processors, this many products must still run one after the other. A `scan` is followed through
    all its steps: only what is carried from one to the next makes it deep. Nothing is run.

    Raises `UnknownCost`: a product stands in a `while` loop, whose number of steps is not part of the program, a `scan`
    is too long to be followed, or code outside of the program is called.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> x, w = jax.ShapeDtypeStruct((8, 64), jnp.float32), jax.ShapeDtypeStruct((64, 64), jnp.float32)
    >>> longest_chain(lambda x, w: (x @ w) @ w + x @ w, x, w)
    2
    >>> longest_chain(lambda x, w: jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), h @ w @ w), x, None, length=10), x, w)
    11
    """
    program = jax.make_jaxpr(fn)(*check_arrays(args, "args", COMPLEX)).jaxpr
    return max(_depths(program, [0] * len(program.invars)), default=0)


def _depths(program: core.Jaxpr, operands: Sequence[int]) -> list[int]:
    """Return the depth of every result of a program, given the depths of its operands; constants are at depth zero."""
    depth: dict[Variable, int] = dict(zip(program.invars, operands, strict=True))

    def of(var: Variable) -> int:
        return 0 if isinstance(var, core.Literal) else depth.get(var, 0)

    for eqn in program.eqns:
        depth.update(zip(eqn.outvars, _results(eqn, [of(var) for var in eqn.invars]), strict=True))
    return [of(var) for var in program.outvars]


def _results(eqn: Equation, operands: list[int]) -> list[int]:
    """Return the depths of an equation's results."""
    if (call := called_program(eqn)) is not None:
        return _depths(call[0], operands)
    name = eqn.primitive.name
    if name == "shard_map":  # every device runs the program once
        return _depths(eqn.params["jaxpr"], operands)
    if name == "scan":
        return _scan(eqn, operands)
    if name == "cond":
        branches = [_depths(branch.jaxpr, operands[1:]) for branch in eqn.params["branches"]]
        return [max(operands[0], *ends) for ends in zip(*branches, strict=True)]
    if name not in PRODUCTS and (name in primitives.OUTSIDE | primitives.KERNELS or "attention" in name):
        why = primitives.describe_uncounted(eqn)[0]
        raise UnknownCost(f"{why}: how many products follow each other there is unknown")
    deepest = max(operands, default=0)
    inside = [_depths(program, [0] * len(program.invars)) for program, _ in inner_programs(eqn)]
    if any(max(ends, default=0) for ends in inside):
        raise UnknownCost(f"a matrix product stands inside {name!r}: how deep that is cannot be read from the program")
    return [deepest + (name in PRODUCTS)] * len(eqn.outvars)


def _scan(eqn: Equation, operands: list[int]) -> list[int]:
    """Follow the carry through every step; a slice of the input is as deep as the input."""
    params = eqn.params
    if (length := params["length"]) > LONGEST_SIMULATION:
        raise UnknownCost(f"a scan of {length:,} steps is followed up to {LONGEST_SIMULATION:,} only: shorten it")
    consts, carries = scan_layout(eqn)
    constants, carry, slices = operands[:consts], operands[consts : consts + carries], operands[consts + carries :]
    stacked: list[int] = []
    for _ in range(params["length"]):
        results = _depths(params["jaxpr"].jaxpr, [*constants, *carry, *slices])
        carry = results[:carries]
        stacked = [max(pair) for pair in zip(results[carries:], stacked or [0] * len(results), strict=False)]
    return [*carry, *(stacked or [0] * (len(params["jaxpr"].jaxpr.outvars) - carries))]
