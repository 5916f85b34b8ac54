"""Kernels and logits before training: the derived law of a logit, and what the study concludes from made-up results."""

import numpy as np
import pytest
import xarray as xr
from scipy.special import k0

from manyheads.errors import UsageError
from manyheads.studies.dmft.initialization import EXPONENTS, Initialization
from manyheads.studies.dmft.shared.logit_distributions import LEVELS, excess_kurtosis, product_below


def test_the_law_of_one_pair_is_a_bessel_function():
    grid = np.linspace(1e-7, 12, 600_001)
    density = k0(grid) / np.pi  # of a product of two standard Gaussians
    above = 0.5 + np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2) * (grid[1] - grid[0])])
    wanted = np.interp(LEVELS[41:], grid, above)
    assert product_below(1)[41:] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("size", [1, 3, 16])
def test_the_law_and_its_kurtosis_are_those_of_drawn_logits(size, rng):
    q, k = rng.standard_normal((2, 400_000, size))
    logits = (q * k).sum(-1) / size**0.5
    below = (logits[:, None] <= LEVELS[::8]).mean(0)
    assert below == pytest.approx(product_below(size)[::8], abs=0.004)
    assert (logits**4).mean() - 3 == pytest.approx(excess_kurtosis(size), abs=8 * 105 / 400_000**0.5)


def made_up(study, rng, *, power=1.0, variance=0.0, gaussian=False, uniform=0.0):
    """Networks whose kernels deviate as H^-power (squared) and whose logits' variance has another exponent of N."""
    rows, replicates = 6, 12
    limit = np.eye(rows) + 1
    cells, drawn = study.cells(), {}
    for cell in cells:
        shape = (replicates, study.networks, 2, rows, rows)
        std = np.sqrt(2 / study.key_dim) * cell["heads"] ** (-power / 2)
        share = gaussian_or_law(cell["key_dim"], gaussian)
        grown = cell["key_dim"] ** (1 - 2 * cell["logit_exponent"] + variance)
        noise = 1 + 0.01 * rng.standard_normal((2, replicates, study.networks))
        for name, value in {
            "kernel": limit + uniform + std * rng.standard_normal(shape),
            "variance": grown * noise[0],
            "excess": (0.0 if gaussian else excess_kurtosis(cell["key_dim"])) + noise[1] - 1,
            "below": share + 0.001 * rng.standard_normal((replicates, study.networks, len(LEVELS))),
        }.items():
            drawn.setdefault(name, []).append(value)
    dims = {"kernel": ("end", "row", "row_too"), "below": ("level",)}
    trained = xr.Dataset(
        {
            name: (("replicate", "cell", "network", *dims.get(name, ())), np.stack(values, 1))
            for name, values in drawn.items()
        },
        coords={name: ("cell", [cell[name] for cell in cells]) for name in cells[0]},
    )
    draws = limit + 1e-3 * rng.standard_normal((4, len(EXPONENTS), rows, rows))
    laws = np.stack([product_below(size) for size in study.key_dims])
    predicted = xr.Dataset(
        {
            "kernel": (("prediction", "logit_exponent", "row", "row_too"), draws),
            "uniform": (("prediction", "row", "row_too"), np.stack([limit + 1] * 4)),
            "gram": (("prediction", "row", "row_too"), np.stack([limit + uniform] * 4)),
            "fluctuation": ("prediction", np.full(4, 2.0)),
            "power": (("prediction", "logit_exponent"), [[1 - 2 * exponent for exponent in EXPONENTS]] * 4),
            "kurtosis": (("prediction", "key_dim"), [[*map(excess_kurtosis, study.key_dims)]] * 4),
            "below": (("prediction", "key_dim", "level"), np.stack([laws] * 4)),
        },
        coords={"logit_exponent": list(EXPONENTS), "key_dim": list(study.key_dims)},
    )
    return predicted, trained


def gaussian_or_law(size, gaussian):
    return product_below(10**4 if gaussian else size)


def outcomes(study, results, word):
    return {verdict.outcome for verdict in study.compare(*results) if word in verdict.claim}


STUDY = Initialization(networks=96)


def test_the_square_deviates_as_one_over_h_and_the_root_does_not(rng):
    found = made_up(STUDY, rng)
    assert outcomes(STUDY, found, "mean square deviation of a network's residual kernel from") == {"holds"}
    assert outcomes(STUDY, found, "the root mean square deviation") == {"refuted"}
    assert outcomes(STUDY, found, "Below the first block") == {"holds"}
    assert outcomes(STUDY, found, "that of uniform attention") == {"refuted"}
    assert STUDY.panels(*found)


def test_another_power_of_h_and_a_mean_that_is_off_are_refuted(rng):
    slow = made_up(STUDY, rng, power=0.5)
    assert outcomes(STUDY, slow, "mean square deviation of a network's residual kernel from") == {"refuted"}
    assert outcomes(STUDY, slow, "Below the first block") == {"refuted"}
    assert outcomes(STUDY, made_up(STUDY, rng, uniform=0.3), "that of infinitely many heads") == {"refuted"}


def test_logits_have_their_law_and_not_that_of_gaussians(rng):
    found = made_up(STUDY, rng)
    for words in (
        "variance of attention logits",
        "excess kurtosis",
        "law of q . k",
        "N=16: attention logits of single",
    ):
        assert outcomes(STUDY, found, words) == {"holds"}
    assert outcomes(STUDY, found, "N=1: attention logits of single heads are Gaussian") == {"refuted"}
    other = made_up(STUDY, rng, variance=0.3, gaussian=True)
    for words in ("variance of attention logits", "excess kurtosis", "N=1: attention logits of single heads have"):
        assert outcomes(STUDY, other, words) == {"refuted"}


@pytest.mark.parametrize("wrong", [{"heads_counts": (4,)}, {"key_dims": (4, 2)}, {"heads": 0}, {"networks": 2}])
def test_what_cannot_be_judged_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Initialization(**wrong)
