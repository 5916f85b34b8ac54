"""`limits/infinite-depth`: convergence of the theory and of networks to a continuum of blocks as L grows."""

from itertools import pairwise

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.statistics.distances import noise_of_mean
from manyheads.studies.dmft.shared.mean_field import NEARER, problem_of, projection, solve_blocks, train_seeds
from manyheads.theory.dmft import Network, Problem
from manyheads.theory.dmft.branches.attention_infinite_key_dim import InfiniteKeyDimAttention, UniformAttention
from manyheads.theory.dmft.grids.depth import continuum_step
from manyheads.theory.dmft.recursion import solve_recursion
from manyheads.theory.papers import BORDELON

NAMES = {1.0: "1", 0.5: "1/2"}
OUTPUT = ("step", "read_out", "class")
LOGITS = ("sample", "token", "token_too")
SETTLED = 4  # depth from which corrections to 1/L are small


class InfiniteDepth(st.Study):
    """Theory at growing depth L against the continuum, and networks against both.

    At depth exponent 1 the continuum is an ordinary differential equation, solved in cells; at 1/2 attention stays
    uniform, and the equation that closes is extrapolated. The theory at depth L is c_1/L + c_2/L^2 + ... away, so that
    a doubling divides the distance by 2 + c/L + O(1/L^2), and 2 f(2L) - f(L) is better than f(2L). At exponent 1/2
    logits are even in what one block learns, which is of order L^(-1/2): they fall like 1/L, by 2 + c/L a doubling,
    with the same kind of correction. Where training stops in mid-growth c is large, and depths must be larger.
    (Derived here.)
    """

    name = "limits/infinite-depth"
    claim = "Infinite depth: attention learns at depth exponent 1 and stays uniform at 1/2"
    source = BORDELON.at("the limit of infinite depth and figure 5; its equations are derived here")
    grid = {"depth_exponent": NAMES, "depth": "depths"}

    task: str = st.setting("digits", "digits, or text, which trains well with --norm --learning-rate 1")
    depths: tuple[int, ...] = st.sweep(
        (2, 4, 8, 16, 32),
        "depths L, each twice the one before",
        count=3,
        small=(4, 8, 16),
        full=(1, 2, 4, 8, 16, 32, 64),
    )
    key_dim: int = st.setting(32, "key dimension N of the networks", least=1, small=2)
    heads: int = st.setting(4, "their number of heads H", least=1, small=2)
    continuum_cells: int = st.setting(16, "cells of the continuum at exponent 1", least=1, small=2)
    norm: bool = st.setting(False, "whether streams are normalized")
    steps: int = st.setting(8, "steps of gradient descent", small=3)
    learning_rate: float = st.setting(0.3, "its learning rate")
    richness: float = st.setting(0.75, "richness of the training")
    networks: int = st.setting(16, "networks of one replicate", least=2, small=2, full=32)

    def check(self) -> None:
        if any(2 * a != b for a, b in pairwise(self.depths)):
            raise st.UsageError(f"depths={self.depths}: expected each twice the one before")
        self.problem(1.0, 1)

    def predict(self, key: st.Key) -> st.Record:
        """Solve the continuum at both exponents, and the largest finite depth without response functions."""
        dims, deepest = ("depth_exponent", *OUTPUT), self.depths[-1]
        without = [solve_blocks(self.problem(exponent, deepest), responses=False).outputs for exponent in NAMES]
        return {
            "continuum": (dims, np.stack([*map(self._continuum, NAMES)]), "outputs at infinite depth"),
            "without": (dims, np.stack(without), "outputs of the largest depth without responses"),
            "step": ("step", np.arange(self.steps), "updates"),
        }

    def train(self, key: st.Key, depth_exponent: float, depth: int) -> st.Record:
        """Solve one finite depth at infinite key dimension, and train some networks of that depth.

        Embeddings and read-outs of networks are the same at every depth.
        """
        problem = self.problem(depth_exponent, depth)
        solved = solve_blocks(problem)
        shown = np.stack([look["logits"] for look in solved.observables[-1]])  # (layer, P, T, T)
        trained = train_seeds(problem, Network(self.key_dim, self.heads), key, self.networks)
        logits = trained["logits"].values.mean(2)  # over layers
        learned = logits[:, -1] - logits[:, 0]
        size = np.sqrt((shown**2).mean())
        return {
            "output": (("network", *OUTPUT), trained["output"].values, "outputs over training"),
            "logits": (("network", *LOGITS), learned, "learned attention logits, mean over layers and heads"),
            "limit_output": (OUTPUT, solved.outputs, "outputs at infinite key dimension"),
            "limit_logits": (LOGITS, shown.mean(0), "attention logits at infinite key dimension, mean over layers"),
            "limit_size": ((), size, "root mean square of the attention logits at infinite key dimension"),
            "step": ("step", np.arange(self.steps), "updates"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        for exponent, name in NAMES.items():
            law, found = (data.sel(depth_exponent=exponent) for data in (theory, trained))
            yield from self._orders(exponent, f"Theory at depth exponent {name}", law, found)
            yield from self._networks(f"Networks at depth exponent {name}", law, found)

    def _orders(self, exponent: float, who: str, law: st.Data, found: st.Data) -> st.Claims:
        plain, better = self._theory_distances(law, found)
        sizes = found["limit_size"].mean("replicate")
        left = (2 / self.depths[-3]) ** 2
        basis = "a ratio is 2 + c/L + e/L^2: of the last two, extrapolated, e/(2 L^2) is left at "
        region = st.near(2, left), f"{basis}L={self.depths[-3]}, |e| up to 8"
        text = f"{who}: the distance from the continuum scales as 1/L (last two ratios, extrapolated)"
        yield st.Claim(text, _ratio(plain.values), *region, "distances, ratio of a doubling of depth")
        settled = [depth for depth in self.depths[1:] if depth >= 2 * min(SETTLED, self.depths[-2])]
        text = f"{who}: from L={SETTLED}, 2 f(2L) - f(L) is nearer to the continuum than f(2L) (largest log ratio)"
        basis = "extrapolation leaves c_2/(2 L^2) of c_1/(2 L) + c_2/(4 L^2)"
        quantity = "extrapolated over plain distance (ln)"
        yield st.Claim(text, st.log(better / plain).sel(depth=settled).max(), st.below(0), basis, quantity)
        if exponent == 1:
            text = f"{who}: the attention logits are independent of depth (ratio of the last doubling)"
            basis = f"a correction c/L, |c| up to 4, changes by c/(2 L) at L={self.depths[-2]}"
            quantity = "logits, ratio of the last doubling"
            yield st.Claim(text, float(sizes[-1]) / float(sizes[-2]), st.near(1, 2 / self.depths[-2]), basis, quantity)
        else:
            text = f"{who}: attention stays uniform, its logits scale as 1/L (last two ratios, extrapolated)"
            yield st.Claim(text, _ratio(sizes.values), *region, "logits, ratio of a doubling of depth")

    def _networks(self, who: str, law: st.Data, found: st.Data) -> st.Claims:
        first, last = self.depths[0], self.depths[-1]
        wanted, mean = found["limit_output"].mean("replicate"), found["output"].mean("network")
        single = st.distance(found["output"], wanted, ("network", *OUTPUT))
        yield st.Claim(
            f"{who}: the distance of single networks from the theory at their depth scales as L^0",
            st.exponent(single, "depth", "L", "distance of single networks from the theory"),
            st.near(0, 0.25),
            "it is that of finite width; half way to the power 1/2 of noise that adds up over blocks",
        )
        change, theirs = (each.sel(depth=first) - each.sel(depth=last) for each in (wanted, mean))
        text = f"{who}: from L={first} to L={last} the mean network changes as the theory predicts (share)"
        basis, quantity = "half way to networks that do not depend on depth", "share of the predicted change"
        yield st.Claim(text, projection(theirs, change, OUTPUT), st.near(1, 0.5), basis, quantity)
        away = st.distance(mean, law["continuum"], OUTPUT)
        text = f"{who}: the mean network is nearer to the continuum at L={last} than at L={first} (log ratio)"
        yield st.Claim(text, st.log(away.sel(depth=last) / away.sel(depth=first)), *NEARER)
        shares = _learned_shares(found)
        depths = np.log(self.depths)
        yield st.Claim(
            f"{who}: from L={first} to L={last} the learned logits of the mean network follow the theory (exponent of "
            "L in their ratio)",
            st.slope(shares, "depth", depths) / shares.mean("depth"),
            st.near(0, 0.25),
            "corrections of relative size 1/N are those of every depth; half way to a power of 1/2",
            "exponent of L in measured over predicted",
        )
        near, far = (st.distance(mean.sel(depth=last), one) for one in (wanted.sel(depth=last), law["without"]))
        yield st.Claim(
            f"{who}: at L={last} the mean network is nearer to the theory than to the theory without responses (log "
            "ratio)",
            st.log(near / far),
            *NEARER,
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        for exponent, name in NAMES.items():
            law, found = (data.sel(depth_exponent=exponent) for data in (theory, trained))
            plain, better = self._theory_distances(law, found)
            outputs = found["output"].stack(entry=OUTPUT).transpose("replicate", "depth", "network", "entry")
            noise = xr.DataArray(noise_of_mean(outputs.values) ** 0.5, found["depth"].coords, ("replicate", "depth"))
            mean = st.distance(found["output"].mean("network"), law["continuum"], OUTPUT)
            yield st.lines(
                f"Distance of outputs from the continuum, depth exponent {name}",
                "depth",
                "root mean square distance",
                {"mean of networks": mean, "its standard error": noise},
                {"theory, f(L)": plain, "theory, 2 f(L) - f(L/2)": better},
                {"1/L": plain[-1] * self.depths[-1] / found["depth"]},
                log="xy",
                x_label="depth L",
                note=f"Networks of N={self.key_dim}, H={self.heads}: means over a replicate; bands range over "
                "replicates. A distance below the standard error is noise.",
                shows=(f"depth exponent {name}: the distance from the continuum",),
            )
        places = {f"exponent {name}": trained.sel(depth_exponent=exponent) for exponent, name in NAMES.items()}
        means = {name: found["limit_logits"].mean("replicate") for name, found in places.items()}
        size = {name: (mean**2).mean(LOGITS) ** 0.5 for name, mean in means.items()}
        learned = {f"networks, {name}": _learned_shares(found) * size[name] for name, found in places.items()}
        predicted = {f"theory, {name}": values for name, values in size.items()}
        guide = {"1/L": size["exponent 1/2"][-1] * self.depths[-1] / trained["depth"]}
        note = "Networks: mean of a replicate, projected on the theory; bands range over replicates."
        shows, curves = ("logits are independent", "attention stays uniform"), (learned, predicted, guide)
        labels = "Attention logits at the end, mean over layers", "depth", "root mean square"
        yield st.lines(*labels, *curves, log="xy", x_label="depth L", note=note, shows=shows)

    def problem(self, exponent: float, depth: int) -> Problem:
        """Return what is trained at one exponent and depth: two samples, so that the theory of many layers fits."""
        tests = {"tests": 0} if self.task == "digits" else {}
        return problem_of(self, samples=2, depth=depth, depth_exponent=exponent, **tests)

    def _continuum(self, exponent: float) -> np.ndarray:
        """Return outputs (S, O, C) at infinite depth."""
        if exponent == 1:
            problem, start = self.problem(exponent, 1), np.random.default_rng(0)
            layers = [[InfiniteKeyDimAttention().start(problem, start)] for _ in range(self.continuum_cells)]
            return solve_recursion(problem, layers, continuum_step(problem, self.continuum_cells)).outputs
        closed = [solve_blocks(self.problem(exponent, L), (UniformAttention(),)).outputs for L in self.depths[-3:]]
        return (8 * closed[2] - 6 * closed[1] + closed[0]) / 3  # Richardson's extrapolation, twice: 1/L and 1/L^2 go

    def _theory_distances(self, law: st.Data, found: st.Data) -> tuple[xr.DataArray, xr.DataArray]:
        """Return how far f(L), and from the second depth on 2 f(L) - f(L/2), are from the continuum."""
        outputs = found["limit_output"].mean("replicate")
        better = (2 * outputs - outputs.shift(depth=1)).isel(depth=slice(1, None))
        plain, better = (st.distance(each, law["continuum"], OUTPUT) for each in (outputs, better))
        return plain, better


def _learned_shares(found: st.Data) -> xr.DataArray:
    """Return how much of the theory's logits the mean of networks has learned, (replicates, depths)."""
    return projection(found["logits"].mean("network"), found["limit_logits"].mean("replicate"), LOGITS)


def _ratio(values: np.ndarray) -> float:
    """Return the ratio of a doubling, extrapolated from the last two."""
    ratios = values[:-1] / values[1:]
    return float(2 * ratios[-1] - ratios[-2])
