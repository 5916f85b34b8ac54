"""Live recording of real trainings: the Hugging Face Trainer on WikiText-2, every way to train, killed processes."""

import logging
import time
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured
from tests.probe.test_live import kill_a_recording
from tests.probe.trainings import (
    LENGTH,
    all_recorders,
    check_store,
    train_by_lightning,
    train_by_trainer,
    train_compiled,
    train_in_two_processes,
    train_plainly,
    train_sharded,
)

from manyheads.probe import AttentionRecorder, measure_checkpoints
from manyheads.probe.heads.dormant import dormant_heads
from manyheads.probe.live.callbacks import trainer_callback
from manyheads.probe.live.reading import open_recording
from manyheads.probe.live.updates import UpdateRecorder

WIKITEXT = "../shared/data/wikitext-2/valid.txt"
LENGTH_OF_TEXT = 256
BATCH = 4
SHARES = {"attention": 0.003, "attention_fixed": 0.006, "updates": 0.001}
"""Shares of the time of the three recorders: 1% together."""


def real_training(folder: Path, learning_rate: float, steps: int, every: int, seed: int) -> Measured:
    """Train a GPT-2-style model with and without recorders, and measure its checkpoints again offline."""
    text = np.frombuffer(Path(WIKITEXT).read_bytes(), dtype=np.uint8).astype(np.int64)
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(text) - LENGTH_OF_TEXT, steps * BATCH + 1)
    windows = [text[start : start + LENGTH_OF_TEXT] for start in starts]
    fixed, windows = windows[:1], windows[1:]
    plain, seconds = _train(folder / "plain", windows, learning_rate, steps, None, every)
    store = folder / "store"
    found, with_recorders = _train(folder / "run", windows, learning_rate, steps, (store, fixed), every)
    tree = open_recording(store)
    shares = {name: float(tree[name].cost_seconds[-1] / tree[name].elapsed_seconds[-1]) for name in SHARES}
    compared, same, apart = _compare(folder / "run", tree["attention_fixed"].to_dataset(), fixed)
    last = tree["attention_fixed"].to_dataset().isel(step=-1)
    entropy, level = last.entropy.mean("head").values, last.entropy_uniform.values
    measured = ", ".join(f"{name} {tree[name].sizes['step']} steps {shares[name]:.2%}" for name in SHARES)
    extent = (
        f"{steps} steps of {BATCH} x {LENGTH_OF_TEXT} bytes; {measured}; CPU seconds {seconds:.0f} without and "
        f"{with_recorders:.0f} with; losses {plain[0]:.2f} to {plain[-1]:.2f}, "
        f"{'identical' if plain == found else 'DIFFERENT'}; checkpoints {', '.join(map(str, compared))}, largest "
        f"difference {apart:.1e}; at the end entropy by layer {_listed(entropy)} of {_listed(level)} nat, dormant: "
        f"{', '.join(dormant_heads(last)) or 'none'}"
    )
    share = sum(shares.values())
    passed = plain == found and share <= 0.01 and same and len(compared) >= 2
    return Measured(
        f"{share:.2%} of the time; checkpoints {'identical' if same else 'DIFFERENT'}", extent, str(seed), passed
    )


def _train(folder, windows, learning_rate, steps, record, every):
    """Train; return losses and CPU seconds. `record`: the store and the fixed batch."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"n_embd": 128, "n_layer": 4, "n_head": 4, "vocab_size": 256, "n_positions": LENGTH_OF_TEXT}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM")
    model = GPT2LMHeadModel(config)
    callbacks = []
    if record is not None:
        store, fixed = record
        batch = {"input_ids": torch.tensor(np.array(fixed))}
        recorders = (
            AttentionRecorder(model, share=SHARES["attention"], store=store),
            AttentionRecorder(model, rows=None, share=SHARES["attention_fixed"], every=every, batch=batch, store=store),
            UpdateRecorder(model, share=SHARES["updates"], store=store),
        )
        callbacks = [trainer_callback(*recorders)]
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        logging_steps=1,
        save_steps=every,
        learning_rate=learning_rate,
        seed=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        per_device_train_batch_size=BATCH,
        dataloader_pin_memory=False,
    )
    data = [{"input_ids": torch.tensor(window), "labels": torch.tensor(window)} for window in windows]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    start = time.process_time()
    trainer.train()
    seconds = time.process_time() - start
    return [line["loss"] for line in trainer.state.log_history if "loss" in line], seconds


def _compare(folder, live, fixed):
    """Measure saved checkpoints on the fixed batch; return which, whether they agree, and the largest difference."""
    steps = [step for step in live.step.values.tolist() if (folder / f"checkpoint-{step}").exists()]
    tree = measure_checkpoints([folder / f"checkpoint-{step}" for step in steps], np.array(fixed))
    offline, live = tree["attention_fixed"].to_dataset(), live.sel(step=steps)
    apart = max(float(abs(live[name] - offline[name]).max()) for name in offline.data_vars)
    return steps, all(live[name].equals(offline[name].drop_vars("checkpoint")) for name in offline.data_vars), apart


BESIDE = "compiled by Inductor, fixed batch and update sizes"
FUSED = ("compiled by Inductor without dropout", "compiled by Inductor, whose dropout is drawn part by part")
COMPILED = {
    "compiled by eager": ("eager", 0.1, True),
    FUSED[0]: ("inductor", 0.0, True),
    BESIDE: ("inductor", 0.1, False),
    FUSED[1]: ("inductor", 0.1, True),
}
"""Way → backend, dropout, and whether steps are measured within the training's own passes, which divides its graph."""


def ways(folder: Path) -> Measured:
    """Train in every way with and without recorders, and compare the losses, of compiled models the weights too."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    same, micro = {}, {}
    for accumulate in (1, 2):
        suffix = f", accumulation {accumulate}" if accumulate > 1 else ""
        for name, train in (("plain loop", _plain), ("Trainer", train_by_trainer), ("Lightning", _lightning)):
            key = name + suffix
            plain = train(folder / f"{key} plain", (), accumulate)
            same[key] = plain == train(folder / key, all_recorders(folder / f"{key} store"), accumulate)
            micro[key] = 2 * LENGTH if (name, accumulate) == ("plain loop", 2) else 4 * LENGTH
    for key, (backend, dropout, within) in COMPILED.items():
        plain = train_compiled(backend, (), dropout)
        same[key] = plain == train_compiled(backend, all_recorders(folder / f"{key} store", within), dropout)
    groups = [folder / "first", folder / "second"]
    for group in groups:
        group.mkdir(exist_ok=True)
    same["DTensors"] = train_sharded(groups[0]) == train_sharded(groups[1], all_recorders(folder / "DTensors store"))
    (folder / "two processes").mkdir(exist_ok=True)
    same["two processes"] = all(plain == found for plain, found in train_in_two_processes(folder / "two processes"))
    check_store(folder / "two processes/store")
    for key in same.keys() - {"two processes", BESIDE}:
        check_store(folder / f"{key} store", micro.get(key, 4 * LENGTH))
    shown = ", ".join(f"{name}: {'identical' if value else 'DIFFERENT'}" for name, value in same.items())
    passed = all(value for name, value in same.items() if name not in FUSED)
    return Measured(f"{sum(same.values())} of {len(same)} ways identical", shown, "0", passed)


def _plain(folder, make, accumulate):
    return train_plainly(make, accumulate)


def _lightning(folder, make, accumulate):
    return train_by_lightning(make, accumulate)


def kills(folder: Path, count: int, seed: int) -> Measured:
    """Kill recordings at random steps, several times in the same store, and read it each time."""
    rng, lost, steps = np.random.default_rng(seed), 0, 0
    for number in range(count):
        store = folder / str(number % 3)
        last = kill_a_recording(store, int(rng.integers(0, 30)))
        found = open_recording(store)["attention"].step.values.tolist()
        lost += found != list(range(len(found))) or len(found) <= last
        steps += len(found)
    extent = f"{count} processes killed, each store continued {(count - 1) // 3} times or more; {steps} steps read"
    return Measured(f"{lost} of {count} stores lost a finished step", extent, str(seed), not lost)


def _listed(values):
    return " ".join(f"{value:.2f}" for value in values)


FIGURES = [
    *(
        Figure(
            f"live-training-{learning_rate:g}",
            f"a GPT-2-style model under the Hugging Face Trainer on WikiText-2 at learning rate {learning_rate:g}",
            "recorders take at most 1% of the time, losses identical to the bit, saved checkpoints measured offline "
            "give the same figures to the bit",
            real_training,
            {"learning_rate": learning_rate, "steps": 200, "every": 25, "seed": 0},
            revision=2,
        )
        for learning_rate in (3e-4, 3e-3, 3e-2)
    ),
    Figure(
        "live-ways",
        "losses with and without recorders, in every way to train",
        "identical to the bit, but for two: steps measured within a training that Inductor compiles",
        ways,
        revision=3,
    ),
    Figure(
        "live-kills",
        "a recording that is killed loses no finished step and stays readable",
        "none lost",
        kills,
        {"count": 9, "seed": 0},
    ),
]
