"""Refusals of files from outside: one class for each way in which a caller may react.

Every message says which file, what stands there and what to do. All but `NotExtractable`, of a model in memory, derive
from `manyheads.errors.FileRefused`.
"""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from manyheads.errors import FileRefused, ManyheadsError

INTERRUPTED = "the download or the save was interrupted: fetch it again"


def shorten(names: Iterable[str], count: int = 5, length: int = 120) -> str:
    """Join the first few names for a message; names from outside may be as long as a file."""
    return ", ".join(name if len(name) <= length else f"{name[:length]}..." for name in islice(names, count))


class CheckpointRefused(FileRefused):
    """Base of all refusals in this module: the path, what was found there and expected, and what to do about it."""

    usual: ClassVar[str]

    def __init__(self, path: Path | str, found: str, remedy: str | None = None):
        self.path = Path(path)
        self.found = found
        self.remedy = remedy or self.usual
        super().__init__(f"{path}: {found}; {self.remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        # A refusal inside a worker process has to reach the parent with its attributes.
        return type(self), (self.path, self.found, self.remedy)


class FileMissing(CheckpointRefused):
    """No file where one has to be: the path itself, a shard, weights or a configuration in a folder."""

    usual = "check the spelling and that the download is complete"


class FileUnreadable(CheckpointRefused):
    """Not a regular file, or one that the operating system refuses to open or read."""

    usual = "check its permissions and the disk"


class SymlinkRefused(CheckpointRefused):
    """A symbolic link, which may lead anywhere."""

    usual = (
        "give the file it points to, or pass follow_links=True if you trust it (a Hugging Face cache consists of links)"
    )


class PickleRefused(CheckpointRefused):
    """A pickled checkpoint; unpickling runs whatever program its author put in."""

    usual = "nothing is ever unpickled here: convert it where you trust it, with model.save_pretrained(folder)"


class FileChanged(CheckpointRefused):
    """The file was truncated, altered or replaced between opening and reading."""

    usual = "wait until whatever writes it has finished, then open it again"


class FileDamaged(CheckpointRefused):
    """The bytes of a file break the rules of its format, or the files of a folder contradict each other."""

    usual = "the file is damaged or hostile: fetch it again from where it was published"


class ConfigInvalid(CheckpointRefused):
    """A configuration that lacks a value, or gives one that cannot be."""

    usual = "check that config.json belongs to these weights"


class FamilyUnknown(CheckpointRefused):
    """A model type that no table describes; roles are never guessed."""

    usual = (
        "streaming works without a family; to name roles, describe it as a manyheads.models.families.Family, and to "
        "count it, give the fields of ModelShape"
    )


class WeightsMismatch(CheckpointRefused):
    """Weights that the family and its configuration do not explain, or require and do not find."""

    usual = "check that config.json belongs to these weights"


class NotExtractable(ManyheadsError, ValueError):
    """A part of a checkpoint that is no layer which queries determine; the message says why, and nothing was asked."""
