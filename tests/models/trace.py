"""Which parameters of a PyTorch model are multiplied in a forward pass, found by watching the pass itself."""

import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

COPIES = {"clone", "index", "index_select", "_to_copy"}
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm", "mv", "addmv", "dot", "vdot"}
SUMS = {"addmm", "baddbmm", "addmv"}  # their first operand is added


def place(tensor):
    """Return where a tensor's numbers lie: views share it."""
    return tensor.untyped_storage().data_ptr()


class Trace(TorchDispatchMode):
    """FLOPs of each parameter, and of products between activations, by PyTorch's own formulas."""

    def __init__(self, model):
        super().__init__()
        self.weights, self.activations, self.kept = {}, 0, []
        # Products with tables of constants, such as the angles of rotary positions, are not of the model.
        self.names = {place(tensor): None for tensor in model.buffers()}
        self.names |= {place(tensor): name for name, tensor in model.named_parameters()}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        if name in COPIES and place(tensors[0]) in self.names:
            self.kept.append(out)  # its memory is used for nothing else while the trace lasts
            self.names[place(out)] = self.names[place(tensors[0])]
        if name in PRODUCTS:
            flops = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
            factors = tensors[1:3] if name in SUMS else tensors[:2]
            found = [self.names[place(each)] for each in factors if place(each) in self.names]
            if not found and factors[0].shape[-1] > 1:  # angles computed in the pass are outer products
                self.activations += flops
            elif found and found[0] is not None:
                self.weights[found[0]] = self.weights.get(found[0], 0) + flops
        return out

    @property
    def flops(self):
        """FLOPs of the forward pass."""
        return sum(self.weights.values()) + self.activations


def trace(model, *inputs):
    """Run a model once in evaluation mode and return what was multiplied."""
    watch = Trace(model.eval())
    with torch.no_grad(), warnings.catch_warnings(), watch:
        warnings.simplefilter("ignore")
        model(*inputs)
    return watch
