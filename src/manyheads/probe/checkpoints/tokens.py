"""Token batches: token ids from an array file, or a text cut into sequences by the tokenizer beside a checkpoint."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyheads._extras import require
from manyheads._namespaces import Array
from manyheads.data import load_text
from manyheads.errors import FileRefused, UsageError, check_integer
from manyheads.models.checkpoints.checkpoint import PICKLES
from manyheads.models.checkpoints.loading import quiet_transformers

Tokens = NDArray[np.int64]

SEQUENCES, LENGTH = 8, 512
CHARACTERS = 32  # of a text that are read for each token: more than any tokenizer needs on average
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
POSITIONS = ("max_position_embeddings", "n_positions")


def read_tokens(
    path: Path | str,
    checkpoint: Path | str,
    *,
    length: int | None = None,
    sequences: int | None = None,
    tokenizer: Path | str | None = None,
) -> Tokens:
    """Read a batch of token ids, (sequences, length).

    A .npy file, or a .npz file of one array, holds (sequences, length), or one stream of tokens, which is cut. Any
    other file is a text in UTF-8, for the tokenizer of the checkpoint or in another folder: tokenized without special
    tokens and cut, each sequence begins and ends with those that the tokenizer adds. Length and sequences are at most
    those of a two-dimensional array; otherwise 512, or what the model takes, and 8 by default, or as many as there are.
    """
    for name, value, least in (("length", length, 2), ("sequences", sequences, 1)):
        if value is not None:
            check_integer(name, value, least)
    path = Path(path)
    if path.suffix in PICKLES:
        raise FileRefused(f"{path} may be pickled, which is never read: store the ids with numpy.save, as .npy")
    if path.suffix in (".npy", ".npz"):
        ids = _read_array(path)
        if ids.ndim == 2:
            return check_tokens(ids[:sequences, :length])
        return _cut(ids, path, length or _default_length(checkpoint), sequences or SEQUENCES, ([], []))
    content = load_text(path).content
    length, sequences = length or _default_length(checkpoint), sequences or SEQUENCES
    ids, around = _tokenize(content[: CHARACTERS * length * sequences], Path(tokenizer or checkpoint))
    return _cut(ids, path, length, sequences, around)


def check_tokens(tokens: Array) -> Tokens:
    """Return token ids as an array (sequences, length); one sequence may be given without its axis."""
    ids = np.asarray(tokens.cpu() if hasattr(tokens, "cpu") else tokens)
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise UsageError(f"tokens of shape {ids.shape} and type {ids.dtype}: expected integers (sequences, length)")
    ids = np.atleast_2d(ids).astype(np.int64)
    if ids.shape[0] < 1 or ids.shape[1] < 2 or ids.min() < 0:
        raise UsageError(f"tokens of shape {ids.shape}: expected a sequence of two or more ids, none of them negative")
    return ids


def check_fit(tokens: Tokens, config: Mapping[str, object]) -> None:
    """Refuse token ids beyond a model's vocabulary, and sequences beyond its positions."""
    vocabulary, positions = config.get("vocab_size"), _positions(config)
    if isinstance(vocabulary, int) and tokens.max() >= vocabulary:
        raise UsageError(
            f"token id {tokens.max()} is outside the model's vocabulary of {vocabulary}: the tokens are of another "
            "tokenizer; give those of this model, or a text"
        )
    if positions is not None and tokens.shape[1] > positions:
        raise UsageError(
            f"sequences of {tokens.shape[1]} tokens, the model has {positions} positions: cut them, with --length "
            f"{positions} or less"
        )


def digest_tokens(tokens: Tokens) -> str:
    """Return the sha256 of a batch of token ids, its shape included."""
    return hashlib.sha256(repr(tokens.shape).encode() + np.ascontiguousarray(tokens, "<i8").tobytes()).hexdigest()


def _positions(config: Mapping[str, object]) -> int | None:
    return next((value for name in POSITIONS if isinstance(value := config.get(name), int)), None)


def _default_length(checkpoint: Path | str) -> int:
    from manyheads.models.checkpoints.files import read_json

    file = Path(checkpoint) / "config.json"
    positions = _positions(read_json(file, follow_links=True)) if file.is_file() else None
    return min(LENGTH, positions or LENGTH)


def _read_array(path: Path) -> np.ndarray:
    try:
        with path.open("rb") as file:
            found: Any = np.load(file, allow_pickle=False)
            if path.suffix == ".npz":
                if len(found.files) != 1:
                    names = ", ".join(found.files) or "none"
                    raise FileRefused(f"{path} holds several arrays ({names}): store one, with numpy.save")
                found = found[found.files[0]]
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; give token ids (.npy) or a text") from None
    except (ValueError, OSError, EOFError) as error:
        raise FileRefused(f"{path} holds no array of numbers ({error}): store token ids with numpy.save") from error
    if found.dtype.kind not in "iu" or found.ndim not in (1, 2):
        raise FileRefused(
            f"{path} holds {found.dtype} of shape {found.shape}: expected integers, (sequences, length) or one stream"
        )
    return found


def _tokenize(content: str, folder: Path) -> tuple[Tokens, tuple[list[int], list[int]]]:
    """Return the ids of a text without special tokens, and the special ones in front of and behind a sequence."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise UsageError(
            f"{folder} holds no tokenizer ({', '.join(TOKENIZERS[:3])}, ...): give its folder with --tokenizer, or "
            "token ids as a .npy file"
        )
    transformers: Any = require("transformers")
    with quiet_transformers():
        try:
            options = {"local_files_only": True, "trust_remote_code": False}
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        except (ValueError, OSError, KeyError, ImportError, TypeError) as error:
            why = str(error)[:200]
            raise UsageError(f"the tokenizer in {folder} cannot be loaded ({why}): give ids as a .npy file") from error
        ids = np.array(tokenizer(content, add_special_tokens=False)["input_ids"], dtype=np.int64)
        special = tokenizer("")["input_ids"]
    first = (tokenizer.bos_token_id, tokenizer.cls_token_id)
    return ids, ([each for each in special if each in first], [each for each in special if each not in first])


def _cut(ids: np.ndarray, path: Path, length: int, sequences: int, around: tuple[list[int], list[int]]) -> Tokens:
    """Cut a stream of tokens into sequences, each between the special tokens."""
    inner = length - sum(map(len, around))
    count = min(sequences, len(ids) // inner) if inner > 0 else 0
    if not count:
        raise UsageError(
            f"{path} gives {len(ids)} tokens, too few for one sequence of {length}: give more, or a smaller --length"
        )
    rows = ids[: count * inner].reshape(count, inner)
    front, back = (np.broadcast_to(np.array(each, np.int64), (count, len(each))) for each in around)
    return check_tokens(np.hstack([front, rows, back]))
