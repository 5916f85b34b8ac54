"""Weights of checkpoints without the model: norms, stable rank and coherence of every matrix, read tensor by tensor.

No more than one attention layer or one matrix is in memory; tables of more than `TABLE_BYTES` are read by blocks of
rows. Every figure stands beside its null level, that of independent entries or directions.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from manyheads._extras import xarray as xr
from manyheads.errors import CertificateError, UsageError
from manyheads.models.attention_layers import attention_config, head_weights, unread
from manyheads.models.checkpoints.checkpoint import Checkpoint
from manyheads.models.modules import Role
from manyheads.models.parameters import ParameterMap, Weight, parameter_map, parameter_roles
from manyheads.models.refusals import FamilyUnknown, FileMissing
from manyheads.probe.attention.datasets import layer_number
from manyheads.probe.checkpoints.series import Source, as_checkpoint, list_sources, path_of
from manyheads.probe.heads.circuits import BOUND, head_dataset, head_norms, largest_norm
from manyheads.spectra import bidiagonal, coherence, levels, ranks, stable_rank

TABLE_BYTES = 2**26
FIRST = (Role.EMBEDDING, Role.POSITION, Role.SEGMENT, Role.PATCH, Role.EMBEDDING_PROJECTION)
SHAPES = ("matrix", "rows", "columns")
PARTS = ("query", "key", "value", "output")
ATTENTION = {Role.QUERY, Role.KEY, Role.VALUE, Role.QUERY_KEY_VALUE, Role.OUTPUT}
NORMS = (Role.QUERY_NORM, Role.KEY_NORM)
PURE_ROTATIONS = {"default", "linear", "dynamic", "llama3"}  # rotary scalings that keep norms
FIGURES = {
    "frobenius": "Frobenius norm",
    "spectral": "largest singular value",
    "spectral_low": "lower bound of the largest singular value",
    "spectral_high": "upper bound of the largest singular value",
    "spectral_random": "Marchenko-Pastur edge of singular values at this Frobenius norm",
    "stable_rank": "stable rank",
    "stable_rank_low": "lower bound of the stable rank",
    "stable_rank_high": "upper bound of the stable rank",
    "stable_rank_random": "expected stable rank of a Gaussian matrix",
    "effective_rank": "exponential of the entropy of the singular values over their sum",
    "participation_ratio": "squared sum of the squared singular values over the sum of their squares",
    "beyond_edge": "singular values beyond the Marchenko-Pastur edge of the others, at the 1% level",
    "coherence": "mean |cos| over pairs of vectors",
    "coherence_low": "mean |cos|, low end of the interval over sampled vectors",
    "coherence_high": "mean |cos|, high end of the interval over sampled vectors",
    "coherence_rms": "root mean square of cos over all pairs, a bound on the mean |cos|",
    "coherence_random": "mean |cos| of independent random directions",
    "zero_vectors": "vectors of zeros, left out of the coherence",
}


@dataclass(frozen=True)
class _Matrix:
    """A matrix of a checkpoint: what it is, its entries or their place on the disk, and its vectors for coherence."""

    name: str
    role: str
    layer: int  # -1 outside of layers
    entries: bidiagonal.Matrix
    vectors: bidiagonal.Matrix | None = None


@dataclass
class _Options:
    tolerance: float
    rows: int
    level: float
    seed: int
    starts: dict[str, np.ndarray | None] = field(default_factory=dict)  # singular vectors of the checkpoint before


def weight_spectra(
    checkpoints: Source | Sequence[Source],
    *,
    tolerance: float = 1e-3,
    rows: int = 256,
    level: float = 0.99,
    seed: int = 0,
) -> "xr.Dataset":
    r"""Compute norms, stable rank and coherence of the weights of checkpoints, without building the model.

    Parameters
    ----------
    checkpoints
        Files or folders in safetensors format, or opened checkpoints: one, or a series of the same model.
    tolerance
        Certified upper / lower - 1 of the stable rank of matrices beyond a smaller side of 1024; below, it is exact.
        Along a series each starts from the singular vector of the checkpoint before.
    rows, level, seed
        Vectors drawn for the coherence, the coverage of its interval, and the seed of the draw.

    Returns
    -------
    xr.Dataset
        Over matrix, and over (checkpoint, matrix) for a series: `frobenius`, `spectral` (the largest singular value)
        and `stable_rank` with bounds (`_low`, `_high`) that hold, rounding included, and the null level (`_random`):
        the Marchenko-Pastur edge at this Frobenius norm, the expected stable rank of a Gaussian matrix. `beyond_edge`
        counts the singular values beyond the edge of a matrix of independent entries with the variance of the others;
        such a matrix has one in 1 of 100 cases. `effective_rank`, exp(-sum p log p) of the singular values over their
        sum, and `participation_ratio`, (sum s^2)^2 / sum s^4 of the singular values s. NaN beyond a smaller side of
        1024, as `beyond_edge` is. `coherence` of the rows of embedding and unembedding and of the vectors that MLPs
        write, with its interval, `coherence_rms` as a bound, and that of random directions; NaN for other matrices.
        Coordinates: `role`, `matrix_layer` (-1 outside of layers), `rows`, `columns` (as stored; of attention (out,
        in)). Matrices with entries that are not finite are NaN throughout.

        For known families: attention by query, key, value and output, also where one tensor fuses them, and
        the figures of `head_spectra` over (head_matrix, layer, head), as `head_frobenius`, `head_stable_rank`, with
        their null levels, also where norms stand behind queries and keys: the query-key circuit says what enters them.
        For others every two-dimensional tensor is a matrix without a role, and `attrs["roles"]` says why.
        `head_logit_bound` (layer), the largest |logit| that the norms of queries and keys allow by their gains.
        `attrs["heads"]`, `attrs["logit_bound"]`: "measured", or why there are none. `attrs["not_measured"]`: tensors of
        two axes or more that are no matrix of floats.

    Raises
    ------
    CheckpointRefused
        A file that cannot be read, or weights that contradict their configuration.
    UsageError
        No checkpoint, no matrix in it, or a series of different matrices.

    Examples
    --------
    >>> import tempfile, safetensors.numpy
    >>> file = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> rng = np.random.default_rng(0)
    >>> safetensors.numpy.save_file({"w": rng.normal(size=(300, 200)), "gain": np.ones(7)}, file)
    >>> found = weight_spectra(file)
    >>> round(found.stable_rank.sel(matrix="w").item() / found.stable_rank_random.sel(matrix="w").item(), 1)
    1.0
    """
    sources = list_sources(checkpoints)
    if not sources:
        raise UsageError("no checkpoint: give a file or a folder, or a list of them")
    options = _Options(tolerance, rows, level, seed)
    found: list[xr.Dataset] = []
    for source in sources:
        found.append(_measure_checkpoint(as_checkpoint(source), options))
        described = [set(zip(*(each[name].values for name in SHAPES), strict=True)) for each in (found[0], found[-1])]
        if differ := sorted(described[0] ^ described[1]):
            raise UsageError(
                f"{sources[0]} and {source} hold different matrices, such as {differ[0][0]} ({differ[0][1]} x "
                f"{differ[0][2]}): give checkpoints of one model; `verify` names every difference"
            )
    if isinstance(checkpoints, Checkpoint | Path | str):
        return found[0]
    names = [str(path_of(source)) for source in sources]
    series = xr.Variable("checkpoint", names)
    return xr.concat(found, series, coords="minimal", compat="override", join="override", combine_attrs="override")


def _measure_checkpoint(checkpoint: Checkpoint, options: _Options) -> "xr.Dataset":
    try:
        explained, weights = parameter_map(checkpoint), parameter_roles(checkpoint)
        note = explained.config.family.model_type
    except (FamilyUnknown, FileMissing) as refusal:
        explained, note = None, f"none: {refusal}"
        weights = tuple(
            Weight(name, "", "weight", layer_number(name), entry.shape, entry.dtype, "")  # type: ignore[arg-type]
            for name, entry in ((name, checkpoint.entry(name)) for name in checkpoint.names)
        )
    gathered: tuple[list[Any], ...] = ([], [], [])
    rows = []
    for matrix in _matrices(checkpoint, weights, explained, gathered):
        about = {"matrix": matrix.name, "role": matrix.role, "matrix_layer": matrix.layer}
        sizes_of = dict(zip(("rows", "columns"), matrix.entries.shape, strict=True))
        rows.append(about | sizes_of | _figures(matrix, options))
        del matrix  # so that the next one is read into free memory
    norms, sizes, left_out = gathered
    if not rows:
        raise UsageError(f"{checkpoint.path} holds no matrix of floating-point numbers")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    coordinates = ("role", "matrix_layer", "rows", "columns")
    found = xr.Dataset(
        {name: ("matrix", columns[name], {"long_name": title, "units": "1"}) for name, title in FIGURES.items()},
        coords={"matrix": columns["matrix"]} | {name: ("matrix", columns[name]) for name in coordinates},
        attrs={
            "roles": note,
            "heads": note if explained is None else _missing_heads_reason(explained) or "measured",
            "logit_bound": note if explained is None else _missing_bound_reason(explained) or "measured",
            "not_measured": ", ".join(sorted(left_out)),
            "level": options.level,
            "vectors": options.rows,
        },
    )
    if norms and explained is not None:
        heads = head_dataset(norms, sizes)
        found = found.assign({f"head_{name}": variable for name, variable in heads.data_vars.items()})
        if found.attrs["logit_bound"] == "measured":
            bounds = [_logit_bound(checkpoint, explained, layer) for layer in range(len(norms))]
            found["head_logit_bound"] = "layer", bounds, BOUND
    return found


def _matrices(
    checkpoint: Checkpoint, weights: Sequence[Weight], explained: ParameterMap | None, gathered: tuple[list[Any], ...]
) -> Iterator[_Matrix]:
    """Go through the matrices by layer; gather norms and sizes of heads, and names that are left out."""
    norms, sizes, left_out = gathered
    done = set()
    by_head = explained is not None and not _missing_heads_reason(explained)
    tables = [weight for weight in weights if weight.layer is None and weight.role in FIRST]
    layers = sorted((each for each in weights if each.layer is not None), key=lambda weight: weight.layer or 0)
    heads_of_model = [weight for weight in weights if weight.layer is None and weight.role not in FIRST]
    for weight in (*tables, *layers, *heads_of_model):
        axes = [extent for extent in weight.shape if extent > 1]  # a table may carry axes of length 1
        floats = weight.dtype.startswith(("F", "BF"))
        if weight.kind != "weight" or len(axes) < 2 or weight.tied_to is not None:
            continue
        if by_head and explained is not None and weight.role in ATTENTION and weight.layer is not None:
            if weight.layer not in done:
                done.add(weight.layer)
                heads = dict(zip(PARTS, head_weights(checkpoint, weight.layer, explained), strict=True))
                norms.append(head_norms(heads))
                sizes.append(heads["query"].shape[1:])
                fused = explained.names(Role.QUERY_KEY_VALUE, layer=weight.layer)
                for part in list(heads):
                    joint = heads.pop(part)
                    joint = joint.reshape(-1, joint.shape[2])  # (out, in), but for the output
                    name = (explained.names(Role(part), layer=weight.layer) or [f"{fused[0]}[{part}]"])[0]
                    yield _Matrix(name, part, weight.layer, joint.T if part == "output" else joint)
                    del joint
        elif floats and 0 not in weight.shape and (len(axes) == 2 or weight.role is Role.PATCH):
            yield _read(checkpoint, weight)
        else:
            left_out.append(weight.name)


def _missing_heads_reason(explained: ParameterMap) -> str:
    """Return why a family has no matrices of heads; empty where it has."""
    if explained.config.family.fused or any(module.role is Role.KEY for module in explained.config.family.body):
        return ""
    return "none: keys and values have a common low-rank factor"


def _missing_bound_reason(explained: ParameterMap) -> str:
    """Return why norms do not bound the logits of a checkpoint; empty where they do."""
    config = explained.config
    if reason := _missing_heads_reason(explained):
        return reason
    if not all(explained.names(role, "gain", 0) for role in NORMS):
        return "none: no gains of norms of queries and keys are stored"
    if reason := unread(config, any_score=True):
        return f"none: {reason}"
    given = config.raw.get("rope_parameters") or config.raw.get("rope_scaling") or {}
    tables = [each for each in (given, *given.values()) if isinstance(each, dict)]  # of all layers, or of each kind
    kinds = {each.get("rope_type", each.get("type", "default")) for each in tables}
    odd = ", ".join(sorted(map(repr, kinds - PURE_ROTATIONS)))
    return f"none: rotary positions of type {odd} may multiply queries and keys by a factor" if odd else ""


def _logit_bound(checkpoint: Checkpoint, explained: ParameterMap, layer: int) -> float:
    """Return the largest |logit| that the gains and biases of the norms of queries and keys of a layer allow."""
    bound = attention_config(explained.config, layer, any_score=True).scale
    for role in NORMS:
        gain, bias = (
            [checkpoint.tensor(name).astype(np.float64) for name in explained.names(role, kind, layer)]
            for kind in ("gain", "bias")
        )
        bound *= largest_norm(gain[0] + explained.config.family.gain_offset, *bias)
    return bound


def _read(checkpoint: Checkpoint, weight: Weight) -> _Matrix:
    """Read a matrix, or leave a large table on the disk; flatten patches to (out, in)."""
    rows, *rest = (extent for extent in weight.shape if extent > 1)
    if len(weight.shape) == 2 and rows >= rest[0] and checkpoint.entry(weight.name).nbytes > TABLE_BYTES:
        entries: bidiagonal.Matrix = checkpoint.stored(weight.name)
    else:
        entries = checkpoint.tensor(weight.name).reshape(rows, -1)
    vectors = entries if weight.role in (Role.EMBEDDING, Role.UNEMBEDDING) else None
    if weight.role == Role.MLP_OUT:
        vectors = entries if weight.layout == "in,out" else entries[:].T
    return _Matrix(weight.name, str(weight.role), -1 if weight.layer is None else weight.layer, entries, vectors)


def _figures(matrix: _Matrix, options: _Options) -> dict[str, float]:
    """Return the figures of one matrix, NaN where it has none."""
    figures = dict.fromkeys(FIGURES, math.nan)
    entries = matrix.entries
    if not all(np.isfinite(block).all() for _, block in bidiagonal.row_blocks(entries)):
        return figures
    rank = _rank(matrix, options)
    edge = math.sqrt(levels.marchenko_pastur_edges(*entries.shape)[1] / math.prod(entries.shape))
    side = float(min(entries.shape))
    beyond = math.nan if rank.squares is None else levels.count_beyond_edge(rank.squares, *entries.shape)
    figures |= {
        "frobenius": rank.frobenius,
        "spectral": rank.frobenius / math.sqrt(rank.value) if rank.value else 0.0,
        "spectral_low": rank.sigma_low,
        "spectral_high": rank.sigma_high,
        "spectral_random": rank.frobenius * edge,
        "stable_rank": rank.value,
        "stable_rank_low": rank.lower,
        "stable_rank_high": rank.upper,
        "stable_rank_random": min(max(levels.expected_stable_rank(*entries.shape), 1.0), side),
        "effective_rank": rank.effective_rank,
        "participation_ratio": rank.participation_ratio,
        "beyond_edge": float(beyond),
    }
    if matrix.vectors is None:
        return figures
    rng = np.random.default_rng(options.seed)
    try:
        found = coherence(matrix.vectors, "estimate", rows=options.rows, rng=rng, level=options.level, omit_zeros=True)
    except UsageError:  # all entries are finite: fewer than two vectors are not zero, and there is no pair
        return figures
    return figures | {
        "coherence": found.value if found.value is not None else math.nan,
        "coherence_low": found.interval.low,
        "coherence_high": found.interval.high,
        "coherence_rms": found.rms,
        "coherence_random": found.random_level,
        "zero_vectors": float(found.zero_rows),
    }


def _rank(matrix: _Matrix, options: _Options) -> ranks.StableRank:
    """Return the stable rank, of a table on the disk by its Gram matrix, of others from the vector kept before."""
    if not isinstance(matrix.entries, np.ndarray):
        return stable_rank(matrix.entries, "gram")
    start = options.starts.get(matrix.name) if min(matrix.entries.shape) <= ranks.CHOLESKY_SIDE else None
    try:
        found = stable_rank(matrix.entries, tolerance=options.tolerance, start=start)
    except CertificateError:
        if start is None:
            raise
        found = stable_rank(matrix.entries, tolerance=options.tolerance)  # the start missed the largest singular value
    if found.vector is not None:
        options.starts[matrix.name] = found.vector
    return found
