"""The trained model of the recovery lane: a GPT-2 of four layers on WikiText-2, character by character.

It is trained once, in about 300 CPU seconds, and kept beside the figures as two checkpoints: `early`, at three tenths
of the training, and `final`.
"""

import math
import os
import shutil
from pathlib import Path

from tests.acceptance._lane import ROOT

from manyheads.data.characters import read_characters

WIKITEXT = "../shared/data/wikitext-2/valid.txt"
KEPT = ROOT / ".acceptance" / "recovery-gpt2"
STEPS, EARLY, RATE, BATCH, LENGTH = 2400, 720, 2e-3, 16, 96


def trained_checkpoints(folder: Path = KEPT, text: str = WIKITEXT) -> dict[str, Path]:
    """Return the folders of the early and the final checkpoint; trains where they are absent."""
    found = {name: folder / name for name in ("early", "final")}
    if not all((path / "config.json").exists() for path in found.values()):
        train_gpt2(folder, ROOT / text)
    return found


def train_gpt2(folder: Path, text: Path) -> None:
    """Train with AdamW, a warm-up of 60 steps and half a cosine; prints the loss on the held-out tenth of the text."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.set_num_threads(1)
    torch.manual_seed(0)
    vocabulary, (training, validation) = read_characters(text)
    config = GPT2Config(
        vocab_size=len(vocabulary),
        n_positions=128,
        n_embd=128,
        n_layer=4,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05, betas=(0.9, 0.98))
    draws = torch.Generator().manual_seed(1)

    def batch(tokens) -> torch.Tensor:
        starts = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=draws).tolist()
        return torch.stack([torch.from_numpy(tokens[start : start + LENGTH]).long() for start in starts])

    for step in range(STEPS):
        cosine = 0.5 * (1 + math.cos(math.pi * step / STEPS))
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 60) * (0.05 + 0.95 * cosine)
        windows = batch(training)
        loss = model(input_ids=windows, labels=windows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step + 1 == EARLY:
            _keep(model, folder / "early")
        if (step + 1) % 200 == 0:
            print(f"step {step + 1} of {STEPS}: {loss.item():.3f} nat", flush=True)
    with torch.no_grad():
        held = [model(input_ids=(windows := batch(validation)), labels=windows).loss.item() for _ in range(30)]
    print(f"held out: {sum(held) / len(held):.3f} nat a character", flush=True)
    _keep(model, folder / "final")


def _keep(model, path: Path) -> None:
    """Write a checkpoint beside its place and rename it, so that a lane that is killed leaves no half of one."""
    part = path.with_name(path.name + ".part")
    model.save_pretrained(part)
    shutil.rmtree(path, ignore_errors=True)
    os.replace(part, path)
