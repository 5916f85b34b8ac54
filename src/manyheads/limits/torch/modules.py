"""Modules and tensors of a PyTorch model, as a forward pass is measured on them: blocks, logits, sums, multipliers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

ACCURACY = 1e-4
"""Relative, of a measured multiplier, where numbers are not rounded more coarsely."""

SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
"""Arguments of `scaled_dot_product_attention`, in order."""


def find_blocks(model: Any, parts: Mapping[int, tuple[str, ...]]) -> list[Any]:
    """Return the smallest modules that hold an attention's output and an MLP's, or where there is no MLP a layer."""
    holds: dict[Any, set[str]] = {}
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


def own_multiplier(torch: Any, module: Any, generator: Any, name: str) -> float:
    """Return what a projection multiplies W x by within itself: 1 for `nn.Linear`.

    Raises
    ------
    ValueError
        It is no multiple of W x.
    """
    if type(module) is torch.nn.Linear:
        return 1.0
    drawn = {
        key: torch.randn(t.shape, generator=generator).to(t) * (t.dim() > 1)
        for key, t in module.named_parameters(recurse=False)
    }
    matrix = next(each for each in drawn.values() if each.dim() > 1)
    for turned in (matrix, matrix.T):  # (out, in), or as Conv1D has it
        x = torch.randn(1, 2, turned.shape[1], generator=generator).to(matrix)
        try:
            made = torch.func.functional_call(module, drawn, (x,)).double()
        except Exception:  # whatever a module raises for the other layout
            continue
        plain = x.double() @ turned.double().T
        rounded = 8 * torch.finfo(matrix.dtype).eps * float(made.abs().max())
        if made.shape == plain.shape and (numbers := fit_sum(torch, made, [plain], rounded)):
            return numbers[0]
    raise ValueError(f"{name} ({type(module).__name__}) does more than multiply by its weight")


def fit_sum(torch: Any, target: Any, columns: list[Any], rounded: float) -> list[float] | None:
    """Return the coefficients of a sum of columns, or None where it is no such sum, or rounding hides it."""
    matrix, target = torch.stack([each.double().flatten() for each in columns], 1), target.flatten()
    if len(matrix) != len(target):
        return None
    numbers = torch.linalg.lstsq(matrix, target[:, None]).solution[:, 0]
    left, size = (float(each.abs().max()) for each in (matrix @ numbers - target, target))
    return None if rounded > size / 4 or left > ACCURACY * size + rounded else numbers.tolist()


def first_tensor(torch: Any, found: Any, last: int | None = None) -> Any:
    """Return the first tensor of floating numbers in nested results, of a given last side."""
    if isinstance(found, torch.Tensor):
        return found if found.is_floating_point() and last in (None, found.shape[-1]) else None
    if isinstance(found, Mapping):
        found = list(found.values())
    for each in found if isinstance(found, list | tuple) else ():
        if (tensor := first_tensor(torch, each, last)) is not None:
            return tensor
    return None


def listen_to_logits(torch: Any, see: Callable[[Any], None]) -> Any:
    """Return a mode in which `see` gets the sum over heads of A_ii, for every i, of each square softmax."""

    class Listener(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, name = kwargs or {}, getattr(func, "__name__", "")
            if name == "scaled_dot_product_attention":
                given = dict(zip(SDPA, args, strict=False)) | kwargs
                query, key, scale = given["query"].double(), given["key"].double(), given.get("scale")
                if query.shape[-2] == key.shape[-2]:
                    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3) if query.dim() > 3 else key
                    scale = query.shape[-1] ** -0.5 if scale is None else scale
                    see(scale * (query * key).sum(-1).flatten(0, -2).sum(0))
            elif name in ("softmax", "_softmax"):
                logits = args[0] if args else kwargs["input"]
                if logits.dim() > 2 and logits.shape[-1] == logits.shape[-2]:
                    see(logits.double().diagonal(dim1=-2, dim2=-1).flatten(0, -2).sum(0))
            return func(*args, **kwargs)

    return Listener()
