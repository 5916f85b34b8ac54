"""Every way in which a checkpoint from outside is refused, by name.

Each class breaks one rule. Its message says which file, what stands there and what to do; `path` and `figure` carry
the file and the offending figure for programs. All derive from `manyheads.errors.FileRefused`.
"""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from manyheads.errors import FileRefused

_DAMAGED = "the file is damaged or hostile: fetch it again from where it was published"
_CONFIG = "check that config.json belongs to these weights"


def shorten(names: Iterable[str], count: int = 5, length: int = 120) -> str:
    """Join the first few names for a message; names from outside may be as long as a file."""
    return ", ".join(name if len(name) <= length else f"{name[:length]}..." for name in islice(names, count))


class CheckpointRefused(FileRefused):
    """Base of all refusals in this module.

    Parameters
    ----------
    path
        The file or folder that is refused.
    found
        What stands there, and what was expected.
    figure
        The offending figure (a length, a name, a list of names), for programs.
    """

    remedy: ClassVar[str] = _DAMAGED

    def __init__(self, path: Path | str, found: str, figure: Any = None):
        super().__init__(f"{path}: {found}; {self.remedy}")
        self.path = Path(path)
        self.found = found
        self.figure = figure

    def __reduce__(self) -> tuple[Any, ...]:
        # A refusal inside a worker process has to reach the parent with its attributes.
        return type(self), (self.path, self.found, self.figure)


# --- the file as an object of the file system -----------------------------------------------------------------------


class FileMissing(CheckpointRefused):
    """There is no file of that name."""

    remedy = "check the spelling and that the download is complete"


class FileUnreadable(CheckpointRefused):
    """The operating system refuses to open or read the file."""

    remedy = "check its permissions and the disk"


class NotAFile(CheckpointRefused):
    """A folder, pipe, socket or device where a regular file has to be."""

    remedy = "give the path of a regular .safetensors file, or of a folder that holds one"


class SymlinkRefused(CheckpointRefused):
    """A symbolic link, which may lead anywhere."""

    remedy = (
        "give the file it points to, or pass follow_links=True if you trust it (a Hugging Face cache consists of links)"
    )


class EmptyFile(CheckpointRefused):
    """A file of zero bytes."""

    remedy = "the download or the save was interrupted: fetch it again"


class PickleRefused(CheckpointRefused):
    """A pickled checkpoint; unpickling runs whatever program its author put in."""

    remedy = "nothing is ever unpickled here: convert it where you trust it, with model.save_pretrained(folder)"


class FileChanged(CheckpointRefused):
    """The file was truncated or altered between opening and reading."""

    remedy = "wait until whatever writes it has finished, then open it again"


# --- JSON: the header, the index, the configuration -----------------------------------------------------------------


class JSONTooLarge(CheckpointRefused):
    """A JSON file beside the weights that is larger than any honest one."""


class JSONEncoding(CheckpointRefused):
    """Text that is not UTF-8, or strings that have no UTF-8 form."""


class JSONSyntax(CheckpointRefused):
    """Text that is not JSON."""


class JSONNotObject(CheckpointRefused):
    """JSON that is no object at the top."""


class JSONTooDeep(CheckpointRefused):
    """JSON nested so deeply that reading it would exhaust the stack."""


class JSONTooComplex(CheckpointRefused):
    """JSON with so many parts that reading it would exhaust the memory."""


class DuplicateKey(CheckpointRefused):
    """One JSON object names the same key twice; readers would disagree about which one counts."""


# --- the header of a safetensors file -------------------------------------------------------------------------------


class FileTooShort(CheckpointRefused):
    """Fewer than the eight bytes that hold the length of the header."""


class HeaderTooLarge(CheckpointRefused):
    """A header longer than the limit of the format."""


class HeaderBeyondFile(CheckpointRefused):
    """A header that claims to be longer than the file."""


class MetadataInvalid(CheckpointRefused):
    """`__metadata__` that is not a table of strings."""


class EntryInvalid(CheckpointRefused):
    """An entry that is not exactly {dtype, shape, data_offsets}."""


class UnknownDtype(CheckpointRefused):
    """An element type that this reader does not know."""

    remedy = "convert the file to one of the listed types; nothing is read by guesswork"


class ShapeInvalid(CheckpointRefused):
    """Dimensions that are not a list of integers from 0 to 2^63 - 1, or too many of them, or too large a product."""


class OffsetsInvalid(CheckpointRefused):
    """Data offsets that are not two integers 0 <= begin <= end."""


class OffsetsBeyondFile(CheckpointRefused):
    """Data offsets that reach beyond the end of the file (as in a truncated download)."""

    remedy = "the download or the save was interrupted: fetch it again"


class ByteCountMismatch(CheckpointRefused):
    """Shape and element type need another number of bytes than the offsets span."""


class TensorsOverlap(CheckpointRefused):
    """Two tensors claim the same bytes."""


class GapBetweenTensors(CheckpointRefused):
    """Bytes that no tensor claims, before or between tensors: a place to hide a payload."""


class TrailingBytes(CheckpointRefused):
    """Bytes that no tensor claims, after the last tensor."""


class BooleanInvalid(CheckpointRefused):
    """A Boolean tensor with a byte that is neither 0 nor 1."""


# --- folders, indexes and shards ------------------------------------------------------------------------------------


class NoWeights(CheckpointRefused):
    """A folder without model.safetensors and without an index of shards."""

    remedy = "give the .safetensors file itself if it has another name"


class AmbiguousFolder(CheckpointRefused):
    """A folder in which a single file and an index of other files both claim to be the model."""

    remedy = "give the one you mean: the .safetensors file or the .index.json file"


class IndexInvalid(CheckpointRefused):
    """An index that is not {"weight_map": {tensor: file}}."""


class ShardOutsideFolder(CheckpointRefused):
    """An index entry that is no plain file name, and so may lead out of the folder."""


class ShardMissing(CheckpointRefused):
    """A file that the index names and the folder does not hold."""

    remedy = "the download is incomplete: fetch the missing shard"


class TensorMissing(CheckpointRefused):
    """A tensor that the index places in a shard that does not hold it."""

    remedy = "shards and index come from different saves: fetch all of them again"


class ShardMismatch(CheckpointRefused):
    """A shard that holds tensors which the index does not place there."""

    remedy = "shards and index come from different saves: fetch all of them again"


# --- families and roles ---------------------------------------------------------------------------------------------


class ConfigMissing(CheckpointRefused):
    """Weights without a configuration, so that nobody can say what they mean."""

    remedy = "open the folder that holds config.json, or pass config="


class ConfigInvalid(CheckpointRefused):
    """A configuration that lacks a figure, or gives one that cannot be."""

    remedy = _CONFIG


class UnknownFamily(CheckpointRefused):
    """A model type that no table describes; roles are never guessed."""

    remedy = "streaming works without a family; to name roles, describe the family as a manyheads.models.Table"


class UnexplainedNames(CheckpointRefused):
    """Tensors that the table of the family does not explain; roles are never guessed."""

    remedy = _CONFIG + ", and that no adapter, wrapper or quantiser renamed the weights"


class WeightsMissing(CheckpointRefused):
    """Tensors that the family and its configuration require and the checkpoint does not hold."""

    remedy = _CONFIG + ", and that the save is complete"


class WeightShapeMismatch(CheckpointRefused):
    """A weight whose shape contradicts the configuration."""

    remedy = _CONFIG


class TieBroken(CheckpointRefused):
    """Two weights that the configuration ties, stored twice with different values."""

    remedy = "set tie_word_embeddings to what was trained; readers disagree about which of the two counts"
