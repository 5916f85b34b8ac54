r"""Query-key and output-value circuits of the heads, and their four weights: norms and stable rank.

The logits of a head are bilinear in the residual stream, :math:`s_{ij} \propto x_i^T M x_j` with the query-key circuit
:math:`M = W_Q^T W_K`, and what it writes is linear, :math:`M^T x_j` with the output-value circuit
:math:`M = W_V^T W_O`. Both are d x d and of rank at most the head size N, and none is formed here. With the N x N
matrices :math:`A = W_Q W_Q^T` and :math:`B = W_K W_K^T`, or those of W_V and W_O,

.. math:: \|M\|_F^2 = \sum_{ij} A_{ij} B_{ij}, \qquad \sigma_1(M)^2 = \lambda_{\max}(A^{1/2} B A^{1/2}).

A change of basis within the head, :math:`W_Q \to G W_Q, W_K \to G^{-T} W_K`, moves W_Q and W_K and leaves M alone.
With rotary positions the query-key circuit is the form at distance 0. Below a norm of queries and keys logits are not
bilinear: M says what enters the norms.
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads._extras import xarray as xr
from manyheads._namespaces import Floats
from manyheads.spectra.ranks import rank_measures

MATRICES = ("query", "key", "value", "output", "query-key", "output-value")  # the matrices of a head
CIRCUITS = {"query-key": ("query", "key"), "output-value": ("value", "output")}
BOUND = {"long_name": "bound on |logit| by the gains of norms", "units": "nat"}
DRAWS = 64  # pairs of Gaussian matrices of which the null levels are the means


def head_norms(weights: Mapping[str, NDArray[Any]]) -> Floats:
    """Return figures of the matrices of every head, (4, 6, H), from small Gram matrices.

    Frobenius and spectral norm, effective rank, and participation ratio (`manyheads.spectra.ranks`) of "query"
    and "output" (H, N, d), "key" and "value" (G, N, d), with head h reading group h // (H / G), and of the circuits.
    Those that are absent, and the circuits that they would form, are NaN, as are heads beyond G.

    Examples
    --------
    >>> norms = head_norms({"query": np.eye(2)[None], "key": np.diag([3.0, 4.0])[None]})
    >>> norms[:2, 4, 0].tolist()
    [5.0, 4.0]
    """
    heads = len(weights["query"])
    # Gram matrices (heads, N, N) of the rows, head after head so that one alone is converted.
    grams = {name: np.stack([h @ h.T for h in (each.astype(np.float64) for each in w)]) for name, w in weights.items()}
    found = np.full((4, len(MATRICES), heads), np.nan)
    for place, name in enumerate(MATRICES):
        if name in grams:
            total, squares = np.trace(grams[name], axis1=-2, axis2=-1), _eigenvalues(grams[name])
            found[:, place, : len(total)] = np.sqrt(total), _root(squares[..., -1]), *rank_measures(squares)
        elif name in CIRCUITS and all(part in grams for part in CIRCUITS[name]):
            factors = (grams[part] for part in CIRCUITS[name])
            found[:, place] = _norms(*(np.repeat(each, heads // len(each), axis=0) for each in factors))
    return found


def _eigenvalues(grams: Floats) -> Floats:
    return np.asarray(np.linalg.eigvalsh(grams), np.float64)


def _root(squares: NDArray[Any]) -> Floats:
    return np.sqrt(np.maximum(squares, 0.0)).astype(np.float64, copy=False)


def _norms(gram: Floats, other: Floats) -> tuple[Floats, ...]:
    """Return the figures of `head_norms` of a product from the Gram matrices of its factors."""
    values, vectors = np.linalg.eigh(gram)
    root = vectors * _root(values)[..., None, :]
    squares = _eigenvalues(root.swapaxes(-1, -2) @ other @ root)
    return _root(np.sum(gram * other, axis=(-1, -2))), _root(squares[..., -1]), *rank_measures(squares)


def largest_norm(gain: NDArray[Any], bias: NDArray[Any] | None = None) -> float:
    """Return the largest norm, sqrt(D) max |gain| + |bias|, of what a norm of the last D components returns.

    Components over their RMS, or over their standard deviation with the mean removed, have the norm sqrt(D) at most.
    """
    offset = 0.0 if bias is None else float(np.linalg.norm(bias.astype(np.float64), axis=-1).max())
    return float(np.sqrt(gain.shape[-1]) * np.abs(gain.astype(np.float64)).max()) + offset


def stable_ranks(norms: Floats) -> Floats:
    """Return (Frobenius / spectral)^2, NaN for weights of zero."""
    with np.errstate(invalid="ignore"):
        return (norms[0] / norms[1]) ** 2


@functools.cache
def random_head_ranks(head_size: int, width: int) -> Floats:
    """Return mean and standard deviation of the stable rank of every matrix of a head with Gaussian weights, (2, 6).

    Estimated from draws of Gram matrices, which are Wishart: the squared norms of rows of a triangular factor are
    chi-squared (Bartlett's decomposition), so that no N x d matrix is drawn where N < d.
    """
    rng = np.random.default_rng([head_size, width])
    pairs = np.array([[_wishart(head_size, width, rng) for _ in range(2)] for _ in range(DRAWS)])
    single = np.trace(pairs, axis1=-2, axis2=-1) / np.linalg.eigvalsh(pairs)[..., -1]
    circuit = stable_ranks(np.array(_norms(pairs[:, 0], pairs[:, 1])))
    ranks = [circuit if name in CIRCUITS else single for name in MATRICES]
    return np.array([[float(each.mean()) for each in ranks], [float(each.std(ddof=1)) for each in ranks]])


def _wishart(side: int, degrees: int, rng: np.random.Generator) -> Floats:
    """Draw the Gram matrix of the rows of a Gaussian matrix (side, degrees)."""
    factor = rng.standard_normal((side, min(side, degrees)))
    if degrees >= side:
        factor = np.tril(factor, -1)
        factor[np.diag_indices(side)] = np.sqrt(rng.chisquare(degrees - np.arange(side)))
    return factor @ factor.T


def head_dataset(norms: list[Floats], sizes: list[tuple[int, int]]) -> "xr.Dataset":
    """Gather what `head_norms` returned for every layer, with head size and width (N, d), beside its null level.

    Over (head_matrix, layer, head) and, for null levels, (head_matrix, layer); NaN where a layer has fewer heads.
    """
    heads = max(found.shape[2] for found in norms)
    table = np.full((4, len(MATRICES), len(norms), heads), np.nan)
    for layer, found in enumerate(norms):
        table[:, :, layer, : found.shape[2]] = found
    levels = np.stack([random_head_ranks(*size) for size in sizes], axis=-1)
    by_layer, by_head = ("head_matrix", "layer"), ("head_matrix", "layer", "head")
    dataset = xr.Dataset(
        coords={"head_matrix": list(MATRICES), "layer": np.arange(len(norms)), "head": np.arange(heads)}
    )
    for name, dims, values, title in (
        ("frobenius", by_head, table[0], "Frobenius norm of a matrix of the head"),
        ("spectral", by_head, table[1], "largest singular value of a matrix of the head"),
        ("stable_rank", by_head, stable_ranks(table), "stable rank of a matrix of the head"),
        ("effective_rank", by_head, table[2], "exp of the entropy of the singular values over their sum"),
        ("participation_ratio", by_head, table[3], "(sum of squares)^2 / sum of fourth powers of singular values"),
        ("stable_rank_random", by_layer, levels[0], "mean stable rank for Gaussian weights"),
        ("stable_rank_random_std", by_layer, levels[1], "standard deviation of the stable rank for Gaussian weights"),
    ):
        dataset[name] = dims, values, {"long_name": title, "units": "1"}
    return dataset
