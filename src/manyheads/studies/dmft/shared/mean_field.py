"""Shared parts of the mean-field studies: what is trained, the solved limit, ensembles of networks beside it.

A study solves a limit with `solve_blocks`, keeps `summarize` of it, and trains networks with `train_ensemble`: `output`
over training, and at its end `logits`, mean over heads, and the kernel `pooled`, of the same dimensions on both sides.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.errors import CertificateError, UsageError
from manyheads.scaling.checks.coordinate_check import finite_size_bias
from manyheads.studies.scaling.shared.parametrizations import TASKS
from manyheads.study.claims import Region
from manyheads.theory.dmft import Network, Problem, train_networks
from manyheads.theory.dmft.branches import attention_infinite_heads, attention_infinite_key_dim, mlp
from manyheads.theory.dmft.branches.branch import Branch, BranchProcess
from manyheads.theory.dmft.branches.gaussian_fields import fewest_heads, fewest_neurons
from manyheads.theory.dmft.dataset import Trajectory
from manyheads.theory.dmft.finite.problems import digits_problem, text_problem
from manyheads.theory.dmft.grids.depth import finite_depth_step
from manyheads.theory.dmft.recursion import solve_recursion

QUANTITIES = {
    "output": "outputs over training",
    "logits": "attention logits at the end",
    "pooled": "kernel of the read-outs at the end",
}
"""Compared quantity → its name in claims and pictures."""

NAMES = QUANTITIES | {
    "output_without": "outputs without response functions",
    "variance_start": "variance of the logits over heads at the start",
    "variance_end": "variance of the logits over heads at the end",
}
DIMS: dict[str, tuple[str, ...]] = {
    "output": ("step", "read_out", "class"),
    "output_without": ("step", "read_out", "class"),
    "logits": ("layer", "sample", "token", "token_too"),
    "pooled": ("read_out", "read_out_too"),
}

NEARER = (
    st.below(0),
    "the logarithm of a ratio of distances is negative where the first is the smaller one",
    "first over second distance (ln)",
)
"""Region, basis and quantity of claims that one distance is smaller than another."""

MOST_BYTES = 1e9  # of the networks that are trained at once
COPIES = 6  # of the weights: themselves, velocity, gradient, and what a step makes of them


@lru_cache(maxsize=64)
def training_problem(task: str, **fields: Any) -> Problem:
    """Return the digits (pooled, squared loss) or the text (causal, every token, cross-entropy); made once."""
    if task not in TASKS:
        raise UsageError(f"task={task!r}: choose one of {', '.join(TASKS)}")
    if fields.get("steps", 2) == 1:
        raise UsageError("steps=1: give two or more, the start is the first of them")
    make = digits_problem if task == "digits" else text_problem
    return make(**fields)


TRAINING = ("steps", "learning_rate", "richness", "depth", "depth_exponent", "norm", "momentum")


def problem_of(study: Any, **others: Any) -> Problem:
    """Return what a study trains: its `task`, those of its fields that are named as in `Problem`, and others."""
    own = {name: getattr(study, name) for name in TRAINING if name not in others and hasattr(study, name)}
    return training_problem(study.task, **own, **others)


def sampled_blocks(
    problem: Problem, key_dim: int, logit_exponent: float = 1.0, activation: str = "none", oversampling: int = 1
) -> tuple[Branch, ...]:
    """Return the branches of a block with infinitely many heads of key dimension N, and an MLP unless it is "none".

    `oversampling` times as many heads are sampled as moments need to be matched, and as many neurons.
    """
    rows = problem.steps * problem.rows
    heads = oversampling * max(512, fewest_heads(rows, key_dim))
    attention = attention_infinite_heads.InfiniteHeadsAttention(key_dim, heads, logit_exponent)
    if activation == "none":
        return (attention,)
    return attention, mlp.InfiniteWidthMLP(activation, oversampling * max(2048, fewest_neurons(2 * rows)))


def solve_blocks(
    problem: Problem,
    branches: Sequence[Branch] = (attention_infinite_key_dim.InfiniteKeyDimAttention(),),
    rng: np.random.Generator | None = None,
    *,
    responses: bool = True,
) -> Trajectory:
    """Solve the limit at the problem's depth, one branch after the other; without responses it is a control."""
    return solve_recursion(problem, _start(problem, branches, rng), finite_depth_step(problem), responses=responses)


def solve_heads(
    problem: Problem, branches: Sequence[Branch], rng: np.random.Generator | None = None
) -> tuple[Trajectory, np.ndarray]:
    """Solve the limit as `solve_blocks` does, and return the logits of all sampled heads at the end, too.

    They are (layer, head, sample, token, token_too), of layers whose heads are sampled.
    """
    layers: Any = _start(problem, branches, rng)
    solved = solve_recursion(problem, layers, finite_depth_step(problem))
    shown = [process.heads() for layer in layers for process in layer if hasattr(process, "heads")]
    return solved, np.stack(shown).swapaxes(1, 2)


def summarize(solved: Trajectory) -> dict[str, np.ndarray]:
    """Return the `QUANTITIES` of a solved limit; layers without attention have no logits."""
    logits = np.stack([look["logits"] for look in solved.observables[-1] if "logits" in look])
    return {"output": solved.outputs, "logits": logits, "pooled": solved.pooled[-1]}


def train_ensemble(
    problem: Problem, network: Network, key: st.Key, count: int, *, every_head: bool = False
) -> dict[str, tuple[Any, ...]]:
    """Train some networks from seeds that follow from a key, all at once.

    Returns
    -------
    Over (network, ...): the `QUANTITIES` of each, and `variance_start` and `variance_end`, the variance of the logits
    over heads before and after training, mean over layers, samples and pairs of tokens. With `every_head` also
    `head_logits` (layer, head, sample, token, token_too), those of single heads at the end.
    """
    trained = train_seeds(problem, network, key, count, every_head=every_head)
    ends = trained["logit_variance"].values[:, [0, -1]].mean(-1)  # (network, 2), mean over layers
    found = {
        "output": trained["output"].values,
        "logits": trained["logits"].values[:, -1],
        "pooled": trained["pooled"].values[:, -1],
        "variance_start": ends[:, 0],
        "variance_end": ends[:, 1],
    }
    heads = {}
    if every_head:
        dims = ("network", "layer", "head", *DIMS["logits"][1:])
        values = trained["head_logits"].values[:, -1].swapaxes(2, 3)
        heads["head_logits"] = (dims, values, "attention logits of single heads at the end")
    return record(found, "network") | heads


def record(values: Mapping[str, np.ndarray], *lead: str) -> dict[str, tuple[Any, ...]]:
    """Return arrays by name as a record: dimensions after `lead`, long names, and the steps."""
    found = {name: ((*lead, *DIMS.get(name, ())), value, NAMES[name]) for name, value in values.items()}
    return found | {"step": ("step", np.arange(values["output"].shape[len(lead)]), "updates")}


def root_law(letter: str, sizes: Sequence[int]) -> tuple[Region, str]:
    """Return region and basis of claims that single networks approach a limit like the inverse root of a size."""
    bias = -finite_size_bias(sizes)
    return st.near(-0.5, bias), f"a correction 1 + {letter}^(-1/2) moves the exponent by {bias:.2f} over these sizes"


def first_output(limit: xr.DataArray, networks: Mapping[str, xr.DataArray], note: str, where: str = "") -> st.Panel:
    """Draw the first output of networks over training beside the limit; bands range over networks and draws."""
    first = {"read_out": 0, "class": 0}
    return st.lines(
        f"Output of the first read-out over training{where}",
        "step",
        "output",
        {name: values.isel(first) for name, values in networks.items()},
        {"limit": limit.isel(first)},
        over=("replicate", "prediction", "network"),
        note=note,
    )


def train_seeds(problem: Problem, network: Network, key: st.Key, count: int, **records: bool) -> xr.Dataset:
    """Train networks as `train_networks` does, from seeds that follow from a key, as many at once as memory holds.

    `records` are its options `every_head` and `movement`.
    """
    seeds = st.generator(key).integers(0, 2**31, count)
    chunk = _chunk(problem, network, count)
    trained = train_networks(problem, network, seeds.tolist(), chunk=chunk, **records)
    if lost := int((~np.isfinite(trained["loss"].values)).any(-1).sum()):
        raise CertificateError(
            f"{lost} of {count} networks with N={network.key_dim}, H={network.heads} diverge, the limit may not: "
            "take a smaller learning rate or richness, or larger networks",
            measured=lost / count,
            threshold=0.0,
        )
    return trained


def projection(found: xr.DataArray, wanted: xr.DataArray, over: Sequence[str]) -> xr.DataArray:
    """Return how much of a wanted array is in another one: 1 is all of it, 0 none."""
    return (found * wanted).sum(over) / (wanted**2).sum(over)


def _chunk(problem: Problem, network: Network, count: int) -> int:
    layers = 4 if network.activation is None else 6
    outside = problem.inputs.shape[-1] + problem.classes
    weights = network.width * (problem.depth * layers * network.width + outside)
    most = max(1, int(MOST_BYTES / (8 * COPIES * weights)))
    return -(-count // -(-count // most))  # in equal parts: another number of networks is another program


def _start(problem: Problem, branches: Sequence[Branch], rng: np.random.Generator | None) -> list[list[BranchProcess]]:
    rng = np.random.default_rng(0) if rng is None else rng
    return [[branch.start(problem, rng)] for _ in range(problem.depth) for branch in branches]
