"""The batched refit of a large net ends where the dense one ends, and nowhere else."""

import numpy as np

from manyheads.recovery.queries.nets.continuation import Continuation
from manyheads.recovery.queries.nets.sigmoid_network import NetDesign, PairNets, fit_nets
from manyheads.recovery.queries.nets.warm_start import follow_nets


def draw(rng, rows=60, width=6, heads=3, outputs=9):
    features = np.concatenate([rng.normal(size=(rows, width - 1)), np.ones((rows, 1))], axis=1)
    design = NetDesign.of(features, rng.choice([0.0, np.log(2), np.log(3)], rows), centred=True)
    return design, 1.5 * rng.normal(size=(heads, width)), rng.normal(size=(heads, outputs))


def test_refit_ends_where_the_dense_fit_ends(rng):
    """With noise the minimum is no zero; two solvers of different linear algebra agree on it."""
    design, slopes, values = draw(rng)
    near = slopes + 0.05 * rng.normal(size=(4, *slopes.shape))
    answers = design.units(near) @ values
    answers += 1e-4 * rng.normal(size=answers.shape)
    start = PairNets(slopes, values, np.zeros(()))
    found = Continuation(design, start, tolerance=1e-12).refit(answers)
    dense = fit_nets(design, answers, slopes, tolerance=1e-12)
    np.testing.assert_allclose(found.residual, dense.residual, rtol=1e-6)
    np.testing.assert_allclose(found.slopes, dense.slopes, rtol=0, atol=1e-4)
    np.testing.assert_allclose(found.values, dense.values, rtol=0, atol=1e-4)


def test_exact_answers_are_met_to_rounding(rng):
    design, slopes, values = draw(rng)
    near = slopes + 0.05 * rng.normal(size=(3, *slopes.shape))
    found = Continuation(design, PairNets(slopes, values, np.zeros(()))).refit(design.units(near) @ values)
    assert found.residual.max() < 1e-12
    np.testing.assert_allclose(found.slopes, near, rtol=0, atol=1e-8)


def test_a_fit_never_ends_above_its_start(rng):
    """Answers of another net altogether: nothing is promised but descent and finite numbers."""
    design, slopes, values = draw(rng)
    answers = rng.normal(size=(5, len(design.features), values.shape[1]))
    found = Continuation(design, PairNets(slopes, values, np.zeros(()))).refit(answers)
    basis = np.linalg.qr(design.units(slopes))[0]
    start = np.linalg.norm(answers - basis @ (basis.T @ answers), axis=(1, 2)) / np.linalg.norm(answers, axis=(1, 2))
    assert (found.residual <= start).all()
    assert np.isfinite(found.slopes).all()


def test_equal_heads_leave_the_preconditioner_definite(rng):
    design, slopes, values = draw(rng)
    slopes[1] = slopes[0]
    found = Continuation(design, PairNets(slopes, values, np.zeros(()))).refit(design.units(slopes)[None] @ values)
    assert found.residual[0] < 1e-12


def test_a_check_that_objects_halves_the_step(rng):
    design, slopes, values = draw(rng)
    direction = rng.normal(size=slopes.shape)

    def ask(displacements):
        return design.units(slopes + displacements[:, :1, None] * direction) @ values

    reference = PairNets(slopes, values, np.asarray(1e-14))
    asked = []

    def check(displacements, nets):
        asked.append(len(nets.slopes))
        return np.where(displacements[:, 0] > 0.02, 2.0, 0.0)

    probes = np.array([[1.0], [0.2]])
    found = follow_nets(design, ask, reference, probes, step=0.04, allowed=1e-9, check=check)
    assert found.accepted.all()
    np.testing.assert_allclose(found.steps, [0.02, 0.04])
    assert asked == [2, 1]
    never = follow_nets(
        design, ask, reference, probes, step=0.04, allowed=1e-9, check=lambda d, n: np.full(len(d), 9.0)
    )
    assert not never.accepted.any()
