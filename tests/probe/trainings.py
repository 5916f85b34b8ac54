"""Small trainings, with and without recorders: in a plain loop, with the Hugging Face Trainer, with Lightning."""

import contextlib
import json
import os
import subprocess
import sys

LENGTH = 16
STEPS = 4


def small_model(**options):
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 29, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", **options))


def save_quietly(model, folder, **options):
    """Save a checkpoint, without the bar of transformers."""
    from manyheads.models.checkpoints.loading import quiet_transformers

    with quiet_transformers():
        model.save_pretrained(folder, **options)


def windows(count=16, seed=2, length=LENGTH):
    import torch

    return torch.randint(0, 29, (count, length), generator=torch.Generator().manual_seed(seed))


def train_plainly(make=(), accumulate=1, model=None, forward=None, seed=2):
    """Train in a loop; `make(model, optimizer)` gives recorders. Return losses."""
    import torch

    model = small_model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    recorders = make(model, optimizer) if make else []
    torch.manual_seed(3)
    losses = []
    for step in range(STEPS):
        for part in windows(seed=seed).view(STEPS, accumulate, -1, LENGTH)[step]:
            with contextlib.ExitStack() as stack:
                for recorder in recorders:
                    if hasattr(recorder, "step"):
                        stack.enter_context(recorder.step(step))
                loss = (model if forward is None else forward)(part, labels=part).loss
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    for recorder in recorders:
        recorder.finish(STEPS)
    return losses


def train_by_trainer(folder, make=(), accumulate=1, fail_at=None, **options):
    """Train with the Trainer of transformers; `make(model)` gives recorders. Return losses."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from manyheads.probe.live.callbacks import trainer_callback

    model = small_model()
    arguments = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-2, "seed": 1}
    arguments |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "per_device_train_batch_size": 4}
    arguments |= {"gradient_accumulation_steps": accumulate, "dataloader_pin_memory": False} | options
    data = [{"input_ids": window, "labels": window} for window in windows(16 * accumulate)]
    callback = trainer_callback(*make(model)) if make else contextlib.nullcontext()
    callbacks = [callback] if make else []
    trainer = Trainer(model, TrainingArguments(str(folder), **arguments), train_dataset=data, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    if fail_at is not None:
        model.register_forward_pre_hook(lambda *_: _fail(trainer.state.global_step, fail_at))
    with callback:
        trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def _fail(step, at):
    if step == at:
        raise KeyError(step)


def train_by_lightning(make=(), accumulate=1, fail_at=None):
    """Train with Lightning; `make(model)` gives recorders. Return losses."""
    import lightning.pytorch as lightning
    import torch

    from manyheads.probe.live.callbacks import lightning_callback

    losses = []

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = small_model()

        def training_step(self, batch, index):
            if index == fail_at:
                raise KeyError(index)
            loss = self.model(batch, labels=batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 1e-2)

    module = Module()
    callbacks = [lightning_callback(*make(module.model))] if make else []
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    torch.manual_seed(3)
    trainer = lightning.Trainer(
        max_steps=STEPS, accelerator="cpu", callbacks=callbacks, accumulate_grad_batches=accumulate, **quiet
    )
    trainer.fit(module, torch.utils.data.DataLoader(windows(16 * accumulate), batch_size=4))
    return losses


def train_sharded(folder, make=()):
    """Train in a loop with parameters that are DTensors: fully_shard, in one process."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=0, world_size=1)
    try:
        mesh, model = init_device_mesh("cpu", (1,)), small_model()
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        return train_plainly(make, model=fully_shard(model, mesh=mesh))
    finally:
        torch.distributed.destroy_process_group()


PROCESS = """
import json, sys
import torch
from tests.probe.trainings import all_recorders, small_model, train_plainly
rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
losses = []
for make in ((), all_recorders(f"{folder}/store")):
    model = torch.nn.parallel.DistributedDataParallel(small_model())
    losses.append(train_plainly(make, model=model, seed=rank))
print(json.dumps(losses))
torch.distributed.destroy_process_group()
"""


def train_in_two_processes(folder):
    """Train on different batches in two processes, without and with recorders; return both losses of each process."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(["src", ".", *filter(None, sys.path)])}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    commands = [[sys.executable, "-c", PROCESS, str(rank), str(folder)] for rank in range(2)]
    children = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True, env=environment) for each in commands]
    return [json.loads(child.communicate(timeout=300)[0].splitlines()[-1]) for child in children]


def train_compiled(backend, make=(), dropout=0.1):
    """Train in a loop through `torch.compile`; return the losses and the last weights, in which gradients add up."""
    import torch

    torch._dynamo.reset()
    model = small_model(**dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout))
    losses = train_plainly(make, model=model, forward=torch.compile(model, backend=backend))
    torch._dynamo.reset()
    return losses, [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


def all_recorders(folder, within=True):
    """Return a function that makes a recorder of each kind, or those alone that measure beside the training's passes.

    They measure all steps of a training.
    """
    from manyheads.probe import AttentionRecorder
    from manyheads.probe.live.updates import UpdateRecorder

    def make(model, *optimizer):
        fixed = {"input_ids": windows(2, seed=5, length=30)}
        updates = UpdateRecorder(model, 3, share=None, store=folder)
        for each in optimizer:
            updates.watch(each)
        in_step = [AttentionRecorder(model, share=None, store=folder)] if within else []
        return [*in_step, AttentionRecorder(model, rows=None, share=None, every=2, batch=fixed, store=folder), updates]

    return make


def check_store(folder, tokens=4 * LENGTH):
    """Check that everything was recorded, of the first micro-batch alone, and nothing twice."""
    from manyheads.probe.live.reading import open_recording

    tree = open_recording(folder)
    assert tree["attention"].step.values.tolist() == list(range(STEPS))
    assert (tree["attention"].measured_rows == tokens).all()
    assert tree["attention_fixed"].step.values.tolist() == [0, 2, 4]  # the last one of the finished weights
    assert (tree["attention_fixed"].measured_rows == 2 * 30).all()
    assert tree["updates"].step.values.tolist() == list(range(STEPS))
    assert int(tree["updates"].update_ratio.count()) == 3 * STEPS
    return tree
