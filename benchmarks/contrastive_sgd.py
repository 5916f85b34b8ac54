"""Online SGD for contrastive learning in n = 3200 dimensions: the exact overlap chain against a plain NumPy loop.

    python benchmarks/contrastive_sgd.py

The loop draws the noise of anchor, positive and negative in n dimensions and updates n weights; the chain draws the
statistics that the overlaps depend on. Both have the same distribution (shown path by path in
tests/theory/meanfield/contrastive/test_sgd.py) and train the default task in float64 on one thread. Time is CPU time
of one run of 6400 steps, compilation excluded, the median of repeats; the ratio comes with the smallest and the
largest ratio of pairs.
"""

import os
import statistics

from _shared import ONE_THREAD, ratio_of, timed, versions_of

os.environ.update(ONE_THREAD)

DIMENSION, HORIZON, START, REPEATS = 3200, 2.0, (0.15, 0.1, 0.5), 3


def chain(task, seed):
    import numpy as np

    from manyheads.theory.meanfield import train_overlaps

    return train_overlaps(task, [START], DIMENSION, [HORIZON], np.random.default_rng(seed))[-1, 0]


def loop(task, seed):
    import numpy as np

    rng, n, root = np.random.default_rng(seed), DIMENSION, DIMENSION**0.5
    basis = np.linalg.qr(rng.standard_normal((n, 3)))[0].T * root
    features = basis[:2]
    weights = np.array([*START[:2], (START[2] - START[0] ** 2 - START[1] ** 2) ** 0.5]) @ basis
    shared, own = task.shared_std, task.augmentation_std
    chances = [(np.array(one.values), np.array(one.probabilities)) for one in task.features]
    steps = int(HORIZON * n)
    drawn = np.stack([rng.choice(values, (steps, 2), p=p) for values, p in chances], -1)
    for positive, negative in drawn:
        noise = rng.standard_normal((4, n))
        common = shared * noise[0] + positive @ features / root
        x = np.stack([common + own * noise[1], common + own * noise[2], task.variance**0.5 * noise[3]])
        x[2] += negative @ features / root
        f = np.tanh(x @ weights / root)
        slope = 1 / (1 + np.exp(f[0] * (f[1] - f[2])))
        gradient = slope * np.array([f[2] - f[1], -f[0], f[0]]) * (1 - f**2)
        weights -= task.learning_rate * (gradient @ x / root + task.weight_decay * weights / n)
    return np.array([*(features @ weights / n), weights @ weights / n])


def main():
    from manyheads.theory.meanfield import ContrastiveTask, overlap_trajectory

    task = ContrastiveTask()
    once, _ = timed(chain, task, 0)
    fast, slow = zip(*((timed(chain, task, seed), timed(loop, task, seed)) for seed in range(REPEATS)), strict=True)
    ours, theirs = ([seconds for seconds, _ in runs] for runs in (fast, slow))
    limit = overlap_trajectory(task, START, [HORIZON])[0]
    apart = max(abs(end - limit).max() for _, end in (*fast, *slow))
    middle = statistics.median(ours)
    print("| chain | compilation | NumPy loop | loop over chain (spread) | farthest end from the ODE |")
    print("|---|---|---|---|---|")
    times = f"{middle:.3f} s | {once - middle:.1f} s | {statistics.median(theirs):.2f} s"
    print(f"| {times} | {ratio_of(theirs, ours, 0)} | {apart:.3f} |")
    print(f"\n{versions_of('manyheads', 'jax', 'numpy')}, CPU time")


if __name__ == "__main__":
    main()
