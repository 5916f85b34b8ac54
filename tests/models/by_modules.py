r"""FLOPs of matrix products through the table of modules: a count of its own, beside the closed forms.

A forward pass multiplies and adds once for each active weight of a matrix and token, and in the attention of a layer
:math:`H (N + N_v) \sum_i n_i` times, where position i sees :math:`n_i` positions.
"""

from manyheads.models.config import ModelConfig
from manyheads.models.counts import _matrices
from manyheads.models.modules import Role


def matrix_flops(source, length, masked=True):
    """Count the FLOPs of a forward pass of one sequence; the length of images is known."""
    config = ModelConfig.of(source)
    sizes = config.sizes
    patches = sizes.get("patches", 0)
    if patches:  # special tokens are no patches
        length = sizes["positions"] - sizes["hidden_patches"]
    products = sum(
        count * (1 if each.once else patches if each.role is Role.PATCH else length)
        for each, count in _matrices(config, sizes)
    )
    per_pair = config.values["heads"] * (config.values["key_dim"] + sizes["value_dim"])
    pairs = sum(_pairs(config, layer, length, masked) for layer in range(config.values["layers"]))
    return 2 * (products + per_pair * pairs)


def _pairs(config, layer, length, masked):
    if not masked:
        return length * length
    window = config.window(layer) or 2 * length
    if config.causal:
        return sum(min(i + 1, window) for i in range(length))
    return sum(abs(i - j) <= window // 2 for i in range(length) for j in range(length))
