"""Weights of checkpoints: memory on the Pythia-410M shape, accuracy of the stable rank, faults of series named."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.numpy
from tests.acceptance._lane import Figure, Measured

from manyheads.probe import verify_checkpoints as verify

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
SIZES |= {"vocab_size": 50304}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
CHILD = """
import hashlib, json, sys, time

def kilobytes(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

bare = kilobytes("VmRSS")
import xarray, scipy.linalg
from manyheads.models.checkpoints.checkpoint import Checkpoint
from manyheads.probe import weight_spectra
path, loaded = sys.argv[1], sys.argv[2] == "loaded"
open("/proc/self/clear_refs", "w").write("5")
before, start = kilobytes("VmRSS"), time.process_time()
if loaded:
    import safetensors.numpy
    arrays = safetensors.numpy.load_file(path + "/model.safetensors")
    Checkpoint.tensor = lambda self, name, rows=None: arrays[name] if rows is None else arrays[name][rows]
    Checkpoint.stored = lambda self, name: arrays[name]
found = weight_spectra(path)
cpu, peak = time.process_time() - start, kilobytes("VmHWM")
digest = hashlib.sha256(b"".join(found[name].values.tobytes() for name in sorted(found.data_vars))).hexdigest()
print(json.dumps({"growth": 1024 * (peak - before), "above": 1024 * (peak - bare), "cpu": cpu, "digest": digest,
                  "matrices": found.sizes["matrix"]}))
"""
"""Measure the weights of a folder, read tensor by tensor or loaded whole; print memory, CPU time and a digest."""


def write_checkpoint(folder: Path, seed: int) -> int:
    """Save a random model; return the number of its parameters."""
    import torch
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(seed)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES))
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def memory(folder: Path, seed: int) -> Measured:
    """Measure a checkpoint tensor by tensor and loaded whole, in processes of their own."""
    count = write_checkpoint(folder, seed)
    found = {}
    for way in ("streamed", "loaded"):
        command = [sys.executable, "-c", CHILD, str(folder), way]
        done = subprocess.run(command, env={**os.environ, **ONE_THREAD}, stdout=subprocess.PIPE, check=True, text=True)
        found[way] = json.loads(done.stdout.splitlines()[-1])
    (folder / "model.safetensors").unlink()
    streamed, loaded = found["streamed"], found["loaded"]
    same = streamed["digest"] == loaded["digest"]
    extent = (
        f"{count / 1e6:.0f}M parameters, {streamed['matrices']} matrices, {streamed['cpu']:.0f} CPU s on one thread; "
        f"{streamed['growth'] / 1e6:.0f} MB above the process with its libraries loaded; loaded whole "
        f"{loaded['growth'] / 1e6:.0f} MB, results {'identical' if same else 'DIFFERENT'}"
    )
    figure = f"{streamed['above'] / 1e6:.0f} MB"
    return Measured(figure, extent, str(seed), same and streamed["above"] <= 150e6)


def stable_rank_accuracy(folder: Path, seeds: int) -> Measured:
    """Compare the stable rank of 2048 x 512 with float64 singular values, and its time with theirs in float32."""
    import torch

    from manyheads.spectra import stable_rank

    torch.set_num_threads(1)
    errors, ratios = [], []
    for seed in range(seeds):
        matrix = np.random.default_rng(seed).standard_normal((2048, 512)).astype(np.float32)
        tensor = torch.from_numpy(matrix)
        start = time.process_time()
        found = stable_rank(matrix)
        between = time.process_time()
        torch.linalg.svdvals(tensor)
        times = between - start, time.process_time() - between
        squares = np.linalg.svd(matrix.astype(float), compute_uv=False) ** 2
        exact = squares.sum() / squares[0]
        assert found.lower <= exact <= found.upper
        errors.append(abs(found.value / exact - 1))
        ratios.append(times[1] / times[0])
    ratio = statistics.median(ratios)
    extent = f"2048 x 512, Gaussian; CPU time of torch.linalg.svdvals in float32 is {ratio:.1f} times ours"
    return Measured(f"{max(errors):.1e} relative", extent, f"0-{seeds - 1}", max(errors) <= 1e-6)


def train_series(folder: Path, seed: int, steps: int, every: int) -> list[Path]:
    """Train a GPT-2 of three layers on text; save it every so many steps, beginning with the initialization."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from manyheads.data import load_text

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    text = torch.tensor(list(load_text().content.encode()), dtype=torch.long)
    sizes = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    folders = []
    for step in range(steps + 1):
        if step % every == 0:
            folders.append(folder / f"step{step}")
            model.save_pretrained(folders[-1])
        starts = torch.randint(0, len(text) - 64, (8,))
        windows = torch.stack([text[start : start + 64] for start in starts])
        optimizer.zero_grad()
        model(windows, labels=windows).loss.backward()
        optimizer.step()
    return folders


def _swap(folders: list[Path]) -> None:
    files = [folders[place] / "model.safetensors" for place in (3, 4)]
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, contents[::-1], strict=True):
        file.write_bytes(content)


def _duplicate(folders: list[Path]) -> None:
    shutil.copy(folders[-1] / "model.safetensors", folders[4] / "model.safetensors")


def _truncate(folders: list[Path]) -> None:
    file = folders[4] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _remove(folders: list[Path]) -> None:
    (folders[4] / "model.safetensors").unlink()


def _change(folders: list[Path], change: Callable[[dict[str, np.ndarray]], None]) -> None:
    file = folders[4] / "model.safetensors"
    arrays = safetensors.numpy.load_file(file)
    change(arrays)
    safetensors.numpy.save_file(arrays, file, {"format": "pt"})


def _interchange(arrays: dict[str, np.ndarray]) -> None:
    first, second = (f"transformer.h.{layer}.mlp.c_fc.weight" for layer in (0, 2))
    arrays[first], arrays[second] = arrays[second].copy(), arrays[first].copy()


def _half(arrays: dict[str, np.ndarray]) -> None:
    arrays.update({name: array.astype(np.float16) for name, array in arrays.items()})


def _break(arrays: dict[str, np.ndarray]) -> None:
    arrays["transformer.h.1.attn.c_attn.weight"][3, 5] = np.nan


FAULTS: dict[str, tuple[Callable[[list[Path]], None], str]] = {
    "steps interchanged": (_swap, "order"),
    "final weights at another step": (_duplicate, "duplicate"),
    "truncated file": (_truncate, "file"),
    "missing file": (_remove, "file"),
    "matrices of two layers interchanged": (lambda folders: _change(folders, _interchange), "interchanged tensors"),
    "half precision": (lambda folders: _change(folders, _half), "dtype"),
    "one NaN": (lambda folders: _change(folders, _break), "not finite"),
}
"""Fault of a series of checkpoints → what makes it, and the kind of the finding that names it."""


def verification(folder: Path, seeds: int, steps: int, every: int) -> Measured:
    """Train models, verify the clean series, and each with one fault; another seed's checkpoint is a fault as well."""
    clean, found, others = 0, dict.fromkeys([*FAULTS, "checkpoint of another seed"], 0), []
    for seed in range(seeds):
        folders = train_series(folder / f"seed{seed}", seed, steps, every)
        clean += len(verify(folders).findings)
        for name, (fault, kind) in FAULTS.items():
            copy = folder / "faulty"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folders[0].parent, copy)
            faulty = [copy / each.name for each in folders]
            fault(faulty)
            kinds = [finding.kind for finding in verify(faulty).findings]
            found[name] += kind in kinds
            others += [f"{name}: {each}" for each in kinds if each != kind]
    for seed in range(seeds):
        folders = [folder / f"seed{seed}" / f"step{step}" for step in range(0, steps + 1, every)]
        shutil.copy(folder / f"seed{(seed + 1) % seeds}" / f"step{4 * every}/model.safetensors", folders[4])
        found["checkpoint of another seed"] += "apart" in [finding.kind for finding in verify(folders).findings]
    hits = ", ".join(f"{name} {count} of {seeds}" for name, count in found.items())
    beside = f"; beside them {', '.join(sorted(set(others)))}" if others else ""
    extent = f"{hits}{beside}; {steps // every + 1} checkpoints each"
    figure = (
        f"{clean} false findings in {seeds} clean series, {sum(found.values())} of {seeds * len(found)} faults named"
    )
    return Measured(figure, extent, f"0-{seeds - 1}", clean == 0 and all(count == seeds for count in found.values()))


FIGURES = [
    Figure(
        "weights-memory",
        "weights of a checkpoint of the Pythia-410M shape are measured tensor by tensor",
        "at most 150 MB above a bare interpreter, libraries included; identical to loading everything",
        memory,
        {"seed": 0},
    ),
    Figure(
        "stable-rank",
        "the stable rank of 2048 x 512 with bounds that hold",
        "within 1e-6 of float64 singular values",
        stable_rank_accuracy,
        {"seeds": 5},
    ),
    Figure(
        "verification",
        "faults of checkpoint series of trained models are named, and clean series have no finding",
        "no false finding, every fault named",
        verification,
        {"seeds": 3, "steps": 140, "every": 20},
    ),
]
