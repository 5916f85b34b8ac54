"""Steps of the sparse contextual bigram: compiled against JAX and PyTorch.

    python benchmarks/bigram.py

Needs the extra `fast`; PyTorch is compared where it is installed. One thread. Every variant runs in a child process of
its own, the children one after the other; compilation is excluded. Time is CPU time and wall time of a step, the least
of repeated calls, since neighbours on a shared machine only add to it; the ratio of CPU times comes with the smallest
and the largest ratio that pairs of repeats give.

A step of descent draws 64 contexts of 5000 tokens and updates both matrices. JAX gathers: tokens from 32 random bits
and thresholds (N = 3) or one multiplication (above), a weighted histogram, `take_along_axis` back, the whole loop
in `lax.scan`. PyTorch is the textbook's way, contexts as dense one-hot arrays.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time

from manyheads._extras import require

ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
}
LENGTH, BATCH, RATE = 5000, 64, 0.01
VOCABULARIES = (3, 20, 100)
NAMES = {
    "ours": "manyheads, compiled",
    "threefry": "JAX, threefry",
    "rbg": "JAX, rbg",
    "torch": "torch, one-hot",
}
STEPS = ("ours", "threefry", "rbg", "torch")
REPEATS = {"ours": 60, "threefry": 12, "rbg": 6, "torch": 2}


def draw_problem(tokens):
    import numpy as np

    from manyheads.theory.bigram import draw_bigram_task

    return draw_bigram_task(np.random.default_rng(4), tokens, LENGTH, 2)


def ours(tokens):
    from manyheads.theory.bigram.training.proximal_sgd import StepSettings, descend, initial_state

    task, settings, steps = draw_problem(tokens), StepSettings(BATCH, RATE, RATE), 20
    state = initial_state(task)
    return lambda: descend(task, state, settings, steps, seed=0, engine="numba"), steps


def gathering_jax(tokens, kind):
    import jax
    import jax.numpy as jnp
    import numpy as np

    task = draw_problem(tokens)
    law = jnp.asarray(task.stationary, jnp.float32)
    bounds = [np.uint32(bound) for bound in np.cumsum(task.stationary)[:-1] * 2.0**32]
    positions = jnp.asarray(task.positions)
    slots = jnp.cumsum(jnp.asarray(task.weights, jnp.float32), axis=1)[:, :-1]
    answers = jnp.cumsum(jnp.asarray(task.transition, jnp.float32), axis=0).T[:, :-1]
    each = jnp.arange(BATCH)

    def draw_tokens(key):
        if tokens <= 8:
            bits = jax.random.bits(key, (BATCH, LENGTH), jnp.uint32)
            return sum((bits >= bound).astype(jnp.int32) for bound in bounds)
        bits = jax.random.bits(key, (BATCH, LENGTH), jnp.uint16).astype(jnp.uint32)  # half the random bits
        return ((bits * tokens) >> 16).astype(jnp.int32)

    def step(state, key):
        value, attention = state
        for_tokens, for_queries, for_slots, for_answers = jax.random.split(key, 4)
        context = draw_tokens(for_tokens)
        query = jax.random.randint(for_queries, (BATCH,), 0, tokens)
        slot = (jax.random.uniform(for_slots, (BATCH, 1)) >= slots[query]).sum(1)
        attended = context[each, positions[query, slot]]
        answer = (jax.random.uniform(for_answers, (BATCH, 1)) >= answers[attended]).sum(1)
        rows = attention[query]
        if tokens <= 8:
            seen = jnp.stack([jnp.where(context == token, rows, 0).sum(1) for token in range(tokens)], axis=1)
        else:
            seen = jax.vmap(lambda row, weights: jnp.zeros(tokens).at[row].add(weights))(context, rows)
        residual = (law + seen @ value.T).at[each, answer].add(-1)
        pull = jnp.take_along_axis(residual @ value, context, axis=1)
        slope = jnp.zeros_like(attention).at[query].add(pull)
        slope = (slope - slope.mean(1, keepdims=True)) / (BATCH * law[:, None])
        return (value - RATE * (residual.T @ (seen - law)) / (BATCH * law), attention - RATE * slope), None

    steps = 20
    run = jax.jit(lambda state, keys: jax.lax.scan(step, state, keys)[0])
    state = jnp.zeros((tokens, tokens)), jnp.full((tokens, LENGTH), 1 / LENGTH)
    keys = jax.random.split(jax.random.key(0, impl=kind), steps)
    return lambda: jax.block_until_ready(run(state, keys)), steps


def one_hot_torch(tokens):
    import torch

    torch.set_num_threads(1)
    task = draw_problem(tokens)
    law, positions = torch.tensor(task.stationary).float(), torch.tensor(task.positions)
    weights, transition = torch.tensor(task.weights).float(), torch.tensor(task.transition).float()
    state = [torch.zeros(tokens, tokens), torch.full((tokens, LENGTH), 1 / LENGTH)]

    def step():
        value, attention = state
        context = torch.multinomial(law, BATCH * LENGTH, replacement=True).view(BATCH, LENGTH)
        query = torch.multinomial(law, BATCH, replacement=True)
        place = positions[query, torch.multinomial(weights[query], 1)[:, 0]]
        answer = torch.multinomial(transition.T[context[torch.arange(BATCH), place]], 1)[:, 0]
        dense = torch.nn.functional.one_hot(context, tokens).float()
        seen = torch.einsum("btn,bt->bn", dense, attention[query])
        residual = law + seen @ value.T - torch.nn.functional.one_hot(answer, tokens)
        pull = torch.einsum("btn,bn->bt", dense, residual @ value)
        slope = torch.nn.functional.one_hot(query, tokens).float().T @ pull
        slope = (slope - slope.mean(1, keepdim=True)) / (BATCH * law[:, None])
        state[:] = value - RATE * (residual.T @ (seen - law)) / (BATCH * law), attention - RATE * slope

    return step, 1


VARIANTS = {
    "ours": ours,
    "threefry": lambda tokens: gathering_jax(tokens, "threefry2x32"),
    "rbg": lambda tokens: gathering_jax(tokens, "rbg"),
    "torch": one_hot_torch,
}


def measure(variant, tokens):
    """Run in the child: CPU and wall seconds of a step, for each repeat."""
    call, steps = VARIANTS[variant](tokens)
    call()
    cpu, wall = [], []
    for _ in range(REPEATS.get(variant, 15)):
        start, begun = time.process_time(), time.perf_counter()
        call()
        cpu.append((time.process_time() - start) / steps)
        wall.append((time.perf_counter() - begun) / steps)
    return {"cpu": cpu, "wall": wall}


def in_child(variant, tokens):
    command = [sys.executable, __file__, variant, str(tokens)]
    answer = subprocess.run(command, env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(answer.stdout.splitlines()[-1])


def ratio(slow, fast):
    """Say how many times the CPU time of `fast` that of `slow` is: of the least ones, and over pairs of repeats."""
    pairs = [one / other for one, other in zip(slow["cpu"], fast["cpu"], strict=False)]
    return f"{min(slow['cpu']) / min(fast['cpu']):.1f} ({min(pairs):.1f} to {max(pairs):.1f})"


def run_steps(variants=STEPS, vocabularies=VOCABULARIES):
    return {(tokens, name): in_child(name, tokens) for tokens in vocabularies for name in variants}


def table_of_steps(results):
    yield "| N | variant | CPU, ms/step | wall, ms/step | CPU, ns/token | median | times ours (spread) |"
    yield "|---|---|---|---|---|---|---|"
    for (tokens, name), result in results.items():
        least, middle = (1e9 / (BATCH * LENGTH) * of(result["cpu"]) for of in (min, statistics.median))
        against = "" if name == "ours" else ratio(result, results[tokens, "ours"])
        spent = f"{1e3 * min(result['cpu']):.3f} | {1e3 * min(result['wall']):.3f}"
        yield f"| {tokens} | {NAMES[name]} | {spent} | {least:.2f} | {middle:.2f} | {against} |"


def main():
    require("numba")
    has_torch = importlib.util.find_spec("torch")
    steps = run_steps([name for name in STEPS if name != "torch" or has_torch])
    packages = ["manyheads", "numba", "jax", *(["torch"] if has_torch else [])]
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages), end=", ")
    print(f"Python {platform.python_version()}, {platform.machine()}, one thread\n")
    print(*table_of_steps(steps), sep="\n")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
