"""Alterations of checkpoint series of trained models: named where they show, and clean series without a finding.

Models of ten families, from initialization or later, by AdamW or by Muon on matrices, 1 to 20 steps apart, at constant
rates, with a warm-up or decaying to zero, part of the layers frozen, saved in one of three types, in shards or not.
"""

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
from tests.acceptance._lane import Figure, Measured
from tests.probe.families import build
from tests.probe.trainings import save_quietly

from manyheads.models import open_checkpoint
from manyheads.probe import verify_checkpoints as verify

Array = np.ndarray[Any, Any]
FAMILIES = ("gpt2", "gpt_neox", "opt", "llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt_oss", "olmo2")
HEADS, LENGTH = 4, 16


def train(folder: Path, seed: int) -> list[Path]:
    """Train a model by a recipe drawn from the seed; return its checkpoints."""
    import torch

    rng = np.random.default_rng(seed)
    count, gap = int(rng.choice([2, 3, 4, 6, 8])), int(rng.choice([1, 4, 10, 20]))
    first, rate, schedule = int(rng.choice([0, 0, 30])), float(rng.choice([3e-4, 1e-3, 3e-3])), rng.integers(4)
    frozen, dtype = (
        rng.choice(["none", "none", "layer", "half"]),
        rng.choice(["float32", "float32", "bfloat16", "float16"]),
    )
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = build(FAMILIES[seed % len(FAMILIES)], seed, factor=1.0).train()
    text = torch.tensor(list(Path(__file__).read_bytes()), dtype=torch.long) % 29
    matrices = [
        each for name, each in model.named_parameters() if each.ndim == 2 and not re.search("emb|wte|wpe|head", name)
    ]
    by_muon = matrices if seed // len(FAMILIES) % 3 == 2 else []
    rest = [each for each in model.parameters() if not any(each is other for other in by_muon)]
    optimizers = [torch.optim.AdamW(rest, rate, weight_decay=0.1)]
    optimizers += [torch.optim.Muon(by_muon, 10 * rate)] if by_muon else []
    rates = [[group["lr"] for group in each.param_groups] for each in optimizers]
    steps, folders = [first + gap * number for number in range(count)], []
    for step in range(steps[-1] + 1):
        if step in steps:
            folders.append(folder / f"step{step}")
            saved = (
                model if dtype == "float32" else build(FAMILIES[seed % len(FAMILIES)], seed).to(getattr(torch, dtype))
            )
            if saved is not model:
                saved.load_state_dict(model.state_dict())
            save_quietly(saved, folders[-1], **({"max_shard_size": "12KB"} if seed % 2 else {}))
        still = frozen == "layer" or (frozen == "half" and step < steps[count // 2])
        for name, weight in model.named_parameters():
            weight.requires_grad_(not (still and ".0." in name))
        starts = torch.randint(0, len(text) - LENGTH, (8,))
        windows = torch.stack([text[start : start + LENGTH] for start in starts])
        model(windows, labels=windows).loss.backward()
        done = step / max(steps[-1], 1)
        factor = (1.0, min(1.0, 3 * done + 0.01), 1 - done, (1 + np.cos(np.pi * done)) / 2)[schedule]
        for optimizer, usual in zip(optimizers, rates, strict=True):
            for group, each in zip(optimizer.param_groups, usual, strict=True):
                group["lr"] = each * factor
            optimizer.step()
            optimizer.zero_grad()
    return folders


def _flip(array: Array, rng: np.random.Generator) -> Array:
    bits = array.reshape(-1).view({2: np.uint16, 4: np.uint32}[array.itemsize])
    low = {"float32": 23, "bfloat16": 7, "float16": 10}[array.dtype.name]
    bits[rng.integers(array.size)] ^= bits.dtype.type(1 << int(rng.integers(low, 8 * array.itemsize - 1)))
    return array


def _heads(array: Array, rng: np.random.Generator) -> Array:
    order = np.roll(np.arange(HEADS), int(rng.integers(1, HEADS)))
    return array.reshape(HEADS, -1, array.shape[1])[order].reshape(array.shape)


def _interleave(array: Array, rng: np.random.Generator) -> Array:
    return array.reshape(HEADS, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def _eight_bits(array: Array, rng: np.random.Generator) -> Array:
    """Round to 255 levels by a scale of the tensor, of every row, or of every column of 16 entries or more."""
    values = array.astype(float)
    axes = (None, 1, 0)[: 3 if len(array) >= 16 else 2]
    steps = np.abs(values).max(axis=axes[rng.integers(len(axes))], keepdims=True) / 127
    return np.rint(values / np.maximum(steps, 1e-30)) * steps


QUERY, INNER = r"(q_proj|attention\.query_key_value)\.weight$", r"(mlp\.\w+|fc[12])\.weight$"
GAIN, ANY = r"(norm|ln_\w+|layer_?norm)\.weight$", r"\.weight$"
KINDS: dict[str, tuple[str, Callable[[Array, np.random.Generator], Array]]] = {
    "exponent bit": (ANY, _flip),
    "heads in another order": (QUERY, _heads),
    "rotary order": (QUERY, _interleave),
    "negated": (INNER, lambda array, rng: -array),
    "zeroed": (INNER, lambda array, rng: 0 * array),
    "transposed": (ANY, lambda array, rng: array.T if array.shape[0] == array.shape[-1] else array),
    "gain shifted by one": (GAIN, lambda array, rng: array + rng.choice([-1, 1])),
    "doubled or halved": (INNER, lambda array, rng: array * rng.choice([0.5, 2])),
    "shifted by its std": (INNER, lambda array, rng: array + array.astype(float).std()),
    "rounded": (INNER, lambda array, rng: array.astype(ml_dtypes.bfloat16)),
    "rounded to int8": (INNER, _eight_bits),
}
"""Kind of alteration → which tensors, and what happens to one of them."""


def alter(folder: Path, kind: str, rng: np.random.Generator) -> tuple[str, Array, Array] | None:
    """Alter one tensor of a checkpoint; return its name and its values before and after, or None."""
    pattern, function = KINDS[kind]
    checkpoint = open_checkpoint(folder)
    names = [name for name in checkpoint.names if re.search(pattern, name) and checkpoint.entry(name).size >= 8]
    if not names:
        return None
    name = str(rng.choice(names))
    before = checkpoint.tensor(name)
    after = np.ascontiguousarray(function(before.copy(), rng)).astype(before.dtype)
    if after.shape != before.shape or np.array_equal(before, after):
        return None
    file = checkpoint.file_of[name].path
    safetensors.numpy.save_file({**safetensors.numpy.load_file(file), name: after}, file, {"format": "pt"})
    return name, before, after


def shows(kind: str, before: Array, after: Array, beside: list[Array]) -> bool:
    """Tell whether an alteration is large beside what the training changed up to each neighbour."""
    before, after = before.astype(float), after.astype(float)
    if kind.startswith("rounded"):
        return True
    for other in beside:
        moved = other.astype(float) - before
        if kind == "exponent bit":
            if np.abs(after - before).max() < 30 * max(np.abs(moved).max() / 5, np.sqrt(np.mean(moved**2))):
                return False
        elif np.linalg.norm(after - before) < 3 * np.linalg.norm(moved):
            return False
    return bool(beside)


def alterations(folder: Path, seeds: int, draws: int) -> Measured:
    """Verify clean series, and each kind of alteration at the first, an inner and the last checkpoint."""
    false, found, shown, beyond = 0, Counter[str](), Counter[str](), Counter[str]()
    series = [train(folder / f"seed{seed}", seed) for seed in range(seeds)]
    for folders in series:
        false += bool(verify(folders).findings)
    for kind in KINDS:
        rng, tried = np.random.default_rng(len(kind)), 0
        while shown[kind] < draws and tried < 20 * draws:
            tried += 1
            folders = series[int(rng.integers(seeds))]
            place = int(rng.choice([0, int(rng.integers(len(folders))), len(folders) - 1]))
            copy = folder / "altered"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(folders[0].parent, copy)
            altered = [copy / each.name for each in folders]
            beside = [open_checkpoint(folders[at]) for at in (place - 1, place + 1) if 0 <= at < len(folders)]
            if (done := alter(altered[place], kind, rng)) is None:
                continue
            name, before, after = done
            named = any(re.search(rf"\b{altered[place].name}\b", each.where) for each in verify(altered).findings)
            if shows(kind, before, after, [each.tensor(name) for each in beside]):
                shown[kind] += 1
                found[kind] += named
            else:
                beyond[kind] += named
    hits = ", ".join(f"{kind} {found[kind]} of {shown[kind]}" for kind in KINDS)
    extent = f"{hits}; of those that are small beside the training {sum(beyond.values())} more were named"
    figure = f"{false} of {seeds} clean series with a finding, {sum(found.values())} of {sum(shown.values())} named"
    passed = not false and found == shown and min(shown.values()) >= draws
    return Measured(figure, extent, f"0-{seeds - 1}", passed)


FIGURES = [
    Figure(
        "alterations",
        "altered tensors and entries of checkpoints of trained models are named, and clean series have no finding",
        "no false finding; every alteration of three times the training's change, or an entry of 30 times, is named",
        alterations,
        {"seeds": 60, "draws": 20},
    ),
]
