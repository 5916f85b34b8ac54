"""Small trainings on real text with faults that are injected at a known step, and their probes on a fixed batch.

GPT-2 with 3 layers of 4 heads, width 48, sequences of 64 bytes of wikitext-2, AdamW or Muon; 320 steps of 8 sequences,
probed every second step on 4 sequences that are not trained on. Faults begin at step 160.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr

LAYERS, HEADS, WIDTH, LENGTH, BATCH = 3, 4, 48, 64, 8
STEPS, FAULT, EVERY = 320, 160, 2
WIKITEXT = {"valid": "../shared/data/wikitext-2/valid.txt", "test": "../shared/data/wikitext-2/test.txt"}
FIGURES = ("entropy", "max_logit", "first_mass")
SPECTRA = ("stable_rank", "frobenius")


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: peak learning rate, cosine or constant, optimizer, steps of warm-up, text, size."""

    learning_rate: float = 3e-3
    cosine: bool = False
    optimizer: str = "adamw"
    warmup: int = 40
    text: str = "valid"
    width: int = WIDTH


def train(folder: Path, seed: int, recipe: Recipe = Recipe(), fault: str = "none") -> xr.Dataset:
    """Return the probes of one training over (step, layer, head) and its loss; stored, so that it is trained once.

    Faults: "rate10" (learning rate times 10), "head8" (W_Q of head 0 of layer 1 times 8, once), "drift2" (W_Q and W_K
    of layer 1 grow by 2% a step), "shuffled" (the bytes of every sequence in another order).
    """
    name = "-".join(map(str, (*vars(recipe).values(), fault, seed)))
    path = folder / "trainings" / f"{name}.nc"
    if path.exists():
        return xr.load_dataset(path, engine="scipy")
    path.parent.mkdir(parents=True, exist_ok=True)
    curves = _train(seed, recipe, fault)
    curves.to_netcdf(path.with_suffix(".part"), engine="scipy")
    path.with_suffix(".part").rename(path)
    return curves


def _train(seed: int, recipe: Recipe, fault: str) -> xr.Dataset:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from manyheads.probe import head_spectra, record_attention

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    batches = torch.Generator().manual_seed(1000 + seed)
    data = torch.tensor(list(Path(WIKITEXT[recipe.text]).read_bytes()), dtype=torch.long)
    fixed, data = data[: 4 * LENGTH].view(4, LENGTH), data[4 * LENGTH :]
    sizes = {"n_embd": recipe.width, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH, "vocab_size": 256}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))
    optimizers = _optimizers(model, recipe)
    losses, probes, spectra = [], [], []
    for step in range(STEPS):
        factor = min(1, (step + 1) / recipe.warmup)
        factor *= 0.5 * (1 + math.cos(math.pi * step / STEPS)) if recipe.cosine else 1.0
        faulty = step >= FAULT
        if faulty and fault.startswith("rate"):
            factor *= float(fault.removeprefix("rate"))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("peak", group["lr"]) * factor
        start = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=batches)
        tokens = torch.stack([data[at : at + LENGTH] for at in start])
        if faulty and fault == "shuffled":
            tokens = tokens[:, torch.randperm(LENGTH, generator=batches)]
        _disturb(model, step, fault)
        loss = model(tokens, labels=tokens).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
        if step % EVERY == EVERY - 1:
            with torch.no_grad(), record_attention(model, rows=LENGTH, figures=(*FIGURES, "distance")) as record:
                model.transformer(fixed, use_cache=False)
            probes.append(
                record.dataset()[[*FIGURES, "entropy_uniform"]].drop_vars(("module", "attention", "key_heads"))
            )
            circuits = head_spectra(model).sel(head_matrix="query-key", drop=True)
            spectra.append(circuits[[*SPECTRA]].drop_vars(("module", "normalized")))
    steps = xr.Variable("step", np.arange(EVERY - 1, STEPS, EVERY))
    curves = xr.merge([xr.concat(probes, steps), xr.concat(spectra, steps)], combine_attrs="drop")
    curves = curves.assign(loss=("update", losses))
    for variable in curves.variables.values():
        variable.attrs = {}
    return curves


def _optimizers(model: Any, recipe: Recipe) -> list[Any]:
    import torch

    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=0.01)]
    matrices = [each for name, each in model.transformer.h.named_parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if not any(each is matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=10 * recipe.learning_rate, weight_decay=0.01)
    return [muon, torch.optim.AdamW(others, recipe.learning_rate, weight_decay=0.01)]


def _disturb(model: Any, step: int, fault: str) -> None:
    """Change weights of layer 1: queries come first in `c_attn`, whose weight is (in, out)."""
    import torch

    joint = model.transformer.h[1].attn.c_attn
    width = joint.weight.shape[0]
    if fault.startswith("head") and step == FAULT:
        columns, factor = slice(0, width // HEADS), float(fault.removeprefix("head"))
    elif fault.startswith("drift") and step >= FAULT:
        columns, factor = slice(0, 2 * width), 1 + float(fault.removeprefix("drift")) / 100
    else:
        return
    with torch.no_grad():
        joint.weight[:, columns] *= factor
        joint.bias[columns] *= factor
