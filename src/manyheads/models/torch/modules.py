"""Modules and tensors of a PyTorch model, as a forward pass is measured on them: blocks, logits, sums, multipliers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from manyheads.models.torch.lazy_torch import Generator, Module, Tensor, torch

ACCURACY = 1e-4  # relative, of a measured multiplier, where numbers are not rounded more coarsely
FAR = 30.0  # size of the inputs of a norm: far above any epsilon in it
SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
"""Arguments of `scaled_dot_product_attention`, in order."""


@contextmanager
def evaluation(model: Module) -> Iterator[None]:
    """Evaluate a model, and leave the modes of its modules alone."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def inference(model: Module) -> Iterator[ExitStack]:
    """Leave out dropout, gradients, compiled graphs and fast paths around hooks; yield what is undone at the end."""
    attention = torch.backends.mha
    with ExitStack() as stack:
        stack.callback(attention.set_fastpath_enabled, attention.get_fastpath_enabled())
        attention.set_fastpath_enabled(False)
        if any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for context in (evaluation(model), torch.no_grad()):
            stack.enter_context(context)
        yield stack


def find_blocks(model: Module, parts: Mapping[int, tuple[str, ...]]) -> list[Module]:
    """Return the smallest modules that hold an attention's output and an MLP's, or where there is no MLP a layer."""
    holds: dict[Module, set[str]] = {}
    numbered = set()
    for name, tensor in model.named_parameters(remove_duplicate=False):
        pieces = name.split(".")[:-1]
        for length in range(1, len(pieces) + 1):
            module = model.get_submodule(".".join(pieces[:length]))
            holds.setdefault(module, set()).update(parts.get(id(tensor), ()))
            if pieces[length - 1].isdigit():
                numbered.add(module)
    with_mlp = any("mlp_out" in each for each in parts.values())
    wanted = {"output", "mlp_out"} if with_mlp else {"output"}
    found = {module for module, held in holds.items() if wanted <= held and (with_mlp or module in numbered)}
    return [module for module in found if not any(each in found for each in module.modules() if each is not module)]


def own_multiplier(module: Module, inputs: Any, output: Any, generator: Generator) -> float | None:
    """Return what a projection multiplies W x by within itself, or a norm its gain times the normalized x.

    With weights and inputs of ones every output is that number times the fan-in, whatever the layout. None if it is not
    linear in its weight.
    """
    own = dict(module.named_parameters(recurse=False))
    matrices = [key for key, t in own.items() if t.dim() > 1]
    if type(module) in (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.RMSNorm):
        return 1.0
    if len(matrices) > 1 or not inputs:
        return None

    def run(key: str, weight: Tensor, x: Tensor) -> Tensor:
        exchanged = {name: torch.zeros_like(t) for name, t in own.items()} | {key: weight}
        return torch.func.functional_call(module, exchanged, (x, *inputs[1:])).double()

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like)

    x = draw(inputs[0])
    rounded = max(ACCURACY, 8 * torch.finfo(x.dtype).eps)
    if not matrices:  # 1 + w multiplies in Gemma's norms
        key = next((key for key in own if not key.endswith("bias")), "")
        if not key or own[key].numel() != x.shape[-1]:
            return None
        slope = run(key, torch.ones_like(own[key]), FAR * x) - run(key, torch.zeros_like(own[key]), FAR * x)
        numbers = [fit_sum(slope, [each], rounded * slope.abs().max()) for each in with_norms(x)[1:]]
        return next((each[0] for each in numbers if each), None)
    (key,) = matrices
    one, other = draw(own[key]), draw(own[key])
    ones = run(key, torch.ones_like(own[key]), torch.ones_like(x))
    found, summed = ones.mean(), run(key, one, x) + run(key, other, x)
    fan_in = (own[key].numel() * x.numel() / output.numel()) ** 0.5
    even = bool((ones / found - 1).abs().max() <= rounded)
    linear = bool((run(key, one + other, x) - summed).abs().max() <= rounded * summed.abs().max())
    return float(found) / fan_in if even and linear else None


def fit_sum(target: Tensor, columns: list[Tensor], rounded: float) -> list[float] | None:
    """Return the coefficients of a sum of columns, or None where it is no such sum, or rounding hides it."""
    matrix, target = torch.stack([each.double().flatten() for each in columns], 1), target.flatten()
    if len(matrix) != len(target):
        return None
    numbers = torch.linalg.lstsq(matrix, target[:, None]).solution[:, 0]
    left, size = (float(each.abs().max()) for each in (matrix @ numbers - target, target))
    return None if rounded > size / 4 or left > ACCURACY * size + rounded else numbers.tolist()


def fit_rows(target: Tensor, table: Tensor, rounded: float) -> float | None:
    """Return m with target = m times successive rows of a table, and one vector for all; None where it is no such sum.

    The rows start with the first; with the second behind a class token; with the third in OPT and RoBERTa.
    """
    for rows in (table[first : first + len(target)] for first in range(3)):
        if rows.shape == target.shape and (numbers := fit_sum(target - target.mean(0), [rows - rows.mean(0)], rounded)):
            return numbers[0]
    return None


def with_norms(stream: Tensor | None) -> list[Tensor]:
    """Return a stream as it is, and after each kind of norm without gains; nothing of None."""
    if stream is None:
        return []
    stream = stream.double()
    rms = stream / (stream.square().mean(-1, keepdim=True) + 1e-12).sqrt()
    return [stream, rms, torch.nn.functional.layer_norm(stream, stream.shape[-1:])]


def first_tensor(found: Any, last: int | None = None) -> Any:
    """Return the first tensor of floating numbers in nested results, no single number, of a given last side."""
    if isinstance(found, torch.Tensor):
        return found if found.is_floating_point() and found.dim() and last in (None, found.shape[-1]) else None
    if isinstance(found, Mapping):
        found = list(found.values())
    for each in found if isinstance(found, list | tuple) else ():
        if (tensor := first_tensor(each, last)) is not None:
            return tensor
    return None


PRODUCTS = ("einsum", "linear", "matmul", "bmm", "mm", "tensordot", "__matmul__", "__rmatmul__")
"""Functions by which a block multiplies with a parameter of its own."""


def listen_to_logits(see: Callable[[list[Tensor]], None], replace: Callable[[list[Tensor], Any], Any]) -> Any:
    """Return a mode that shows `see` the logits of each softmax: A_ii summed over heads, for every i.

    `replace` gets the operands and the result of each product, and returns what goes on in the place of the result.
    """

    class Listener(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, getattr(func, "__name__", "")
            if name in PRODUCTS:
                flat = [each for one in args for each in (one if isinstance(one, list | tuple) else (one,))]
                return replace([each for each in flat if isinstance(each, torch.Tensor)], func(*args, **kwargs))
            if name == "scaled_dot_product_attention":
                given = dict(zip(SDPA, args, strict=False)) | kwargs
                query, key, scale = given["query"].double(), given["key"].double(), given.get("scale")
                if query.shape[-2] == key.shape[-2]:
                    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3) if query.dim() > 3 else key
                    scale = query.shape[-1] ** -0.5 if scale is None else scale
                    see([scale * (query * key).sum(-1).flatten(0, -2).sum(0)])
            elif name in ("softmax", "_softmax"):
                logits = args[0] if args else kwargs["input"]
                axis = kwargs.get("dim", args[1] if len(args) > 1 else -1)
                sides = [
                    i for i in range(logits.dim()) if logits.shape[i] == logits.shape[axis] and i != axis % logits.dim()
                ]
                if logits.dim() > 2 and sides:
                    diagonals = [logits.double().diagonal(dim1=i, dim2=axis) for i in reversed(sides)]
                    see([each.flatten(0, -2).sum(0) for each in diagonals])
            return func(*args, **kwargs)

    return Listener()
