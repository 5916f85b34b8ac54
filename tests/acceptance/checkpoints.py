"""Files from outside: no bytes bring the reader down, and no file is too large to be read."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import safetensors.numpy
from tests.acceptance._lane import Figure, Measured
from tests.models.checkpoints.test_header import VALID, as_bytes, check, mutate
from tests.models.checkpoints.test_tensor_file import STREAMING

from manyheads.errors import FileRefused
from manyheads.models import open_checkpoint

KINDS = ("flip", "insert", "delete", "copy", "cut", "length")


def tensor_files(folder: Path, count: int, seed: int) -> Measured:
    """Mutate the bytes of a file: refused by name, or read as the format's own library reads it, in bounded memory."""
    rng, path = np.random.default_rng(seed), folder / "model.safetensors"
    whole, read, faults = as_bytes(VALID), 0, []
    for _ in range(count):
        content = mutate(whole, _mutations(rng, len(whole)))
        try:
            read += check(path, content)
        except Exception as error:
            faults.append(f"{content!r}: {type(error).__name__}: {error}")
    print(*faults[:10], sep="\n")
    extent = f"{read} read as the library reads them, {count - read - len(faults)} refused by name"
    return Measured(f"{len(faults)} faults in {count} files", extent, str(seed), not faults)


def folders(folder: Path, count: int, seed: int) -> Measured:
    """Mutate the index and the configuration of a checkpoint in shards: refused by name, or the arrays are the same."""
    rng = np.random.default_rng(seed)
    arrays = {f"w{number}": np.arange(number + 1, dtype=np.float32) for number in range(4)}
    for number in range(2):
        shard = {name: arrays[name] for name in sorted(arrays)[2 * number : 2 * number + 2]}
        safetensors.numpy.save_file(shard, folder / f"model-{number}.safetensors")
    names = {name: f"model-{int(name[1]) // 2}.safetensors" for name in arrays}
    index = {"metadata": {"total_size": sum(array.nbytes for array in arrays.values())}, "weight_map": names}
    texts = {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": json.dumps({"model_type": "gpt2", "n_embd": 4, "n_head": 2, "n_layer": 1}).encode(),
    }
    for name, text in texts.items():
        (folder / name).write_bytes(text)
    read, faults = 0, []
    for number in range(count):
        name = sorted(texts)[number % 2]
        content = mutate(texts[name], _mutations(rng, len(texts[name])))
        (folder / name).write_bytes(content)
        try:
            checkpoint = open_checkpoint(folder)
            found = dict(checkpoint.stream())
            if found.keys() != arrays.keys() or any((found[key] != arrays[key]).any() for key in arrays):
                faults.append(f"{name}: {content!r}: read as {sorted(found)}")
            read += 1
        except FileRefused:
            pass
        except Exception as error:
            faults.append(f"{name}: {content!r}: {type(error).__name__}: {error}")
        (folder / name).write_bytes(texts[name])
    print(*faults[:10], sep="\n")
    extent = f"{read} read to the same arrays, {count - read} refused by name"
    return Measured(f"{len(faults)} faults in {count} folders", extent, str(seed), not faults)


def _mutations(rng: np.random.Generator, size: int) -> list[tuple[str, int, bytes]]:
    # Four of five are single flips and other small things: what is far from valid is refused at once.
    kinds = rng.choice(KINDS, size=int(rng.integers(1, 4)), p=[0.5, 0.2, 0.1, 0.05, 0.05, 0.1])
    return [(str(kind), int(rng.integers(size)), rng.bytes(int(rng.integers(1, 10)))) for kind in kinds]


def streaming(folder: Path, megabytes: int, tensors: int) -> Measured:
    """Stream a large file in a process of its own and fingerprint it; measure how far the process's peak rises."""
    path, size = folder / "model.safetensors", megabytes * 2**20 // tensors
    table, end = {}, 0
    for number in range(tensors):
        shape = [2048, size // 8192]
        table[f"w{number}"] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(table).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for number in range(tensors):
            file.write(np.full(size // 4, number, np.float32).tobytes())
    done = subprocess.run([sys.executable, "-c", STREAMING, path], stdout=subprocess.PIPE, check=True, text=True)
    growth, total = map(float, done.stdout.split())
    os.unlink(path)
    right = total == 2048 * sum(range(tensors))
    extent = f"{megabytes} MB in {tensors} tensors of {size / 2**20:.0f} MB, every one read and fingerprinted"
    return Measured(
        f"{growth / size:.2f} tensors ({growth / 2**20:.1f} MB)", extent, "none", right and growth < 1.5 * size
    )


FIGURES = (
    Figure(
        "tensor-files",
        "whatever its bytes, a safetensors file is refused by name or read as its own library reads it",
        "no other outcome, memory bounded by the file",
        tensor_files,
        {"count": 20_000, "seed": 0},
    ),
    Figure(
        "folders",
        "whatever the bytes of its index and configuration, a checkpoint is refused by name or read as it is",
        "no other outcome",
        folders,
        {"count": 6000, "seed": 0},
    ),
    Figure(
        "streaming",
        "a checkpoint is read tensor by tensor",
        "the peak rises by less than 1.5 tensors",
        streaming,
        {"megabytes": 512, "tensors": 32},
    ),
)
