"""Gradient flow of one layer of attention under an MLP: a compiled scan against a plain PyTorch loop.

    python benchmarks/joma_flow.py

The check of theorem 1: 40 contexts, 12 tokens, 24 neurons, exp attention, cross-entropy, Runge-Kutta steps of 0.02 to
time 40, float64, one thread. Both follow the same draw and must end in the same place. Time is CPU time, compilation
excluded (it is given beside), the median of repeats; the ratio comes with the smallest and the largest ratio of pairs.
"""

import os
import statistics

from _shared import ONE_THREAD, ratio_of, timed, versions_of

os.environ.update(ONE_THREAD)

HORIZON, STEP, REPEATS = 40.0, 0.02, 3


def draw(activation):
    import numpy as np

    from manyheads.theory.joma.systems.layer import draw_parameters, draw_upper
    from manyheads.theory.joma.task import Sizes, UpdateRule, draw_joma_task

    rng, sizes, rule = np.random.default_rng(0), Sizes(), UpdateRule("exp", activation)
    return draw_parameters(sizes, rule, rng), draw_joma_task(sizes, rng), draw_upper(sizes, rng), rule


def ours(problem):
    from manyheads.theory.joma.systems.gradient_flow import FixedSteps, gradient_flow

    return gradient_flow(*problem, FixedSteps.until(HORIZON, STEP)).network.logits[-1]


def torch_loop(problem):
    import torch

    torch.set_num_threads(1)
    network, task, upper, rule = problem
    contexts, embeddings, asked, out = (
        torch.tensor(a) for a in (task.contexts, task.token_embeddings, task.query_embeddings, upper.upper)
    )
    queries, labels = torch.tensor(task.queries).long(), torch.tensor(task.labels).long()
    phi = {"gelu": torch.nn.functional.gelu, "relu": torch.relu}[rule.activation]

    def downhill(z, w):
        z, w = z.detach().requires_grad_(), w.detach().requires_grad_()
        f = (torch.exp(z[queries]) * contexts) @ embeddings.T + asked.T[queries]
        loss = torch.nn.functional.cross_entropy(phi(f @ w) @ out.T, labels)
        return [-g for g in torch.autograd.grad(loss, (z, w))]

    state = [torch.tensor(network.logits), torch.tensor(network.weights)]
    for _ in range(round(HORIZON / STEP)):
        first = downhill(*state)
        second = downhill(*(y + STEP / 2 * d for y, d in zip(state, first, strict=True)))
        third = downhill(*(y + STEP / 2 * d for y, d in zip(state, second, strict=True)))
        fourth = downhill(*(y + STEP * d for y, d in zip(state, third, strict=True)))
        slopes = zip(state, first, second, third, fourth, strict=True)
        state = [y + STEP / 6 * (a + 2 * b + 2 * c + d) for y, a, b, c, d in slopes]
    return state[0].numpy()


def main():
    import numpy as np

    print("| activation | ours | compilation | torch loop | torch over ours (spread) | difference of the ends |")
    print("|---|---|---|---|---|---|")
    for activation in ("gelu", "relu"):
        problem = draw(activation)
        once, _ = timed(ours, problem)
        fast = [timed(ours, problem) for _ in range(REPEATS)]
        slow = [timed(torch_loop, problem) for _ in range(REPEATS)]
        own, theirs = ([seconds for seconds, _ in runs] for runs in (fast, slow))
        middle, apart = statistics.median(own), np.abs(fast[0][1] - slow[0][1]).max()
        times = f"{middle:.2f} s | {once - middle:.1f} s | {statistics.median(theirs):.2f} s"
        print(f"| {activation} | {times} | {ratio_of(theirs, own)} | {apart:.0e} |")
    print(f"\n{versions_of('manyheads', 'jax', 'torch')}, CPU time")


if __name__ == "__main__":
    main()
