"""Small trainings on real text with faults that begin at a known step, their probes on a fixed batch and their updates.

GPT-2 with 3 layers of 4 heads, width 48, sequences of 64 bytes of wikitext-2, AdamW or Muon; 320 steps of 8 sequences,
probed every second step on 4 sequences that are not trained on. Faults begin at step 160.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xarray as xr

LAYERS, HEADS, WIDTH, LENGTH, BATCH = 3, 4, 48, 64, 8
STEPS, FAULT, EVERY = 320, 160, 2
WIKITEXT = {"valid": "../shared/data/wikitext-2/valid.txt", "test": "../shared/data/wikitext-2/test.txt"}
FIGURES = ("entropy", "max_logit", "first_mass")
SPECTRA = ("stable_rank", "frobenius")
KEPT = ("step", "layer", "head", "matrix", "head_matrix")


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: peak learning rate, its schedule, optimizer, steps of warm-up, text, width.

    Schedules: "constant", "cosine" to zero, "wsd" (constant, then linear to zero in the last fifth).
    """

    learning_rate: float = 3e-3
    schedule: str = "constant"
    optimizer: str = "adamw"
    warmup: int = 40
    text: str = "valid"
    width: int = WIDTH

    def factor(self, step: int) -> float:
        """Return the learning rate of a step over its peak."""
        later = {
            "constant": 1.0,
            "cosine": 0.5 * (1 + math.cos(math.pi * step / STEPS)),
            "wsd": min(1.0, 5 * (1 - step / STEPS)),
        }
        return min(1, (step + 1) / self.warmup) * later[self.schedule]


def train(folder: Path, seed: int, recipe: Recipe, fault: str = "none") -> tuple[xr.Dataset, xr.Dataset]:
    """Return probes (step, layer, head), with the losses, and updates of one training; stored, to be trained once.

    Faults: "rate10" (learning rate times 10), "head8" (W_Q of head 0 of layer 1 times 8, once), "drift2" (W_Q and W_K
    of layer 1 grow by 2% a step), "shuffled" (the bytes of every sequence in another order), "zeroed" (W_Q of head 0
    of layer 1 is set to zero, once), "frozen" (its gradient is zero), "dropped" (all gradients of layer 1 are zero),
    "rounded" (all weights are rounded to bfloat16 after every step), "repeated" (every batch is that of step 160).
    """
    name = "-".join(map(str, (*vars(recipe).values(), fault, seed)))
    paths = [folder / "trainings" / f"{name}-{kind}.nc" for kind in ("probes", "updates")]
    if not paths[-1].exists():
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        for path, dataset in zip(paths, _train(seed, recipe, fault), strict=True):
            dataset.to_netcdf(path.with_suffix(".part"), engine="scipy")
            path.with_suffix(".part").rename(path)
    probes, updates = (xr.load_dataset(path, engine="scipy") for path in paths)
    return probes, updates


def _train(seed: int, recipe: Recipe, fault: str) -> tuple[xr.Dataset, xr.Dataset]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from manyheads.probe import AttentionRecorder, head_spectra
    from manyheads.probe.live.updates import UpdateRecorder

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    batches = torch.Generator().manual_seed(1000 + seed)
    data = torch.tensor(list(Path(WIKITEXT[recipe.text]).read_bytes()), dtype=torch.long)
    fixed, data = data[: 4 * LENGTH].view(4, LENGTH), data[4 * LENGTH :]
    sizes = {"n_embd": recipe.width, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH, "vocab_size": 256}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))
    optimizers = _optimizers(model, recipe)
    batch = {"input_ids": fixed, "use_cache": False}
    recorder = AttentionRecorder(model, LENGTH, share=None, every=EVERY, batch=batch, figures=FIGURES)
    updates = UpdateRecorder(model, 100, share=None, every=EVERY, spectra=False)
    for optimizer in optimizers:
        updates.watch(optimizer)
    losses, spectra = [], []
    for step in range(STEPS):
        faulty = step >= FAULT
        factor = recipe.factor(step) * (10 if faulty and fault == "rate10" else 1)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group.setdefault("peak", group["lr"]) * factor
        start = torch.randint(0, len(data) - LENGTH, (BATCH,), generator=batches)
        if not faulty or fault != "repeated" or step == FAULT:
            tokens = torch.stack([data[at : at + LENGTH] for at in start])
        if faulty and fault == "shuffled":
            tokens = tokens[:, torch.randperm(LENGTH, generator=batches)]
        with torch.no_grad():
            _disturb(model, step, fault)
        if step % EVERY == 0:
            spectra.append(head_spectra(model).sel(head_matrix="query-key", drop=True)[[*SPECTRA]])
        with recorder.step(step):
            loss = model(tokens, labels=tokens).loss
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if faulty:
            _lose_gradients(model, fault)
        updates.begin(step)
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    curves = recorder.dataset()[[*FIGURES, "entropy_uniform"]]
    ranks = xr.concat(spectra, curves.step, coords="minimal", compat="override")
    curves = curves.assign({name: (ranks[name].dims, ranks[name].values) for name in SPECTRA})
    curves["loss"] = "update", losses
    found = [each.drop_vars(set(each.coords) - set(KEPT)) for each in (curves, updates.dataset())]
    for dataset in found:
        for variable in dataset.variables.values():
            variable.attrs = {}
    return found[0], found[1]


def _optimizers(model: Any, recipe: Recipe) -> list[Any]:
    import torch

    if recipe.optimizer == "adamw":
        return [torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=0.01)]
    matrices = [each for name, each in model.transformer.h.named_parameters() if each.ndim == 2]
    others = [each for each in model.parameters() if not any(each is matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=10 * recipe.learning_rate, weight_decay=0.01)
    return [muon, torch.optim.AdamW(others, recipe.learning_rate, weight_decay=0.01)]


def _disturb(model: Any, step: int, fault: str) -> None:
    """Change weights, mostly those of layer 1: queries come first in `c_attn`, whose weight is (in, out)."""
    joint = model.transformer.h[1].attn.c_attn
    width = joint.weight.shape[0]
    head, queries_and_keys = slice(0, width // HEADS), slice(0, 2 * width)
    columns, factor = {"head8": (head, 8), "zeroed": (head, 0), "drift2": (queries_and_keys, 1.02)}.get(
        fault, (head, 1)
    )
    if step == FAULT or (step > FAULT and fault == "drift2"):
        joint.weight[:, columns] *= factor
        joint.bias[columns] *= factor
    if step > FAULT and fault == "rounded":
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())


def _lose_gradients(model: Any, fault: str) -> None:
    block = model.transformer.h[1]
    if fault == "dropped":
        for parameter in block.parameters():
            parameter.grad.zero_()
    elif fault == "frozen":
        columns = slice(0, block.attn.c_attn.weight.shape[0] // HEADS)
        block.attn.c_attn.weight.grad[:, columns] = 0
        block.attn.c_attn.bias.grad[columns] = 0
