from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from manyheads.theory.bigram.engines import kernels
from manyheads.theory.bigram.engines.generator import draw_step_batch, sample_keys, scramble
from manyheads.theory.bigram.engines.kernels import compile_kernel
from manyheads.theory.bigram.task import draw_bigram_task
from manyheads.theory.bigram.training.proximal_sgd import (
    Diverged,
    State,
    StepSettings,
    _prepare,
    batch_gradients,
    descend,
    initial_state,
)

pytestmark = pytest.mark.fast

TASKS = [
    (2, 70, True),
    (3, 100, True),
    (2, 50, False),
    (3, 100, False),
    (4, 50, False),
    (4, 60, True),
    (9, 60, False),
    (20, 1100, True),
    (300, 40, False),
]


def problem(rng, tokens, length, uniform):
    task = draw_bigram_task(rng, tokens, length, 2, uniform=uniform)
    value = rng.normal(size=(tokens, tokens)) * 0.3
    value -= (value @ task.stationary)[:, None]
    return task, State(value, rng.dirichlet(np.ones(length), tokens).astype(np.float32))


@pytest.mark.parametrize(("tokens", "length", "uniform"), TASKS)
def test_tokens_agree_bit_for_bit(rng, seed, tokens, length, uniform):
    task, state = problem(rng, tokens, length, uniform)
    _, tables, roots = _prepare(task, state, seed)
    workspace = kernels.make_workspace(tables, length, 1)
    assert (len(workspace.guide) == 0) == uniform
    first, second = sample_keys(roots, np.array([9], np.uint32), np.arange(40, dtype=np.uint32))
    expected = draw_step_batch(task, 40, seed=seed, step=9).tokens
    for b in range(40):
        compile_kernel(kernels.fill, kernels.FAST_FUNCTIONS)(workspace, first[b], second[b])
        np.testing.assert_array_equal(workspace.tokens, expected[b])
    assert workspace.tokens.dtype == expected.dtype


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "length", "uniform"), [TASKS[0], TASKS[3], *TASKS[6:]])
def test_gradients_agree_to_rounding(rng, seed, tokens, length, uniform):
    task, state = problem(rng, tokens, length, uniform)
    for sparse in (False, True):
        if sparse:  # read by its list of positions
            attention = task.attention
            if length < 2 * kernels.SPARSE:
                continue
            state = State(state.value, attention.astype(np.float32))
        one, two = (batch_gradients(task, state, 50, seed=seed, step=7, engine=engine) for engine in ("jax", "numba"))
        for name in one._fields:
            exact = getattr(one, name)
            np.testing.assert_allclose(getattr(two, name), exact, atol=4e-6 * np.abs(exact).max(), err_msg=name)


@pytest.mark.parametrize("penalty", [0.0, 0.02])
@pytest.mark.parametrize("tokens", [3, 20])
def test_states_agree_after_tens_of_steps(rng, seed, tokens, penalty):
    task, state = problem(rng, tokens, 200, True)
    settings = StepSettings(50, 0.01, 0.01, penalty)
    one, two = (descend(task, state, settings, 40, seed=seed, engine=engine) for engine in ("jax", "numba"))
    assert np.abs(one.value - state.value).max() > 1e-4  # something happened
    np.testing.assert_allclose(two.value, one.value, atol=1e-6)
    np.testing.assert_allclose(two.attention, one.attention, atol=1e-6)
    assert (one.attention == 0).any() == (penalty > 0)
    np.testing.assert_array_equal((two.attention == 0).mean().round(2), (one.attention == 0).mean().round(2))


def test_runs_share_a_process_as_threads(rng):
    task = draw_bigram_task(rng, 3, 200, 2)
    settings = StepSettings(32, 0.02, 0.02)

    def run(seed):
        return descend(task, initial_state(task), settings, 200, seed=seed, engine="numba")

    alone = [run(seed) for seed in range(4)]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(run, range(4)))
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.value, other.value)
        np.testing.assert_array_equal(one.attention, other.attention)
    assert (alone[0].value != alone[1].value).any()


def test_divergence_is_found_in_the_same_step(rng):
    task, state = problem(rng, 3, 50, True)
    found = []
    for engine in ("jax", "numba"):
        with pytest.raises(Diverged) as caught:
            descend(task, state, StepSettings(8, 60.0, 60.0), 500, seed=0, first_step=7, engine=engine)
        found.append(caught.value.message)
    assert found[0] == found[1]


def test_compiled_code_is_kept_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)

    kept = compile_kernel(kernels.count_reached, ())
    assert kept(np.array([5, 9], np.uint64), np.uint32(7)) == 1
    assert Path(kept.stats.cache_path).is_relative_to(tmp_path / "manyheads" / "numba")
    assert list(tmp_path.rglob("*.nbc"))
    assert scramble(0).dtype == np.uint32
