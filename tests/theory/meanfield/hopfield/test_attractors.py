"""Lyapunov exponents against eigenvalues of the period map, attractors by kind, and the bifurcation scan."""

from dataclasses import replace

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.theory.meanfield import OneBitNetwork, bifurcation_scan, lyapunov_spectrum, mean_field_trajectory
from manyheads.theory.meanfield.hopfield.attractors import classify_attractors
from manyheads.theory.meanfield.hopfield.dynamics import State, Sweep, fill_window, first_state, read_weights, step
from manyheads.theory.meanfield.hopfield.lyapunov import LyapunovSpectrum, flatten, orthonormalize, unflatten

PUBLISHED = OneBitNetwork.published()
SHORT = {"transient": 400, "steps": 400, "record": 80}


def multipliers(network, beta, periods):
    """Return the eigenvalues of the Jacobian of a period, by complex steps, where the orbit has settled."""
    weights, context, features = read_weights(network), network.context, network.features
    size = features * (2 * context - 1)
    one = Sweep(np.full(size, beta), np.full(size, network.gain), (size,))
    state, _ = fill_window(weights, first_state(weights, network.output[0][:, None], one), one)
    for _ in range(periods):
        for position in weights.positions:
            state, _ = step(weights, position, state, one.beta, one.gain)
    state = unflatten(flatten(State(*(part[None] for part in state))) + 1e-30j * np.eye(size), context, features)
    state = State(*(part[0] for part in state))
    for position in weights.positions:
        state, _ = step(weights, position, state, one.beta, one.gain)
    return np.linalg.eigvals(flatten(State(*(part[None] for part in state)))[0].imag / 1e-30)


def test_exponents_are_logarithms_of_the_multipliers_of_a_locked_orbit(rng):
    network = replace(OneBitNetwork.random(rng, 2, 3, 1), gain=2.0, positional_weight=0.3)
    found = lyapunov_spectrum(network, 0.6, exponents=2, **SHORT)
    expected = np.sort(np.log(np.abs(multipliers(network, 0.6, 100)) + 1e-300))[::-1][:2] / network.context
    kept = expected > -8  # below that a period contracts to rounding
    np.testing.assert_allclose(found.exponents[kept], expected[kept], atol=0.03)


@pytest.mark.slow
def test_published_exponents_and_kinds():
    spectrum = lyapunov_spectrum(PUBLISHED, [0.8, 1.0, 1.4], **SHORT | {"steps": 2000})
    found = classify_attractors(spectrum)
    assert found.kind.tolist() == ["locked", "locked", "chaotic"]
    assert found.period.tolist() == [4, 4, 0]
    np.testing.assert_allclose(spectrum.exponents[:2, 0], [-0.164, -0.0827], atol=0.005)
    np.testing.assert_allclose(
        spectrum.exponents[:2, 0],
        np.log(np.abs([multipliers(PUBLISHED, b, 100) for b in (0.8, 1.0)]).max(1)) / 4,
        atol=1e-3,
    )


@pytest.mark.slow
def test_systems_of_one_chunk_keep_their_first_tokens(rng):
    first = np.array(
        [[1.0, -1.0, 1.0], [0.2, 0.5, -0.7], [-1.0, 0.0, 1.0]]
    )  # three systems, as everywhere in this file
    found = lyapunov_spectrum(PUBLISHED, [0.8, 1.0, 1.4], initial=first, **SHORT | {"transient": 0})
    begun = mean_field_trajectory(PUBLISHED, [0.8, 1.0, 1.4], 3 + 440 + 80, initial=first)
    np.testing.assert_allclose(found.overlaps[:2], begun[:2, -80:], atol=1e-9)


@pytest.mark.slow
def test_the_record_is_the_end_of_the_trajectory():
    found = lyapunov_spectrum(PUBLISHED, [0.8, 1.0, 1.4], **SHORT)
    total = 3 + 400 + 440 + 80  # the window, the transient, aligned and measured steps, the record
    np.testing.assert_allclose(
        found.overlaps[:2], mean_field_trajectory(PUBLISHED, [0.8, 1.0, 1.4], total)[:2, -80:], atol=1e-12
    )


def test_vectors_are_those_of_a_qr_decomposition(rng):
    vectors = rng.normal(size=(3, 6, 2))
    found, logs = orthonormalize(vectors)
    for system in range(2):
        q, r = np.linalg.qr(vectors[..., system].T)
        np.testing.assert_allclose(np.abs(np.asarray(found)[..., system].T), np.abs(q), rtol=1e-4)
        np.testing.assert_allclose(np.asarray(logs)[:, system], np.log(np.abs(np.diag(r))), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("orbit", "exponent", "kind", "period"),
    [
        (lambda t: 0.3 + 0 * t, -0.1, "fixed point", 1),
        (lambda t: np.cos(np.pi * t / 2), -0.1, "locked", 4),
        (lambda t: np.cos(np.pi * t / 10), -0.1, "locked", 20),
        (lambda t: np.cos(t), 0.0, "quasi-periodic", 0),
        (lambda t: np.cos(t), -0.1, "unresolved", 0),
        (lambda t: np.cos(t), 0.1, "chaotic", 0),
        (lambda t: 0.3 + 0 * t, 0.1, "unresolved", 0),
    ],
)
def test_kinds(orbit, exponent, kind, period):
    overlaps = orbit(np.arange(80.0))[:, None]
    found = classify_attractors(LyapunovSpectrum(np.array([exponent]), np.array(1e-4), overlaps, 10_000, 4))
    assert (found.kind, found.period) == (kind, period)


def test_without_positional_weight_nothing_drives_the_map():
    """The spins alternate although the context holds four tokens; with positional weight periods are multiples of 4."""
    one = np.ones((1, 1))
    network = OneBitNetwork(one, one, one, -one, np.ones((3, 1, 2)), positional_weight=0.0, gain=20.0)
    spectrum = lyapunov_spectrum(network, 2.0, exponents=1, **SHORT)
    assert spectrum.drive == 1
    np.testing.assert_allclose(np.abs(spectrum.overlaps), 0.9575, atol=1e-4)
    found = classify_attractors(spectrum)
    assert (found.kind, found.period) == ("locked", 2)


def test_a_scan_follows_its_attractor_in_both_directions():
    betas = np.linspace(0.6, 1.0, 3)
    fixed = lyapunov_spectrum(PUBLISHED, betas, **SHORT)
    for direction in ("up", "down"):
        found = bifurcation_scan(PUBLISHED, betas, direction, **SHORT)
        np.testing.assert_allclose(found.overlaps, fixed.overlaps, atol=1e-9)
        assert (classify_attractors(found).period == 4).all()
    with pytest.raises(UsageError, match="direction"):
        bifurcation_scan(PUBLISHED, betas, "left")
    with pytest.raises(UsageError, match="increase"):
        bifurcation_scan(PUBLISHED, betas[::-1])
    with pytest.raises(UsageError, match="directions"):
        lyapunov_spectrum(PUBLISHED, 1.0, exponents=13)
