"""A recovered layer on the disk: a safetensors file that says what it holds, checked tensor by tensor when it is read.

The file holds `theta` (m, d, d) and `projection` (m, d, d), and `key_bias` (m, d) and `bias` (d,) where the layer has
them, all in float64; its metadata say the format and whether the layer is causal. Any reader of safetensors can open
it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from manyheads.attention import AttentionLayer
from manyheads.checkpoints import TensorFile
from manyheads.errors import FileRefused, UsageError
from manyheads.study.disk import room_on_disk, temporary_beside

FORMAT = "manyheads attention layer 1"
NEEDED, OPTIONAL = ("theta", "projection"), ("key_bias", "bias")
CAUSAL = {True: "yes", False: "no"}


class LayerFileRefused(FileRefused):
    """A file that does not hold an attention layer as `save_layer` writes it; the message says what it holds."""


def save_layer(path: Path | str, layer: AttentionLayer, notes: Mapping[str, str] | None = None) -> Path:
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
    arrays = {
        name: np.ascontiguousarray(getattr(layer, name), dtype=np.float64)
        for name in NEEDED + OPTIONAL
        if getattr(layer, name) is not None
    }
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise UsageError(f"{name} of this layer holds NaN or infinite numbers: there is nothing to keep")
    metadata = dict(notes or {}) | {"format": FORMAT, "causal": CAUSAL[layer.causal]}
    temporary = temporary_beside(path)
    with room_on_disk(path):
        try:
            temporary.write_bytes(safetensors.numpy.save(arrays, metadata))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def load_layer(path: Path | str, *, follow_links: bool = False) -> AttentionLayer:
    """Read a layer that `save_layer` wrote; everything is checked before a tensor is read.

    Parameters
    ----------
    path
        The file.
    follow_links
        Whether it may be a symbolic link.

    Returns
    -------
    AttentionLayer
        With float64 arrays.

    Raises
    ------
    CheckpointRefused
        The file cannot be read safely, see `manyheads.checkpoints.refusals`.
    LayerFileRefused
        It is no file of this format: names, shapes, dtypes or metadata differ, or a number is not finite.
    """
    with TensorFile(path, follow_links=follow_links) as file:
        _check(file)
        arrays = {name: file.tensor(name) for name in file.names}
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise LayerFileRefused(f"{path}: {name} holds NaN or infinite numbers; write the file again")
    causal = file.metadata["causal"] == CAUSAL[True]
    return AttentionLayer(**arrays, causal=causal)


def is_layer_file(path: Path | str) -> bool:
    """Tell whether a file says that it is one of ours; a file that cannot be read is none.

    Examples
    --------
    >>> is_layer_file("no-such-file.safetensors")
    False
    """
    try:
        with TensorFile(path, follow_links=True) as file:
            return file.metadata.get("format") == FORMAT
    except FileRefused:
        return False


def _check(file: TensorFile) -> None:
    """Refuse a file whose format, names, shapes or dtypes are not those of a layer."""

    def refuse(found: str) -> None:
        raise LayerFileRefused(f"{file.path}: {found}; expected what manyheads.recovery.save_layer writes")

    found = file.metadata.get("format")
    if found != FORMAT:
        refuse(f"its metadata say format {str(found)[:80]!r}, not {FORMAT!r}")
    if file.metadata.get("causal") not in CAUSAL.values():
        refuse(f"its metadata say causal {str(file.metadata.get('causal'))[:80]!r}, not yes or no")
    strangers = set(file.names) - set(NEEDED + OPTIONAL)
    absent = set(NEEDED) - set(file.names)
    if strangers or absent:
        refuse(f"it holds the tensors {', '.join(name[:40] for name in file.names[:8])}")
    shape = file.entry("theta").shape
    if len(shape) != 3 or shape[1] != shape[2] or 0 in shape:
        refuse(f"theta has shape {shape}, not (m, d, d)")
    heads, dim, _ = shape
    expected = {"theta": shape, "projection": shape, "key_bias": (heads, dim), "bias": (dim,)}
    for name in file.names:
        entry = file.entry(name)
        if entry.shape != expected[name]:
            refuse(f"{name} has shape {entry.shape}, not {expected[name]}")
        if entry.dtype != "F64":
            refuse(f"{name} is {entry.dtype}, not F64")
