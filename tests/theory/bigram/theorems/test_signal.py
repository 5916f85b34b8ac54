"""The signal system against the gradients that it summarizes, against closed forms and against simulated runs."""

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.theory.bigram.task import draw_bigram_task
from manyheads.theory.bigram.theorems.population import excess, gradients
from manyheads.theory.bigram.theorems.signal import SignalSystem, predict_escape, solve_signals


def signal_excess(system, value_signal, attention_signal):
    """Return the excess loss on the plane of the two signals, from the module's text."""
    mismatch = system.attention_squared_norm * (1 - value_signal * attention_signal) ** 2
    return 0.5 * system.transition_squared_norm * (mismatch + (1 - value_signal) ** 2 / system.length)


def descend(task, system, value_signal, attention_signal, steps):
    """Follow the exact population gradients of the dense weights."""
    value = value_signal * task.centred
    attention = 1 / task.length + attention_signal * (task.attention - 1 / task.length)
    for _ in range(steps):
        slope = gradients(task, value, attention)
        value = value - system.value_learning_rate * slope.value
        attention = attention - system.attention_learning_rate * slope.attention
    return value, attention


def solve(system, last, start=(0.0, 0.0)):
    return solve_signals(system, np.linspace(0.0, last, 11), start)


def test_the_plane_is_kept_and_the_system_is_the_descent(rng):
    task = draw_bigram_task(rng, 3, 50, 2, uniform=False)
    system = SignalSystem.of(task, 0.02, 0.03)
    start = tuple(rng.uniform(-1, 1, 2))
    value, attention = descend(task, system, *start, 200)
    found = solve(system, 200, start)
    a, b = found.value_signal[-1], found.attention_signal[-1]
    # steps against time: first order in the rates
    assert np.abs(value - a * task.centred).max() < 0.01
    assert np.abs(attention - 1 / 50 - b * (task.attention - 1 / 50)).max() < 0.01
    assert excess(task, a * task.centred, 1 / 50 + b * (task.attention - 1 / 50)) == pytest.approx(
        signal_excess(system, a, b), abs=1e-12
    )


def test_small_signals_grow_like_hyperbolic_functions():
    system = SignalSystem(0.2, 0.4, length=10**7, vocabulary=3, value_learning_rate=0.025, attention_learning_rate=0.05)
    found = solve(system, 600)
    drift = 1 / (10**7 * 0.4)
    assert found.value_signal[1:] == pytest.approx(drift * np.sinh(0.01 * found.times[1:]), rel=1e-4)
    assert found.attention_signal[1:] == pytest.approx(drift * (np.cosh(0.01 * found.times[1:]) - 1), rel=1e-4)


def test_the_solution_rests_and_the_sign_flipped_point_drifts():
    system = SignalSystem(0.2, 0.4, length=1000, vocabulary=3, value_learning_rate=0.025, attention_learning_rate=0.05)
    rest = solve(system, 1000, (1.0, 1.0))
    assert np.abs(rest.value_signal - 1).max() < 1e-9
    creep = solve(system, 100_000, (-1.0, -1.0))
    assert signal_excess(system, -1, -1) == pytest.approx(2 * 0.2 / 1000)
    assert (np.diff(creep.value_signal) > 0).all()  # it never comes to rest,
    assert creep.value_signal[-1] > -0.6
    assert creep.value_signal[-1] < 0  # never crosses to the other branch,
    assert creep.attention_signal * creep.value_signal == pytest.approx(np.ones(11), abs=0.02)  # and stays on its own
    losses = signal_excess(system, creep.value_signal, creep.attention_signal)
    assert (np.diff(losses) < 0).all()
    assert losses[-1] > 0.5 * 0.2 / 1000  # above what is left at the end of the branch, K_P / 2T


def test_noise_delays_the_escape_and_prevents_it():
    times = [predict_escape(SignalSystem(0.2, 0.4, 1000, 3, 0.025, 0.05, batch)) for batch in (np.inf, 2000, 20, 10, 1)]
    assert times == sorted(times)
    assert times[0] < times[1] < 1.05 * times[0]
    assert times[-1] == np.inf
    # without noise: the product of drift^2 e^{2t}/4 reaches .3, later than in the linear system
    assert times[0] * np.log1p(0.01) > np.log(2 * 0.3**0.5 * 1000 * 0.4)


def test_the_path_with_noise_is_that_of_small_euler_steps():
    """An own right side, written down again from the module's text, in ten thousand steps of first order."""
    system = SignalSystem(
        0.2, 0.4, length=500, vocabulary=3, value_learning_rate=0.025, attention_learning_rate=0.05, batch=20
    )
    state, step = np.zeros(4), 0.1
    for _ in range(10_000):
        v, a, e, f = state
        norm, values = 1 / 500 + 0.4 * a * a + e, 0.2 * v * v + f
        state = state + step * np.array(
            [
                0.025 * (0.4 * a + 1 / 500 - norm * v),
                0.05 * (0.2 * v - values * a),
                -0.1 * values * e + 0.05**2 * 500 * values / 20,
                -0.05 * norm * f + 0.025**2 * norm * (2 / 3 * 2 - 1 / 3) / 20,
            ]
        )
    found = solve(system, 1000)
    assert found.attention_noise[-1] > 0.01  # the noise counts
    assert [part[-1] for part in found[1:]] == pytest.approx(state.tolist(), rel=5e-3)


def test_nonsense_is_refused():
    with pytest.raises(UsageError, match="'value_learning_rate': 0"):
        SignalSystem(0.2, 0.4, 1000, 3, 0, 0.05)
    system = SignalSystem(0.2, 0.4, 1000, 3, 0.1, 0.05)
    with pytest.raises(UsageError, match="limit=1"):
        predict_escape(system, limit=1)
    with pytest.raises(UsageError, match="each later"):
        solve(system, 0.0)
