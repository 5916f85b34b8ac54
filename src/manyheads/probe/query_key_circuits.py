r"""Query-key circuits W_Q^T W_K of the heads of a PyTorch model: norms and stable rank, without forming them.

The logits of a head are bilinear in the residual stream, :math:`s_{ij} \propto x_i^T M x_j`, with
:math:`M = W_Q^T W_K` of shape d x d and rank at most the head size N. With the N x N matrices
:math:`A = W_Q W_Q^T` and :math:`B = W_K W_K^T`,

.. math:: \|M\|_F^2 = \sum_{ij} A_{ij} B_{ij}, \qquad \sigma_1(M)^2 = \lambda_{\max}(A^{1/2} B A^{1/2}).

A change of basis within the head, :math:`W_Q \to G W_Q, W_K \to G^{-T} W_K`, moves W_Q and W_K and leaves M alone.
With rotary positions M is the form at distance 0. Below a norm of queries and keys logits are not bilinear: M says what
enters the norms, and their gains g bound the logits whatever the data,

.. math:: |s_{ij}| \le \mathrm{scale}\; D \max |g_Q| \max |g_K|,

with D the number of components that one norm covers, those of a head or of all heads.
"""

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from manyheads._extras import require
from manyheads.errors import UsageError
from manyheads.probe.attention_modules import head_count, head_size, query_key_norms, query_norm

if TYPE_CHECKING:
    import xarray as xr

Array = np.ndarray

# Names of the query and the key projection of an attention module, weights (out, in).
SEPARATE = (("q_proj", "k_proj"), ("query", "key"), ("q", "k"))
# Name of a joint projection → its rows: all queries, all keys, all values; or query, key, value head after head.
FUSED = {"query_key_value": "heads", "Wqkv": "parts", "c_attn": "parts"}
DRAWS = 64  # pairs of Gaussian matrices of which the null level is the mean


def query_key_spectra(model: Any) -> "xr.Dataset":
    """Compute norms and stable rank of W_Q^T W_K for every head of a PyTorch model of transformers.

    Parameters
    ----------
    model
        A model whose attention modules hold separate or joint projections of queries and keys.

    Returns
    -------
    xr.Dataset
        Over (layer, head): `frobenius` and `spectral`, the norms; `stable_rank`, (frobenius / spectral)^2, at least 1
        and at most N; `stable_rank_random` (layer), its mean for independent Gaussian weights, and
        `stable_rank_random_std`; `logit_bound` (layer), the largest |logit| that norms of queries and keys allow, NaN
        without RMS norms there. Coordinates: `module` (layer) and `normalized` (layer), whether queries are normalized
        before the logits. Heads that a layer lacks are NaN.

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
    >>> from manyheads.probe import query_key_spectra
    >>> model = GPT2Model(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=9))
    >>> found = query_key_spectra(model)
    >>> bool((abs(found.stable_rank - found.stable_rank_random) < 6 * found.stable_rank_random_std).all())
    True
    """
    import xarray as xr

    require("torch")
    layers = {name: weights for name, module in model.named_modules() if (weights := _weights(module)) is not None}
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no module with projections of queries and keys that are known here: "
            f"{', '.join(name for name, _ in SEPARATE)}, {', '.join(FUSED)}"
        )
    modules = dict(model.named_modules())
    found = [circuit_spectrum(query, key) for query, key in layers.values()]
    levels = [random_circuit_rank(*query.shape[1:]) for query, _ in layers.values()]
    heads = max(len(frobenius) for frobenius, _ in found)
    table = np.full((2, len(found), heads), np.nan)
    for layer, norms in enumerate(found):
        table[:, layer, : len(norms[0])] = norms
    normalized = [query_norm(modules[name]) is not None for name in layers]
    with np.errstate(invalid="ignore"):  # weights of zero
        rank = (table[0] / table[1]) ** 2
    bounds = [_logit_bound(modules[name]) for name in layers]
    both, form = ("layer", "head"), "W_Q^T W_K of the head"
    return xr.Dataset(
        {
            "frobenius": (both, table[0], {"long_name": f"Frobenius norm of {form}", "units": "1"}),
            "spectral": (both, table[1], {"long_name": f"largest singular value of {form}", "units": "1"}),
            "stable_rank": (both, rank, {"long_name": f"stable rank of {form}", "units": "1"}),
            "stable_rank_random": (
                "layer",
                [mean for mean, _ in levels],
                {"long_name": f"mean stable rank of {form} for Gaussian weights", "units": "1"},
            ),
            "stable_rank_random_std": (
                "layer",
                [std for _, std in levels],
                {"long_name": f"standard deviation of the stable rank of {form} for Gaussian weights", "units": "1"},
            ),
            "logit_bound": ("layer", bounds, {"long_name": "bound on |logit| by the gains of norms", "units": "nat"}),
        },
        coords={
            "layer": np.arange(len(layers)),
            "head": np.arange(heads),
            "module": ("layer", list(layers)),
            "normalized": ("layer", normalized),
        },
    )


def circuit_spectrum(query: Array, key: Array) -> tuple[Array, Array]:
    """Return Frobenius and spectral norm of query^T key for every head, (H,) each, from the small Gram matrices.

    Parameters
    ----------
    query, key
        Weights (H, N, d) and (G, N, d), float64; head h reads the keys of group h // (H / G).

    Examples
    --------
    >>> circuit_spectrum(np.eye(2)[None], np.diag([3.0, 4.0])[None])
    (array([5.]), array([4.]))
    """
    gram = query @ query.swapaxes(-1, -2)
    key_gram = np.repeat(key @ key.swapaxes(-1, -2), len(query) // len(key), axis=0)
    return _norms(gram, key_gram)


def _norms(gram: Array, key_gram: Array) -> tuple[Array, Array]:
    """Return Frobenius and spectral norm of a product from the Gram matrices of its factors."""
    values, vectors = np.linalg.eigh(gram)
    root = vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]
    top = np.linalg.eigvalsh(root.swapaxes(-1, -2) @ key_gram @ root)[..., -1]
    return np.sqrt(np.maximum(np.sum(gram * key_gram, axis=(-1, -2)), 0.0)), np.sqrt(np.maximum(top, 0.0))


@functools.cache
def random_circuit_rank(head_size: int, width: int) -> tuple[float, float]:
    """Return mean and standard deviation of the stable rank of W_Q^T W_K for independent Gaussian weights.

    Estimated from draws of the two Gram matrices, which are Wishart: the squared norms of rows of a triangular factor
    are chi-squared (Bartlett's decomposition), so that no N x d matrix is drawn where N < d.

    Examples
    --------
    >>> mean, std = random_circuit_rank(64, 512)
    >>> bool(abs(mean - 28.6) < 0.5)
    True
    """
    rng = np.random.default_rng([head_size, width])
    frobenius, spectral = np.array([_norms(*(_wishart(head_size, width, rng) for _ in "qk")) for _ in range(DRAWS)]).T
    ranks = (frobenius / spectral) ** 2
    return float(ranks.mean()), float(ranks.std(ddof=1))


def _wishart(side: int, degrees: int, rng: np.random.Generator) -> Array:
    """Draw the Gram matrix of the rows of a Gaussian matrix (side, degrees)."""
    if degrees < side:
        factor = rng.standard_normal((side, degrees))
    else:
        factor = np.tril(rng.standard_normal((side, side)), -1)
        factor[np.diag_indices(side)] = np.sqrt(rng.chisquare(degrees - np.arange(side)))
    return factor @ factor.T


def _weights(module: Any) -> tuple[Array, Array] | None:
    """Return query and key weights (H, N, d) and (G, N, d) of an attention module; None if it is none."""
    size, heads = head_size(module), head_count(module)
    if size is None or heads is None:
        return None
    for names in SEPARATE:
        query, key = (getattr(getattr(module, name, None), "weight", None) for name in names)
        if query is None or key is None:
            continue
        if len(query) != heads * size or len(key) % size or query.shape[1] != key.shape[1]:
            return None  # such as gates beside the queries
        return _as_array(query).reshape(heads, size, -1), _as_array(key).reshape(-1, size, key.shape[1])
    for name, order in FUSED.items():
        projection = getattr(module, name, None)
        if projection is None:
            continue
        joint = _as_array(projection.weight)
        joint = joint.T if type(projection).__name__ == "Conv1D" else joint
        if len(joint) != 3 * heads * size:
            return None  # shared key heads, in an order of their own
        parts = joint.reshape(*((3, heads) if order == "parts" else (heads, 3)), size, -1)
        return (parts[0], parts[1]) if order == "parts" else (parts[:, 0], parts[:, 1])
    return None


def _as_array(weight: Any) -> Array:
    return weight.detach().double().cpu().numpy()


def _logit_bound(module: Any) -> float:
    """Return the bound on |logit| by the RMS norms of queries and keys; NaN without them, or with other norms."""
    import torch

    norms, size, scale = query_key_norms(module), head_size(module), getattr(module, "scaling", None)
    if norms is None or size is None or not isinstance(scale, float):
        return np.nan
    gains, width = [], size
    for norm in norms:
        weight = getattr(norm, "weight", None)
        if weight is None or weight.dim() != 1 or "RMS" not in type(norm).__name__:
            return np.nan
        with torch.no_grad():  # what the norm makes of ones: its gain, also where that is 1 + weight
            gains.append(float(norm(torch.ones_like(weight)).abs().max()))
        width = max(width, len(weight))
    return scale * width * gains[0] * gains[1]
