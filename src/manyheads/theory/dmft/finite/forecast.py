r"""Forecast of a training loss at many heads from the limit of infinitely many and two small ensembles.

For networks of H heads, with random initial weights,

    mean log loss_H(t) = log loss_inf(t) + c(t)/H + c2(t)/H^2 + ...,      Var log loss_H(t) = v(t)/H + ...

The limit gives loss_inf, two ensembles of H_1 < H_2 heads give c and c2 (the quadratic in 1/H through the limit and
both), and v. A single network is off by v^(1/2) H^(-1/2), which no forecast knows, and at large H this exceeds the bias
c/H. So the interval of a single network holds this fluctuation and the errors of the forecast: of the heads that the
limit samples, of the ensembles' means, and of the order of the bias. That of the mean over networks holds the errors
alone. Both are bands for the whole curve at once. (Derived here.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from manyheads._extras import Figure, Float
from manyheads._overview import Overview, Shown
from manyheads.errors import CertificateError, UsageError, check_integer, check_rising
from manyheads.statistics.intervals import check_level
from manyheads.theory.dmft.branches.gaussian_fields import fewest_heads
from manyheads.theory.dmft.finite.ensembles import Network, train_networks
from manyheads.theory.dmft.options import Sampling
from manyheads.theory.dmft.problem import Problem
from manyheads.theory.dmft.solutions import infinite_heads

Target = Literal["network", "mean"]
MOST = 0.5  # std of log losses over the networks of the larger ensemble, up to which it is a small deviation
DRAWS = 20_000  # of curves, for the quantile of their largest deviation
SHOWN = 6  # steps in a `repr`


@dataclass(frozen=True, repr=False, eq=False)
class LossForecast(Shown):
    """Forecast loss curve of networks with many heads, with a band for the whole curve.

    Attributes
    ----------
    network, target, level
        Size, what is forecast (`"network"` or `"mean"`), and the probability that the band holds all of its curve.
    loss, low, high
        (step,) the forecast and its band.
    bias, fluctuation, error
        (step,) in log loss: what the bias adds to the limit, the std of single networks, and the std error of the
        forecast of their mean.
    """

    network: Network
    target: Target
    level: float
    loss: Float[np.ndarray, " step"]
    low: Float[np.ndarray, " step"]
    high: Float[np.ndarray, " step"]
    limit: Float[np.ndarray, " step"]  # (step,) loss of infinitely many heads
    ensembles: Float[np.ndarray, "2 step"]  # (2, step) geometric mean losses of the small ensembles
    sizes: tuple[int, int]  # their numbers of heads
    bias: Float[np.ndarray, " step"]
    fluctuation: Float[np.ndarray, " step"]
    error: Float[np.ndarray, " step"]

    def covers(self, losses: Float[np.ndarray, "*networks step"]) -> np.ndarray:
        """Return whether the band holds the whole of each loss curve."""
        losses = np.asarray(losses, np.float64)
        if losses.shape[-1:] != self.loss.shape:
            raise UsageError(f"losses of shape {losses.shape}: give {len(self.loss)} steps, those of the forecast")
        near = 1e-9 * self.loss  # rounding, where nothing is random: before the first update
        return np.asarray(((losses >= self.low - near) & (losses <= self.high + near)).all(-1))

    def plot(self) -> Figure:
        """Draw the forecast with its band, the limit and the small ensembles."""
        from manyheads.study.panels import Curve, Lines
        from manyheads.study.reporting.charts import draw_titled

        steps = tuple(map(float, range(len(self.loss))))
        small = zip(self.sizes, self.ensembles, strict=True)
        curves = [
            Curve(steps, _plain(self.loss), "forecast", low=_plain(self.low), high=_plain(self.high)),
            Curve(steps, _plain(self.limit), "limit", "predicted", 1),
            *(Curve(steps, _plain(mean), f"mean, H={heads}", "reference", 2 + heads) for heads, mean in small),
        ]
        return draw_titled(Lines(self._title(), "updates", "loss", tuple(curves), log_y=True))

    def _title(self) -> str:
        what = "a single network" if self.target == "network" else "the mean network"
        return f"Forecast loss of {what} with H={self.network.heads}, N={self.network.key_dim}"

    def _overview(self) -> Overview:
        places = np.unique(np.linspace(0, len(self.loss) - 1, min(SHOWN, len(self.loss))).astype(int))
        rows = [
            (int(at), *(float(curve[at]) for curve in (self.loss, self.low, self.high, self.limit))) for at in places
        ]
        note = f"low, high: {self.level:.0%} band of the whole curve; limit and ensembles of H={self.sizes}"
        return Overview(self._title(), ("step", "loss", "low", "high", "limit"), rows, (note,))


def forecast_loss(
    problem: Problem,
    network: Network,
    *,
    sizes: tuple[int, int] = (8, 16),
    networks: int = 64,
    target: Target = "network",
    level: float = 0.99,
    seed: int = 0,
    sampling: Sampling | None = None,
) -> LossForecast:
    """Forecast the loss curve of networks with many heads, without training one.

    Parameters
    ----------
    sizes, networks
        Numbers of heads of the two small ensembles, and networks of each.
    target
        ``"network"``, a single one, or ``"mean"``, the geometric mean over networks.
    level
        Probability with which the band holds the whole curve.
    seed
        Of the ensembles and, unless `sampling` has its own, of the limit's heads.
    sampling
        How the limit's heads are sampled.

    Raises
    ------
    UsageError
        Sizes that are not rising, or not smaller than the network; fewer than eight networks.
    CertificateError
        The limit or a small network diverges, or networks of the larger ensemble scatter too far for an expansion in
        1/H, as where the loss comes near zero.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.theory.dmft import Network, Problem, forecast_loss, train_networks
    >>> inputs = np.random.default_rng(0).standard_normal((2, 2, 8))
    >>> problem = Problem(inputs, np.array([1.0, -1.0]), steps=4, learning_rate=0.1)
    >>> forecast = forecast_loss(problem, Network(2, 64), sizes=(4, 8), networks=32)
    >>> trained = train_networks(problem, Network(2, 64), range(4))
    >>> forecast.covers(trained.loss.values).tolist()
    [True, True, True, True]

    References
    ----------
    Bordelon, Chaudhry, Pehlevan, arXiv 2405.15712, for the limit; expansion and band are derived here.
    """
    check_rising("sizes", sizes)
    check_integer("networks", networks, 8)
    level = check_level(level)
    if target not in get_args(Target) or len(sizes) != 2 or sizes[-1] >= network.heads:
        raise UsageError(
            f"target={target!r}, sizes={sizes}, heads={network.heads}: expected 'network' or 'mean', and two sizes "
            "smaller than the network; a network as small as those is trained, not forecast"
        )
    rng = np.random.default_rng(seed)
    heads_seed, *seeds = (rng.integers(0, 2**31, count) for count in (1, networks, networks))
    if sampling is None:  # as few heads as match moments: what they scatter is far below H^(-1/2)
        fewest = max(512, fewest_heads(problem.steps * problem.rows, network.key_dim))
        sampling = Sampling(int(heads_seed[0]), fewest if network.activation is None else None)
    exponent, activation = network.logit_exponent, network.activation
    solved = infinite_heads(problem, network.key_dim, logit_exponent=exponent, activation=activation, sampling=sampling)
    limit = _logs(solved["loss"].values, "the limit")
    drawn = np.maximum.accumulate(solved["loss_error"].values / solved["loss"].values)  # one draw a step
    curves = [
        _logs(
            train_networks(problem, replace(network, heads=heads), own.tolist(), chunk=networks)["loss"].values,
            f"a network of {heads} heads",
        )
        for heads, own in zip(sizes, seeds, strict=True)
    ]
    means, variances = (np.stack([getattr(logs, name)(0) for logs in curves]) for name in ("mean", "var"))
    variances *= networks / (networks - 1)
    if (scatter := float(np.sqrt(variances[1].max()))) > MOST:
        raise CertificateError(
            f"log losses of {sizes[1]} heads scatter by {scatter:.2g}, too far for an expansion in 1/H: give larger "
            "sizes, or fewer steps where the loss comes near zero",
            measured=scatter,
            threshold=MOST,
        )
    shares = _interpolation(sizes, network.heads)  # of both ensembles' distances from the limit
    bias = shares @ (means - limit)
    linear = sizes[1] / network.heads * (means[1] - limit)  # of first order, from the larger ensemble
    error = np.sqrt((1 - shares.sum()) ** 2 * drawn**2 + shares**2 @ variances / networks + (bias - linear) ** 2)
    fluctuation = np.sqrt((np.asarray(sizes)[:, None] * variances).max(0) / network.heads)
    std = np.hypot(error, fluctuation) if target == "network" else error
    width = _quantile(curves[1], level, rng) * std
    centre = limit + bias
    loss, low, high, infinite, finite = map(np.exp, (centre, centre - width, centre + width, limit, means))
    return LossForecast(
        network, target, level, loss, low, high, infinite, finite, (sizes[0], sizes[1]), bias, fluctuation, error
    )


def _interpolation(sizes: tuple[int, int], heads: int) -> np.ndarray:
    """Weights of two values in the quadratic in 1/H through zero at infinite H and through both, (2,)."""
    first, second, x = 1 / sizes[0], 1 / sizes[1], 1 / heads
    return np.array([x * (x - second) / (first * (first - second)), x * (x - first) / (second * (second - first))])


def _quantile(logs: np.ndarray, level: float, rng: np.random.Generator) -> float:
    """Quantile of the largest deviation of a curve, in its std at every step: Student's, correlated as networks are."""
    count = len(logs)
    random = logs.std(0) > 1e-9
    correlation = np.atleast_2d(np.corrcoef(logs[:, random].T))
    values, vectors = np.linalg.eigh(correlation)
    drawn = rng.standard_normal((DRAWS, len(values))) * np.sqrt(np.maximum(values, 0)) @ vectors.T
    drawn /= np.sqrt(rng.chisquare(count - 1, (DRAWS, 1)) / (count - 1))
    return float(np.quantile(np.abs(drawn).max(-1), level))


def _logs(losses: np.ndarray, who: str) -> np.ndarray:
    """Logarithms of losses, which must be positive and finite."""
    bad = float((~(np.isfinite(losses) & (losses > 0))).mean())
    if bad:
        raise CertificateError(
            f"{who} diverges or its loss is zero ({bad:.0%} of the losses): take a smaller learning rate or richness",
            measured=bad,
            threshold=0.0,
        )
    return np.log(losses)


def _plain(values: np.ndarray) -> tuple[float, ...]:
    return tuple(np.asarray(values, float).tolist())
