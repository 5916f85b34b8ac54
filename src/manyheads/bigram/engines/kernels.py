r"""The stochastic gradient step as one compiled loop: every context is drawn, read and forgotten within the cache.

The same step as `manyheads.bigram.engines.reference`, arranged for the processor: all queries of a batch are drawn
first and
the samples sorted by query; column after column, each sample's T tokens are generated (T bytes), read once forward and
once backward into one gradient of T numbers; the column's update and its soft threshold follow while it is in the
cache. Nothing of size B T ever exists.

Tokens are found by one multiplication where all are equally frequent, :math:`\lfloor wN/2^{32} \rfloor`, by comparisons
where there are four or fewer, and by a guide table and a comparison or two elsewhere: the same outcome as counting
thresholds, bit for bit. An attention with
less than a sixteenth of its entries is read by its list of positions.

Functions of this module are compiled when they are first needed (`manyheads.bigram.engines.compiling`). numba's
integers grow to 64 bits with every operation, hence the casts.
"""

from typing import Any, NamedTuple

import numpy as np

from manyheads.bigram.engines.compiling import compile_kernel
from manyheads.bigram.engines.generator import FIRST, OTHER, QUERY, SECOND, SLOT, TARGET, WEYL
from manyheads.bigram.engines.reference import ROUNDS, Rates, Tables

HALF, SHIFT, SPARSE = np.uint32(16), np.uint32(15), 16
FOR_QUERY, FOR_SLOT, FOR_TARGET = np.uint32(QUERY[0]), np.uint32(SLOT[0]), np.uint32(TARGET[0])
CHUNK = 512  # words on their way to tokens
FEW = 9  # up to so many tokens, passes over the context that count two each beat a histogram
RULES = {"none": 0, "shrink": 1, "shrink_to_sum_one": 2}


def finish(h: Any, second: Any) -> Any:
    """Turn counter times multiplier plus first key word into the word."""
    h = np.uint32(np.uint32(np.uint32(h ^ (h >> HALF)) * FIRST) ^ second)
    h = np.uint32(np.uint32(h ^ (h >> SHIFT)) * SECOND)
    return np.uint32(h ^ (h >> SHIFT))


def one_word(counter: Any, first: Any, second: Any, multiplier: Any) -> Any:
    """Return one word of `manyheads.bigram.engines.generator.mix`."""
    return finish(np.uint32(np.uint32(np.uint32(counter) * multiplier) + first), second)


def fill_even(tokens: Any, outcomes: Any, first: Any, second: Any) -> None:
    """Fill with equally frequent tokens."""
    h = np.uint32(first)
    for t in range(tokens.shape[0]):
        tokens[t] = (np.uint64(finish(h, second)) * outcomes) >> np.uint64(32)
        h = np.uint32(h + WEYL)


def fill_few(tokens: Any, bounds: Any, first: Any, second: Any) -> None:
    """Fill with up to four tokens of any law: every bound is compared."""
    h = np.uint32(first)
    last = bounds.shape[0] - 1
    one, two, three = bounds[0], bounds[min(1, last)], bounds[min(2, last)]
    has_two, has_three = np.uint8(last >= 1), np.uint8(last >= 2)
    for t in range(tokens.shape[0]):
        word = finish(h, second)
        tokens[t] = np.uint8(word >= one) + (np.uint8(word >= two) & has_two) + (np.uint8(word >= three) & has_three)
        h = np.uint32(h + WEYL)


def fill_guided(tokens: Any, words: Any, bounds: Any, guide: Any, shift: Any, first: Any, second: Any) -> None:
    """Fill with tokens of any law: the guide names the least token of a bucket, comparisons do the rest."""
    h = np.uint32(first)
    for begin in range(0, tokens.shape[0], CHUNK):
        size = min(CHUNK, tokens.shape[0] - begin)
        for i in range(size):
            words[i] = finish(h, second)
            h = np.uint32(h + WEYL)
        for i in range(size):
            token = np.int64(guide[words[i] >> shift])
            while token < bounds.shape[0] and words[i] >= bounds[token]:
                token += 1
            tokens[begin + i] = token


def fill(desk: Any, first: Any, second: Any) -> None:
    """Fill the desk's tokens in the fastest of the three ways."""
    if desk.guide.shape[0] == 0:
        fill_even(desk.tokens, np.uint64(desk.bounds.shape[0] + 1), first, second)
    elif desk.bounds.shape[0] <= 3:
        fill_few(desk.tokens, desk.bounds, first, second)
    else:
        fill_guided(desk.tokens, desk.words, desk.bounds, desk.guide, desk.shift, first, second)


def count_reached(bounds: Any, word: Any) -> Any:
    """Return the outcome of one word by bisection: how many bounds it reaches."""
    low, high, target = 0, bounds.shape[0], np.uint64(word)
    while low < high:
        middle = (low + high) // 2
        if bounds[middle] <= target:
            low = middle + 1
        else:
            high = middle
    return low


def sum_two(tokens: Any, weights: Any, token: Any) -> Any:
    """Return the weight of a token and of the next one."""
    one, two = np.float32(0), np.float32(0)
    narrow, after = np.uint8(token), np.uint8(token + 1)  # compared as bytes, 64 at a time
    for t in range(tokens.shape[0]):
        one += weights[t] if tokens[t] == narrow else np.float32(0)
        two += weights[t] if tokens[t] == after else np.float32(0)
    return one, two


def sum_all(weights: Any) -> Any:
    """Return the sum of all weights."""
    total = np.float32(0)
    for t in range(weights.shape[0]):
        total += weights[t]
    return total


def weigh_tokens(tokens: Any, weights: Any, total: Any, seen: Any, parts: Any) -> None:
    """Sum the weights of every token: two tokens a pass where there are few, four histograms in turn elsewhere."""
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
    for t in range(0, whole, 4):  # a histogram of its own each, so that no addition waits for the one before
        parts[0, tokens[t]] += weights[t]
        parts[1, tokens[t + 1]] += weights[t + 1]
        parts[2, tokens[t + 2]] += weights[t + 2]
        parts[3, tokens[t + 3]] += weights[t + 3]
    for t in range(whole, tokens.shape[0]):
        parts[0, tokens[t]] += weights[t]
    for token in range(size):
        seen[token] = parts[0, token] + parts[1, token] + parts[2, token] + parts[3, token]


def weigh_listed(tokens: Any, weights: Any, listed: Any, seen: Any) -> None:
    """Sum the weights of every token over listed positions: all others have none."""
    seen[:] = 0
    for i in range(listed.shape[0]):
        seen[tokens[listed[i]]] += weights[listed[i]]


def add_pull(tokens: Any, pull: Any, gradient: Any) -> None:
    """Add what each position's token pulls; `pull` has four entries or more."""
    if pull.shape[0] == 4:
        zero, one, two, three = pull[0], pull[1], pull[2], pull[3]
        for t in range(tokens.shape[0]):
            token = tokens[t]
            gradient[t] += (zero if token == 0 else one) if token < 2 else (two if token == 2 else three)
    else:
        for t in range(tokens.shape[0]):
            gradient[t] += pull[tokens[t]]


def settle(value: Any, law: Any, target: Any, seen: Any, residual: Any, by_value: Any, pull: Any) -> None:
    """Do what one sample costs besides its tokens: residual, its share of the value's gradient, the pull on tokens."""
    size = law.shape[0]
    total = 0.0
    for j in range(size):
        total += seen[j]
    for i in range(size):
        predicted = 0.0
        for j in range(size):
            predicted += value[i, j] * seen[j]
        residual[i] = law[i] + predicted - (1.0 if i == target else 0.0)
    for j in range(size):
        seen[j] -= total * law[j]
        residual[size + j] = 0.0
    for i in range(size):
        off = residual[i]
        for j in range(size):
            by_value[i, j] += off * seen[j]
            residual[size + j] += off * value[i, j]
    for j in range(size):
        pull[j] = residual[size + j]


def move(weights: Any, gradient: Any, rate: Any) -> None:
    """Step against a gradient whose mean over the positions is taken off."""
    mean = np.float32(sum_all(gradient) / np.float32(gradient.shape[0]))
    for t in range(weights.shape[0]):
        weights[t] -= rate * (gradient[t] - mean)


def shrink_row(weights: Any, shift: Any, threshold: Any) -> None:
    """Move every entry by `shift`, then towards zero by `threshold`."""
    for t in range(weights.shape[0]):
        moved = weights[t] + shift
        weights[t] = moved - min(max(moved, -threshold), threshold)


def sum_shrunk(weights: Any, shift: Any, threshold: Any) -> Any:
    """Return the sum of the entries that `shrink_row` would leave, and how many it would leave."""
    total, count = 0.0, 0.0
    for t in range(weights.shape[0]):
        moved = weights[t] + shift
        kept = moved - min(max(moved, -threshold), threshold)
        total += kept
        count += 1.0 if kept != 0.0 else 0.0
    return total, count


def find_shift(weights: Any, threshold: Any) -> Any:
    """Return the shift after which the shrunk row sums to one: `reference.shrink_to_sum_one`."""
    length = weights.shape[0]
    total, _ = sum_shrunk(weights, 0.0, 0.0)
    shift = (1.0 - total) / length
    low, high = shift - threshold, shift + threshold
    for number in range(ROUNDS):
        total, count = sum_shrunk(weights, shift, threshold)
        excess = total - 1.0
        if abs(excess) <= 1e-12 * (1.0 + length * threshold):
            break
        if excess > 0:
            high = shift
        else:
            low = shift
        newton = shift - excess / max(count, 1.0)
        good = count > 0 and low < newton < high and number % 3 != 2
        shift = newton if good else (low + high) / 2
    return shift


def draw_keys(roots: Any, step: Any, keys: Any, queries: Any, order: Any, starts: Any, bounds: Any) -> None:
    """Draw the keys and queries of a batch, and list its samples query by query: those of k from starts[k] on."""
    counter = np.uint32(step)
    one = one_word(counter, roots[0], roots[1], WEYL)
    two = one_word(counter, roots[2], roots[3], OTHER)
    starts[:] = 0
    for b in range(keys.shape[0]):
        keys[b, 0] = one_word(b, one, np.uint32(roots[2] ^ two), WEYL)
        keys[b, 1] = one_word(b, two, np.uint32(roots[0] ^ one), OTHER)
        queries[b] = count_reached(bounds, one_word(FOR_QUERY, keys[b, 0], keys[b, 1], WEYL))
        starts[queries[b] + 1] += 1
    for k in range(1, starts.shape[0]):
        starts[k] += starts[k - 1]
    for b in range(keys.shape[0] - 1, -1, -1):  # backwards, from the end of each group: samples stay in order
        starts[queries[b] + 1] -= 1
        order[starts[queries[b] + 1]] = b
    for k in range(starts.shape[0] - 1):
        starts[k] = starts[k + 1]
    starts[-1] = keys.shape[0]


def list_positions(weights: Any, listed: Any) -> Any:
    """Write the positions of the entries that are not zero, and return their number, or -1 where they are many."""
    count = 0
    for t in range(weights.shape[0]):
        if weights[t] != 0:
            if (count + 1) * SPARSE > weights.shape[0]:
                return -1
            listed[count] = t
            count += 1
    return count


def sum_column(
    value: Any, weights: Any, query: Any, chosen: Any, keys: Any, tables: Any, desk: Any, by_value: Any, gradient: Any
) -> None:
    """Add up both gradients over the samples of one query."""
    gradient[:] = 0
    total = sum_all(weights)
    few = list_positions(weights, desk.listed)
    for b in chosen:
        first, second = keys[b, 0], keys[b, 1]
        fill(desk, first, second)
        slot = count_reached(tables.slots[query], one_word(FOR_SLOT, first, second, WEYL))
        attended = desk.tokens[tables.positions[query, slot]]
        target = count_reached(tables.targets[attended], one_word(FOR_TARGET, first, second, WEYL))
        if few >= 0:
            weigh_listed(desk.tokens, weights, desk.listed[:few], desk.seen)
        else:
            weigh_tokens(desk.tokens, weights, total, desk.seen, desk.parts)
        settle(value, tables.law, target, desk.seen, desk.residual, by_value, desk.pull)
        add_pull(desk.tokens, desk.pull, gradient)


def run_steps(value: Any, attention: Any, tables: Any, desk: Any, roots: Any, span: Any, rates: Any, rule: Any) -> Any:
    """Make the steps in place; return the step that was not begun any more and the largest entry of the value."""
    size, length = attention.shape
    batch = desk.keys.shape[0]
    gradient = np.empty(length, np.float32)
    by_value = np.empty((size, size))
    threshold = np.float32(rates.threshold)
    peak = 0.0
    for step in range(span[0], span[1]):
        by_value[:] = 0
        draw_keys(roots, step, desk.keys, desk.queries, desk.order, desk.starts, tables.tokens)
        for k in range(size):
            chosen = desk.order[desk.starts[k] : desk.starts[k + 1]]
            if chosen.shape[0]:
                sum_column(value, attention[k], k, chosen, desk.keys, tables, desk, by_value, gradient)
                move(attention[k], gradient, np.float32(rates.attention / (batch * tables.law[k])))
            if rule == 1:
                shrink_row(attention[k], np.float32(0), threshold)
            elif rule == 2:
                shift = find_shift(attention[k], rates.threshold)
                shrink_row(attention[k], shift, rates.threshold)
        peak = 0.0
        for i in range(size):
            for j in range(size):
                value[i, j] -= rates.value * by_value[i, j] / (batch * tables.law[j])
                if not abs(value[i, j]) <= peak:
                    peak = abs(value[i, j])
        if not peak <= rates.limit:
            return step + 1, peak
    return span[1], peak


def run_gradients(value: Any, attention: Any, tables: Any, desk: Any, roots: Any, step: Any) -> Any:
    """Return both preconditioned gradients of one step."""
    size, length = attention.shape
    batch = desk.keys.shape[0]
    by_value, by_attention = np.zeros((size, size)), np.zeros((size, length), np.float32)
    gradient = np.empty(length, np.float32)
    draw_keys(roots, step, desk.keys, desk.queries, desk.order, desk.starts, tables.tokens)
    for k in range(size):
        chosen = desk.order[desk.starts[k] : desk.starts[k + 1]]
        if chosen.shape[0]:
            sum_column(value, attention[k], k, chosen, desk.keys, tables, desk, by_value, gradient)
            move(by_attention[k], gradient, np.float32(-1 / (batch * tables.law[k])))
    return by_value / (batch * tables.law), by_attention


FAST_FUNCTIONS = (
    finish,
    one_word,
    fill_even,
    fill_few,
    fill_guided,
    fill,
    count_reached,
    sum_two,
    sum_all,
    weigh_tokens,
    weigh_listed,
    add_pull,
    settle,
    move,
    shrink_row,
    sum_shrunk,
    find_shift,
    draw_keys,
    list_positions,
    sum_column,
)


class Desk(NamedTuple):
    """Room to work in, and the tables that turn words into tokens; an empty guide says that all are as frequent."""

    tokens: np.ndarray  # (T,)
    words: np.ndarray  # (CHUNK,)
    listed: np.ndarray  # (T / SPARSE + 1,)
    seen: np.ndarray  # (N,)
    parts: np.ndarray  # (4, N)
    residual: np.ndarray  # (2 N,)
    pull: np.ndarray  # (max(N, 4),)
    keys: np.ndarray  # (B, 2)
    queries: np.ndarray  # (B,)
    order: np.ndarray  # (B,)
    starts: np.ndarray  # (N + 1,)
    bounds: np.ndarray  # (N - 1,)
    guide: np.ndarray
    shift: np.uint32


def prepare_desk(tables: Tables, length: int, batch: int) -> Desk:
    """Lay out the working arrays of a run."""
    size = len(tables.law)
    bounds = tables.tokens.astype(np.uint32)
    even = ((np.arange(1, size) << 32) + size - 1) // size  # rounded up
    bits = 12 if size <= 256 else 16
    buckets = np.arange(1 << bits, dtype=np.uint64) << np.uint64(32 - bits)
    is_even = np.array_equal(even.astype(np.uint64), tables.tokens)
    guide = np.searchsorted(tables.tokens, np.zeros(0, np.uint64) if is_even else buckets, side="right")
    return Desk(
        tokens=np.empty(length, np.uint8 if size <= 256 else np.uint16),
        words=np.empty(CHUNK, np.uint32),
        listed=np.empty(length // SPARSE + 1, np.int64),
        seen=np.empty(size, np.float32),
        parts=np.empty((4, size), np.float32),
        residual=np.empty(2 * size),
        pull=np.zeros(max(size, 4), np.float32),
        keys=np.empty((batch, 2), np.uint32),
        queries=np.empty(batch, np.int64),
        order=np.empty(batch, np.int64),
        starts=np.empty(size + 1, np.int64),
        bounds=bounds,
        guide=guide.astype(np.uint16),
        shift=np.uint32(32 - bits),
    )


def descend_in_numba(
    state: tuple[np.ndarray, np.ndarray],
    tables: Tables,
    roots: np.ndarray,
    span: tuple[int, int],
    rates: Rates,
    *,
    batch: int,
    rule: str,
) -> tuple[np.ndarray, np.ndarray, int, float]:
    """Make the steps on the arrays of `state`, which are changed: `reference.descend_in_jax`."""
    value, attention = state
    run = compile_kernel(run_steps, FAST_FUNCTIONS)
    desk = prepare_desk(tables, attention.shape[1], batch)
    floats = Rates(*(float(rate) for rate in rates))
    reached, peak = run(value, attention, tables, desk, roots, span, floats, RULES[rule])
    return value, attention, reached, peak


def gradients_in_numba(
    state: tuple[np.ndarray, np.ndarray], tables: Tables, roots: np.ndarray, step: int, *, batch: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return both gradients of one step: `manyheads.bigram.engines.reference.mean_gradients`."""
    run = compile_kernel(run_gradients, FAST_FUNCTIONS)
    return run(*state, tables, prepare_desk(tables, state[1].shape[1], batch), roots, step)
