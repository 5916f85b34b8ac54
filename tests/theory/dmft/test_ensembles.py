"""Networks of finite size: what they send back agrees with the limit, level by level."""

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.theory.dmft import Network, Problem, infinite_key_dim, train_networks


@pytest.mark.slow
def test_the_backward_variable_of_networks_scatters_around_the_limits(rng):
    drawn = rng.standard_normal((3, 2, 6))
    inputs = drawn / np.sqrt((drawn**2).mean(-1, keepdims=True))
    problem = Problem(inputs, np.array([1.0, -1.0, 1.0]), steps=4, learning_rate=0.3, richness=0.7, depth=2, norm=True)
    limit = infinite_key_dim(problem).backward.values  # (step, level, row, row)
    found = train_networks(problem, Network(32, 4), rng.integers(0, 2**31, 24).tolist(), chunk=24).backward.values
    assert found.shape == (24, *limit.shape)
    for level in range(3):
        mean, error = found[:, :, level].mean(0), found[:, :, level].std(0) / np.sqrt(24)
        scale = np.abs(limit[:, level]).max()
        # Bias falls like one over the width of 128; five standard errors fail once in a million.
        assert np.abs(mean - limit[:, level]).max() < 5 * error.max() + 0.03 * scale
        assert np.abs(limit[:, level]).max() > 10 * error.max()  # the test is not about noise
    assert not np.allclose(limit[:, 0], limit[:, 2], rtol=0.2)  # nor blind to the level


@pytest.mark.slow
def test_networks_show_what_the_limit_shows_between_attention_and_mlp_too(rng):
    """Every variable that both have lies around the limit, in units of what a network scatters."""
    drawn = rng.standard_normal((2, 2, 6))
    inputs = drawn / np.sqrt((drawn**2).mean(-1, keepdims=True))
    problem = Problem(inputs, np.array([1.0, -1.0]), steps=3, learning_rate=0.2, richness=0.7, causal=True)
    limit = infinite_key_dim(problem, activation="gelu")
    found = train_networks(problem, Network(32, 2, activation="gelu"), rng.integers(0, 2**31, 64).tolist(), chunk=64)
    assert {"output", "loss", "logits", "attention", "stream", "backward", "pooled"} <= {*found} & {*limit}
    for name in {*found} & {*limit}:
        assert found[name].dims[1:] == limit[name].dims
        gaps = np.abs(found[name].mean("seed") - limit[name])  # of equal sizes, or xarray refuses
        spread = float(found[name].std("seed").max())
        # A mean of 64 scatters by an eighth of that; the bias at a width of 64 is below a half, the rest is chance.
        assert gaps.max() < spread
    for name in ("stream", "backward"):  # level by level, of which neighbours differ by a third
        wanted, met = (np.einsum("...laa->...l", each[name].values[..., 0, :, :, :]) for each in (limit, found))
        assert np.all(np.abs(np.diff(np.log(wanted))) > 0.25)
        assert np.allclose(met.mean(0), wanted, rtol=0.15)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"key_dim": 2.5}, "an integer"), ({"heads": 0}, "at least 1"), ({"logit_exponent": 0.2}, "at least 0.5")],
)
def test_sizes_that_no_network_has_are_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        Network(**({"key_dim": 2, "heads": 2} | fields))


@pytest.mark.parametrize("asked", [{"seeds": []}, {"seeds": [0.5]}, {"seeds": [0], "chunk": 0}])
def test_networks_without_seeds_are_refused(asked):
    with pytest.raises(UsageError, match=r"seed|chunk"):
        train_networks(Problem(np.ones((1, 1, 2)), np.ones(1), steps=2), Network(2, 1), **asked)
