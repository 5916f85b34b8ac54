"""Hooks on a PyTorch model during one forward pass: outputs of weights are replaced and inputs are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from manyheads.models.torch.lazy_torch import Module, Tensor, torch
from manyheads.models.torch.model import TorchModel
from manyheads.models.torch.modules import (
    ACCURACY,
    find_blocks,
    first_tensor,
    fit_sum,
    inference,
    listen_to_logits,
    own_multiplier,
)

TOKENS = 5  # length of the two sequences that are tried where no example is given
LARGE = 4.0  # size of the replaced outputs of branches: not lost in the rounding of a stream of size one


@dataclass
class Measured:
    """One measured multiplier."""

    values: dict[str, float] = field(default_factory=dict)  # name of a module → number
    unknown: list[str] = field(default_factory=list)  # why there is none: a module or a reason, and what was found
    normed: bool = False  # whether a norm without gains stands before it, so that no weight can carry a factor


@dataclass
class Block:
    """A block that is being run."""

    before: Any = None  # the stream below it
    written: list[tuple[str, Tensor]] = field(default_factory=list)  # name of a projection → its replaced outputs
    sources: list[Tensor] = field(default_factory=list)  # replaced outputs of norms
    level: float | None = None  # that of all replaced values
    hidden: list[Tensor] = field(default_factory=list)  # replaced outputs of the MLP's first matrices
    reads: list[tuple[str, Tensor]] = field(default_factory=list)  # inputs not explained by them


class Hooks:
    """Hooks during one forward pass; what they replace and measure is up to the classes below this one."""

    table_size = 0.01  # of the random unembedding: outputs far below any cap

    def __init__(self, model: Module, read: TorchModel) -> None:
        self.model, self.read = model, read
        self.names = {module: name for name, module in model.named_modules()}
        tensors = {**read.frozen, **read.tensors}
        parameters = (*read.architecture.parameters, *read.architecture.frozen)
        self.parts = {id(tensors[parameter.name]): parameter.parts for parameter in parameters}
        tied = next((tensors[parameter.name] for parameter in parameters if parameter.tied), None)
        heads = (tensors[parameter.name] for parameter in parameters if parameter.parts == ("unembedding",))
        self.table = next(heads, tied)
        self.swapped: Tensor | None = None  # what the table was exchanged for
        self.positions: dict[str, Tensor] = {}  # name of an exchanged table → its numbers, (positions, D)
        self.raw: dict[int, tuple[str, str]] = {}  # storage of a parameter that its block multiplies → name, kind
        self.expected: set[tuple[str, str]] = set()  # modules and what their weights make
        self.called: set[tuple[str, str]] = set()
        self.blocks: list[Block] = []
        self.stream: list[Tensor] = []  # below and above every block
        self.busy = False
        self.generator = torch.Generator().manual_seed(0)
        self.rounding = max(torch.finfo(t.dtype).eps for t in read.tensors.values() if t.is_floating_point())
        self.accuracy = max(ACCURACY, self.rounding)

    def run(self, example: Any) -> Any:
        """Run the model once; return its result."""
        with self._attached() as swapped:
            arguments, named = self._example(example)
            return torch.func.functional_call(self.model, swapped, arguments, named)

    # What a pass replaces and measures

    def kind(self, parts: set[str]) -> str:
        """Return what the weights of these parts make; empty for others."""
        raise NotImplementedError

    def draw(self, name: str, kind: str, x: Tensor | None, output: Tensor, own: float | None = 1.0) -> Any:
        """Return what replaces the output of a weight with an input x, or None; `own` is its own multiplier."""
        raise NotImplementedError

    def attend(self, module: Module, inputs: Any, output: Any) -> Any:
        """Replace the outputs of an `nn.MultiheadAttention`."""
        raise NotImplementedError

    def other(self, module: Module, own: set[str]) -> Callable[..., Any] | None:
        """Return the hook of a module of other parts."""
        return None

    def close(self, name: str, block: Block, after: Any) -> bool:
        """Measure a block that has been run; return whether it adds to a stream."""
        raise NotImplementedError

    def see_logits(self, readings: list[Tensor]) -> None:
        """See the logits of a softmax."""

    # Attached

    @contextmanager
    def _attached(self) -> Iterator[dict[str, Any]]:
        """Attach all hooks; yield the parameters that are exchanged."""
        with inference(self.model) as stack:
            for module, hook in list(self._hooks()):
                stack.callback(module.register_forward_hook(hook).remove)
            for block in find_blocks(self.model, self.parts):
                stack.callback(block.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self._leave).remove)
            stack.enter_context(listen_to_logits(self.see_logits, self._replace_product))
            yield self._exchange(stack)

    def _hooks(self) -> Iterator[tuple[Any, Callable[..., Any]]]:
        """Choose the hook of every module by what its own parameters are."""
        whole = torch.nn.MultiheadAttention
        inside = {module.out_proj for module in self.names if isinstance(module, whole)}
        for module, name in self.names.items():
            own = {part for t in module.parameters(recurse=False) for part in self.parts.get(id(t), ("unknown",))}
            if isinstance(module, whole):
                yield module, self.attend
            elif module in inside:
                continue
            elif sum(t.dim() > 1 for t in module.parameters(recurse=False)) < 2 and (kind := self._kind(own)):
                self.expected.add((name, kind))
                yield module, partial(self._project, name, kind)
            elif hook := self.other(module, own):
                yield module, hook
            else:
                for key, tensor in module.named_parameters(name, recurse=False):
                    if kind := self._kind(set(self.parts.get(id(tensor), ()))) if tensor.dim() > 1 else "":
                        self.raw[tensor.untyped_storage().data_ptr()] = key, kind
                        self.expected.add((key, kind))

    def _kind(self, parts: set[str]) -> str:
        return self.kind({part.removesuffix("_bias").replace("_shift", "_gain") for part in parts})

    def _example(self, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments of a forward pass."""
        device = next(iter(self.read.tensors.values())).device
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

    def _exchange(self, stack: ExitStack) -> dict[str, Any]:
        """Return random embeddings, positions and unembedding by name; sharded ones are set and put back."""
        found = {}
        for name, tensor in self.model.named_parameters():
            if tensor is self.table:
                drawn = self.swapped = self.random(tensor, self.table_size)
            elif self.parts.get(id(tensor)) in (("embedding",), ("patch",)):
                drawn = self.random(tensor)
            elif self.parts.get(id(tensor)) == ("positional",) and tensor.dim() > 1:
                drawn = self.random(tensor)
                self.positions[name] = drawn.flatten(0, -2)
            else:
                continue
            if hasattr(tensor, "placements") and hasattr(tensor, "device_mesh"):  # a DTensor
                stack.callback(tensor.copy_, tensor.detach().clone())
                distribute = torch.distributed.tensor.distribute_tensor
                tensor.copy_(distribute(drawn, tensor.device_mesh, tensor.placements))
            else:
                found[name] = drawn
        return found

    def random(self, like: Tensor, size: float = 1.0) -> Tensor:
        """Return Gaussian numbers of the shape and type of a tensor."""
        drawn = torch.randn(like.shape, generator=self.generator) * size
        return drawn.to(device=like.device, dtype=like.dtype)

    def fit(self, target: Tensor, columns: list[Tensor], largest: float | None = None) -> list[float] | None:
        """Return the coefficients of a sum; `largest` is the largest number that was rounded, the target's if None."""
        largest = float(target.abs().max()) if largest is None else largest
        return fit_sum(target, columns, 8 * self.rounding * largest)

    # Hooks

    def own(self, module: Module, inputs: Any, output: Any) -> float | None:
        """Return a module's own multiplier; while it is called for that, hooks do nothing."""
        self.busy = True
        try:
            return own_multiplier(module, inputs, output, self.generator)
        finally:
            self.busy = False

    def _project(self, name: str, kind: str, module: Module, inputs: Any, output: Any) -> Any:
        """Replace the outputs of a projection, or of a norm."""
        if self.busy:  # called to measure its own multiplier
            return None
        self.called.add((name, kind))
        return self.draw(name, kind, inputs[0] if inputs else None, output, self.own(module, inputs, output))

    def _replace_product(self, operands: list[Any], output: Any) -> Any:
        """Replace a product with a parameter that its block itself multiplies, as by `torch.einsum`."""
        for each in operands if self.raw and not self.busy else ():
            if (found := self.raw.get(each.untyped_storage().data_ptr())) is not None:
                self.called.add(found)
                drawn = self.draw(*found, next((x for x in operands if x is not each), None), output)
                return output if drawn is None else drawn
        return output

    def enter(self, module: Module, arguments: Any, named: Any) -> None:
        """Keep what goes into a block."""
        self.blocks.append(Block(first_tensor((arguments, named))))

    def _leave(self, module: Module, _: Any, output: Any) -> Any:
        """Measure a block; pass on its input, so that nothing piles up."""
        block, after = self.blocks.pop(), first_tensor(output)
        if not self.close(self.names[module], block, after):
            return None
        passed = None
        if output is after:
            passed = block.before
        elif type(output) is tuple and output[0] is after:
            passed = (block.before, *output[1:])
        self.stream += [block.before, after if passed is None else block.before]
        return passed
