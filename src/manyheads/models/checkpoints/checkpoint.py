"""A checkpoint: one file, or a folder with a configuration and one file or many shards, behind one set of names."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from numpy.typing import NDArray

from manyheads.errors import UsageError
from manyheads.models.checkpoints.files import read_json
from manyheads.models.checkpoints.tensor_file import DTYPES, TensorEntry, TensorFile, unknown_name
from manyheads.models.refusals import FileDamaged, FileMissing, FileUnreadable, PickleRefused, shorten

Array = NDArray[Any]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@final
class Checkpoint:
    """The tensors of one model, opened by `open_checkpoint`.

    `file_of` is the file that every tensor is read from, None where no tensor stands in two of them. `entries`: name →
    `TensorEntry` (dtype, shape, bytes), file after file in the order of each file. `aliases`: name that was left out on
    saving because it shared its memory → name that holds the values. Only what the metadata of a file states; see
    `manyheads.models.parameters.recognize` for weights that the configuration ties.
    """

    def __init__(
        self,
        path: Path,
        files: Sequence[TensorFile],
        config: Mapping[str, Any] | None,
        file_of: Mapping[str, TensorFile] | None = None,
    ):
        self.path = path
        self.files = tuple(files)
        self.config = None if config is None else MappingProxyType(dict(config))
        self.file_of = file_of or {name: file for file in self.files for name in file.entries}
        self.entries: Mapping[str, TensorEntry] = MappingProxyType(
            {name: file.entries[name] for file in self.files for name in file.entries if self.file_of[name] is file}
        )
        # The library that writes safetensors from PyTorch drops shared tensors and notes {dropped: kept}.
        self.aliases: Mapping[str, str] = MappingProxyType(
            {
                dropped: kept
                for file in self.files
                for dropped, kept in file.metadata.items()
                if kept in self.entries and dropped not in self.entries
            }
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stored tensors, file after file in the order of each file."""
        return tuple(self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, each stored one once."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def parameters(self) -> int:
        """Number of stored values: tied weights once, buffers (masks, position indices) included."""
        return sum(entry.size for entry in self.entries.values())

    def entry(self, name: str) -> TensorEntry:
        """Return dtype, shape and bytes of a tensor, or of the one that an alias stands for."""
        stored, file = self._find(name)
        return file.entry(stored)

    def tensor(self, name: str, rows: slice | Sequence[int] | Array | None = None) -> Array:
        """Read one tensor, or some of its rows, into a new array; see `TensorFile.tensor`."""
        stored, file = self._find(name)
        return file.tensor(stored, rows)

    def stored(self, name: str) -> "StoredTensor":
        """Return a tensor that stays on the disk: its rows are read when it is indexed."""
        return StoredTensor(self, name)

    def stream(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Array]]:
        """Read tensor after tensor, in the order of the files or of `names`.

        This generator holds one tensor at a time. A loop variable keeps the last one alive while the next is read:
        `del` it at the end of the loop's body where two would be too many.
        """
        for name in self.names if names is None else names:
            yield name, self.tensor(name)

    def fingerprint(self, name: str) -> str:
        """Return the sha256 of a tensor's bytes, reading a megabyte at a time; dtype and shape do not enter."""
        stored, file = self._find(name)
        return file.fingerprint(stored)

    def __repr__(self) -> str:
        return (
            f"Checkpoint({str(self.path)!r}, {len(self.entries)} tensors in {len(self.files)} files, "
            f"{self.parameters:,} parameters, {self.nbytes:,} bytes)"
        )

    def _find(self, name: str) -> tuple[str, TensorFile]:
        stored = self.aliases.get(name, name)
        if stored not in self.file_of:
            raise UsageError(unknown_name(self.path, name, self.names))
        return stored, self.file_of[stored]


@final
class StoredTensor:
    """A tensor on the disk with `shape`, `dtype` and rows `stored[a:b]` or `stored[indices]`, read when indexed."""

    def __init__(self, checkpoint: Checkpoint, name: str):
        self.checkpoint, self.name, entry = checkpoint, name, checkpoint.entry(name)
        self.shape, self.dtype = entry.shape, DTYPES[entry.dtype]

    def __getitem__(self, rows: slice | Sequence[int] | Array) -> Array:
        return self.checkpoint.tensor(self.name, rows)


def open_checkpoint(
    path: Path | str, *, config: Mapping[str, Any] | None = None, follow_links: bool = False
) -> Checkpoint:
    """Open a checkpoint: headers are read and checked, weights are left on the disk, no file stays open.

    Raises `CheckpointRefused`: see `manyheads.models.refusals`.

    Parameters
    ----------
    path
        A `.safetensors` file, an `.index.json` file, or a folder that holds `model.safetensors` or
        `model.safetensors.index.json`.
    config
        The configuration; None: the `config.json` beside the weights, when there is one.
    follow_links
        Whether files may be symbolic links, as they are in a Hugging Face cache. Names in an index stay inside the
        folder either way.

    Examples
    --------
    >>> import tempfile, numpy as np, safetensors.numpy
    >>> folder = Path(tempfile.mkdtemp())
    >>> safetensors.numpy.save_file({"wte.weight": np.zeros((5, 4), np.float32)}, folder / "model.safetensors")
    >>> checkpoint = open_checkpoint(folder)
    >>> checkpoint.names, checkpoint.parameters, checkpoint.nbytes
    (('wte.weight',), 20, 80)
    """
    path = Path(path)
    if path.suffix in PICKLES:
        raise PickleRefused(path, f"a {path.suffix} file is a pickled checkpoint")
    # os.path answers False where Path raises: a name from outside may be longer than the system allows.
    is_folder = os.path.isdir(path)
    folder = path if is_folder else path.parent
    if config is None and os.path.lexists(folder / "config.json"):
        config = read_json(folder / "config.json", follow_links)
    weights = _choose(path, config, follow_links) if is_folder else path
    if weights.name.endswith(".json"):
        return Checkpoint(path, *_open_shards(weights, config, follow_links))
    return Checkpoint(path, [TensorFile(weights, follow_links=follow_links)], config)


def _choose(folder: Path, config: Mapping[str, Any] | None, follow_links: bool) -> Path:
    """Find the one file of a folder that says where its weights are, as transformers does."""
    if isinstance(named := (config or {}).get("transformers_weights"), str):
        return folder / _check_plain(named, folder / "config.json", (".safetensors", ".safetensors.index.json"))
    single, index = folder / SINGLE, folder / INDEX
    has_single, has_index = (os.path.lexists(path) for path in (single, index))
    if has_single and has_index:  # transformers reads the file, and leaves the index of an earlier save
        shards = _read_index(index, follow_links).values()
        if all(os.path.lexists(folder / shard) for shard in shards):
            files, _, file_of = _open_shards(index, None, follow_links)
            file = TensorFile(single, follow_links=follow_links)
            if differing := [
                name
                for name in {**file.entries, **file_of}
                if name not in file_of or not _hold_same(name, file, file_of[name])
            ]:
                found = f"{SINGLE} and the {len(files)} shards of {INDEX} differ in {shorten(sorted(differing), 3)}"
                raise FileDamaged(folder, found, "give the one you mean: the .safetensors file or the .index.json file")
    if has_single or has_index:
        return single if has_single else index
    try:
        held = sorted(os.listdir(folder))
    except OSError as error:
        raise FileUnreadable(folder, f"cannot be listed: {error.strerror}") from error
    pickles = [name for name in held if name.endswith(PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in held):
        raise PickleRefused(folder, f"holds only pickled weights ({', '.join(pickles[:3])})")
    found = f"holds neither {SINGLE} nor {INDEX}, but {', '.join(held[:5]) or 'nothing'}"
    raise FileMissing(folder, found, "give the .safetensors file itself if it has another name")


def _hold_same(name: str, one: TensorFile, other: TensorFile) -> bool:
    """Tell whether two files hold the same tensor of a name."""
    if name not in one.entries or name not in other.entries:
        return False
    said = [(file.entries[name].dtype, file.entries[name].shape) for file in (one, other)]
    return said[0] == said[1] and one.fingerprint(name) == other.fingerprint(name)


def _check_plain(name: str, path: Path, endings: tuple[str, ...] = (".safetensors",)) -> str:
    """Return a file name that `path` gives; refuse one that is no plain name with one of the endings."""
    if name in ("", ".", "..") or any(mark in name for mark in "/\\:\0"):
        found = f"the file {name[:200]!r} is no plain file name"
        raise FileDamaged(path, found, f"put the file beside {path.name}, and give its plain name")
    if not name.endswith(endings):
        raise PickleRefused(path, f"the file {name[:200]!r} is no .safetensors file")
    return name


def _read_index(path: Path, follow_links: bool) -> dict[str, str]:
    """Read which shard, a plain name in the folder of the index, holds a tensor.

    `metadata.total_size` is not believed: published indexes disagree on whether tied weights count twice.
    """
    table = read_json(path, follow_links).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(shard, str) for shard in table.values()):
        raise FileDamaged(path, "weight_map is not a table from tensors to file names")
    for shard in set(table.values()):
        _check_plain(shard, path)
    return table


def _open_shards(
    index: Path, config: Mapping[str, Any] | None, follow_links: bool
) -> tuple[list[TensorFile], Mapping[str, Any] | None, dict[str, TensorFile]]:
    """Open every shard of an index; return the files, the configuration, and the file that each tensor is read from.

    transformers reads all tensors of the shards that the index names, a tensor of two shards from the last of them,
    whichever the index gives.
    """
    placed = _read_index(index, follow_links)
    shards = sorted(set(placed.values()))
    if absent := [shard for shard in shards if not os.path.lexists(index.parent / shard)]:
        also = f"; also missing: {shorten(absent[1:])}" if absent[1:] else ""
        found = f"{index.name} places {list(placed.values()).count(absent[0])} tensors in it{also}"
        raise FileMissing(index.parent / absent[0], found, "the download is incomplete: fetch the missing shard")
    files = {shard: TensorFile(index.parent / shard, follow_links=follow_links) for shard in shards}
    file_of = {name: file for file in files.values() for name in file.entries}
    if nowhere := sorted(placed.keys() - file_of.keys()):
        found = f"places {len(nowhere)} tensors that no shard holds, such as {nowhere[0][:120]!r}"
        raise FileDamaged(index, found, "the save is incomplete: fetch index and shards again")
    for name, last in file_of.items():
        file = files.get(placed.get(name, ""), last)
        if name in file.entries and file is not last and not _hold_same(name, file, last):
            found = f"{name[:120]!r} is in {file.path.name}, which it names, and with other values in {last.path.name}"
            raise FileDamaged(index, found, "transformers reads the latter: remove the tensor that is not meant")
    return list(files.values()), config, file_of
