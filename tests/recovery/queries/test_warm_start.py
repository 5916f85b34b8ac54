"""From probe to probe: exchanged heads are seen, steps are halved."""

import numpy as np

from manyheads.recovery.queries.nets.sigmoid_network import NetDesign, PairNets, fit_nets
from manyheads.recovery.queries.nets.warm_start import MARGIN, follow_nets, match_net


def draw(rng, rows=24, width=4, heads=3, outputs=7, shifts=0.0, centred=False):
    """A design with an offset, and a net on it."""
    features = np.concatenate([rng.normal(size=(rows, width - 1)), np.ones((rows, 1))], axis=1)
    design = NetDesign.of(features, shifts, centred=centred)
    return design, 1.5 * rng.normal(size=(heads, width)), rng.normal(size=(heads, outputs))


def test_match_finds_the_order_and_its_margin(rng):
    slopes, values = rng.normal(size=(5, 6)), rng.normal(size=(5, 8))
    net = PairNets(slopes, values, np.zeros(()))
    order = rng.permutation(5)
    near = PairNets(slopes + 0.05 * rng.normal(size=slopes.shape), values * 1.03, np.zeros(()))
    match = match_net(near.permute(order), net)
    np.testing.assert_array_equal(order[match.order], np.arange(5))
    assert match.margin < MARGIN
    mixed = PairNets(slopes, (values + values[::-1]) / 2, np.zeros(()))
    assert match_net(mixed, net).margin > match.margin


def test_one_head_always_matches(rng):
    net = PairNets(rng.normal(size=(1, 3)), rng.normal(size=(1, 4)), np.zeros(()))
    assert match_net(net, net).margin < MARGIN


def test_followed_probes_keep_the_order_of_the_reference(rng):
    """Values and slopes that are linear in the probe: each accepted net is the planted one, in the same order."""
    design, slopes, values = draw(rng, rows=40, heads=4, outputs=9)
    turn = rng.normal(size=(6, *slopes.shape))
    pull = rng.normal(size=(6, *values.shape))

    def ask(shift):
        return design.units(slopes + np.tensordot(shift, turn, 1)) @ (values + np.tensordot(shift, pull, 1))

    reference = fit_nets(design, ask(np.zeros((1, 6)))[0], slopes)
    found = follow_nets(design, ask, reference, np.eye(6), step=0.8, allowed=1e-11)
    assert found.accepted.all()
    expected = values + found.steps[:, None, None] * pull
    np.testing.assert_allclose(found.nets.values, expected, rtol=0, atol=1e-7)


def test_a_fit_that_leaves_a_residual_is_halved_and_then_refused(rng):
    design, slopes, values = draw(rng, rows=30)
    disturb = rng.normal(size=(30, 7))
    asked = []

    def ask(shift):
        asked.append(len(shift))
        return design.units(slopes) @ values + (np.abs(shift).sum(1) > 0.3)[:, None, None] * disturb

    reference = PairNets(slopes, values, np.zeros(()))
    found = follow_nets(design, ask, reference, np.array([[1.0], [0.0]]), step=1.0, allowed=1e-9)
    assert found.accepted.all()
    assert found.steps.tolist() == [0.25, 1.0]
    assert found.halvings == 2
    assert asked == [2, 1, 1]
    always = follow_nets(design, lambda s: ask(s + 1), reference, np.array([[1.0]]), step=1.0, allowed=1e-9)
    assert not always.accepted.any()
