r"""Multipliers of a PyTorch model's forward pass, measured on one small batch.

Folding a factor into a weight has its effect only if the model computes as is assumed. Here the outputs of projections
are replaced by random numbers, so that no weight matters, and five quantities are read off one forward pass:

* logits: the diagonal :math:`A_{ii} = s\, q_i \cdot k_i`, which rotary positions leave as it is;
* branches: what a block adds to the stream, :math:`x' - x = \sum_j b_j y_j` over the outputs of its projections;
* outputs: :math:`f = r\, W_U z + b` with the last norm's output z, and random numbers for :math:`W_U`;
* embeddings: :math:`x_1 - x_2 = m (e_1 - e_2)` of two sequences, below the first block;
* positions: :math:`x_1 - m e_1 = m_p p + c` over the tokens of one sequence, there too.

A norm behind a projection (QK-norm, sandwich norms) leaves no such proportion: a factor in the weight has no effect.
The outputs of its gain are replaced instead; without gains, logits are compared with normalized queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from manyheads._extras import require
from manyheads.models.torch.modules import (
    ACCURACY,
    find_blocks,
    first_tensor,
    fit_rows,
    fit_sum,
    listen_to_logits,
    own_multiplier,
    with_norms,
)
from manyheads.scaling.torch.layouts import find_scale, split_fused

if TYPE_CHECKING:
    from manyheads.models.torch.model import TorchModel

TOKENS = 5
"""Length of the two sequences that are tried where no example is given."""
SMALL = 0.03
"""Size of the replaced queries and keys: far below any cap on logits."""
ABOVE_EPSILON = 30.0
"""Size of the replaced queries and keys where a norm follows: far above any epsilon in it."""
LARGE = 4.0
"""Size of the replaced outputs of branches: not lost in the rounding of a stream of size one."""


@dataclass
class Measured:
    """One measured multiplier."""

    values: dict[str, float] = field(default_factory=dict)  # name of a module → number
    unknown: list[str] = field(default_factory=list)  # why there is none: a module or a reason, and what was found
    normed: bool = False  # whether a norm without gains stands before it, so that no weight can carry a factor


@dataclass
class ForwardPass:
    """The multipliers of a model, and the relative accuracy with which they are known."""

    logit: Measured = field(default_factory=Measured)
    branch: Measured = field(default_factory=Measured)
    output: Measured = field(default_factory=Measured)
    embedding: Measured = field(default_factory=Measured)
    position: Measured = field(default_factory=Measured)
    accuracy: float = ACCURACY


def measure_forward(model: Any, read: TorchModel, example: Any = None) -> ForwardPass:
    """Measure what a model multiplies its logits, branches, outputs, embeddings and positions by."""
    torch = require("torch")
    probe = _Probe(torch, model, read)
    try:
        result = probe.run(example)
        if probe.found.logit.unknown:
            again = _Probe(torch, model, read, ABOVE_EPSILON)
            again.run(example)
            if again.found.logit.normed and not again.found.logit.unknown:
                probe.found.logit = again.found.logit
    except Exception as error:  # whatever a model raises for a batch that it does not take
        said = (str(error).splitlines() or [""])[0][:150]
        unknown = Measured(unknown=[f"the batch did not pass ({type(error).__name__}: {said})"])
        return ForwardPass(unknown, unknown, unknown, unknown, unknown)
    probe.measure_outputs(result)
    probe.measure_embeddings()
    logits = (
        "the products that make queries and keys were not seen" if probe.softmax else "no softmax over logits was seen"
    )
    for measured, reason in ((probe.found.logit, logits), (probe.found.branch, "no block with a branch was seen")):
        if not measured.values and not measured.unknown:
            measured.unknown.append(reason)
    return probe.found


class _Probe:
    """Hooks that replace and record outputs of modules during one forward pass."""

    def __init__(self, torch: Any, model: Any, read: TorchModel, size: float = SMALL) -> None:
        self.torch, self.model, self.read, self.found, self.size = torch, model, read, ForwardPass(), size
        self.names = {module: name for name, module in model.named_modules()}
        tensors = {**read.frozen, **read.tensors}
        parameters = (*read.architecture.parameters, *read.architecture.frozen)
        self.parts = {id(tensors[parameter.name]): parameter.parts for parameter in parameters}
        tied = next((tensors[parameter.name] for parameter in parameters if parameter.tied), None)
        self.table = next(
            (tensors[parameter.name] for parameter in parameters if parameter.parts == ("unembedding",)), tied
        )
        self.shift = next(
            (tensors[parameter.name] for parameter in parameters if parameter.parts == ("unembedding_bias",)), None
        )
        # A norm behind queries, keys or a branch eats what stands before it: its own output is replaced.
        held = {part for each in self.parts.values() for part in each}
        self.drawn = {each: f"{each}_gain" if f"{each}_gain" in held else each for each in ("query", "key")}
        self.written = {"output", "mlp_out"} & set(read.architecture.carries)
        self.written |= held & {"attention_post_gain", "mlp_post_gain"}
        self.swapped: Any = None
        self.raw: dict[int, tuple[str, str]] = {}  # storage of a parameter that its block multiplies → name, kind
        self.busy = self.softmax = False
        self.queries: list[tuple[str, list[Any]]] = []  # in every reading of their layout
        self.keys: list[list[Any]] = []
        self.blocks: list[tuple[Any, list[tuple[str, Any]]]] = []
        self.stream: list[Any] = []  # below and above every block
        self.last: list[Any] = []  # outputs of the last norm
        self.embedded: list[Any] = []
        self.positions: dict[str, Any] = {}  # name of an exchanged table → its numbers, (positions, D)
        self.generator = torch.Generator().manual_seed(0)
        self.rounding = max(torch.finfo(t.dtype).eps for t in read.tensors.values() if t.is_floating_point())
        self.found.accuracy = max(ACCURACY, self.rounding)

    def run(self, example: Any) -> Any:
        """Run the model once; return its result."""
        with self.attached() as swapped:
            arguments, named = self.example(example)
            return self.torch.func.functional_call(self.model, swapped, arguments, named)

    def example(self, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of a forward pass."""
        torch, device = self.torch, next(iter(self.read.tensors.values())).device
        if isinstance(given, Mapping):
            return (), dict(given)
        if given is not None:
            return (tuple(given) if isinstance(given, tuple | list) else (given,)), {}
        config: Any = getattr(self.model, "config", None)
        if getattr(self.model, "main_input_name", "") == "pixel_values" and hasattr(config, "image_size"):
            pixels = torch.zeros(2, config.num_channels, config.image_size, config.image_size, device=device)
            return (pixels.to(next(iter(self.read.tensors.values())).dtype),), {}
        rows = min([len(tensor) for key, tensor in self.read.tensors.items() if tensor.dim() == 2] or [2])
        return ((torch.arange(2 * TOKENS, device=device) % rows).reshape(2, TOKENS),), {}

    @contextmanager
    def attached(self) -> Iterator[dict[str, Any]]:
        """Attach all hooks, without dropout and gradients; yield the parameters that are exchanged."""
        torch = self.torch
        modes = {module: module.training for module in self.names}
        fast = torch.backends.mha.get_fastpath_enabled()
        with ExitStack() as stack:
            for module, mode in modes.items():
                stack.callback(setattr, module, "training", mode)
            stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
            self.model.eval()
            torch.backends.mha.set_fastpath_enabled(False)
            stack.enter_context(torch.no_grad())
            for module, hook in list(self._hooks()):
                stack.callback(module.register_forward_hook(hook).remove)
            for block in find_blocks(self.model, self.parts):
                for handle in (
                    block.register_forward_pre_hook(self._enter, with_kwargs=True),
                    block.register_forward_hook(self._leave),
                ):
                    stack.callback(handle.remove)
            if any(type(module).__name__ == "OptimizedModule" for module in self.names):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(listen_to_logits(torch, self._see_logits, self._replace_product))
            yield self._exchange(stack)

    def _hooks(self) -> Iterator[tuple[Any, Callable[..., Any]]]:
        """Choose the hook of every module by what its own parameters are."""
        whole = self.torch.nn.MultiheadAttention
        inside = {module.out_proj for module in self.names if isinstance(module, whole)}
        for module, name in self.names.items():
            own = {part for t in module.parameters(recurse=False) for part in self.parts.get(id(t), ("unknown",))}
            if isinstance(module, whole):
                yield module, self._attend
            elif module in inside:
                continue
            elif kind := self._kind(own):
                yield module, partial(self._project, name, kind)
            elif own in ({"final_gain"}, {"final_gain", "final_shift"}):
                yield module, self._normalize
            elif own in ({"embedding"}, {"patch"}, {"patch", "embedding_bias"}) and not self._reads_out(module):
                yield module, self._embed
            else:
                for tensor in module.parameters(recurse=False):
                    if kind := self._kind(set(self.parts.get(id(tensor), ()))) if tensor.dim() > 1 else "":
                        self.raw[tensor.untyped_storage().data_ptr()] = name, kind

    def _kind(self, parts: set[str]) -> str:
        """Return which outputs the weights of these parts make that are replaced; empty for others."""
        plain = {part.removesuffix("_bias").replace("_shift", "_gain") for part in parts}
        if plain == {self.drawn["query"]}:
            return "query"
        if plain == {self.drawn["key"]}:
            return "key"
        if len(plain) > 1 and plain <= {"query", "key", "value"} and plain & set(self.drawn.values()):
            return "+".join(sorted(plain, key=("query", "key", "value").index))
        return "write" if len(plain) == 1 and plain <= self.written else ""

    def _reads_out(self, module: Any) -> bool:
        """Whether a module reads out: of a tied table, the one that is no `nn.Embedding`."""
        return any(t is self.table for t in module.parameters(recurse=False)) and not isinstance(
            module, self.torch.nn.Embedding
        )

    def _exchange(self, stack: ExitStack) -> dict[str, Any]:
        """Return random embeddings, positions and unembedding by name; sharded ones are set and put back."""
        found = {}
        for name, tensor in self.model.named_parameters():
            if tensor is self.table:
                drawn = self.swapped = self._random(tensor, 0.01)
            elif self.parts.get(id(tensor)) in (("embedding",), ("patch",)):
                drawn = self._random(tensor)
            elif self.parts.get(id(tensor)) == ("positional",) and tensor.dim() > 1:
                drawn = self._random(tensor)
                self.positions[name] = drawn.flatten(0, -2)
            else:
                continue
            if hasattr(tensor, "placements"):  # a DTensor, which its module gathers itself
                stack.callback(tensor.copy_, tensor.detach().clone())
                tensor.copy_(
                    self.torch.distributed.tensor.distribute_tensor(drawn, tensor.device_mesh, tensor.placements)
                )
            else:
                found[name] = drawn
        return found

    # Random numbers

    def _random(self, like: Any, size: float = 1.0) -> Any:
        drawn = self.torch.randn(like.shape, generator=self.generator) * size
        return drawn.to(device=like.device, dtype=like.dtype)

    def _uneven(self, like: Any, positive: bool = False) -> Any:
        """Return numbers of another size for every token, as no norm leaves them; positive ones do not cancel."""
        if positive:
            drawn = self.size * (0.5 + self.torch.rand(like.shape, generator=self.generator))
        else:
            drawn = LARGE * self.torch.randn(like.shape, generator=self.generator)
        if like.dim() > 1:
            drawn *= self.torch.linspace(0.25, 1, like.shape[-2])[:, None]
        return drawn.to(device=like.device, dtype=like.dtype)

    # Hooks

    def _project(self, name: str, kind: str, module: Any, inputs: Any, output: Any) -> Any:
        """Replace the outputs of a projection, or of the norm behind it."""
        if self.busy:  # called to measure its own multiplier
            return None
        self.busy = True
        try:
            own = own_multiplier(self.torch, module, inputs, output, self.generator)
        finally:
            self.busy = False
        if own is not None:
            return self._draw(name, kind, output, own)
        measured = self.found.branch if kind == "write" else self.found.logit
        measured.unknown.append(f"{name} ({type(module).__name__}) does more than multiply by its weight")
        return None

    def _draw(self, name: str, kind: str, output: Any, own: float = 1.0) -> Any:
        """Return random numbers in the place of a projection's outputs, and keep them over its own multiplier."""
        drawn, shape = self._uneven(output, positive=kind != "write"), self.read.architecture.shape
        if kind == "write" and self.blocks:
            self.blocks[-1][1].append((name, drawn / own))
        elif kind == "write":
            self.found.branch.unknown.append(f"{name} is in no module that holds a whole block")
        else:
            readings = split_fused(drawn / own, kind, shape)
            if "query" in kind:
                self.queries.append((name, [each[0] for each in readings]))
            if "key" in kind:
                self.keys.append([each[-1] for each in readings])
        return drawn

    def _replace_product(self, operands: list[Any], output: Any) -> Any:
        """Replace a product with a parameter that its block itself multiplies, as by `torch.einsum`."""
        for each in operands if self.raw and not self.busy else ():
            if (found := self.raw.get(each.untyped_storage().data_ptr())) is not None:
                return self._draw(*found, output)
        return output

    def _attend(self, module: Any, inputs: Any, output: Any) -> Any:
        self.found.logit.values[self.names[module]] = float(module.head_dim) ** -0.5
        return (self._draw(self.names[module], "write", output[0]), *output[1:])

    def _normalize(self, module: Any, _: Any, output: Any) -> Any:
        self.last.append(self._random(output))
        return self.last[-1]

    def _embed(self, module: Any, inputs: Any, output: Any) -> Any:
        table = next(iter(module.parameters(recurse=False)))  # the exchanged one
        looked_up = inputs and not inputs[0].is_floating_point() and table.dim() == 2
        self.embedded.append(table[inputs[0]] if looked_up else self._random(output))
        return None if looked_up else self.embedded[-1]

    def _enter(self, module: Any, arguments: Any, named: Any) -> None:
        self.blocks.append((first_tensor(self.torch, (arguments, named)), []))

    def _leave(self, module: Any, _: Any, output: Any) -> Any:
        """Compare what a block adds with what its projections put out; pass on its input, so that nothing piles up."""
        before, written = self.blocks.pop()
        after, name, branch = first_tensor(self.torch, output), self.names[module], self.found.branch
        if not written or before is None or after is None or before.shape != after.shape:
            branch.unknown.append(f"{name} is no block that adds to a stream")
            return None
        numbers = self._fit(after.double() - before.double(), [each for _, each in written], float(after.abs().max()))
        if numbers is None:
            who = " and ".join(each for each, _ in written)
            branch.unknown.append(
                f"what {name} adds to the stream does not follow {who}: a norm or something else stands behind them"
            )
        else:
            branch.values |= {each: number for (each, _), number in zip(written, numbers, strict=True)}
        passed = None
        if output is after:
            passed = before
        elif type(output) is tuple and output[0] is after:
            passed = (before, *output[1:])
        self.stream += [before, after if passed is None else before]
        return passed

    def _see_logits(self, readings: list[Any]) -> None:
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
        measured.unknown.append(
            f"the logits do not follow what {name} puts out: a norm (QK-norm), a bias or a cap stands in between"
        )

    # After the pass

    def measure_outputs(self, result: Any) -> None:
        """Find r with outputs = r W z + b."""
        measured = self.found.output
        if self.swapped is None:
            measured.unknown.append("no unembedding is among its parameters")
            return
        table = self.swapped.double()
        outputs = getattr(result, "logits", None)
        outputs = first_tensor(self.torch, result, len(table)) if outputs is None else outputs
        states = self.last or with_norms(self.torch, self.stream[-1] if self.stream else None)
        for state in states if outputs is not None else ():
            pooled = (state, state[:, -1:], *((state.mean(1), state[:, 0], state[:, -1]) if state.dim() > 2 else ()))
            for plain in [each.double() @ table.T for each in pooled if each.shape[-1] == table.shape[-1]]:
                if plain.shape != outputs.shape:
                    continue
                columns = [plain]
                if self.shift is not None and bool(self.shift.any()):
                    columns.append(self.shift.detach().double().expand_as(plain))
                numbers = self._fit(outputs.double(), columns, float(outputs.abs().max()))
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
        for variant in zip(*(with_norms(self.torch, each) for each in batched), strict=True):
            rows = [each for each in variant if len(each) == len(below) and each.shape[1] <= longest]
            if rows := [each for each in rows if each.shape[-1] == width]:
                ends = below[:, -rows[0].shape[1] :].double()
                if numbers := self._fit(ends[0] - ends[1], [each[0] - each[1] for each in rows], largest):
                    measured.values |= {f"embeddings {number}": value for number, value in enumerate(numbers)}
                    shared = ends[0] - sum(number * each[0] for number, each in zip(numbers, rows, strict=True))
                    for name, table in self.positions.items():
                        value = fit_rows(self.torch, shared, table.double(), 8 * self.rounding * largest)
                        self.found.position.values |= {} if value is None else {name: value}
                    return
        measured.unknown.append("the stream below the first block does not follow the embeddings")

    def _fit(self, target: Any, columns: list[Any], largest: float) -> list[float] | None:
        return fit_sum(self.torch, target, columns, 8 * self.rounding * largest)
