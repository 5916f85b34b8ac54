"""Recovery: the student against the one a user would write, and extraction against the information limit.

    python benchmarks/recovery.py

One thread. Every variant runs in a child process of its own, one after the other; compilation is excluded. Figures are
medians over three drawn layers; ratios, calls and the seconds of extraction have their range beside them. One layer at
dimension 768. All takes about three CPU minutes.

Both students see the same examples, are told the number of heads, and start again until the relative squared error on
examples that were held out is below 1e-12 or their starts are spent. The user's student is optax's L-BFGS on all
matrices together, in JAX with float64. Time is CPU time.

The limit of extraction is the number of free numbers of a layer of m heads of rank d/m, 4 d^2 - 2 d^2/m without its
biases, over the d numbers that a row of an answer has. Tokens and rows read can only be above it; calls may be below,
because a call shows all its rows. Verification and the measurement of noise are left out.
"""

import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time

ONE_THREAD = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
}
LAYERS = ((8, 2, 2, 1000), (16, 2, 4, 2000), (16, 3, 8, 3000))  # d, k, heads, sequences
EXTRACTED = ((64, 4), (64, 8), (256, 12), (768, 12))
DRAWS = 3
WANTED, STARTS, STEPS = 1e-12, 5, 2000
OTHERS = ("noise", "verification")


def draw(dim, length, heads, count, number):
    import numpy as np

    from manyheads.recovery import evaluate_layer, planted_layer, sequences
    from manyheads.recovery.fit.variable_projection import Examples

    rng = np.random.default_rng([dim, length, heads, number])
    layer = planted_layer(rng, dim, heads)
    parts = [sequences(rng, n, length, dim) for n in (count, 500)]
    return [Examples(x, evaluate_layer(layer, x)) for x in parts]


def ours(*layer):
    import numpy as np

    from manyheads.recovery.examples.student import StudentSettings, fit_student

    examples, held_out = draw(*layer)
    begun = time.process_time()
    settings = StudentSettings(restarts=STARTS)
    fit = fit_student(examples, held_out, layer[2], np.random.default_rng(0), wanted=WANTED, settings=settings)
    return {"seconds": time.process_time() - begun, "error": fit.held_out_error, "starts": fit.restarts}


def users(*layer):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    dim, _, heads, _, _ = layer
    jax.config.update("jax_enable_x64", True)
    (x, y), (held_x, held_y) = ((jnp.asarray(part.x), jnp.asarray(part.y)) for part in draw(*layer))

    def apply(weights, tokens):
        theta, projection = weights
        pattern = jax.nn.softmax(jnp.einsum("nrd,mde,nse->nmrs", tokens, theta, tokens), axis=-1)
        return jnp.einsum("nmrs,nsd,mde->nre", pattern, tokens, projection)

    def loss(weights):
        return jnp.mean((apply(weights, x) - y) ** 2) / jnp.mean(y**2)

    optimizer, slope = optax.lbfgs(memory_size=30), optax.value_and_grad_from_state(loss)

    @jax.jit
    def run(weights, state, steps):
        def step(carry):
            weights, state, count, _ = carry
            value, gradient = slope(weights, state=state)
            change, state = optimizer.update(gradient, state, weights, value=value, grad=gradient, value_fn=loss)
            return optax.apply_updates(weights, change), state, count + 1, value

        return jax.lax.while_loop(
            lambda carry: (carry[2] < steps) & (carry[3] > WANTED / 10), step, (weights, state, 0, jnp.inf)
        )

    rng = np.random.default_rng(0)

    def start():
        theta = rng.normal(size=(heads, dim, dim)) * 0.5 / dim
        return jnp.asarray(theta), jnp.asarray(rng.normal(size=theta.shape) / dim**0.5)

    first = start()
    jax.block_until_ready(run(first, optimizer.init(first), 1))  # compiles
    begun, best, starts = time.process_time(), np.inf, 0
    while starts < STARTS and best > WANTED:
        weights = start()
        found = run(weights, optimizer.init(weights), STEPS)[0]
        error = float(jnp.sum((apply(found, held_x) - held_y) ** 2) / jnp.sum(held_y**2))
        best, starts = min(best, error), starts + 1
    return {"seconds": time.process_time() - begun, "error": best, "starts": starts}


def extracted(dim, heads, number):
    import numpy as np

    from manyheads.recovery import compare_layers, evaluate_layer, extract_layer, gpt_layer

    layer = gpt_layer(np.random.default_rng([dim, heads, number]), dim, heads)
    begun = time.process_time()
    found = extract_layer(lambda x: evaluate_layer(layer, x), dim)
    seconds, errors = time.process_time() - begun, compare_layers(layer, found.layer)
    asked = [counts for stage, counts in found.counts.items() if stage not in OTHERS]
    sums = {name: sum(getattr(one, name) for one in asked) for name in ("calls", "tokens", "numbers")}
    return sums | {"seconds": seconds, "theta": errors.theta, "projection": errors.projection}


VARIANTS = {"ours": ours, "users": users, "extracted": extracted}
NAMES = {"ours": "manyheads", "users": "optax L-BFGS, all matrices"}


def in_children(variant, *sizes, draws=DRAWS):
    """Return what a variant measured, a list over drawn layers for every figure."""
    command = [sys.executable, __file__, variant, *map(str, sizes)]
    answers = []
    for number in range(draws):
        answer = subprocess.run(
            [*command, str(number)], env=os.environ | ONE_THREAD, stdout=subprocess.PIPE, text=True, check=True
        )
        answers.append(json.loads(answer.stdout.splitlines()[-1]))
    return {name: [one[name] for one in answers] for name in answers[0]}


def middle(values):
    return statistics.median(values)


def ranged(values, digits):
    spread = f" ({min(values):.{digits}f} to {max(values):.{digits}f})" if len(values) > 1 else ""
    return f"{middle(values):.{digits}f}{spread}"


def table_of_students(results):
    yield "| d, k, heads, sequences | student | CPU, s | peak, MB | worst held-out error | starts | times ours |"
    yield "|---|---|---|---|---|---|---|"
    for (layer, name), result in results.items():
        pairs = zip(result["seconds"], results[layer, "ours"]["seconds"], strict=True)
        ratios = [theirs / own for theirs, own in pairs]
        against = "" if name == "ours" else ranged(ratios, 1)
        spent = f"{middle(result['seconds']):.2f} | {middle(result['peak']):.0f} | {max(result['error']):.1e}"
        yield f"| {', '.join(map(str, layer))} | {NAMES[name]} | {spent} | {max(result['starts'])} | {against} |"


def table_of_extractions(results):
    yield "| d, heads | calls | x limit | tokens (x) | numbers / d (x) | worst error of Theta, W | CPU, s | peak, MB |"
    yield "|---|---|---|---|---|---|---|---|"
    for (dim, heads), result in results.items():
        limit = 4 * dim - 2 * dim / heads
        shown = f"{ranged(result['calls'], 0)} | {middle(result['calls']) / limit:.2f}"
        for count in (middle(result["tokens"]), middle(result["numbers"]) / dim):
            shown += f" | {count:.0f} ({count / limit:.2f})"
        errors = f"{max(result['theta']):.0e}, {max(result['projection']):.0e}"
        yield f"| {dim}, {heads} | {shown} | {errors} | {ranged(result['seconds'], 2)} | {middle(result['peak']):.0f} |"


def main():
    students = {(layer, name): in_children(name, *layer) for layer in LAYERS for name in ("ours", "users")}
    extractions = {sizes: in_children("extracted", *sizes, draws=1 if sizes[0] > 256 else DRAWS) for sizes in EXTRACTED}
    packages = ["manyheads", "jax", "optax", "numpy", "scipy"]
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages), end=", ")
    print(f"Python {platform.python_version()}, {platform.machine()}, one thread\n")
    print(*table_of_students(students), "", *table_of_extractions(extractions), sep="\n")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        measured = VARIANTS[sys.argv[1]](*map(int, sys.argv[2:]))
        measured["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(measured))
    else:
        main()
