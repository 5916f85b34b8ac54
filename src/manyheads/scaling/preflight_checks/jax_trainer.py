r"""Runs of a JAX training: how far every array of weights has moved what is computed with it on the first batch.

The loss is traced, and its operations are run one by one. Where an array of weights meets another value, in a matrix
product, a sum, a lookup or a convolution, the result with :math:`W_t` is compared with that with :math:`W_0` at the
same other value: *by weights*, as for modules of PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from manyheads.costs.jax.jaxpr import Equation, Variable, called_program, scan_layout
from manyheads.errors import UsageError
from manyheads.models.names import join_layers
from manyheads.scaling.preflight_checks.training import Measured, Membership, Training, Update

LAYOUT = ("transpose", "reshape", "convert_element_type", "broadcast_in_dim", "squeeze", "slice", "copy")
MEETINGS = ("dot_general", "conv_general_dilated", "gather", "mul", "div", "add", "sub")
_COMPILED: dict[str, Callable[..., Any]] = {}
MOST_COMPILED = 64


class JaxTrainer:
    """A JAX training: a tree of weights, an optax transformation, batches and a loss."""

    def __init__(self, training: Training) -> None:
        if training.loss is None:
            raise UsageError("a tree of JAX arrays without a loss: return loss(model, batch) as the fourth value")
        if not isinstance(training.optimizer, optax.GradientTransformation):
            raise UsageError(f"{type(training.optimizer).__name__}: a tree of JAX arrays needs an optax transformation")
        self.training = replace(training)
        self.start, self.rest = eqx.partition(training.model, eqx.is_inexact_array_like)
        self.start = jax.tree.map(jnp.asarray, self.start)
        self.example: Any = None

    def weights(self) -> int:
        """Count the trained numbers."""
        return sum(each.size for each in jax.tree.leaves(self.start))

    def membership(self) -> Membership:
        """Return nothing: an optax transformation takes the whole tree."""
        return Membership()

    def unknown_roles(self) -> str:
        """Return why roles are not known; empty where they came with it."""
        return "" if self.training.roles is not None else "no roles came with it"

    def look(self) -> None:
        """Do nothing: the loss alone says how the model is called."""

    def roles(self) -> dict[str, str]:
        """Return the role of every array by its joined name; a role in place of a branch holds for all of it."""
        full = jax.tree.map(
            lambda label, branch: jax.tree.map(lambda _: label, branch),
            self.training.roles,
            self.start,
            is_leaf=lambda each: isinstance(each, str),
        )
        return {
            join_layers(jax.tree_util.keystr(path)): label
            for path, label in jax.tree_util.tree_flatten_with_path(full)[0]
        }

    def measure(self, steps: int) -> Measured:
        """Train, and measure how far arrays have moved what is computed with them on the first batch."""
        batch = self.training.batch(0)
        arrays = compiled(lambda weights, one: self._pure(weights, one)[1], (self.start, batch))
        before = arrays(self.start, batch)
        trained, losses = self._train(steps, 1.0)
        rows = _compare(lambda weights: self._pure(weights, batch)[0], self.start, trained)
        rows |= {name: [Update(float(_rms(now - before[name])))] for name, now in arrays(trained, batch).items()}
        return Measured.of(rows, losses)

    def losses(self, steps: int, factor: float, parts: int = 1) -> list[float]:
        """Train at all learning rates times a factor, on several batches a step."""
        return self._train(steps, factor, parts)[1]

    def _pure(self, weights: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        assert self.training.loss is not None
        found = self.training.loss(eqx.combine(weights, self.rest), batch)
        loss, arrays = found if isinstance(found, tuple) else (found, {})
        if jnp.shape(loss) != () or not isinstance(arrays, Mapping):
            raise UsageError("the loss is no number: return one, or (loss, {name: array})")
        return loss, dict(arrays)

    def _train(self, steps: int, factor: float, parts: int = 1) -> tuple[Any, list[float]]:
        def step(weights: Any, state: Any, batches: Any, scale: Any) -> Any:
            mean = lambda each: sum(self._pure(each, batch)[0] for batch in batches) / parts  # noqa: E731
            loss, slopes = jax.value_and_grad(mean)(weights)
            updates, state = self.training.optimizer.update(slopes, state, weights)
            return optax.apply_updates(weights, jax.tree.map(lambda each: scale * each, updates)), state, loss

        weights, state, found, run = self.start, self.training.optimizer.init(self.start), [], None
        for number in range(steps):
            batches = [self.training.batch(number * parts + part) for part in range(parts)]
            arguments = (weights, state, batches, jnp.float32(factor))
            run = run or compiled(step, arguments)
            weights, state, loss = run(*arguments)
            found.append(float(loss))
            if not math.isfinite(found[-1]):
                return weights, found + [math.inf] * (steps - len(found))
        return weights, found


def compiled(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a function that runs compiled; one that traces to the same program as another one shares its program."""
    traced, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    leaves, tree = jax.tree.flatten(arguments)
    key = f"{tree} {[(jnp.shape(each), jnp.result_type(each)) for each in leaves]} {traced.jaxpr}"
    if key not in _COMPILED:
        if len(_COMPILED) >= MOST_COMPILED:
            _COMPILED.clear()
        _COMPILED[key] = jax.jit(lambda constants, *flat: jax.core.eval_jaxpr(traced.jaxpr, constants, *flat))
    program, results = _COMPILED[key], jax.tree.structure(shape)
    return lambda *given: jax.tree.unflatten(results, program(traced.consts, *jax.tree.leaves(given)))


class _Value(NamedTuple):
    """A value in the trace, and where it is an array of weights its name and the array of the start."""

    now: Any
    name: str = ""
    then: Any = None


@dataclass
class _Trace:
    """Operations run one by one."""

    rows: dict[str, list[tuple[Any, Any]]]

    def run(self, jaxpr: core.Jaxpr, constants: Any, inputs: list[_Value]) -> list[_Value]:
        known = dict(zip(jaxpr.constvars, map(_Value, constants), strict=True))
        known |= dict(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Variable) -> _Value:
            return _Value(atom.val) if isinstance(atom, core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            results = self._apply(equation, [read(atom) for atom in equation.invars])
            known |= dict(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _apply(self, equation: Equation, values: list[_Value]) -> list[_Value]:
        kind, marked = equation.primitive.name, [each for each in values if each.name]
        if (inner := called_program(equation)) is not None:
            return self.run(*inner, values)
        if not marked:
            return [_Value(each) for each in _bind(equation, [each.now for each in values])]
        if kind == "scan":
            return self._scan(equation, values)
        results = _bind(equation, [each.now for each in values])
        names = {each.name for each in marked}
        scalar = kind in ("mul", "div") and all(jnp.size(each.now) == 1 for each in values if not each.name)
        if len(names) > 1 or kind not in (*LAYOUT, *MEETINGS):
            return [_Value(each) for each in results]
        old = _bind(equation, [each.then if each.name else each.now for each in values])
        if kind in LAYOUT or scalar:
            return [_Value(now, marked[0].name, then) for now, then in zip(results, old, strict=True)]
        update = _rms(results[0] - old[0]), _random_part(equation, values)
        self.rows.setdefault(join_layers(marked[0].name), []).append(update)
        return [_Value(each) for each in results]

    def _scan(self, equation: Equation, values: list[_Value]) -> list[_Value]:
        params, inner = equation.params, equation.params["jaxpr"]
        consts, carries = scan_layout(equation)
        moved = consts + carries
        constants, carry, stacked = values[:consts], values[consts:moved], values[moved:]
        outputs: list[list[Any]] = []
        order = range(params["length"])
        for place in reversed(order) if params["reverse"] else order:
            each = [_Value(one.now[place], one.name, one.then[place] if one.name else None) for one in stacked]
            found = self.run(inner.jaxpr, inner.consts, [*constants, *carry, *each])
            carry = found[:carries]
            outputs.append([one.now for one in found[carries:]])
        if params["reverse"]:
            outputs.reverse()
        return [*carry, *(_Value(jnp.stack(column)) for column in zip(*outputs, strict=True))]


def _compare(loss: Callable[[Any], Any], start: Any, trained: Any) -> dict[str, list[Update]]:
    """Run the loss at trained weights, and return for every array what its motion makes, wherever it is used."""

    def compare(then: Any, now: Any) -> dict[str, list[tuple[Any, Any]]]:
        traced = jax.make_jaxpr(loss)(now)
        leaves = jax.tree_util.tree_flatten_with_path(now)[0]
        pairs = zip(leaves, jax.tree.leaves(then), strict=True)
        trace = _Trace({})
        trace.run(
            traced.jaxpr,
            traced.consts,
            [_Value(value, jax.tree_util.keystr(path), old) for (path, value), old in pairs],
        )
        return trace.rows

    found = compiled(compare, (start, trained))(start, trained)
    return {name: [Update(float(size), float(random)) for size, random in each] for name, each in found.items()}


def _bind(equation: Equation, values: list[Any]) -> list[Any]:
    found = equation.primitive.bind(*values, **equation.params)
    return list(found) if equation.primitive.multiple_results else [found]


def _random_part(equation: Equation, values: list[_Value]) -> jax.Array | float:
    """Return n0 / n of the other side of a matrix product: pi/2 times the directions of its rows over their width."""
    if equation.primitive.name != "dot_general":
        return 0.0
    (contracted, batched), side = equation.params["dimension_numbers"], 1 if values[0].name else 0
    if batched[side]:
        return 0.0
    x = jnp.moveaxis(values[side].now, contracted[side], range(-len(contracted[side]), 0)).astype(jnp.float32)
    width = math.prod(x.shape[-len(contracted[side]) :])
    x = x.reshape(-1, width)
    kernel = x.T @ x if len(x) > width else x @ x.T
    return math.pi / 2 * (x**2).sum() ** 2 / jnp.maximum((kernel**2).sum(), 1e-30) / width


def _rms(values: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean(jnp.square(values.astype(jnp.float32))))
