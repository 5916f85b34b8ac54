"""Width-only groups of the package `mup` beside ours on one PyTorch transformer: their numbers, and the best rate.

    pip install mup torch
    python benchmarks/mup.py [--seeds 3] [--steps 60]

A vision transformer on scikit-learn's digits (Adam, batch 16), from the base (N, H, L) = (8, 4, 2). First every
parameter's learning rate and weight decay, from `mup.MuAdamW` and `mup.MuSGD` and from `Parametrization.torch_groups`,
at shapes along N, H and L. Then one training of each with the same draws: with the same theory they are the same
numbers. Then the best learning rate along each axis under mup and under the parametrization of key dimension, heads and
depth, whose factors are folded into the weights of the usual forward pass: its drift over a factor 8 in size with an
interval over seeds, and the loss that is reached.
"""

import argparse
import importlib.metadata
import math
import os
import platform
import sys
import time
from fnmatch import fnmatchcase

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from manyheads.data import load_digits
from manyheads.data.digits import cut_patches, normalize
from manyheads.scaling import BaseHyperparameters, Parametrization, initialize_model, torch_groups, transfer_check
from manyheads.scaling.axes import shapes_along
from manyheads.scaling.parametrization.targets import forward_multipliers
from manyheads.transformer import Shape

BASE = Shape(8, 4, 2)
SIZES = {"key_dim": (8, 32), "heads": (4, 16), "depth": (2, 8)}
EPSILON = 1e-12  # far below every gradient: mup has no rule for it
RATES = np.geomspace(1e-3, 1e-1, 7)
ROLES = {
    "patches.weight": "embedding",
    "positions": "positional",
    "blocks.*.query.weight": "query",
    "blocks.*.key.weight": "key",
    "blocks.*.value.weight": "value",
    "blocks.*.output.weight": "output",
    "blocks.*.mlp_in.weight": "mlp_in",
    "blocks.*.mlp_out.weight": "mlp_out",
    "blocks.*.norm?.weight": "attention_gain",
    "blocks.*.norm?.bias": "attention_shift",
    "norm.weight": "final_gain",
    "norm.bias": "final_shift",
    "read_out.weight": "unembedding",
}
BULK = BASE.width**-0.5
SPREADS = dict.fromkeys(("query", "key", "value", "output", "mlp_in", "unembedding"), BULK)
SPREADS |= {"embedding": 0.5, "positional": 1.0, "mlp_out": BULK / 2}


def make(shape, written_for_mup):
    """Return the transformer; written for mup it scales logits by 1/N and reads out by MuReadout."""
    import torch
    from torch import nn

    import mup

    d, n, heads = shape.width, shape.key_dim, shape.heads
    logit = BASE.key_dim**0.5 / n if written_for_mup else n**-0.5

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value, self.output = (nn.Linear(d, d, bias=False) for _ in range(4))
            self.mlp_in, self.mlp_out = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
            self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

        def forward(self, x):  # (B, T, d)
            z = self.norm1(x)
            q, k, v = (f(z).unflatten(-1, (heads, n)).transpose(-2, -3) for f in (self.query, self.key, self.value))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, scale=logit)
            x = x + self.output(mixed.transpose(-2, -3).flatten(-2))
            return x + self.mlp_out(nn.functional.gelu(self.mlp_in(self.norm2(x))))

    class Digits(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches = nn.Linear(4, d, bias=False)
            self.positions = nn.Parameter(torch.zeros(16, d))
            self.blocks = nn.ModuleList(Block() for _ in range(shape.depth))
            self.norm = nn.LayerNorm(d)
            self.read_out = (mup.MuReadout if written_for_mup else nn.Linear)(d, 10, bias=False)

        def forward(self, x):  # (B, 16, 4)
            x = self.patches(x) + self.positions
            for block in self.blocks:
                x = block(x)
            return self.read_out(self.norm(x).mean(-2))

    return Digits()


def with_base_shapes(shape):
    """Return the transformer that is written for mup, with mup's base shapes on its parameters."""
    import mup

    delta = make(Shape(2 * BASE.key_dim, 2 * BASE.heads, shape.depth), True)
    return mup.set_base_shapes(make(shape, True), make(Shape(BASE.key_dim, BASE.heads, shape.depth), True), delta=delta)


def start_as_mup(model, seed):
    """Draw as mup does: its own initializer, from the spreads at the base."""
    import torch

    import mup

    torch.manual_seed(seed)
    for name, tensor in model.named_parameters():
        role = next(role for pattern, role in ROLES.items() if fnmatchcase(name, pattern))
        if role in SPREADS:
            mup.init.normal_(tensor, 0.0, SPREADS[role])


def compare_groups():
    """Print for every shape how far apart the groups are, and where."""
    import mup

    print("| shape (N, H, L) | optimizer | parameters that differ from mup: width-only | N, H and L |")
    print("|---|---|---|---|")
    grown = [Shape(32, 4, 2), Shape(8, 16, 2), Shape(24, 12, 2), Shape(8, 4, 8)]
    for shape in grown:
        for optimizer, kind in (("adam", mup.MuAdamW), ("sgd", mup.MuSGD)):
            model = with_base_shapes(shape)
            made = kind(model.parameters(), lr=0.1, weight_decay=0.2)
            theirs = {id(t): (row["lr"], row["weight_decay"]) for row in made.param_groups for t in row["params"]}
            cells = []
            for p in (Parametrization.mup(BASE, optimizer), Parametrization(base=BASE, optimizer=optimizer)):
                groups = torch_groups(
                    p, model, BaseHyperparameters(0.1, 1e-8, 0.2), ROLES, shape, forward_multipliers(p, shape)
                )
                differ, worst = {}, 0.0
                for group in groups:
                    for tensor in group["params"]:
                        lr, decay = theirs[id(tensor)]
                        apart = max(abs(group["lr"] / lr - 1), abs(group["weight_decay"] / decay - 1))
                        worst = max(worst, apart if apart < 1e-9 else 0.0)
                        if apart >= 1e-9:
                            differ[group["role"]] = group["lr"] / lr
                named = ", ".join(f"{role} x{factor:.3g}" for role, factor in differ.items())
                cells.append(named or f"none of {len(theirs)} (largest relative difference {worst:.0e})")
            print(f"| ({shape.key_dim}, {shape.heads}, {shape.depth}) | {optimizer} | {cells[0]} | {cells[1]} |")


def prepare(theory, shape, rate, seed):
    """Return a model and its optimizer."""
    import torch

    import mup

    tuned = BaseHyperparameters(rate, EPSILON, stds=SPREADS)
    if theory == "N, H and L":  # folded into the usual forward pass
        model, p = make(shape, False), Parametrization(base=BASE)
        initialize_model(p, model, tuned, ROLES, shape, generator=torch.Generator().manual_seed(seed))
        return model, torch.optim.Adam(torch_groups(p, model, tuned, ROLES, shape))
    model = with_base_shapes(shape)
    start_as_mup(model, seed)
    if theory == "mup":
        return model, mup.MuAdam(model.parameters(), lr=rate, eps=EPSILON)
    p = Parametrization.mup(BASE)
    return model, torch.optim.Adam(torch_groups(p, model, tuned, ROLES, shape, forward_multipliers(p, shape)))


def train(theory, shape, rate, seed, steps):
    """Return the loss of every step; not a number from where training diverged."""
    import torch

    digits = load_digits()
    patches = torch.as_tensor(np.asarray(cut_patches(normalize(digits.images, np.float32), 2)))
    labels = torch.as_tensor(np.asarray(digits.labels), dtype=torch.long)
    rng = np.random.default_rng([seed, 7])
    model, optimizer = prepare(theory, shape, rate, seed)
    losses = np.full(steps, np.nan)
    for step in range(steps):
        batch = rng.integers(0, len(labels), 16)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(patches[batch]), labels[batch])
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
        if not math.isfinite(losses[step]):
            break
    return losses


def drifts(seeds, steps):
    """Print the drift of the best rate along each axis, and the loss at the largest size."""
    print("| axis | sizes | theory | drift over x8, decades (interval) | verdict | best loss, base to largest |")
    print("|---|---|---|---|---|---|")
    for axis, sizes in SIZES.items():
        for theory in ("mup", "N, H and L"):
            reached = {}

            def losses(shape, rates, seed, theory=theory, reached=reached):
                last = steps // 5
                ends = [train(theory, shape, rate, seed, steps)[-last:].mean() for rate in rates]
                best = np.nanmin(ends)
                reached.setdefault(shape, {})[seed] = min(best, reached.get(shape, {}).get(seed, np.inf))
                return np.array(ends)

            found = transfer_check(shapes_along(axis, BASE, sizes), RATES, losses, seeds=range(seeds))
            fitted, low, high = found.decades
            ends = " to ".join(f"{np.mean(list(each.values())):.3f}" for each in reached.values())
            shown = ", ".join(map(str, sizes))
            print(
                f"| {axis} | {shown} | {theory} | {fitted:.2f} ({low:.2f}, {high:.2f}) | {found.sentence()} | {ends} |"
            )
            sys.stdout.flush()


def main():
    """Run the three comparisons."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    # This file has the name of the package it measures: with its folder off the path, `import mup` finds the package.
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
    sys.modules.pop("mup", None)
    try:
        import torch

        import mup
    except ImportError as error:
        sys.exit(f"{error.name} is not installed: pip install mup torch")
    torch.set_num_threads(1)
    version = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("mup", "torch"))
    print(
        f"{version}, Python {platform.python_version()}, one thread of {platform.machine()}; {mup.__name__} from "
        f"width {BASE.width}\n"
    )
    compare_groups()
    one, other = (train(theory, Shape(16, 8, 2), 0.01, 0, given.steps) for theory in ("mup", "width-only"))
    print(
        f"\nwidth-only groups and mup, same draws, (16, 8, 2), {given.steps} steps: losses differ by "
        f"{np.abs(one - other).max():.1e}\n"
    )
    start = time.monotonic()
    drifts(given.seeds, given.steps)
    print(f"\n{given.seeds} seeds, {given.steps} steps, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
