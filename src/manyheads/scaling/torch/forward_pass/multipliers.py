r"""Multipliers of a PyTorch model's forward pass, measured on one small batch.

Folding a factor into a weight has its effect only if the model computes as is assumed. Here the outputs of projections
are replaced by random numbers, so that no weight matters, and six quantities are read off one forward pass:

* logits: the diagonal :math:`A_{ii} = s\, q_i \cdot k_i`, which rotary positions leave as it is;
* branches: what a block adds to the stream, :math:`x' - x = \sum_j b_j y_j` over the outputs of its projections;
* outputs: :math:`f = r\, W_U z + b` with the last norm's output z, and random numbers for :math:`W_U`;
* embeddings: :math:`x_1 - x_2 = m (e_1 - e_2)` of two sequences, below the first block;
* positions: :math:`x_1 - m e_1 = m_p p + c` over the tokens of one sequence, there too;
* stream: what goes into a block over what the block before it passed on.

A norm behind a projection (QK-norm, sandwich norms) leaves no such proportion: a factor in the weight has no effect.
The outputs of its gain are replaced instead; without gains, logits are compared with normalized queries and keys.
What stands between the weights of a branch is measured by `manyheads.scaling.torch.forward_pass.branch_inputs`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from manyheads.models.torch.lazy_torch import Module, Tensor, torch
from manyheads.models.torch.model import TorchModel
from manyheads.models.torch.modules import ACCURACY, first_tensor, fit_rows, with_norms
from manyheads.scaling.torch.forward_pass.branch_inputs import measure_branches
from manyheads.scaling.torch.forward_pass.hooks import LARGE, Block, Hooks, Measured
from manyheads.scaling.torch.forward_pass.layouts import find_scale, split_fused

SMALL = 0.03  # size of the replaced queries and keys: far below any cap on logits
ABOVE_EPSILON = 30.0  # size of the replaced queries and keys where a norm follows: far above any epsilon in it


@dataclass
class ForwardPass:
    """The multipliers of a model, and the relative accuracy with which they are known."""

    logit: Measured = field(default_factory=Measured)
    branch: Measured = field(default_factory=Measured)
    output: Measured = field(default_factory=Measured)
    embedding: Measured = field(default_factory=Measured)
    position: Measured = field(default_factory=Measured)
    stream: Measured = field(default_factory=Measured)
    input: Measured = field(default_factory=Measured)
    value: Measured = field(default_factory=Measured)
    hidden: Measured = field(default_factory=Measured)
    accuracy: float = ACCURACY


def measure_forward(model: Module, read: TorchModel, example: Any = None) -> ForwardPass:
    """Measure what a model multiplies in its forward pass."""
    probe = _Probe(model, read)
    try:
        result = probe.run(example)
        if probe.found.logit.unknown:
            again = _Probe(model, read, ABOVE_EPSILON)
            again.run(example)
            if again.found.logit.normed and not again.found.logit.unknown:
                probe.found.logit = again.found.logit
        within = measure_branches(model, read, example)
    except Exception as error:  # whatever a model raises for a batch that it does not take
        said = str(error).partition("\n")[0][:150]
        found, unknown = ForwardPass(), Measured(unknown=[f"the batch did not pass ({type(error).__name__}: {said})"])
        for name in vars(found).keys() - {"accuracy"}:
            setattr(found, name, unknown)
        return found
    probe.measure_outputs(result)
    probe.measure_embeddings()
    seen = "the products that make queries and keys were not" if probe.softmax else "no softmax over logits was"
    for measured, reason in (
        (probe.found.logit, f"{seen} seen"),
        (probe.found.branch, "no block with a branch was seen"),
    ):
        if not measured.values and not measured.unknown:
            measured.unknown.append(reason)
    if probe.positions and not probe.found.position.values and not probe.found.position.unknown:
        probe.found.position.unknown = probe.found.embedding.unknown
    for name, measured in within.items():
        setattr(probe.found, name, measured)
    return probe.found


class _Probe(Hooks):
    """Hooks that measure logits, branches, outputs and the stream."""

    def __init__(self, model: Module, read: TorchModel, size: float = SMALL) -> None:
        super().__init__(model, read)
        self.found, self.size = ForwardPass(accuracy=self.accuracy), size
        # A norm behind queries, keys or a branch eats what stands before it: its own output is replaced.
        held = {part for each in self.parts.values() for part in each}
        self.drawn = {each: f"{each}_gain" if f"{each}_gain" in held else each for each in ("query", "key")}
        self.written = {"output", "mlp_out"} & set(read.architecture.carries)
        self.written |= held & {"attention_post_gain", "mlp_post_gain"}
        self.shift = next((t for t in model.parameters() if self.parts.get(id(t)) == ("unembedding_bias",)), None)
        self.softmax = False
        self.queries: list[tuple[str, list[Tensor]]] = []  # in every reading of their layout
        self.keys: list[list[Tensor]] = []
        self.wrote: set[str] = set()  # projections that were called
        self.last: list[Tensor] = []  # outputs of the last norm
        self.embedded: list[Tensor] = []

    def kind(self, parts: set[str]) -> str:
        """Return which outputs the weights of these parts make that are replaced; empty for others."""
        if parts == {self.drawn["query"]}:
            return "query"
        if parts == {self.drawn["key"]}:
            return "key"
        if len(parts) > 1 and parts <= {"query", "key", "value"} and parts & set(self.drawn.values()):
            return "+".join(sorted(parts, key=("query", "key", "value").index))
        return "write" if len(parts) == 1 and parts <= self.written else ""

    def other(self, module: Module, own: set[str]) -> Callable[..., Any] | None:
        """Return the hook of the last norm, and that of the embeddings."""
        if own in ({"final_gain"}, {"final_gain", "final_shift"}):
            return self._normalize
        # Of a tied table, the module that reads out is the one that is no `nn.Embedding`.
        tied = any(t is self.table for t in module.parameters(recurse=False))
        reads_out = tied and not isinstance(module, torch.nn.Embedding)
        if own in ({"embedding"}, {"patch"}, {"patch", "embedding_bias"}) and not reads_out:
            return self._embed
        return None

    def _uneven(self, like: Tensor, positive: bool = False) -> Tensor:
        """Return numbers of another size for every token, as no norm leaves them; positive ones do not cancel."""
        draw = torch.rand if positive else torch.randn
        drawn = draw(like.shape, generator=self.generator)
        drawn = self.size * (0.5 + drawn) if positive else LARGE * drawn
        if like.dim() > 1:
            drawn *= torch.linspace(0.25, 1, like.shape[-2])[:, None]
        return drawn.to(device=like.device, dtype=like.dtype)

    # Hooks

    def draw(self, name: str, kind: str, x: Tensor | None, output: Tensor, own: float | None = 1.0) -> Any:
        """Return random numbers in the place of a projection's outputs, and keep them over its own multiplier."""
        if own is None:
            measured = self.found.branch if kind == "write" else self.found.logit
            module = type(self.model.get_submodule(name)).__name__
            measured.unknown.append(f"{name} ({module}) does more than multiply by its weight")
            return None
        drawn, shape = self._uneven(output, positive=kind != "write"), self.read.architecture.shape
        if kind == "write" and name in self.wrote:
            self.found.branch.unknown.append(f"{name} is used more than once, and its gradient is a sum over its uses")
        self.wrote.add(name)
        if kind == "write" and self.blocks:
            self.blocks[-1].written.append((name, drawn / own))
        elif kind == "write":
            self.found.branch.unknown.append(f"{name} is in no module that holds a whole block")
        else:
            readings = split_fused(drawn / own, kind, shape)
            if "query" in kind:
                self.queries.append((name, [each[0] for each in readings]))
            if "key" in kind:
                self.keys.append([each[-1] for each in readings])
        return drawn

    def attend(self, module: Any, inputs: Any, output: Any) -> Any:
        """Replace the outputs of an `nn.MultiheadAttention`, whose logits are known."""
        self.found.logit.values[self.names[module]] = float(module.head_dim) ** -0.5
        return (self.draw(self.names[module], "write", None, output[0]), *output[1:])

    def _normalize(self, module: Module, inputs: Any, output: Any) -> Any:
        if self.busy:
            return None
        own, drawn = self.own(module, inputs, output), self.random(output)
        if own is None:
            name = f"{self.names[module]} ({type(module).__name__})"
            self.found.output.unknown.append(f"{name} does more than normalize and multiply by its gain")
        self.last.append(drawn / (own or 1.0))
        return drawn

    def _embed(self, module: Module, inputs: Any, output: Any) -> Any:
        table = next(iter(module.parameters(recurse=False)))  # the exchanged one
        looked_up = inputs and not inputs[0].is_floating_point() and table.dim() == 2
        self.embedded.append(table[inputs[0]] if looked_up else self.random(output))
        return None if looked_up else self.embedded[-1]

    def enter(self, module: Module, arguments: Any, named: Any) -> None:
        """Compare what goes into a block with what the block before it passed on."""
        super().enter(module, arguments, named)
        before, name = self.blocks[-1].before, self.names[module]
        if self.stream and before is not None:
            if numbers := self.fit(before.double(), [self.stream[-1]]):
                self.found.stream.values[name] = numbers[0]
            else:
                self.found.stream.unknown.append(f"{name} does not start from what the block before it puts out")

    def close(self, name: str, block: Block, after: Any) -> bool:
        """Compare what a block adds with what its projections put out."""
        before, written, branch = block.before, block.written, self.found.branch
        if not written or before is None or after is None or before.shape != after.shape:
            branch.unknown.append(f"{name} is no block that adds to a stream")
            return False
        numbers = self.fit(after.double() - before.double(), [each for _, each in written], float(after.abs().max()))
        if numbers is None:
            who = " and ".join(each for each, _ in written)
            branch.unknown.append(f"what {name} adds to the stream does not follow {who}: a norm may stand behind them")
        else:
            branch.values |= {each: number for (each, _), number in zip(written, numbers, strict=True)}
        return True

    def see_logits(self, readings: list[Tensor]) -> None:
        """Compare the diagonal of a layer's logits with the products of its queries and keys."""
        self.softmax = True
        if not self.queries or not self.keys:
            return
        (name, queries), keys, measured = self.queries[-1], self.keys[-1], self.found.logit
        self.queries.clear()
        self.keys.clear()
        measured.normed = self.size != SMALL
        key_dim = self.read.architecture.shape.key_dim
        scale = find_scale(readings, queries, keys, key_dim, self.found.accuracy, measured.normed)
        if scale is not None:
            measured.values[name] = scale
            return
        between = "a norm (QK-norm), a bias or a cap stands in between"
        measured.unknown.append(f"the logits do not follow what {name} puts out: {between}")

    # After the pass

    def measure_outputs(self, result: Any) -> None:
        """Find r with outputs = r W z + b."""
        measured = self.found.output
        if self.swapped is None:
            measured.unknown.append("no unembedding is among its parameters")
            return
        table = self.swapped.double()
        outputs = getattr(result, "logits", None)
        outputs = first_tensor(result, len(table)) if outputs is None else outputs
        if not self.last and any(each.closes for each in self.read.architecture.parameters):
            measured.unknown.append("no output of the last norm, which would carry a factor, was seen")
            return
        states = self.last or with_norms(self.stream[-1] if self.stream else None)
        for state in states if outputs is not None else ():
            pooled = (state, state[:, -1:], *((state.mean(1), state[:, 0], state[:, -1]) if state.dim() > 2 else ()))
            for plain in [each.double() @ table.T for each in pooled if each.shape[-1] == table.shape[-1]]:
                if plain.shape != outputs.shape:
                    continue
                columns = [plain]
                if self.shift is not None and bool(self.shift.any()):
                    columns.append(self.shift.detach().double().expand_as(plain))
                numbers = self.fit(outputs.double(), columns, float(outputs.abs().max()))
                if numbers is not None:
                    measured.values["outputs"] = numbers[0]
                    return
        measured.unknown.append("the outputs do not follow the last norm and the unembedding")

    def measure_embeddings(self) -> None:
        """Find m and m_p with the stream below the first block = m times embeddings + m_p times positions + c."""
        measured, below = self.found.embedding, self.stream[0] if self.stream else None
        batched = [each.flatten(2).transpose(1, 2) if each.dim() == 4 else each for each in self.embedded]
        if below is None or below.dim() < 3 or len(below) < 2 or not batched:
            measured.unknown.append("no stream of two sequences below a first block was seen")
            return
        largest, (_, longest, width) = float(below.abs().max()), below.shape
        for variant in zip(*(with_norms(each) for each in batched), strict=True):
            rows = [each for each in variant if len(each) == len(below) and each.shape[1] <= longest]
            if rows := [each for each in rows if each.shape[-1] == width]:
                ends = below[:, -rows[0].shape[1] :].double()
                if numbers := self.fit(ends[0] - ends[1], [each[0] - each[1] for each in rows], largest):
                    measured.values |= {f"embeddings {number}": value for number, value in enumerate(numbers)}
                    shared = ends[0] - sum(number * each[0] for number, each in zip(numbers, rows, strict=True))
                    self._measure_positions(shared, largest)
                    return
        measured.unknown.append("the stream below the first block does not follow the embeddings")

    def _measure_positions(self, shared: Any, largest: float) -> None:
        """Find m_p with what all sequences share below the first block, (tokens, D), from learned or fixed tables."""
        measured, rounded = self.found.position, 8 * self.rounding * largest
        fixed = {name: each for name, each in self.model.named_buffers() if each.dim() > 1 and each.is_floating_point()}
        for name, table in (self.positions | {name: each.flatten(0, -2) for name, each in fixed.items()}).items():
            if (value := fit_rows(shared, table.double(), rounded)) is not None:
                measured.values[name] = value
        if not measured.values and (missing := list(self.positions)):
            measured.unknown.append(f"{missing[0]} is not added to the stream below the first block")
        elif not measured.values and float((shared - shared.mean(0)).abs().max()) > ACCURACY * largest + rounded:
            measured.unknown.append("the stream below the first block holds more than embeddings and a table")
