r"""Stochastic gradient step as one compiled loop: every context is drawn and used within the processor cache.

The same step as `manyheads.theory.bigram.engines.reference`: all queries of a batch are drawn first and the samples
sorted by query; query after query, each sample's T tokens are generated (T bytes), read once forward and once backward
into one gradient of T numbers; the row's update and its soft threshold follow. No array of size B T is allocated.

Tokens follow from one multiplication if all are equally frequent, :math:`\lfloor wN/2^{32} \rfloor`, from comparisons
if there are four or fewer, else from a guide table and a comparison or two: the same outcome as counting thresholds,
bit for bit. Attention with less than a sixteenth of nonzero weights is read by its list of positions.

Kernels are plain functions at module level, which import nothing. With the extra `fast` numba compiles them on the
first call and keeps them in the user's cache folder under a hash of their source. It promotes integers to 64 bits in
every operation, hence the casts.
"""

import contextlib
import hashlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyheads._extras import require
from manyheads.theory.bigram.engines.draw_kernels import (
    CHUNK,
    Doubles,
    Floats,
    Ints,
    Tokens,
    Word,
    Words,
    count_reached,
    draw_keys,
    fill_even,
    fill_few,
    fill_guided,
    finish,
    one_word,
)
from manyheads.theory.bigram.engines.generator import SLOT, TARGET, WEYL
from manyheads.theory.bigram.engines.reference import Rates, Tables

# Sums may be reordered and products fused; infinities and NaN are preserved for the divergence check.
FAST = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy"}
EXACT = {"error_model": "numpy"}
_lock = threading.RLock()
_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
_registered: set[Callable[..., Any]] = set()


def compile_kernel(entry: Callable[..., Any], fast: tuple[Callable[..., Any], ...]) -> Callable[..., Any]:
    """Return `entry` compiled; it releases the GIL, so that several runs share a process as threads.

    `fast` lists every function that it or another of them calls, callees first; their sums may be reordered, those of
    `entry` not.
    """
    with _lock:
        if entry not in _compiled:
            numba, extending = require("numba"), require("numba.extending")
            for function in fast:
                if function not in _registered:
                    extending.register_jitable(**FAST)(function)
                    _registered.add(function)
            with _cache_of(numba, entry, fast) as kept:
                _compiled[entry] = numba.njit(cache=kept, nogil=True, **EXACT)(entry)
        return _compiled[entry]


@contextlib.contextmanager
def _cache_of(numba: ModuleType, entry: Callable[..., Any], fast: tuple[Callable[..., Any], ...]) -> Iterator[bool]:
    """Point numba to a folder of the user's cache while it decides where to store a function; True if there is one."""
    modules = {inspect.getmodule(function) for function in (entry, *fast)}
    sources = sorted(inspect.getsource(module) for module in modules if module is not None)
    name = hashlib.sha256("".join(sources).encode()).hexdigest()[:16]
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "manyheads" / "numba" / f"{name}-{sys.implementation.cache_tag}"
    before = numba.config.CACHE_DIR
    if before:  # the caller has chosen a folder
        yield True
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        kept = os.access(folder, os.W_OK)
    except OSError:
        kept = False  # a read-only home: compilation is repeated in every process
    try:
        if kept:
            numba.config.CACHE_DIR = str(folder)
        yield kept
    finally:
        numba.config.CACHE_DIR = before


SPARSE = 16
FOR_SLOT, FOR_TARGET = np.uint32(SLOT[0]), np.uint32(TARGET[0])
FEW = 9  # up to this number of tokens, passes that count two each are faster than a histogram


def fill(workspace: "Workspace", first: Word, second: Word) -> None:
    """Fill the workspace's tokens in the fastest of the three ways."""
    if workspace.guide.shape[0] == 0:
        fill_even(workspace.tokens, np.uint64(workspace.bounds.shape[0] + 1), first, second)
    elif workspace.bounds.shape[0] <= 3:
        fill_few(workspace.tokens, workspace.bounds, first, second)
    else:
        fill_guided(
            workspace.tokens, workspace.words, workspace.bounds, workspace.guide, workspace.shift, first, second
        )


def sum_two(tokens: Tokens, weights: Floats, token: int) -> tuple[np.float32, np.float32]:
    """Return the weight of a token and of the next one."""
    one, two = np.float32(0), np.float32(0)
    narrow, after = np.uint8(token), np.uint8(token + 1)  # compared as bytes, 64 at a time
    for t in range(tokens.shape[0]):
        one += weights[t] if tokens[t] == narrow else np.float32(0)
        two += weights[t] if tokens[t] == after else np.float32(0)
    return one, two


def sum_all(weights: Floats) -> np.float32:
    """Return the sum of all weights."""
    total = np.float32(0)
    for t in range(weights.shape[0]):
        total += weights[t]
    return total


def weigh_tokens(tokens: Tokens, weights: Floats, total: np.float32, seen: Floats, parts: Floats) -> None:
    """Sum the weights of every token: two tokens a pass for small vocabularies, else four histograms in turn."""
    size = seen.shape[0]
    if size <= FEW:
        rest = total
        for token in range(0, size - 1, 2):
            one, two = sum_two(tokens, weights, token)
            seen[token], seen[token + 1] = one, two
            rest -= one + two
        if size % 2:
            seen[size - 1] = rest
        return
    parts[:] = 0
    whole = tokens.shape[0] // 4 * 4
    for t in range(0, whole, 4):  # four histograms, so that no addition waits for the previous one
        parts[0, tokens[t]] += weights[t]
        parts[1, tokens[t + 1]] += weights[t + 1]
        parts[2, tokens[t + 2]] += weights[t + 2]
        parts[3, tokens[t + 3]] += weights[t + 3]
    for t in range(whole, tokens.shape[0]):
        parts[0, tokens[t]] += weights[t]
    for token in range(size):
        seen[token] = parts[0, token] + parts[1, token] + parts[2, token] + parts[3, token]


def weigh_listed(tokens: Tokens, weights: Floats, listed: Ints, seen: Floats) -> None:
    """Sum the weights of every token over listed positions."""
    seen[:] = 0
    for i in range(listed.shape[0]):
        seen[tokens[listed[i]]] += weights[listed[i]]


def add_token_gradient(tokens: Tokens, by_token: Floats, gradient: Floats) -> None:
    """Add the gradient of each position's token; `by_token` has four entries or more."""
    if by_token.shape[0] == 4:
        zero, one, two, three = by_token[0], by_token[1], by_token[2], by_token[3]
        for t in range(tokens.shape[0]):
            token = tokens[t]
            gradient[t] += (zero if token == 0 else one) if token < 2 else (two if token == 2 else three)
    else:
        for t in range(tokens.shape[0]):
            gradient[t] += by_token[tokens[t]]


def accumulate_sample(
    value: Doubles, mu: Doubles, target: int, seen: Floats, residual: Doubles, by_value: Doubles, by_token: Floats
) -> None:
    """Accumulate one sample apart from its tokens: residual, its share of the value gradient, gradient by token."""
    size = mu.shape[0]
    total = 0.0
    for j in range(size):
        total += seen[j]
    for i in range(size):
        predicted = 0.0
        for j in range(size):
            predicted += value[i, j] * seen[j]
        residual[i] = mu[i] + predicted - (1.0 if i == target else 0.0)
    for j in range(size):
        seen[j] -= total * mu[j]
        residual[size + j] = 0.0
    for i in range(size):
        off = residual[i]
        for j in range(size):
            by_value[i, j] += off * seen[j]
            residual[size + j] += off * value[i, j]
    for j in range(size):
        by_token[j] = residual[size + j]


def move(weights: Floats, gradient: Floats, rate: np.float32) -> None:
    """Step against a gradient centred over positions."""
    mean = np.float32(sum_all(gradient) / np.float32(gradient.shape[0]))
    for t in range(weights.shape[0]):
        weights[t] -= rate * (gradient[t] - mean)


def shrink_row(weights: Floats, threshold: np.float32) -> None:
    """Move every weight towards zero by `threshold`."""
    for t in range(weights.shape[0]):
        moved = weights[t]
        weights[t] = moved - min(max(moved, -threshold), threshold)


def list_positions(weights: Floats, listed: Ints) -> int:
    """Write the positions of nonzero weights, and return their number, or -1 if they are too many."""
    count = 0
    for t in range(weights.shape[0]):
        if weights[t] != 0:
            if (count + 1) * SPARSE > weights.shape[0]:
                return -1
            listed[count] = t
            count += 1
    return count


def sum_column(
    value: Doubles,
    weights: Floats,
    query: int,
    chosen: Ints,
    keys: Words,
    tables: Tables,
    workspace: "Workspace",
    by_value: Doubles,
    gradient: Floats,
) -> None:
    """Add up both gradients over the samples of one query."""
    gradient[:] = 0
    total = sum_all(weights)
    few = list_positions(weights, workspace.listed)
    for b in chosen:
        first, second = keys[b, 0], keys[b, 1]
        fill(workspace, first, second)
        slot = count_reached(tables.slots[query], one_word(FOR_SLOT, first, second, WEYL))
        attended = workspace.tokens[tables.positions[query, slot]]
        target = count_reached(tables.targets[attended], one_word(FOR_TARGET, first, second, WEYL))
        if few >= 0:
            weigh_listed(workspace.tokens, weights, workspace.listed[:few], workspace.seen)
        else:
            weigh_tokens(workspace.tokens, weights, total, workspace.seen, workspace.parts)
        accumulate_sample(
            value, tables.stationary, target, workspace.seen, workspace.residual, by_value, workspace.by_token
        )
        add_token_gradient(workspace.tokens, workspace.by_token, gradient)


def run_steps(
    value: Doubles,
    attention: Floats,
    tables: Tables,
    workspace: "Workspace",
    roots: Words,
    span: tuple[int, int],
    rates: Rates,
) -> tuple[int, float]:
    """Make the steps in place; return the first step that was not made and the largest entry of the value."""
    size, length = attention.shape
    batch = workspace.keys.shape[0]
    gradient = np.empty(length, np.float32)
    by_value = np.empty((size, size))
    threshold = np.float32(rates.threshold)
    peak = 0.0
    for step in range(span[0], span[1]):
        by_value[:] = 0
        draw_keys(roots, step, workspace.keys, workspace.queries, workspace.order, workspace.starts, tables.tokens)
        for k in range(size):
            chosen = workspace.order[workspace.starts[k] : workspace.starts[k + 1]]
            if chosen.shape[0]:
                sum_column(value, attention[k], k, chosen, workspace.keys, tables, workspace, by_value, gradient)
                move(attention[k], gradient, np.float32(rates.attention / (batch * tables.stationary[k])))
            if threshold > 0:
                shrink_row(attention[k], threshold)
        peak = 0.0
        for i in range(size):
            for j in range(size):
                value[i, j] -= rates.value * by_value[i, j] / (batch * tables.stationary[j])
                if not abs(value[i, j]) <= peak:
                    peak = abs(value[i, j])
        if not peak <= rates.limit:
            return step + 1, peak
    return span[1], peak


def run_gradients(
    value: Doubles, attention: Floats, tables: Tables, workspace: "Workspace", roots: Words, step: int
) -> tuple[Doubles, Floats]:
    """Return both preconditioned gradients of one step."""
    size, length = attention.shape
    batch = workspace.keys.shape[0]
    by_value, by_attention = np.zeros((size, size)), np.zeros((size, length), np.float32)
    gradient = np.empty(length, np.float32)
    draw_keys(roots, step, workspace.keys, workspace.queries, workspace.order, workspace.starts, tables.tokens)
    for k in range(size):
        chosen = workspace.order[workspace.starts[k] : workspace.starts[k + 1]]
        if chosen.shape[0]:
            sum_column(value, attention[k], k, chosen, workspace.keys, tables, workspace, by_value, gradient)
            move(by_attention[k], gradient, np.float32(-1 / (batch * tables.stationary[k])))
    return by_value / (batch * tables.stationary), by_attention


DRAWS = (finish, one_word, fill_even, fill_few, fill_guided, fill, count_reached)
SUMS = (sum_two, sum_all, weigh_tokens, weigh_listed, add_token_gradient, accumulate_sample, move, shrink_row)
FAST_FUNCTIONS = (*DRAWS, *SUMS, draw_keys, list_positions, sum_column)


class Workspace(NamedTuple):
    """Working arrays of a run, and the tables that turn words into tokens; an empty guide for equal frequencies."""

    tokens: Tokens  # (T,)
    words: Words  # (CHUNK,)
    listed: Ints  # (T / SPARSE + 1,)
    seen: Floats  # (N,)
    parts: Floats  # (4, N)
    residual: Doubles  # (2 N,)
    by_token: Floats  # (max(N, 4),)
    keys: Words  # (B, 2)
    queries: Ints  # (B,)
    order: Ints  # (B,)
    starts: Ints  # (N + 1,)
    bounds: Words  # (N - 1,)
    guide: NDArray[np.uint16]
    shift: np.uint32


def make_workspace(tables: Tables, length: int, batch: int) -> Workspace:
    """Allocate the working arrays of a run."""
    size = len(tables.stationary)
    bounds = tables.tokens.astype(np.uint32)
    even = ((np.arange(1, size) << 32) + size - 1) // size  # rounded up
    bits = 12 if size <= 256 else 16
    buckets = np.arange(1 << bits, dtype=np.uint64) << np.uint64(32 - bits)
    is_even = np.array_equal(even.astype(np.uint64), tables.tokens)
    guide = np.searchsorted(tables.tokens, np.zeros(0, np.uint64) if is_even else buckets, side="right")
    return Workspace(
        tokens=np.empty(length, np.uint8) if size <= 256 else np.empty(length, np.uint16),
        words=np.empty(CHUNK, np.uint32),
        listed=np.empty(length // SPARSE + 1, np.int64),
        seen=np.empty(size, np.float32),
        parts=np.empty((4, size), np.float32),
        residual=np.empty(2 * size),
        by_token=np.zeros(max(size, 4), np.float32),
        keys=np.empty((batch, 2), np.uint32),
        queries=np.empty(batch, np.int64),
        order=np.empty(batch, np.int64),
        starts=np.empty(size + 1, np.int64),
        bounds=bounds,
        guide=guide.astype(np.uint16),
        shift=np.uint32(32 - bits),
    )


def descend_in_numba(
    state: tuple[Doubles, Floats], tables: Tables, roots: Words, span: tuple[int, int], rates: Rates, *, batch: int
) -> tuple[Doubles, Floats, int, float]:
    """Make the steps in place on the arrays of `state`: `reference.descend_in_jax`."""
    value, attention = state
    run = compile_kernel(run_steps, FAST_FUNCTIONS)
    workspace = make_workspace(tables, attention.shape[1], batch)
    floats = Rates(*(float(rate) for rate in rates))
    reached, peak = run(value, attention, tables, workspace, roots, span, floats)
    return value, attention, reached, peak


def gradients_in_numba(
    state: tuple[Doubles, Floats], tables: Tables, roots: Words, step: int, *, batch: int
) -> tuple[Doubles, Floats]:
    """Return both gradients of one step: `manyheads.theory.bigram.engines.reference.mean_gradients`."""
    run = compile_kernel(run_gradients, FAST_FUNCTIONS)
    return run(*state, tables, make_workspace(tables, state[1].shape[1], batch), roots, step)
