r"""Multipliers within the branches of a PyTorch model: what every weight takes in, over what stands before it.

The outputs of all weights and norms of a branch are replaced, once more and otherwise than for the multipliers around
the branches (`manyheads.scaling.torch.forward_pass.multipliers`), and every input of a weight is compared with them:

* inputs of queries, keys, values and of the MLP's first matrices: the random output u of the norm before them, c u;
  without gains the normalized stream;
* inputs of :math:`W_O`: queries, keys and values all have one level v, so that attention, whose rows sum to one, gives
  that level back wherever tokens and heads stand: c v, at two levels;
* inputs of the MLP's second matrix: s f(c h) of random h, f one of the activations in use, with a gate s f(c g) h.

All numbers are one in a usual model, at every shape.
"""

from __future__ import annotations

from typing import Any

from manyheads.models.torch.lazy_torch import Module, Tensor, torch
from manyheads.models.torch.model import TorchModel
from manyheads.models.torch.modules import with_norms
from manyheads.scaling.torch.forward_pass.activations import fit_activation
from manyheads.scaling.torch.forward_pass.hooks import LARGE, Block, Hooks, Measured

READS = {
    **dict.fromkeys(("query", "key", "query_up"), "logit"),
    **dict.fromkeys(("value", "key_value_up"), "value"),
    **dict.fromkeys(("query_down", "key_value_down"), "latent"),
    **dict.fromkeys(("mlp_in", "mlp_gate"), "hidden"),
    "router": "router",
}
NORMS = {"attention_gain", "mlp_gain", "inner_gain"}
WRITES = {"output", "mlp_out", "attention_post_gain", "mlp_post_gain"}
COMPARED = {"output": "value", "mlp_out": "hidden", **dict.fromkeys(READS.values(), "input")}
"""What the weights of a part make → the multiplier that is measured at their input."""
WIDE = 2.0  # size of the replaced outputs of the MLP's first matrix: beyond the bend of an activation


def measure_branches(model: Module, read: TorchModel, example: Any) -> dict[str, Measured]:
    """Measure what a model multiplies between the weights of its branches; the names are those of `ForwardPass`."""
    first, second = (_BranchProbe(model, read, level) for level in (1.0, 2.0))
    for probe in (first, second):
        probe.run(example)
        probe.finish()
    value, again = first.found["value"], second.found["value"].values
    for name, number in list(value.values.items()):
        if not abs(again.get(name, 0.0) - number) <= first.accuracy * abs(number):
            del value.values[name]
            value.unknown.append(f"what goes into {name} is not proportional to its values")
    return first.found


class _BranchProbe(Hooks):
    """Hooks that compare the inputs of weights with what stands before them."""

    table_size = 1.0  # a tied table makes the stream, which is to be far above any epsilon of a norm

    def __init__(self, model: Module, read: TorchModel, level: float) -> None:
        super().__init__(model, read)
        self.level = level
        self.found = {name: Measured() for name in ("input", "value", "hidden")}
        self.outside = Block()  # what stands in no block
        self.normed = {part for each in self.parts.values() for part in each} >= {"query_gain", "key_gain"}

    def kind(self, parts: set[str]) -> str:
        """Return which of the comparisons above the weights of these parts take part in; empty for others."""
        if parts and parts <= READS.keys():
            kinds = {READS[part] for part in parts}
            return "value" if "value" in kinds else min(kinds)
        if parts and parts <= NORMS:
            return "norm"
        return next(iter(parts)) if len(parts) == 1 and parts <= WRITES else ""

    def finish(self) -> None:
        """Note the inputs that were not explained, and the weights that were not called."""
        self._explain(self.outside, [])
        for name, kind in sorted(self.expected - self.called):
            if kind in COMPARED:
                self.found[COMPARED[kind]].unknown.append(f"no product with the weights of {name} was seen")

    def draw(self, name: str, kind: str, x: Tensor | None, output: Tensor, own: float | None = 1.0) -> Any:
        """Compare the input of a weight; return what replaces its output."""
        block = self.blocks[-1] if self.blocks else self.outside
        if kind in COMPARED and not (kind == "logit" and self.normed):  # the norm takes a factor away
            self._compare(name, kind, x, block)
        if own is None and kind not in WRITES:  # else the branch says so
            module = type(self.model.get_submodule(name)).__name__
            self.found["input"].unknown.append(f"{name} ({module}) does more than multiply by its weight")
        if own is None or kind == "router":
            return None
        if kind in ("logit", "value"):
            block.level = self.level / own if kind == "value" else block.level
            return torch.full_like(output, self.level)
        drawn = self.random(output, {"hidden": WIDE, "norm": 1.0, "latent": 1.0}.get(kind, LARGE))
        if kind in WRITES:
            block.written.append((name, drawn))
        else:
            (block.hidden if kind == "hidden" else block.sources).append(drawn / own)
        return drawn

    def attend(self, module: Module, inputs: Any, output: Tensor) -> Any:
        """Replace the outputs of an `nn.MultiheadAttention`, which multiplies its values by one."""
        block, name = self.blocks[-1] if self.blocks else self.outside, self.names[module]
        for x in {id(each): each for each in inputs[:3] or [None]}.values():
            self._compare(name, "logit", x, block)
        self.found["value"].values[name] = 1.0
        block.written.append((name, self.random(output[0], LARGE)))
        return (block.written[-1][1], *output[1:])

    def close(self, name: str, block: Block, after: Any) -> bool:
        """Explain inputs by what a block adds to the stream, where no norm of a part of its own stands before them."""
        before, written = block.before, block.written
        adds = bool(written) and before is not None and after is not None and before.shape == after.shape
        streams = [before] if adds else []
        if block.reads and adds:
            columns = [each for _, each in written]
            numbers = self.fit(after.double() - before.double(), columns, float(after.abs().max())) or []
            for number, column in zip(numbers, columns[:-1], strict=False):
                streams.append(streams[-1] + number * column)
        self._explain(block, streams)
        return adds

    def _explain(self, block: Block, streams: list[Tensor]) -> None:
        """Compare inputs with the stream, as it is and normalized, after each branch."""
        candidates = [each for stream in reversed(streams) for each in with_norms(stream)]
        for name, x in block.reads:
            fits = (found[0] for each in candidates if (found := self.fit(x.double(), [each])))
            self._keep("input", name, next(fits, None), "the norm before it, or the stream")

    def _keep(self, kind: str, name: str, number: float | None, words: str) -> None:
        """Keep a number, the farthest from one of a weight that is used more than once, or that there is none."""
        values = self.found[kind].values
        if number is None:
            self.found[kind].unknown.append(f"what goes into {name} does not follow {words}")
        elif abs(number - 1) >= abs(values.get(name, 1.0) - 1):
            values[name] = number

    def _compare(self, name: str, kind: str, x: Tensor | None, block: Block) -> None:
        """Compare the input of a weight with replaced norms, values or hidden units, or leave it to the stream."""
        fits = (self.fit(x.double(), [each]) for each in reversed(block.sources) if x is not None)
        number = next((found[0] for found in fits if found), None)
        if kind == "output":
            number = self._level(x, block) if number is None else number
            self._keep("value", name, number, "its values")
        elif kind == "mlp_out" and self.level == 1.0:  # once is enough
            accuracy = max(self.accuracy, 2 * self.rounding)
            fit = fit_activation(x, block.hidden, accuracy) if number is None and x is not None else None
            self._keep("hidden", name, fit.behind if fit else number, "a known activation")
            if fit:
                self._keep("hidden", f"{name}, in front of its activation,", fit.before, "")
        elif kind != "mlp_out" and number is None and x is not None:
            block.reads.append((name, x))
        elif kind != "mlp_out":
            self._keep("input", name, number, "a norm: it is given by name")
        block.level = None if kind == "output" else block.level
        block.hidden = [] if kind == "mlp_out" else block.hidden

    def _level(self, x: Tensor | None, block: Block) -> float | None:
        """Return the level of an input over that of the values; None if it has none."""
        if x is None or block.level is None:
            return None
        middle = float(x.double().mean())
        even = float((x.double() - middle).abs().max()) <= max(self.accuracy, 8 * self.rounding) * abs(middle)
        return middle / block.level if even and middle else None
