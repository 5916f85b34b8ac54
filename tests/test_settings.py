"""What a user has set in JAX and NumPy stops no call on NumPy arrays, and changes no number of a study."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from threading import Event

import jax
import numpy as np
import pytest
from tests.array_rows import EXPENSIVE, ROWS
from tests.study.toys import VectorizedAverages, Walk
from tests.test_arrays import call, drawn, leaves

from manyheads._settings import default_numpy_errors, reproducible
from manyheads.study import run

FOLLOW_THE_CALLER = {"data.TextWindows", "data.TextWindows.cut"}  # they hold arrays of JAX


@contextmanager
def strict():
    """Every setting of JAX and NumPy that turns into an error what is meant."""
    with ExitStack() as stack:
        stack.enter_context(jax.numpy_rank_promotion("raise"))
        stack.enter_context(jax.numpy_dtype_promotion("strict"))
        stack.enter_context(jax.transfer_guard("disallow"))
        stack.enter_context(jax.debug_nans(True))
        stack.enter_context(jax.debug_infs(True))
        stack.enter_context(np.errstate(all="raise"))
        yield


@contextmanager
def other_numbers():
    """Settings that give other numbers."""
    with ExitStack() as stack:
        stack.enter_context(jax.threefry_partitionable(False))
        stack.enter_context(jax.default_matmul_precision("bfloat16"))
        stack.enter_context(jax.default_prng_impl("rbg"))
        stack.enter_context(jax.enable_x64(False))
        stack.enter_context(jax.disable_jit(True))
        jax.config.update("jax_random_seed_offset", 7)
        stack.callback(jax.config.update, "jax_random_seed_offset", 0)
        yield
        assert jax.config.jax_random_seed_offset == 7


@pytest.mark.parametrize("name", sorted(set(ROWS) - EXPENSIVE - FOLLOW_THE_CALLER))
def test_plain_calls_go_on_under_strict_settings(name):
    arrays, expected = drawn(name)
    with strict():
        found = leaves(call(name, arrays))
    assert [leaf.tobytes() for leaf in found] == [leaf.tobytes() for leaf in expected]


@pytest.mark.slow
@pytest.mark.parametrize("study", [Walk(), VectorizedAverages(repeats=5)], ids=lambda study: study.name)
def test_a_run_in_two_halves_under_other_settings_equals_one_without_a_break(study, tmp_path, seed):
    whole = run(study, 6, seed, store=tmp_path / "whole", progress=False)
    with other_numbers():
        run(study, 3, seed, store=tmp_path / "halves", progress=False)
    with strict():
        halves = run(study, 6, seed, store=tmp_path / "halves", progress=False)
    for group in ("predicted", "trained"):
        for name, variable in whole[group].variables.items():
            if variable.attrs.get("deterministic", True):
                assert halves[group][name].values.tobytes() == variable.values.tobytes(), name
    assert [str(claim) for claim in halves["verdicts"]["claim"].values] == [
        str(claim) for claim in whole["verdicts"]["claim"].values
    ]


def test_a_computation_that_expects_an_overflow_keeps_its_say_in_what_it_calls():
    with default_numpy_errors():
        assert np.geterr()["over"] == "warn"
        with np.errstate(over="ignore"), default_numpy_errors():
            assert np.geterr()["over"] == "ignore"
    with np.errstate(over="raise"), default_numpy_errors():
        assert np.geterr()["over"] == "warn"


def test_the_offset_of_seeds_is_zero_until_the_last_thread_has_left():
    jax.config.update("jax_random_seed_offset", 7)
    try:
        with ThreadPoolExecutor(1) as pool, ExitStack() as first:
            first.enter_context(reproducible())
            entered, leave = Event(), Event()
            second = pool.submit(hold, entered, leave)
            assert entered.wait(10)
            first.close()
            assert jax.config.jax_random_seed_offset == 0
            leave.set()
            second.result()
        assert jax.config.jax_random_seed_offset == 7
    finally:
        jax.config.update("jax_random_seed_offset", 0)


def hold(entered, leave):
    with reproducible():
        entered.set()
        assert leave.wait(10)
