"""Counter of the operations of a JAX function: a walk over its jaxpr."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.extend import core

from manyheads._arrays import COMPLEX, as_native
from manyheads._namespaces import Array
from manyheads._trees import PyTree
from manyheads.costs.conventions import find_convention
from manyheads.costs.cost import LOOP, Cost, Item
from manyheads.costs.jax import jaxpr, primitives
from manyheads.costs.jax.jaxpr import Consts, Equation, Known, Liveness, Mask, Variable
from manyheads.costs.tally import Tally
from manyheads.errors import UsageError, check_call, check_integer


@dataclass
class _Work:
    """Operations by row: (multiply-adds, elementwise, transcendental)."""

    rows: dict[str, np.ndarray] = field(default_factory=lambda: defaultdict(lambda: np.zeros(3, dtype=object)))
    notes: dict[str, None] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)

    def add(self, row: str, macs: int = 0, elementwise: int = 0, transcendental: int = 0) -> None:
        if macs or elementwise or transcendental:
            self.rows[row] = self.rows[row] + np.array([macs, elementwise, transcendental], dtype=object)

    def absorb(self, other: "_Work", times: int = 1) -> None:
        for row, amounts in other.rows.items():
            self.rows[row] = self.rows[row] + times * amounts
        self.notes.update(other.notes)
        self.unknown.update(other.unknown)

    def total(self) -> tuple[int, ...]:
        return tuple(sum((amounts for amounts in self.rows.values()), np.zeros(3, dtype=object)))


class _Counter:
    """One count: what is needed is remembered, and `trips` stands for loops whose end is unknown."""

    def __init__(self, trips: int | None):
        self.trips = trips
        self.liveness = Liveness()

    def program(self, program: core.Jaxpr, consts: Consts, operands: Sequence[Known], wanted: Mask) -> _Work:
        work = _Work()
        environment = jaxpr.bind(program, consts, operands)
        for eqn, mask in self.liveness.needed(program, wanted).equations:
            known = [jaxpr.look_up(environment, var) for var in eqn.invars]
            self.equation(work, eqn, mask, known)
            environment.update(zip(eqn.outvars, jaxpr.known_results(eqn, known), strict=True))
        return work

    def equation(self, work: _Work, eqn: Equation, mask: Mask, known: list[Known]) -> None:
        name = eqn.primitive.name
        if name in ("dot_general", "conv_general_dilated"):
            left, right = (str(var.aval.shape).replace(" ", "") for var in eqn.invars)
            plain = name == "dot_general"
            macs = primitives.dot_macs(eqn) if plain else primitives.convolution_macs(eqn)
            work.add(f"{name if plain else 'convolution'} {left} {right}", macs=macs)
            self._note_complex(work, eqn)
        elif name == "scan":
            self._scan(work, eqn, mask, known)
        elif name == "while":
            self._while(work, eqn, mask, known)
        elif name == "cond":
            self._cond(work, eqn, mask, known)
        elif (amounts := primitives.arithmetic(eqn)) is not None:
            work.add(amounts[0], 0, *amounts[1:])
        elif (called := jaxpr.called_program(eqn)) is not None:
            work.absorb(self.program(*called, known, mask))
        elif (solved := primitives.factorization(eqn)) is not None:
            work.add(*solved)
            self._note_complex(work, eqn)
        elif (repeated := jaxpr.repeated_program(eqn)) is not None:
            program, times = repeated  # that of a kernel has references for operands, and no results
            operands = known if program.outvars else [None] * len(program.invars)
            work.absorb(self.program(program, (), operands, mask[: len(program.outvars)]), times)
        else:
            reason, unknown = primitives.describe_uncounted(eqn)
            (work.unknown if unknown else work.notes)[reason] = None

    def _scan(self, work: _Work, eqn: Equation, mask: Mask, known: list[Known]) -> None:
        params = eqn.params
        consts, carries = jaxpr.scan_layout(eqn)
        body = params["jaxpr"]
        mask = self.liveness.loop_results(body.jaxpr, mask, consts, carries)
        # Carries and slices differ from one iteration to the next: only constants stay known.
        fixed, carry = known[:consts], known[consts : consts + carries]
        if params["length"]:
            slices = [None] * (len(known) - consts - carries)
            self._repeat(work, body, fixed, carry, slices, mask, params["length"])

    def _repeat(self, work: _Work, body: core.ClosedJaxpr, fixed: list[Known], carry: list[Known], slices: list[Known],
                mask: Mask, trips: int) -> None:  # fmt: skip
        """Add the body of a loop `trips` times; follow its counters where a loop inside ends by them."""
        step = self.program(body.jaxpr, body.consts, [*fixed, *[None] * len(carry), *slices], mask)
        if not step.unknown or all(value is None for value in carry) or trips > jaxpr.LONGEST_WALK:
            work.absorb(step, trips)
            return
        for _ in range(trips):
            inside = [*fixed, *carry, *slices]
            work.absorb(self.program(body.jaxpr, body.consts, inside, mask))
            carry = jaxpr.evaluate_known(body.jaxpr, body.consts, inside)[: len(carry)]

    def _while(self, work: _Work, eqn: Equation, mask: Mask, known: list[Known]) -> None:
        params = eqn.params
        condition, body = params["cond_jaxpr"], params["body_jaxpr"]
        first, second = params["cond_nconsts"], params["body_nconsts"]
        mask = self.liveness.while_results(eqn, mask)
        carries = [None] * (len(known) - first - second)
        test = self.program(condition.jaxpr, condition.consts, [*known[:first], *carries], (True,))
        step = self.program(body.jaxpr, body.consts, [*known[first : first + second], *carries], mask)
        trips, reason = jaxpr.while_trips(eqn, known, self.liveness)
        costs = any((*step.total(), *test.total())) or step.unknown or test.unknown
        if trips is None and not costs:
            return  # a loop that costs nothing costs nothing however often it runs
        if trips is None and self.trips is not None:
            trips = self.trips
            work.notes[f"{LOOP} of unknown length is taken to run {trips} times"] = None
        if trips is None:
            work.unknown[f"{LOOP} of {step.total()[0]:,} multiply-adds an iteration {reason}"] = None
            work.unknown.update(step.unknown | test.unknown)
            return
        if trips:
            self._repeat(work, body, known[first : first + second], known[first + second :], [], mask, trips)
        work.absorb(test, trips + 1)

    def _cond(self, work: _Work, eqn: Equation, mask: Mask, known: list[Known]) -> None:
        branches = eqn.params["branches"]
        if known[0] is not None:
            branches = [branches[int(np.clip(int(known[0]), 0, len(branches) - 1))]]
        costs = [self.program(branch.jaxpr, branch.consts, known[1:], mask) for branch in branches]
        totals = [cost.total() for cost in costs]
        work.absorb(costs[totals.index(max(totals))])
        for cost in costs:
            work.unknown.update(cost.unknown)
        if len(set(totals)) > 1:
            column, unit = (0, "multiply-adds") if len({total[0] for total in totals}) > 1 else (1, "operations")
            amounts = ", ".join(f"{total[column]:,}" for total in totals)
            work.notes[f"a cond has branches of {amounts} {unit}: the largest is counted"] = None

    @staticmethod
    def _note_complex(work: _Work, eqn: Equation) -> None:
        if getattr(eqn.outvars[0].aval.dtype, "kind", "") == "c":
            work.notes["a complex multiply-add is counted as one"] = None

    def traffic(self, closed: core.ClosedJaxpr, wanted: Mask) -> int:
        """Bytes of needed inputs, of needed constants and of results."""
        program = closed.jaxpr
        needed = self.liveness.needed(program, wanted)
        inputs = [var for var, use in zip(program.invars, needed.inputs, strict=True) if use]
        moved = [*inputs, *program.outvars, *self._constants(program, tuple(closed.consts), wanted).values()]
        return sum(primitives.size(var) * primitives.itemsize(var) for var in moved)

    def _constants(self, program: core.Jaxpr, consts: Consts, wanted: Mask) -> dict[int, Variable]:
        # Arrays that a function closes over stand in the program as constants or as literals, in inner programs too,
        # and the same array in several places: it is found by its identity.
        found: dict[int, Variable] = {}
        values = dict(zip(program.constvars, consts, strict=True)) if len(consts) == len(program.constvars) else {}
        for eqn, mask in self.liveness.needed(program, wanted).equations:
            for var in eqn.invars:
                if isinstance(var, core.Literal):
                    if primitives.size(var) > 1:
                        found[id(var.val)] = var
                elif var in values:
                    found[id(values[var])] = var
            called = jaxpr.called_program(eqn)
            inner = [(*called, mask)] if called else [(*part, None) for part in jaxpr.inner_programs(eqn)]
            for part, constants, results in inner:
                found |= self._constants(part, constants, results or (True,) * len(part.outvars))
        return found


def count_program(fn: Callable[..., PyTree], args: tuple[PyTree, ...], trips: int | None = None) -> Cost:
    """Count what a JAX function computes by walking its program; see `manyheads.count`."""
    if trips is not None:
        trips = check_integer("count: trips", trips, 0)
    check_call("fn", fn, *(f"argument {number}" for number in range(1, len(args) + 1)))
    leaves, tree = jax.tree.flatten(args)
    leaves = [as_native(leaf, "an argument", COMPLEX) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    numbers = (int, float, complex)
    traced = [
        i for i, x in enumerate(leaves) if isinstance(x, numbers) or (hasattr(x, "shape") and hasattr(x, "dtype"))
    ]

    def call(*values: Array) -> PyTree:
        filled = list(leaves)
        for index, value in zip(traced, values, strict=True):
            filled[index] = value
        out = fn(*jax.tree.unflatten(tree, filled))
        if type(out).__module__ == "torch":
            raise UsageError("count: the function returns a tensor of PyTorch; give its tensors as arguments")
        return out

    closed = jax.make_jaxpr(call)(*(leaves[index] for index in traced))
    wanted = (True,) * len(closed.jaxpr.outvars)
    known = [_integer_value(leaves[index]) for index in traced]
    counter = _Counter(trips)
    work = counter.program(closed.jaxpr, closed.consts, known, wanted)
    amounts = {row: map(Tally.of, counted) for row, counted in work.rows.items()}
    items = [Item(row, "forward", macs, elementwise=e, transcendental=t) for row, (macs, e, t) in amounts.items()]
    items.append(Item("inputs and outputs", bytes=counter.traffic(closed, wanted)))
    return Cost(tuple(items), find_convention("executed"), tuple(work.notes), tuple(work.unknown))


def _integer_value(leaf: Array) -> Known:
    """Return the value of an integer among the arguments, None for other leaves."""
    concrete = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and not leaf.ndim
    return jaxpr.known_value(np.asarray(leaf) if concrete and getattr(leaf.dtype, "kind", "") in tuple("iub") else leaf)
