"""Jaxprs: programs inside an equation, dead-code elimination, and integers known before a program runs."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from jax.extend import core

from manyheads._namespaces import Array

# Longest loop whose end is found by running its integers; a longer one is reported as undetermined.
LONGEST_SIMULATION = 100_000
# Longest loop that is followed step by step because an inner loop ends by its counter.
LONGEST_WALK = 1_000

Equation: TypeAlias = Any  # core.JaxprEqn
Variable: TypeAlias = Any  # core.Var or core.Literal, whose abstract value has a shape and a dtype
Known: TypeAlias = Any  # an integer or Boolean scalar of NumPy, or None
Mask = tuple[bool, ...]
Consts = Sequence[Array]


def inner_programs(eqn: Equation) -> list[tuple[core.Jaxpr, tuple[Array, ...]]]:
    """List the programs among the parameters of an equation, each with its constants."""

    def search(value: object) -> Iterator[tuple[core.Jaxpr, tuple[Array, ...]]]:
        if isinstance(value, core.ClosedJaxpr):
            yield value.jaxpr, tuple(value.consts)
        elif isinstance(value, core.Jaxpr):
            yield value, ()
        elif isinstance(value, (tuple, list)):
            for part in value:
                yield from search(part)

    return [found for value in eqn.params.values() for found in search(value)]


def repeated_program(eqn: Equation) -> tuple[core.Jaxpr, int] | None:
    """Return the program of a `shard_map` or `pallas_call`, and how often it runs: on all devices, at all grid points.

    None for other primitives, and for a grid whose size is not known before the program runs.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "shard_map":
        axes = params.get("newly_manual_axes", params.get("manual_axes"))  # as JAX 0.10 and 0.9 call them
        return params["jaxpr"], math.prod(params["mesh"].shape[axis] for axis in axes)
    if name == "pallas_call" and all(isinstance(extent, int) for extent in params["grid_mapping"].grid):
        return params["jaxpr"], math.prod(params["grid_mapping"].grid)
    return None


def called_program(eqn: Equation) -> tuple[core.Jaxpr, tuple[Array, ...]] | None:
    """Return the program of a plain call (jit, remat, custom derivatives): operands in, results out, one to one."""
    if eqn.primitive.name in ("scan", "while", "cond", "shard_map", "pallas_call", "xla_pmap"):
        return None
    if eqn.primitive.name == "custom_linear_solve":
        return _solving_program(eqn)
    programs = inner_programs(eqn)
    if len(programs) != 1:
        return None
    program, _ = programs[0]
    fits = len(program.invars) == len(eqn.invars) and len(program.outvars) == len(eqn.outvars)
    return programs[0] if fits else None


def _solving_program(eqn: Equation) -> tuple[core.Jaxpr, tuple[Array, ...]]:
    """Return the one program of a `custom_linear_solve` that runs, as a function of all its operands.

    The operands are the constants of four programs (product, transposed product, solve, transposed solve), then the
    right-hand sides; only the third program runs.
    """
    lengths, programs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    solve, constants = programs.solve, lengths.solve
    others = [program.jaxpr.invars[:length] for program, length in zip(programs, lengths, strict=True) if program]
    others[list(filter(None, programs)).index(solve)] = solve.jaxpr.invars[:constants]
    invars = [var for part in others for var in part] + solve.jaxpr.invars[constants:]
    return solve.jaxpr.replace(invars=invars), tuple(solve.consts)


def scan_layout(eqn: Equation) -> tuple[int, int]:
    """Return how many operands of a `scan` are constants, and how many are carried; slices follow.

    Read from the ranks: a slice and a stacked result have one axis more outside than inside. The parameters that say
    it differ between versions of JAX.
    """
    body = eqn.params["jaxpr"].jaxpr

    def sliced(outside: Sequence[Variable], inside: Sequence[Variable]) -> int:
        return sum(_rank(outer) > _rank(inner) for outer, inner in zip(outside, inside, strict=True))

    carries = len(eqn.outvars) - sliced(eqn.outvars, body.outvars)
    return len(eqn.invars) - carries - sliced(eqn.invars, body.invars), carries


def _rank(var: Variable) -> int:
    return len(getattr(var.aval, "shape", ()))


@dataclass(frozen=True)
class Needed:
    """The equations of a program that its wanted results depend on, each with the mask of its wanted results."""

    equations: tuple[tuple[Equation, Mask], ...]
    inputs: Mask


class Liveness:
    """Dead-code elimination, remembering each program and mask (programs repeat: layers, fixed points of loops)."""

    def __init__(self) -> None:
        # The program is kept beside its result: an id is unique only while its object lives.
        self._memory: dict[tuple[int, Mask], tuple[core.Jaxpr, Needed]] = {}

    def needed(self, program: core.Jaxpr, wanted: Mask) -> Needed:
        """Return what `wanted` results of `program` need; an equation with an effect is always needed."""
        key = (id(program), wanted)
        if key not in self._memory:
            live = _variables(program.outvars, wanted)
            kept = []
            for eqn in reversed(program.eqns):
                mask = tuple(var in live for var in eqn.outvars)
                if any(mask) or eqn.effects:
                    kept.append((eqn, mask))
                    live |= _variables(eqn.invars, self.operands(eqn, mask))
            needed = Needed(tuple(reversed(kept)), tuple(var in live for var in program.invars))
            self._memory[key] = (program, needed)
        return self._memory[key][1]

    def operands(self, eqn: Equation, mask: Mask) -> Mask:
        """Return which operands the wanted results of an equation need."""
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            consts, carries = scan_layout(eqn)
            mask = self.loop_results(params["jaxpr"].jaxpr, mask, consts, carries)
            return _with_carries(self.needed(params["jaxpr"].jaxpr, mask).inputs, mask, consts, carries)
        if name == "while":
            mask = self.while_results(eqn, mask)
            ends = self.needed(params["cond_jaxpr"].jaxpr, (True,)).inputs[: params["cond_nconsts"]]
            body = self.needed(params["body_jaxpr"].jaxpr, mask).inputs
            return (*ends, *_with_carries(body, mask, params["body_nconsts"], len(mask)))
        if name == "cond":
            used = [self.needed(branch.jaxpr, mask).inputs for branch in params["branches"]]
            return (True, *(any(uses) for uses in zip(*used, strict=True)))
        if (called := called_program(eqn)) is not None:
            return self.needed(called[0], mask).inputs
        return (True,) * len(eqn.invars)

    def loop_results(self, body: core.Jaxpr, mask: Mask, consts: int, carries: int) -> Mask:
        """Extend a mask of wanted results until no wanted carry depends on an unwanted one."""
        while True:
            used = self.needed(body, mask).inputs[consts : consts + carries]
            wider = tuple(want or use for want, use in zip(mask[:carries], used, strict=True)) + mask[carries:]
            if wider == mask:
                return mask
            mask = wider

    def while_results(self, eqn: Equation, mask: Mask) -> Mask:
        """Extend a mask of wanted carries by those that the end of the loop depends on."""
        params = eqn.params
        ends = self.needed(params["cond_jaxpr"].jaxpr, (True,)).inputs[params["cond_nconsts"] :]
        wider = tuple(want or end for want, end in zip(mask, ends, strict=True))
        return self.loop_results(params["body_jaxpr"].jaxpr, wider, params["body_nconsts"], len(mask))


def _with_carries(used: Mask, wanted: Mask, consts: int, carries: int) -> Mask:
    # A wanted carry is an operand even if the body overwrites it: a loop may run zero times.
    middle = tuple(use or want for use, want in zip(used[consts : consts + carries], wanted[:carries], strict=True))
    return used[:consts] + middle + used[consts + carries :]


def _variables(values: Sequence[Variable], wanted: Mask) -> set[Variable]:
    return {var for var, want in zip(values, wanted, strict=True) if want and not isinstance(var, core.Literal)}


_INTEGER_ARITHMETIC: dict[str, Callable[..., Known]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "neg": np.negative,
    "sign": np.sign, "square": np.square, "integer_pow": np.power, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal, "and": np.bitwise_and,
    "or": np.bitwise_or, "not": np.invert, "xor": np.bitwise_xor, "shift_left": np.left_shift,
    "select_n": lambda which, *cases: cases[int(which)],
    "clamp": lambda low, value, high: np.minimum(np.maximum(low, value), high),
    # XLA rounds integer division toward zero, and the remainder follows the dividend.
    "div": lambda a, b: abs(int(a)) // abs(int(b)) * (1 if (a < 0) == (b < 0) else -1), "rem": np.fmod,
}  # fmt: skip
_SAME_VALUE = {"broadcast_in_dim", "convert_element_type", "copy", "device_put", "reshape", "squeeze", "stop_gradient"}


def known_value(value: object) -> Known:
    """Return an integer or Boolean scalar as NumPy holds it, anything else as None."""
    scalar = isinstance(value, (bool, int, np.generic, np.ndarray)) and np.ndim(value) == 0
    return np.asarray(value)[()] if scalar and np.asarray(value).dtype.kind in "iub" else None


def known_results(eqn: Equation, operands: Sequence[Known]) -> list[Known]:
    """Work out the results of an equation on integer scalars as far as they are known."""
    unknown: list[Known] = [None] * len(eqn.outvars)
    if (called := called_program(eqn)) is not None:
        return evaluate_known(called[0], called[1], operands)
    name = eqn.primitive.name
    if len(eqn.outvars) != 1 or any(operand is None for operand in operands) or not operands:
        return unknown
    aval = eqn.outvars[0].aval
    if getattr(aval, "shape", None) != () or getattr(getattr(aval, "dtype", None), "kind", "") not in tuple("iub"):
        return unknown
    if name in _SAME_VALUE:
        value = operands[0]
    elif name in _INTEGER_ARITHMETIC and not (name in ("div", "rem") and operands[1] == 0):
        with np.errstate(over="ignore"):  # integers wrap, as on the device
            power = [eqn.params["y"]] if name == "integer_pow" else []
            value = _INTEGER_ARITHMETIC[name](*operands, *power)
    else:
        return unknown
    return [np.asarray(value).astype(aval.dtype)[()]]


def evaluate_known(program: core.Jaxpr, consts: Consts, operands: Sequence[Known], part: Any = None) -> list[Known]:
    """Run a program, or the part of its equations that is needed, on the integer scalars that are known."""
    environment = bind(program, consts, operands)
    for eqn in program.eqns if part is None else part:
        results = known_results(eqn, [look_up(environment, var) for var in eqn.invars])
        environment.update(zip(eqn.outvars, results, strict=True))
    return [look_up(environment, var) for var in program.outvars]


def bind(program: core.Jaxpr, consts: Consts, operands: Sequence[Known]) -> dict[Variable, Known]:
    """Return an environment of the known constants and operands of a program."""
    environment: dict[Variable, Known] = {}
    if len(consts) == len(program.constvars):
        environment.update(zip(program.constvars, map(known_value, consts), strict=True))
    environment.update(zip(program.invars, operands, strict=True))
    return environment


def look_up(environment: dict[Variable, Known], var: Variable) -> Known:
    """Return the known value of a variable or literal."""
    return known_value(var.val) if isinstance(var, core.Literal) else environment.get(var)


def while_trips(eqn: Equation, operands: Sequence[Known], liveness: Liveness) -> tuple[int | None, str]:
    """Return how often the body of a `while` runs, if integers known beforehand decide it; otherwise None, and why."""
    params = eqn.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    first, second = params["cond_nconsts"], params["body_nconsts"]
    ends, fixed, carry = operands[:first], operands[first : first + second], list(operands[first + second :])
    deciding = liveness.while_results(eqn, (False,) * len(carry))
    step = [equation for equation, _ in liveness.needed(body.jaxpr, deciding).equations]
    for trips in range(LONGEST_SIMULATION + 1):
        (goes_on,) = evaluate_known(condition.jaxpr, condition.consts, [*ends, *carry])
        if goes_on is None:
            others = "data, elements of arrays, or the counter of a loop around it"
            return None, f"ends by values other than known integer scalars, such as {others}"
        if not goes_on:
            return trips, ""
        carry = evaluate_known(body.jaxpr, body.consts, [*fixed, *carry], step)
    return None, f"runs over {LONGEST_SIMULATION:,} iterations"
