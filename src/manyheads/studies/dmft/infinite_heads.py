"""`limits/infinite-heads`: convergence of networks to the mean-field limit of infinitely many heads."""

import math
from functools import partial

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.statistics import distances
from manyheads.studies.dmft.shared import mean_field
from manyheads.studies.dmft.shared.mean_field import QUANTITIES
from manyheads.theory.dmft import Network, Problem
from manyheads.theory.papers import BORDELON

LOGITS = {1.0: "logit exponent 1", 0.5: "logit exponent 1/2"}
FASTER = 0.25  # middle between H^(-1/2) and 1/H
ENDS = ("variance_start", "variance_end")


class InfiniteHeads(st.Study):
    """Single networks, their mean and their std over heads against infinitely many heads of one key dimension.

    The limit is sampled: every draw of the prediction has heads of its own, and the intervals include the noise of the
    draws.

    `full()` is the strongly rich regime: four blocks at richness 1.5, whose kernel moves by its own size while
    attention learns. How the mean network nears the limit is not settled there: from H=16 to 64 it does so like
    H^-0.76 (99%: -0.97 to -0.60, 512 networks of each size), faster than single networks, but so near the edge of the
    claim that larger H have to decide and not more seeds. That was `--depth 4 --richness 1.5 --learning-rate 0.15
    --steps 10 --heads-counts 16 32 64 --logit-exponents 1.0 --networks 64`. The learning rate is half the default, at
    which four blocks are at the edge of stability: there the limit's own loss rises between two steps, and H=64 is far
    from it.
    """

    name = "limits/infinite-heads"
    claim = "Training converges to its mean-field limit as H grows, at both logit exponents"
    source = BORDELON.at("the limit of infinitely many heads; its solution and the rates are derived here")
    predictions = 8
    grid = {"logit_exponent": "logit_exponents", "heads": "heads_counts"}

    task: str = st.setting("digits", "Pooled with squared loss, or text: causal, every token, cross-entropy")
    heads_counts: tuple[int, ...] = st.sweep(
        (4, 16, 64), "numbers of heads H", least=2, small=(2, 4), full=(16, 64, 256)
    )
    key_dim: int = st.setting(4, "Key dimension N of the heads", small=2)
    logit_exponents: tuple[float, ...] = st.setting(
        (1.0, 0.5), "one or both", choices=LOGITS, small=(0.5,), full=(1.0,)
    )
    depth: int = st.setting(2, "Blocks", small=1, full=4)
    depth_exponent: float = st.setting(1.0, "Exponent of the branch multiplier")
    norm: bool = st.setting(False, "Whether streams are normalized")
    activation: str = st.setting("none", "Activation of an MLP after every attention; none for no MLP")
    steps: int = st.setting(8, "Steps of gradient descent", small=3, full=10)
    learning_rate: float = st.setting(0.3, "Its learning rate", full=0.15)
    richness: float = st.setting(0.75, "Richness of the training", full=1.5)
    momentum: float = st.setting(0.0, "Its momentum")
    networks: int = st.setting(48, "Networks of one replicate", least=4, small=4, full=128)
    oversampling: int = st.setting(4, "Sampled heads over those that moments need", least=1, small=1)

    def check(self) -> None:
        self._network(self.heads_counts[0], self.logit_exponents[0])
        self.problem()

    def predict(self, key: st.Key) -> st.Record:
        """Solve the limit with heads of its own, and, to see what they are worth, without response functions."""
        streams = st.generator(key).spawn(len(self.logit_exponents))
        solutions = [self._solve(exponent, rng) for exponent, rng in zip(self.logit_exponents, streams, strict=True)]
        found = {name: np.stack([solution[name] for solution in solutions]) for name in solutions[0]}
        return mean_field.record(found, "logit_exponent")

    def train(self, key: st.Key, logit_exponent: float, heads: int) -> st.Record:
        network = self._network(heads, logit_exponent)
        return mean_field.train_ensemble(self.problem(), network, key, self.networks)

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        for exponent in self.logit_exponents:
            limit, found = (data.sel(logit_exponent=exponent) for data in (theory, trained))
            yield from self._claims(LOGITS[exponent], limit, found)

    def _claims(self, where: str, limit: st.Data, found: st.Data) -> st.Claims:
        first, heads = self.heads_counts[0], self.heads_counts[-1]
        most = 1.28 / heads
        for name, words in QUANTITIES.items():
            scatter = limit[name].var("prediction", ddof=1).mean()
            yield st.Claim(
                f"{where}: the distance of single networks from the limit scales as H^(-1/2) ({words})",
                st.over_draws(partial(_single_networks, found[name], scatter), limit[name]),
                *mean_field.root_law("H", self.heads_counts),
            )
        mean = found["output"].sel(heads=heads).mean("network")
        yield st.Claim(
            f"{where}: at H={heads} the mean network is nearer to the limit than to the equations without response "
            "functions (log ratio)",
            st.over_draws(
                lambda one, _: st.log(_rms(mean - one["output"]) / _rms(mean - one["output_without"])),
                limit[["output", "output_without"]],
            ),
            *mean_field.NEARER,
        )
        near, nearest = (_bias(limit["output"], found["output"].sel(heads=size)) for size in (first, heads))
        text = f"{where}: at H={heads} the distance of the mean network from the limit is at most {most:.2g}"
        basis = "of second order: 1.28 / H, a constant of order one; noise is subtracted, the root keeps the sign"
        quantity = "distance of the means"
        yield st.Claim(text, st.Root.of(nearest, self.networks), st.near(0, (math.inf, most)), basis, quantity)
        needed = distances.samples_to_decide((first, heads), near, nearest, FASTER - 1)
        fall = distances.distance_exponent((first, heads), near, nearest)
        yield st.Claim(
            f"{where}: from H={first} to {heads} the distance of the mean network from the limit falls as 1/H or "
            "faster",
            (*fall, None if needed is None else -(-needed // self.networks)),
            st.near(-1, (math.inf, FASTER)),
            "a quarter is the middle between the second order, 1/H, and H^(-1/2) of single networks",
            "exponent of H",
        )
        draws = limit["variance_end"].values
        # The variance of H heads about their own mean is that over all heads times 1 - 1/H.
        ratios = found["variance_end"].sel(heads=heads).values.ravel() * heads / (heads - 1) / draws.mean()
        yield st.Claim(
            f"{where}: at H={heads} the std of attention logits over heads is that of the limit to {100 * most:.1f}% "
            "(ratio)",
            st.Root(ratios, float(ratios.mean()), distances.half_width_of_draws(draws / draws.mean()), self.networks),
            st.near(1, most),
            "1.28 / H: a correction 1/H of a variance is 1/(2 H) of its root; 2.5 times as much is allowed",
            "std of logits, measured over limit",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        for exponent in self.logit_exponents:
            limit, found = (data["output"].sel(logit_exponent=exponent) for data in (theory, trained))
            networks = {f"H={heads}": found.sel(heads=heads) for heads in self.heads_counts}
            note = "Means over networks; bands range over all of them. Dashed: the limit, all draws."
            yield mean_field.first_output(limit, networks, note, f", {LOGITS[exponent]}")

    def problem(self) -> Problem:
        return mean_field.problem_of(self)

    def _network(self, heads: int, logit_exponent: float) -> Network:
        return Network(self.key_dim, heads, logit_exponent, None if self.activation == "none" else self.activation)

    def _solve(self, exponent: float, rng: np.random.Generator) -> dict[str, np.ndarray]:
        problem = self.problem()
        # The control is far away, and needs no more heads than it must have.
        branches, few = (
            mean_field.sampled_blocks(problem, self.key_dim, exponent, self.activation, times)
            for times in (self.oversampling, 1)
        )
        solved = mean_field.solve_blocks(problem, branches, rng)
        without = mean_field.solve_blocks(problem, few, rng, responses=False)
        found = mean_field.summarize(solved) | {"output_without": without.outputs}
        for name, records in zip(ENDS, (solved.observables[0], solved.observables[-1]), strict=True):
            found[name] = np.mean([record["logit_variance"] for record in records if "logit_variance" in record])
        return found


def _single_networks(found: xr.DataArray, scatter: xr.DataArray, limit: xr.DataArray, share: float) -> st.Figure:
    """Fit the exponent of the distances of single networks from the limit; what its draws scatter is subtracted."""
    away = (found - limit) ** 2
    away = (away.mean([dim for dim in away.dims if dim not in ("replicate", "heads")]) - share * scatter) ** 0.5
    return st.exponent(away, "heads", "H", "distance of single networks")


def _rms(away: xr.DataArray) -> xr.DataArray:
    return (away**2).mean([dim for dim in away.dims if dim != "replicate"]) ** 0.5


def _bias(limit: xr.DataArray, found: xr.DataArray) -> distances.SquaredDistance:
    """Return how far the mean network of one size is from the limit."""
    networks = found.values.reshape(-1, *found.shape[2:])  # (replicates x networks, ...)
    return distances.squared_distance(networks, limit.transpose("prediction", ...).values)
