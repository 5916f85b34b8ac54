"""Forecast of the loss curve of 512 heads: error, coverage and cost in 40 cases, on fresh seeds."""

import time
from pathlib import Path

import numpy as np
from tests.acceptance._lane import Figure, Measured

from manyheads.statistics import mean_interval
from manyheads.statistics.intervals import proportion_interval
from manyheads.studies.dmft.forecast import Forecast, compare_losses, relative_error
from manyheads.theory.dmft import Network, forecast_loss, train_networks

LEAST, WITHIN, SHARE = 0.95, 0.01, 0.1


def cases(folder: Path, seed: int, cases: int) -> Measured:
    """Forecast and train, measuring the CPU time of both; the first case, which compiles, is done once beforehand."""
    study = Forecast()
    network = Network(study.key_dim, study.heads)
    rng = np.random.default_rng(seed)
    found, seconds = [], []
    for case in range(-1, cases):
        richness = study.richness[case % len(study.richness)]
        for_problem, for_forecast, for_network = map(int, rng.integers(0, 2**31, 3))
        problem = study.problem(richness, for_problem)
        start = time.process_time()
        forecast = forecast_loss(problem, network, sizes=study.sizes, networks=study.networks, seed=for_forecast)
        middle = time.process_time()
        losses = train_networks(problem, network, [for_network], chunk=1)["loss"].values
        end = time.process_time()
        if case < 0:
            continue
        extrapolated = np.exp(_from_ensembles(study, np.log(forecast.ensembles)))
        found.append(
            compare_losses(forecast, losses)
            | {"extrapolated": relative_error(extrapolated, losses), "unbiased": relative_error(forecast.limit, losses)}
        )
        seconds.append((middle - start, end - middle))
    values = {name: np.array([each[name] for each in found]) for name in ("covered", "covered_by_errors", *ERRORS)}
    covered, error = int(values["covered"].sum()), mean_interval(values["error"])
    forecasts, trainings = np.sum(seconds, axis=0)
    shown = [
        (
            f"band covers {covered} of {cases}, mean error {error.low:.2%} to {error.high:.2%} (largest "
            f"{values['error'].max():.2%}), CPU time {forecasts / trainings:.3f} of the training's"
        ),
        f"band without the fluctuation of a network: {int(values['covered_by_errors'].sum())} of {cases}",
        *(f"error of {words}: {_shown(values[name])}" for name, words in ERRORS.items()),
    ]
    interval = proportion_interval(covered, cases)
    extent = [f"coverage [{interval.low:.3f}, {interval.high:.3f}]; {forecasts:.0f} s against {trainings:.0f} s"]
    passed = covered >= LEAST * cases and error.high <= WITHIN and forecasts <= SHARE * trainings
    return Measured("<br>".join(shown), "<br>".join(extent), f"{seed}", bool(passed))


ERRORS = {
    "error": "the forecast",
    "unbiased": "the limit without the bias",
    "extrapolated": "both small ensembles extrapolated, without the limit",
    "error_of_small": "the larger small ensemble",
}


def _from_ensembles(study: Forecast, means: np.ndarray) -> np.ndarray:
    """Extrapolate two means to the size of the network, linearly in 1/H."""
    first, last = (1 / size for size in study.sizes)
    return means[1] + (means[0] - means[1]) * (1 / study.heads - last) / (first - last)


def _shown(values: np.ndarray) -> str:
    interval = mean_interval(values)
    return f"{values.mean():.2%} [{interval.low:.2%}, {interval.high:.2%}]"


FIGURES = (
    Figure(
        "forecast-512-heads",
        "the limit and ensembles of 8 and 16 heads forecast the loss curve of 512 heads, 40 cases on text",
        "covers at least 95% of cases, mean error at most 1%, at most a tenth of the training's CPU time",
        cases,
        {"seed": 1, "cases": 40},
    ),
)
