r"""QK-clip factors: by how much QK-clip would shrink the logits of each head, computed and never applied.

.. math:: \gamma_h = \min(1, \tau / \max_h), \qquad \gamma_h = 1 \text{ where } \max_h \le 0,

with the largest logit of head h. Which weights can carry a factor depends on the attention:

=================  ==================================================================  =================================
rule               weights                                                             logits of head h times
=================  ==================================================================  =================================
head               query and key rows of h times sqrt(gamma_h)                         gamma_h
group              query rows of a group and its keys times sqrt(min gamma)            the smallest gamma of the group
latent             q_nope and k_nope times sqrt(gamma_h), q_rope times gamma_h         gamma_h
gain of a head     the slice for h of the gain of the query norm times gamma_h         gamma_h
shared gain        the gain of the query norm, one for all heads, times min gamma      the smallest gamma of the layer
none               a norm of queries and keys has no gain                              1: no weight carries a factor
=================  ==================================================================  =================================

Below a norm of queries the projections carry no factor, because the norm takes it out.
"""

import numpy as np
from numpy.typing import NDArray

from manyheads._extras import xarray as xr
from manyheads.errors import UsageError
from manyheads.models.torch.attention_modules import head_size, query_norm
from manyheads.models.torch.lazy_torch import Module


def qk_clip_factors(model: Module, statistics: "xr.Dataset", threshold: float = 100.0) -> "xr.Dataset":
    """Compute the factors that QK-clip would apply to the heads of a model.

    Raises `UsageError`: the threshold is not positive, the largest logits were not recorded, or the record is of
    another model.

    Parameters
    ----------
    model, statistics
        The PyTorch model that was recorded, and `AttentionRecord.dataset()` of a record with `rows=None`, over all
        batches of the step.
    threshold
        tau, the largest logit that is tolerated, positive.

    Returns
    -------
    xr.Dataset
        `factor` (layer, head), gamma_h = min(1, tau / max_h); `applied` (layer, head), what the weights of the layer
        can carry of it: the logits of the head are multiplied by it; `rule` (layer), see the module. NaN where a layer
        has fewer heads, and where logits are NaN.

    References
    ----------
    Kimi Team (2025), Kimi K2: Open Agentic Intelligence, algorithm 1.
    """
    if not 0 < threshold < np.inf:
        raise UsageError(f"threshold={threshold}: expected a positive number")
    if "max_logit" not in statistics:
        raise UsageError(
            "the dataset has no max_logit, which sampled rows do not give: record with rows=None and figures=None"
        )
    largest = statistics["max_logit"].values
    factor = np.where(largest > threshold, threshold / np.where(largest > threshold, largest, 1.0), 1.0)
    factor = np.where(np.isnan(largest), np.nan, factor)
    modules = dict(model.named_modules())
    rules, applied = [], np.full_like(factor, np.nan)
    for layer, name in enumerate(statistics["module"].values):
        if name not in modules:
            raise UsageError(f"the model has no module {name}: give the model that was recorded")
        heads, key_heads = (int(statistics[name].values[layer]) for name in ("heads", "key_heads"))
        rules.append(find_rule(modules[name], heads, key_heads))
        applied[layer, :heads] = _apply(rules[-1], factor[layer, :heads], key_heads)
    both = ("layer", "head")
    found = xr.Dataset(coords=statistics.coords)
    found["factor"] = both, factor, {"long_name": "QK-clip factor of the head", "units": "1"}
    found["applied"] = both, applied, {"long_name": "factor on the head's logits that weights can carry", "units": "1"}
    found["rule"] = "layer", rules, {"long_name": "weights that carry the factor"}
    found.attrs = {"threshold": threshold}
    return found


def find_rule(module: Module, heads: int, key_heads: int) -> str:
    """Return the rule, as named in the table of this file, by which an attention module carries a factor."""
    norm = query_norm(module)
    if norm is not None:
        gains = sum(gain.numel() for name, gain in norm.named_parameters() if name.endswith("weight"))
        if not gains:
            return "none"
        return "gain of a head" if gains == heads * (head_size(module) or 0) else "shared gain"
    if hasattr(module, "kv_b_proj"):
        return "latent"
    return "head" if heads == key_heads else "group"


def _apply(rule: str, factor: NDArray[np.float64], key_heads: int) -> NDArray[np.float64]:
    """Return what the logits of each head of a layer are multiplied with, (H,)."""
    if rule == "none":
        return np.ones_like(factor)
    if rule == "shared gain":
        return np.full_like(factor, factor.min())
    if rule == "group":
        groups = factor.reshape(key_heads, -1)
        return np.repeat(groups.min(axis=1), groups.shape[1])
    return factor
