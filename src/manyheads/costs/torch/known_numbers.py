"""Numbers of meta tensors that token ids and positions decide, computed beside them on the CPU."""

from typing import Any

from manyheads.costs.cost import UnknownCost
from manyheads.errors import UsageError

LARGEST, LARGEST_FLOAT = 1 << 26, 1 << 20  # elements of the tensors whose numbers are followed
DATA_DECIDE = "a number that depends on weights or data decides what runs; count on the CPU, device=None"
OWN_TENSORS = "the function holds trained tensors of its own; on meta give the module, or its tensors as arguments"


class KnownNumbers:
    """The numbers of small meta tensors, as long as these live."""

    def __init__(self) -> None:
        import torch.utils.weak

        self.torch, self.tree = torch, torch.utils._pytree
        self.known: Any = torch.utils.weak.WeakTensorKeyDictionary()

    def find(self, value: Any) -> Any:
        """Return the numbers of a meta tensor, None if they are not known; anything else as it is."""
        return self.known.get(value) if isinstance(value, self.torch.Tensor) and value.is_meta else value

    def put(self, tensor: Any, numbers: Any) -> Any:
        """Remember the numbers of a meta tensor if there are not too many; return the tensor."""
        if tensor.numel() <= (LARGEST_FLOAT if tensor.is_floating_point() else LARGEST):
            self.known[tensor] = numbers
        return tensor

    def stand_in(self, value: Any) -> Any:
        """Return a meta tensor in place of one that a model made on another device."""
        if not isinstance(value, self.torch.Tensor) or value.is_meta or not value.dim():
            return value
        if value.requires_grad:
            raise UsageError(OWN_TENSORS)
        return self.put(self.torch.empty_like(value, device="meta"), value.detach().cpu())

    def evaluate(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on known numbers; None if some are not known, or it draws."""
        if self.torch.Tag.nondeterministic_seeded in operation.tags:
            return None
        if any(self.find(each) is None for each in self.tree.tree_leaves((args, kwargs)) if each is not None):
            return None

        def real(value: Any) -> Any:
            return self.torch.device("cpu") if isinstance(value, self.torch.device) else self.find(value)

        try:
            return operation(*self.tree.tree_map(real, args), **self.tree.tree_map(real, kwargs))
        except (RuntimeError, NotImplementedError):  # no such kernel on the CPU
            return None

    def decide(self, operation: Any, args: Any, kwargs: Any, keep: bool = False) -> Any:
        """Return what numbers decide, on the CPU if `keep`; refuse unknown ones."""
        made = self.evaluate(operation, args, kwargs)
        if made is None:
            raise UnknownCost(DATA_DECIDE)
        return made if keep else self.tree.tree_map(self.stand_in, made)

    def follow(self, operation: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Compute the numbers of the results of an operation, or forget those that it overwrites."""
        tensors = lambda made: [each for each in self.tree.tree_leaves(made) if isinstance(each, self.torch.Tensor)]  # noqa: E731
        results = [each for each in tensors(out) if each.is_meta]
        small = results and all(each.numel() <= LARGEST for each in results)
        if small and (made := self.evaluate(operation, args, kwargs)) is not None:
            for tensor, numbers in zip(results, tensors(made), strict=True):
                self.put(tensor, numbers)
        elif operation._schema.is_mutable:
            memory = lambda numbers: numbers.untyped_storage().data_ptr()  # noqa: E731
            lost = {memory(self.known[each]) for each in results if each in self.known}
            for each in [key for key, numbers in self.known.items() if memory(numbers) in lost]:
                del self.known[each]
