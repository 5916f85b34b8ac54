import jax
import numpy as np
import pytest
from tests.study.toys import Averages, Still, VectorizedAverages, Walk

from manyheads.errors import UsageError
from manyheads.study.execution.units import Layout, compute, prediction_key, replicate_key
from manyheads.study.store.records.schema import MalformedResult


def test_layout_covers_every_replicate_once_and_in_whole_chunks():
    for study, replicates in ((Averages(), 5), (VectorizedAverages(), 5), (Walk(), 2)):
        layout = Layout.of(study)
        assert Layout.from_json(layout.to_json()) == layout
        for cell in layout.cells:
            covered = [r for u in layout.trained(replicates) if u.cell == cell for r in range(u.first, u.last + 1)]
            assert covered[:replicates] == list(range(replicates))
            assert len(covered) % layout.chunk == 0


def test_more_replicates_keep_the_units_of_fewer():
    layout = Layout.of(VectorizedAverages())
    assert set(layout.trained(4)) <= set(layout.trained(11))


def test_keys_are_those_of_the_definition_and_all_different(seed):
    keys = [replicate_key(seed, replicate) for replicate in range(50)] + [
        prediction_key(seed, draw) for draw in range(50)
    ]
    assert len({tuple(np.asarray(jax.random.key_data(key))) for key in keys}) == 100
    assert (keys[7] == jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), 7)).all()


def test_a_chunk_holds_what_its_replicates_hold_alone(seed):
    """Vectorized and single training agree to rounding."""
    vectorized, single = VectorizedAverages(repeats=8), Averages(repeats=8)
    (chunk,) = (unit for unit in Layout.of(vectorized).trained(3) if unit.cell["size"] == 16)
    together = compute(vectorized, chunk, seed)
    for unit in Layout.of(single).trained(3):
        if unit.cell["size"] == 16:
            alone = compute(single, unit, seed)
            np.testing.assert_allclose(together["error"][unit.first], alone["error"], rtol=1e-12)
            assert together["error"].attrs == alone["error"].attrs


def test_units_run_in_double_precision_and_leave_the_switch_alone(seed):
    before = jax.config.jax_enable_x64
    dataset = compute(Averages(), Layout.of(Averages()).trained(1)[0], seed)
    assert dataset["error"].dtype == np.float64
    assert jax.config.jax_enable_x64 == before
    assert float(dataset["wall_seconds"]) > 0
    assert dataset["wall_seconds"].attrs["deterministic"] is False


@pytest.mark.parametrize(
    ("fault", "words"),
    [("type", r"expected \(dimensions, values"), ("objects", "dtype object"), ("reserved", "'replicate'")],
)
def test_results_that_no_store_can_hold_are_refused(fault, words):
    study = Still(fault=fault)
    with pytest.raises((MalformedResult, UsageError), match=words):
        compute(study, Layout.of(study).trained(1)[0], 0)
