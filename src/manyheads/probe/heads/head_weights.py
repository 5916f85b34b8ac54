r"""Weights of the heads of a PyTorch model of transformers: their norms and stable rank, and bounds on the logits.

Gains g of norms of queries and keys bound the logits whatever the data,

.. math:: |s_{ij}| \le \mathrm{scale}\; c^2 \sqrt{D_Q D_K}\, \max |g_Q| \max |g_K|,

with D the number of components that one norm covers, those of a head or of all heads, because components over their RMS
have the norm sqrt(D). Rotary positions keep norms, but for the factor c that some scalings of theirs multiply them by.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyheads._extras import require
from manyheads._extras import xarray as xr
from manyheads.errors import UsageError
from manyheads.models.torch.attention_modules import head_count, head_size, query_key_norms, query_norm
from manyheads.models.torch.lazy_torch import Module, Tensor, torch
from manyheads.probe.heads.circuits import BOUND, head_dataset, head_norms, largest_norm

INPUTS = ("query", "key", "value")
# Names of the projections of an attention module to queries, keys and values, weights (out, in).
SEPARATE = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"))
# Name of a joint projection → its rows: all queries, all keys, all values; or query, key, value head after head.
FUSED = {"query_key_value": "heads", "Wqkv": "parts", "c_attn": "parts"}
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "Wo", "o")  # names of the output projection of an attention module


class HeadLayout(NamedTuple):
    """Order of the heads along one axis of a two-dimensional weight."""

    layer: int  # number of the attention module
    axis: int  # that of the heads
    parts: tuple[str, ...]  # "query", "key", "value" or "output", as they follow each other
    heads: int  # of each part
    size: int  # components of a head
    by_head: bool = False  # whether the parts follow each other within every head

    def sums(self, tensor: Tensor) -> dict[str, list[float]]:
        """Return part -> sums of the entries of a tensor of the weight's shape over each head."""
        totals = tensor.sum(1 - self.axis).view(-1, self.size).sum(1)
        parts = totals.view(self.heads, -1).T if self.by_head else totals.view(len(self.parts), self.heads)
        return {part: row.tolist() for part, row in zip(self.parts, parts, strict=True)}

    def matrices(self, weight: Tensor) -> dict[str, NDArray[np.float64]]:
        """Return part -> the matrices (heads, size, width) of the weight in float64."""
        array = weight.detach().double().cpu().numpy()
        array = array.T if self.axis else array
        order = (self.heads, len(self.parts)) if self.by_head else (len(self.parts), self.heads)
        parts = array.reshape(*order, self.size, -1)
        return dict(zip(self.parts, parts.swapaxes(0, 1) if self.by_head else parts, strict=True))


def head_layouts(model: Module) -> dict[int, HeadLayout]:
    """Return the id of a parameter -> its layout, for the projections of attention whose order is known."""
    modules = dict(model.named_modules())
    found: dict[int, HeadLayout] = {}
    layer = 0
    for name in modules:
        if layouts := attention_layouts(modules, name, layer):
            found = {id(weight): layout for weight, layout in layouts} | found
            layer += 1
    return found


def attention_layouts(modules: Mapping[str, Module], name: str, layer: int = 0) -> list[tuple[Tensor, HeadLayout]]:
    """Return the weights of a module with their layouts; none if it is no attention of known projections."""
    module = modules[name]
    size, heads = head_size(module), head_count(module)
    if size is None or heads is None:
        return []
    found = _separate(module, heads, size, layer) or _joint(module, heads, size, layer)
    # BERT keeps the output projection beside the module that holds the others.
    places = [(module, each) for each in OUTPUTS] + [(modules.get(name.rpartition(".")[0] + ".output"), "dense")]
    outputs = (_weight(getattr(place, each, None)) for place, each in places)
    output, axis = next((each for each in outputs if each[0] is not None), (None, 0))
    if found and output is not None and output.shape[1 - axis] == heads * size:
        found.append((output, HeadLayout(layer, 1 - axis, ("output",), heads, size)))
    return found


def _separate(module: Module, heads: int, size: int, layer: int) -> list[tuple[Tensor, HeadLayout]]:
    for names in SEPARATE:
        weights = [_weight(getattr(module, each, None)) for each in names]
        (query, axis), (key, _) = weights[:2]
        if query is None or key is None:
            continue
        if query.shape[axis] != heads * size:
            return []  # such as gates beside the queries
        return [
            (weight, HeadLayout(layer, axis, (part,), weight.shape[axis] // size, size))
            for part, (weight, axis) in zip(INPUTS, weights, strict=True)
            if weight is not None and weight.shape[axis] % size == 0
        ]
    return []


def _joint(module: Module, heads: int, size: int, layer: int) -> list[tuple[Tensor, HeadLayout]]:
    for name, order in FUSED.items():
        weight, axis = _weight(getattr(module, name, None))
        if weight is not None and weight.shape[axis] == 3 * heads * size:
            return [(weight, HeadLayout(layer, axis, INPUTS, heads, size, order == "heads"))]
    return []


def _weight(projection: Module | None) -> tuple[Tensor | None, int]:
    """Return the weight of a projection and its axis of outputs; (None, 0) if there is none of two axes."""
    weight = getattr(projection, "weight", None)
    if weight is None or weight.dim() != 2 or hasattr(weight, "device_mesh"):
        return None, 0
    return weight, 1 if type(projection).__name__ == "Conv1D" else 0


ROTARY_FACTOR = "attention_scaling"  # end of the attribute of rotary positions that multiplies sines and cosines


def head_spectra(model: Module) -> "xr.Dataset":
    """Compute norms and stable rank of the weights of every head of a PyTorch model of transformers.

    Attention modules hold separate or joint projections of queries, keys and values.

    Returns
    -------
    xr.Dataset
        Over (head_matrix, layer, head), with the head matrices W_Q, W_K, W_V, W_O ("query", "key", "value", "output"),
        W_Q^T W_K ("query-key") and W_V^T W_O ("output-value"), the last two of which no change of basis within the head
        moves: `frobenius` and `spectral`, the norms; `stable_rank`, (frobenius / spectral)^2, at least 1 and at most N;
        `effective_rank` and `participation_ratio`, as in `weight_spectra`.
        Over (head_matrix, layer): `stable_rank_random`, its mean for independent Gaussian weights, and
        `stable_rank_random_std`. `logit_bound` (layer), the largest |logit| that norms of queries and keys allow, NaN
        without RMS norms there. Coordinates: `module` (layer) and `normalized` (layer), whether queries are normalized
        before the logits. NaN: heads that a layer lacks, and values and outputs in an order that is not known.

    Raises
    ------
    ExtraMissing
        PyTorch is not installed.
    UsageError
        No module holds projections of queries and keys that are known here, as with latent attention (MLA), where a
        norm stands within W_Q and W_K.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2Model
    >>> from manyheads.probe import head_spectra
    >>> found = head_spectra(GPT2Model(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=9)))
    >>> bool((abs(found.stable_rank - found.stable_rank_random) < 6 * found.stable_rank_random_std).all())
    True
    """
    require("torch")
    modules = dict(model.named_modules())
    layers = {name: weights for name in modules if (weights := _weights(modules, name)) is not None}
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no module with projections of queries and keys that are known here: "
            f"{', '.join(name for name, *_ in SEPARATE)}, {', '.join(FUSED)}"
        )
    sizes = [weights["query"].shape[1:] for weights in layers.values()]
    found = head_dataset([head_norms(weights) for weights in layers.values()], sizes)
    facts = (fact for each in modules.values() for fact in vars(each).items())
    factor = max([1.0, *(value for name, value in facts if name.endswith(ROTARY_FACTOR))]) ** 2  # 1: not turned
    found["logit_bound"] = "layer", [factor * _logit_bound(modules[name]) for name in layers], BOUND
    normalized = [query_norm(modules[name]) is not None for name in layers]
    return found.assign_coords(module=("layer", list(layers)), normalized=("layer", normalized))


def _weights(modules: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return query (H, N, d), key (G, N, d) and, where they are known, value and output; None if it is no attention."""
    found: dict[str, Any] = {}
    for weight, layout in attention_layouts(modules, name):
        found |= layout.matrices(weight)
    if "key" not in found or found["query"].shape[2] != found["key"].shape[2]:
        return None
    if "value" in found and found["value"].shape != found["key"].shape:
        del found["value"]
    if "output" in found and found["output"].shape != found["query"].shape:
        del found["output"]
    return found


def _logit_bound(module: Module) -> float:
    """Return the bound on |logit| by the RMS norms of queries and keys; NaN without them, or with other norms."""
    norms, scale = query_key_norms(module), getattr(module, "scaling", None)
    if norms is None or not isinstance(scale, float):
        return np.nan
    bound = scale
    for norm in norms:
        weight = getattr(norm, "weight", None)
        if weight is None or weight.dim() != 1 or "RMS" not in type(norm).__name__:
            return np.nan
        with torch.no_grad():  # what the norm makes of large equal numbers: its gain, also where that is 1 + weight
            bound *= largest_norm(norm(torch.full_like(weight, 1e4)).float().cpu().numpy())
    return bound
