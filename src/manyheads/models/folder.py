"""A checkpoint: one file, or a folder with a configuration and one file or many shards, behind one set of names."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import numpy as np

from manyheads.errors import UsageError
from manyheads.models import refusals
from manyheads.models.header import Entry
from manyheads.models.index import read_index, read_json
from manyheads.models.tensorfile import TensorFile, unknown_name

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@final
class Checkpoint:
    """The tensors of one model, opened by `open_checkpoint`.

    Parameters
    ----------
    path
        The file or folder it was opened from.
    files
        The open files; no tensor stands in two of them.
    config
        The configuration, or None.

    Attributes
    ----------
    path, files, config
        As given.
    entries
        Name → `Entry` (dtype, shape, bytes), file after file in the order of each file.
    aliases
        Name that was left out on saving because it shared its memory → name that holds the values. Only what the
        metadata of a file states; see `manyheads.models.Family` for weights that the configuration ties.
    """

    def __init__(self, path: Path, files: Sequence[TensorFile], config: Mapping[str, Any] | None):
        self.path = path
        self.files = tuple(files)
        self.config = None if config is None else MappingProxyType(dict(config))
        self._file_of = {name: file for file in self.files for name in file.entries}
        self.entries: Mapping[str, Entry] = MappingProxyType(
            {name: entry for file in self.files for name, entry in file.entries.items()}
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
        """How many bytes the tensors take, each stored one once."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def parameters(self) -> int:
        """How many numbers are stored: tied weights once, buffers (masks, position indices) included."""
        return sum(entry.size for entry in self.entries.values())

    def entry(self, name: str) -> Entry:
        """Return dtype, shape and bytes of a tensor, or of the one that an alias stands for.

        Raises
        ------
        UsageError
            No tensor of that name; the message lists the nearest names.
        """
        stored, file = self._find(name)
        return file.entry(stored)

    def tensor(self, name: str, rows: slice | Sequence[int] | np.ndarray | None = None) -> np.ndarray:
        """Read one tensor, or some of its rows, into a new array; see `TensorFile.tensor`."""
        stored, file = self._find(name)
        return file.tensor(stored, rows)

    def stream(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
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

    def duplicates(self, names: Iterable[str] | None = None) -> tuple[tuple[str, ...], ...]:
        """Group the tensors that hold the same values in the same dtype and shape.

        Parameters
        ----------
        names
            Which tensors to compare; None: all of two or more axes, because fresh biases and gains are all alike.

        Returns
        -------
        tuple[tuple[str, ...], ...]
            Groups of two or more names. Tensors are compared by sha256; those of a dtype and shape of their own are
            not read.
        """
        chosen = names if names is not None else [name for name, entry in self.entries.items() if len(entry.shape) > 1]
        alike: dict[tuple[str, tuple[int, ...]], list[str]] = defaultdict(list)
        for name in chosen:
            entry = self.entry(name)
            alike[entry.dtype, entry.shape].append(name)
        groups: dict[tuple[str, tuple[int, ...], str], list[str]] = defaultdict(list)
        for (dtype, shape), members in alike.items():
            if len(members) > 1:
                for name in members:
                    groups[dtype, shape, self.fingerprint(name)].append(name)
        return tuple(tuple(members) for members in groups.values() if len(members) > 1)

    def close(self) -> None:
        """Close all files; closing twice does nothing."""
        for file in self.files:
            file.close()

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Checkpoint({str(self.path)!r}, {len(self.entries)} tensors in {len(self.files)} files, "
            f"{self.parameters:,} parameters, {self.nbytes:,} bytes)"
        )

    def _find(self, name: str) -> tuple[str, TensorFile]:
        stored = self.aliases.get(name, name)
        if stored not in self._file_of:
            raise UsageError(unknown_name(self.path, name, self.names))
        return stored, self._file_of[stored]


def open_checkpoint(
    path: Path | str, *, config: Mapping[str, Any] | None = None, follow_links: bool = False
) -> Checkpoint:
    """Open a checkpoint: headers are read and checked, weights are left on the disk.

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

    Returns
    -------
    Checkpoint
        To be closed, or used in a `with` block.

    Raises
    ------
    CheckpointRefused
        One subclass for each rule that files from outside may break, see `manyheads.models.refusals`.

    Examples
    --------
    >>> import tempfile, numpy as np, safetensors.numpy
    >>> folder = Path(tempfile.mkdtemp())
    >>> safetensors.numpy.save_file({"wte.weight": np.zeros((5, 4), np.float32)}, folder / "model.safetensors")
    >>> with open_checkpoint(folder) as checkpoint:
    ...     print(checkpoint.names, checkpoint.parameters, checkpoint.nbytes)
    ('wte.weight',) 20 80
    """
    path = Path(path)
    if path.suffix in PICKLES:
        raise refusals.PickleRefused(path, f"a {path.suffix} file is a pickled checkpoint", path.suffix)
    # os.path answers False where Path raises: a name from outside may be longer than the system allows.
    is_folder = os.path.isdir(path)
    folder = path if is_folder else path.parent
    if config is None and os.path.lexists(folder / "config.json"):
        config = read_json(folder / "config.json", follow_links)
    weights = _choose(path) if is_folder else path
    with ExitStack() as opened:
        if weights.name.endswith(".json"):
            files = _open_shards(weights, follow_links, opened)
        else:
            files = [opened.enter_context(TensorFile(weights, follow_links=follow_links))]
        checkpoint = Checkpoint(path, files, config)
        opened.pop_all()  # from here on the checkpoint closes them
    return checkpoint


def _choose(folder: Path) -> Path:
    """Find the one file of a folder that says where its weights are."""
    single, index = folder / SINGLE, folder / INDEX
    has_single, has_index = (os.path.lexists(path) for path in (single, index))
    if has_single and has_index:
        raise refusals.AmbiguousFolder(folder, f"holds both {SINGLE} and {INDEX}")
    if has_single or has_index:
        return single if has_single else index
    held = sorted(path.name for path in folder.iterdir())
    pickles = [name for name in held if name.endswith(PICKLES)]
    if pickles and not any(name.endswith(".safetensors") for name in held):
        raise refusals.PickleRefused(folder, f"holds only pickled weights ({', '.join(pickles[:3])})", pickles)
    shown = ", ".join(held[:5]) or "nothing"
    raise refusals.NoWeights(folder, f"holds neither {SINGLE} nor {INDEX}, but {shown}", held)


def _open_shards(index: Path, follow_links: bool, opened: ExitStack) -> list[TensorFile]:
    """Open every shard of an index and check that each holds exactly what the index says."""
    placed: dict[str, set[str]] = defaultdict(set)
    for name, shard in read_index(index, follow_links).items():
        placed[shard].add(name)
    files = []
    for shard, names in sorted(placed.items()):
        path = index.parent / shard
        if not os.path.lexists(path):
            raise refusals.ShardMissing(path, f"{index.name} places {len(names)} tensors in it", shard)
        file = opened.enter_context(TensorFile(path, follow_links=follow_links))
        if absent := sorted(names - file.entries.keys()):
            raise refusals.TensorMissing(
                path, f"lacks {len(absent)} tensors that {index.name} places in it, such as {absent[0][:120]!r}", absent
            )
        if extra := sorted(file.entries.keys() - names):
            raise refusals.ShardMismatch(
                path,
                f"holds {len(extra)} tensors that {index.name} does not place in it, such as {extra[0][:120]!r}",
                extra,
            )
        files.append(file)
    return files
