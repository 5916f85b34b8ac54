"""CPU time of commands and first calls, in processes of their own, as Markdown tables.

First commands that only say something, beside an interpreter that does nothing and the help of a study computed from
its module, as it is where no description is kept. Then tools that need no JAX: a table of scales, the audit of a GPT-2
of four layers, a layer of 16 dimensions and 2 heads extracted from its answers. Each tool runs as installed, and in a
process that cannot import JAX. Repeats are interleaved; a first round that fills the caches of the file system is left
out.

    make bench NAME=command_line
"""

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from _shared import ONE_THREAD, ratio_of, versions_of

HERE = str(Path(__file__).parent)
REPEATS = 7
STUDY = "limits/infinite-heads"
START = "import sys; from manyheads.cli import main; main(sys.argv[1:])"
COMPUTED = f"import manyheads.cli.study as study; study.kept_description = lambda name: None; {START}"
COMMANDS = {
    "an interpreter alone": ("pass",),
    "manyheads --help": (START, "--help"),
    "manyheads study list": (START, "study", "list"),
    f"manyheads study show {STUDY}": (START, "study", "show", STUDY),
    f"manyheads study run {STUDY} --help": (START, "study", "run", STUDY, "--help"),
    "the same, from the study's module": (COMPUTED, "study", "run", STUDY, "--help"),
}
EXTRACTION = """
import numpy as np
import manyheads as mh
from manyheads.attention import AttentionLayer
layer = AttentionLayer(*np.random.default_rng(0).normal(size=(2, 2, 16, 16)) / 4)
mh.extract_layer(lambda x: layer(x), 16)
"""
TOOLS = {
    "manyheads scale": (START, "scale", "--base", "64,4,4", "--to", "64,12,12", "--learning-rate", "3e-3"),
    "manyheads scale audit": (
        START,
        "scale",
        "audit",
        "command_line:build",
        "--base",
        "16,4,4",
        "--learning-rate",
        "3e-3",
    ),
    "extract_layer, d = 16": (EXTRACTION,),
}
WITHOUT_JAX = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jax", "equinox", "optax", "diffrax", "optimistix", "jaxtyping", "zarr"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def build():
    """Return the model and the optimizer that are audited."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=4, n_head=12, n_embd=192, vocab_size=128, n_positions=32))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def cpu_seconds(words):
    """Return the CPU seconds of a process, user and system."""
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", *words], env=environment, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def measure(commands):
    rounds = [{name: cpu_seconds(words) for name, words in commands.items()} for _ in range(REPEATS + 1)][1:]
    return {name: [each[name] for each in rounds] for name in commands}


def shown(taken):
    return f"{statistics.median(taken):.2f} ({min(taken):.2f} to {max(taken):.2f})"


def main():
    times = measure(COMMANDS)
    *_, slowest = times.values()
    print(f"{versions_of('manyheads', 'jax', 'tyro')}; {REPEATS} repeats\n")
    print("| command | CPU s, median (range) | times faster than from the module |\n|---|---|---|")
    for name, taken in times.items():
        print(f"| {name} | {shown(taken)} | {ratio_of(slowest, taken)} |")
    print("\n| tool | CPU s, median (range) | where JAX cannot be imported |\n|---|---|---|")
    without = {f"{name}, alone": (WITHOUT_JAX + code, *words) for name, (code, *words) in TOOLS.items()}
    times = measure({**TOOLS, **without})
    for name in TOOLS:
        print(f"| {name} | {shown(times[name])} | {shown(times[f'{name}, alone'])} |")


if __name__ == "__main__":
    main()
