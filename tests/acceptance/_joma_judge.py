"""Verdicts on the curves of GPT-2-style models that the Hugging Face Trainer trained, from the command line alone."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured

from manyheads.cli import main

WIKITEXT = "../shared/data/wikitext-2/valid.txt"
LENGTH, BATCH, HELD_OUT = 128, 4, 16


def judge_trainer_runs(folder: Path, rates: list[float], seeds: int, steps: int, every: int) -> Measured:
    """Train at several learning rates, measure the saved checkpoints, judge the curves beside the Trainer's losses."""
    text = np.frombuffer(Path(WIKITEXT).read_bytes(), dtype=np.uint8).astype(np.int64)
    held_out = text[-HELD_OUT * LENGTH :].reshape(HELD_OUT, LENGTH)
    np.save(folder / "tokens.npy", held_out[:4])
    stores, losses = [], []
    for rate in rates:
        for seed in range(seeds):
            run = folder / f"rate-{rate:g}-seed-{seed}"
            if not (run / f"checkpoint-{steps}").exists():
                _train(run, text[: -HELD_OUT * LENGTH], held_out, rate, seed, steps, every)
            stores.append(str(folder / f"{run.name}-probe"))
            losses.append(str(run / f"checkpoint-{steps}/trainer_state.json"))
            _command("probe", "attention", str(run), "--tokens", str(folder / "tokens.npy"), "--store", stores[-1])
    found = json.loads(_command("curves", "judge", *stores, "--losses", *losses, "--json"))
    shapes = [row for row in found["layers"] if row["shape"]]
    passed = len(shapes) == len(found["layers"]) == len(stores) * 4 * 2 and len(found["relations"]) == 4
    sentences = found["sentences"]
    return Measured(
        f"{len(shapes)} of {len(found['layers'])} curves judged, {len(found['relations'])} relations to the loss",
        f"{len(stores)} runs of {steps} steps, {len(rates)} learning rates: {'; '.join(sentences)}",
        f"0-{seeds - 1}",
        passed,
    )


def _train(folder, text, held_out, rate, seed, steps, every):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 256, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
    starts = np.random.default_rng(seed).integers(0, len(text) - LENGTH, steps * BATCH)
    windows = [text[start : start + LENGTH] for start in starts]
    train, validation = (
        [{"input_ids": torch.tensor(w), "labels": torch.tensor(w)} for w in of] for of in (windows, held_out)
    )
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        logging_steps=every,
        save_steps=every,
        eval_strategy="steps",
        eval_steps=every,
        learning_rate=rate,
        seed=seed,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_only_model=True,
        per_device_train_batch_size=BATCH,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=validation)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def _command(*arguments):
    """Run the command line in this process; return what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(list(arguments))
    assert not code, f"{arguments}: exit status {code}"
    return printed.getvalue()


FIGURES = [
    Figure(
        "judge-trainer-runs",
        "GPT-2-style models, trained by the Hugging Face Trainer on WikiText-2, judged from the command line",
        "a shape for every layer's entropy and stable rank, and four relations to the validation loss",
        judge_trainer_runs,
        {"rates": [3e-4, 1e-3, 3e-3, 1e-2], "seeds": 3, "steps": 240, "every": 10},
    )
]
