"""Files of recovered layers: safetensors with a checked header.

An attention layer is `theta` (m, d, d) and `projection` (m, d, d), and `key_bias` (m, d) and `bias` (d,) where it has
them. A layer with rotary positions is `forms` (T, m, d + 1, d + 1), `projection`, perhaps `bias`, and, where it goes on
beyond T offsets, `left`, `turn`, `first` and `shift` of every head, as `turn.0`; a layer with other scores has what its
class names besides. Everything is float64; the metadata
say the format and whether the layer is causal. Any reader of safetensors can open it.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.errors import FileRefused, UsageError
from manyheads.models.checkpoints.tensor_file import TensorFile
from manyheads.recovery.layers.rotary import RotaryLayer, Turns
from manyheads.recovery.layers.scores import ScoreLayer
from manyheads.study.store.disk import room_on_disk, temporary_beside

SavedLayer: TypeAlias = AttentionLayer | RotaryLayer
PLAIN, TURNED, SCORED = "manyheads attention layer 1", "manyheads rotary layer 1", "manyheads score layer 1"
CAUSAL = {True: "yes", False: "no"}
SCALARS: Mapping[str, Any] = {"cap": float, "window": int}  # of a layer with other scores, as arrays of one number
TURNS = ("left", "turn", "first", "shift")


class LayerFileRefused(FileRefused):
    """A file that does not hold a layer as `save_layer` writes it; the message says what it holds."""


def save_layer(path: Path | str, layer: SavedLayer, notes: Mapping[str, str] | None = None) -> Path:
    """Write a layer as safetensors, in one step: readers see the old file or the new one.

    Parameters
    ----------
    path
        The file to write.
    layer
        Its arrays are written as float64.
    notes
        Strings for the metadata of the file, such as what the layer was extracted from.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    UsageError
        No such folder, a folder in place of the file, or weights that are not finite.
    StoreFull
        The disk is full; the old file is as it was.

    Examples
    --------
    >>> import tempfile
    >>> layer = AttentionLayer(theta=np.ones((1, 2, 2)), projection=np.eye(2)[None], causal=True)
    >>> path = save_layer(Path(tempfile.mkdtemp()) / "layer.safetensors", layer, {"from": "an example"})
    >>> load_layer(path).causal
    True
    """
    import safetensors.numpy

    path = Path(path)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"{path}: name a file in a folder that exists")
    arrays = {name: np.ascontiguousarray(array, dtype=np.float64) for name, array in _arrays(layer)}
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise UsageError(f"{name} of this layer holds NaN or infinite numbers: there is nothing to keep")
    kind = SCORED if isinstance(layer, ScoreLayer) else TURNED if isinstance(layer, RotaryLayer) else PLAIN
    metadata = dict(notes or {}) | {"format": kind, "causal": CAUSAL[bool(layer.causal)]}
    temporary = temporary_beside(path)
    with room_on_disk(path):
        try:
            temporary.write_bytes(safetensors.numpy.save(arrays, metadata))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def load_layer(path: Path | str, *, follow_links: bool = False) -> SavedLayer:
    """Read a layer that `save_layer` wrote; names, shapes and dtypes are checked before a tensor is read.

    Parameters
    ----------
    path
        The file.
    follow_links
        Whether it may be a symbolic link.

    Returns
    -------
    AttentionLayer or RotaryLayer, as it was saved, with float64 arrays.

    Raises
    ------
    CheckpointRefused
        The file cannot be read safely, see `manyheads.models.refusals`.
    LayerFileRefused
        It is no file of this format: names, shapes, dtypes or metadata differ, or a number is not finite.
    """
    file = TensorFile(path, follow_links=follow_links)
    _check(file)
    arrays = {name: file.tensor(name) for name in file.names}
    metadata = file.metadata
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise LayerFileRefused(f"{path}: {name} holds NaN or infinite numbers; write the file again")
    if metadata["format"] == PLAIN:
        return AttentionLayer(**arrays, causal=metadata["causal"] == CAUSAL[True])
    turns = None
    if "turn.0" in arrays:
        heads = range(len(arrays["projection"]))
        turns = Turns(*(tuple(arrays[f"{part}.{head}"] for head in heads) for part in TURNS))
    own = (arrays["forms"], arrays["projection"], arrays.get("bias"), turns)
    if metadata["format"] == TURNED:
        return RotaryLayer(*own)
    given: dict[str, Any] = {name: arrays[name] for name in ScoreLayer.shapes(1, 1) if name in arrays}
    given |= {name: kind(arrays[name][0]) for name, kind in SCALARS.items() if name in arrays}
    return ScoreLayer(*own, **given)


def is_layer_file(path: Path | str) -> bool:
    """Tell whether a file says that it is one of ours; a file that cannot be read is none."""
    try:
        return TensorFile(path, follow_links=True).metadata.get("format") in (PLAIN, TURNED, SCORED)
    except FileRefused:
        return False


def _arrays(layer: SavedLayer) -> Iterator[tuple[str, Any]]:
    """Yield the arrays of a layer by name, without those that are None."""
    own = ["projection", "bias", *(["forms"] if isinstance(layer, RotaryLayer) else ["theta", "key_bias"])]
    yield from ((name, getattr(layer, name)) for name in own if getattr(layer, name) is not None)
    if isinstance(layer, ScoreLayer):
        for name in (*ScoreLayer.shapes(1, 1), *SCALARS):
            if (value := getattr(layer, name)) is not None:
                yield name, np.atleast_1d(value)
    if isinstance(layer, RotaryLayer) and layer.turns is not None:
        for part in TURNS:
            yield from ((f"{part}.{head}", array) for head, array in enumerate(getattr(layer.turns, part)))


def _expected_shapes(file: TensorFile, kind: str, heads: int, dim: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes that the tensors of a layer have; offsets, ranks and terms are as many as the file has."""
    square: tuple[int, ...] = (heads, dim, dim)
    if kind == PLAIN:
        return {"theta": square, "projection": square, "key_bias": (heads, dim), "bias": (dim,)}
    own = {name: entry.shape for name, entry in file.entries.items()}
    expected = {"forms": (*own.get("forms", ())[:1], heads, dim + 1, dim + 1), "projection": square, "bias": (dim,)}
    for head in range(heads) if any(name.startswith("turn.") for name in own) else ():
        rank = (*own.get(f"turn.{head}", ()), 0)[0]
        kinds = ((dim + 1, rank), (rank, rank), (rank, dim + 1), (rank,))
        expected |= {f"{part}.{head}": shape for part, shape in zip(TURNS, kinds, strict=True)}
    if kind == TURNED:
        return expected
    terms = own.get("position_bias", ())[1:2]
    for name, shape in ScoreLayer.shapes(heads, dim).items():
        expected[name] = tuple(size for size in shape if size is not None) + (terms if None in shape else ())
    return dict.fromkeys(SCALARS, (1,)) | expected


def _check(file: TensorFile) -> None:
    """Refuse a file whose format, names, shapes or dtypes are not those of a layer."""

    def refuse(found: str) -> None:
        raise LayerFileRefused(f"{file.path}: {found}; expected what manyheads.recovery.save_layer writes")

    kind = file.metadata.get("format")
    if kind not in (PLAIN, TURNED, SCORED):
        refuse(f"its metadata say format {str(kind)[:80]!r}, not {PLAIN!r}, {TURNED!r} or {SCORED!r}")
    if file.metadata.get("causal") not in CAUSAL.values():
        refuse(f"its metadata say causal {str(file.metadata.get('causal'))[:80]!r}, not yes or no")
    shape = file.entries["projection"].shape if "projection" in file.entries else ()
    if len(shape) != 3 or shape[1] != shape[2] or 0 in shape:
        refuse(f"projection has shape {shape}, not (m, d, d)")
    heads, dim, _ = shape
    expected = _expected_shapes(file, str(kind), heads, dim)
    needed = set(expected) - {"key_bias", "bias", *SCALARS, *ScoreLayer.shapes(1, 1)}
    if not needed <= set(file.names) <= set(expected):
        refuse(f"it holds the tensors {', '.join(name[:40] for name in file.names[:8])}")
    for name in file.names:
        entry = file.entry(name)
        if entry.shape != expected[name] or 0 in entry.shape:
            refuse(f"{name} has shape {entry.shape}, not {expected[name]}")
        if entry.dtype != "F64":
            refuse(f"{name} is {entry.dtype}, not F64")
