"""`limits/initialization`: residual kernels against H and the law of attention logits against N, before training."""

import math

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.statistics.distances import squared_distance
from manyheads.studies.dmft.shared import logit_distributions as logits_law
from manyheads.studies.dmft.shared import mean_field
from manyheads.theory.dmft import Network, Problem
from manyheads.theory.dmft.finite.problems import digits_problem
from manyheads.theory.papers import BORDELON

EXPONENTS = {1.0: "logit exponent 1", 0.5: "logit exponent 1/2"}
GAUSSIAN = 0.01  # of probability
ROWS = ("row", "row_too")


class Initialization(st.Study):
    """Kernels of the residual stream against H, and attention logits of single heads against N, before training.

    Kernels are h_a . h_b / d, d = N H. Below the first block entries of h are independent Gaussians of covariance X, so
    one kernel deviates by mean square (X_aa X_bb + X_ab^2)/d, exactly. Each block adds the output weights' own
    fluctuation, of mean square 1/d, that of a mean over H heads, 1/H, and transports the one below it: at fixed N all
    of it is 1/H, so what is of order 1/H is the square, and the root mean square goes as H^(-1/2). The mean kernel is
    off by the second order of these fluctuations, 1/H. A logit of a normalized stream is q . k / N^alpha_A with q and k
    Gaussian and independent, in every block and at any H: its variance over heads is N^(1 - 2 alpha_A), its law that of
    `product_below`, its excess kurtosis 6/N. (Derived here.)
    """

    name = "limits/initialization"
    claim = "Before training kernels deviate as 1/H (squared); logits have kurtosis 3 + 6/N"
    source = BORDELON.at("figure 3 and its caption; constants and the law of the logits are derived here")
    predictions = 4

    heads_counts: tuple[int, ...] = st.sweep(
        (4, 16, 64), "numbers of heads H at which kernels are compared", small=(2, 4), full=(4, 16, 64, 256)
    )
    key_dim: int = st.setting(4, "their key dimension N", least=1, small=2)
    key_dims: tuple[int, ...] = st.sweep(
        (1, 4, 16), "key dimensions at which logits are compared", small=(1, 2), full=(1, 2, 4, 16, 64)
    )
    heads: int = st.setting(16, "their number of heads", least=1, small=4)
    depth: int = st.setting(8, "blocks L; streams are normalized, as in the paper's transformer", small=2)
    branch: float = st.setting(4.0, "beta0 of the branch multiplier beta0/L")
    networks: int = st.setting(32, "networks of one replicate", least=3, small=3, full=64)
    oversampling: int = st.setting(4, "sampled heads over those that moments need", least=1, small=1)

    def check(self) -> None:
        self.problem()

    def cells(self) -> tuple[st.Cell, ...]:
        """Return the networks of both comparisons at both logit exponents, each once."""
        sizes = [(self.key_dim, heads) for heads in self.heads_counts] + [(size, self.heads) for size in self.key_dims]
        return tuple(
            st.Cell(logit_exponent=exponent, key_dim=size, heads=heads)
            for exponent in EXPONENTS
            for size, heads in dict.fromkeys(sizes)
        )

    def predict(self, key: st.Key) -> st.Record:
        problem, gram = self.problem(), self.problem().gram
        limits = []
        for exponent, stream in zip(EXPONENTS, st.generator(key).spawn(len(EXPONENTS)), strict=True):
            branches = mean_field.sampled_blocks(problem, self.key_dim, exponent, oversampling=self.oversampling)
            limits.append(mean_field.solve_blocks(problem, branches, stream).stream[0, -1])
        uniform = mean_field.solve_blocks(problem).stream[0, -1]
        fluctuation = float((np.outer(np.diag(gram), np.diag(gram)) + gram**2).mean())
        kurtosis, below = map(logits_law.excess_kurtosis, self.key_dims), map(logits_law.product_below, self.key_dims)
        return {
            "kernel": (("logit_exponent", *ROWS), np.stack(limits), "kernel of the stream, H to infinity"),
            "uniform": (ROWS, uniform, "kernel of the stream under uniform attention, N to infinity"),
            "gram": (ROWS, gram, "kernel below the first block, H to infinity"),
            "fluctuation": ((), fluctuation, "d times the kernel's variance there"),
            "power": ("logit_exponent", [1 - 2 * exponent for exponent in EXPONENTS], "exponent of N in the variance"),
            "kurtosis": ("key_dim", [*kurtosis], "excess kurtosis of the logits"),
            "below": (("key_dim", "level"), np.stack([*below]), "share of the logits below a level"),
            "key_dim": ("key_dim", list(self.key_dims), "key dimension"),
        }

    def train(self, key: st.Key, logit_exponent: float, key_dim: int, heads: int) -> st.Record:
        """Draw some networks of one size; keep their kernels below and above all blocks and describe their logits."""
        network = Network(key_dim, heads, logit_exponent)
        drawn = mean_field.train_seeds(self.problem(), network, key, self.networks, every_head=True)
        logits = drawn["head_logits"].values[:, 0].swapaxes(2, 3)  # (network, layer, head, sample, token, key)
        unit = key_dim ** (0.5 - logit_exponent)  # the std of all of them, since streams are normalized
        pooled = logits_law.pool_logits(logits, np.full(logits.shape[-3:], unit))
        kernels, excess = drawn["stream"].values[:, 0, [0, -1]], ((logits / unit) ** 4).reshape(len(logits), -1)
        return {
            "kernel": (("network", "end", *ROWS), kernels, "kernel of the stream below and above all blocks"),
            "variance": ("network", pooled["square"] * unit**2, "variance of the logits over heads"),
            "excess": ("network", excess.mean(-1) - 3, "excess kurtosis of the logits over heads"),
            "below": (("network", "level"), pooled["below"], "share of the logits below a level"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        law = theory.mean("prediction")
        kernels = trained["kernel"].sel(key_dim=self.key_dim, heads=list(self.heads_counts))
        # The same at both exponents.
        away = kernels.sel(logit_exponent=1.0).isel(end=0) - law["gram"]
        squares = (away**2).mean(("network", *ROWS)) * self.key_dim * away["heads"]
        yield st.Claim(
            "Below the first block N H times the mean square deviation of a network's kernel is mean(X_aa X_bb + "
            "X_ab^2) (ratio)",
            squares.mean("heads") / float(law["fluctuation"]),
            st.near(1, 0.1),
            "exact for sums over Gaussian entries; a tenth of it is allowed",
            "mean square deviation, measured over derived",
        )
        for exponent, words in EXPONENTS.items():
            limit = theory.sel(logit_exponent=exponent)
            yield from self._kernels(words, limit, kernels.sel(logit_exponent=exponent).isel(end=-1))
        logits = trained[["variance", "excess", "below"]].sel(heads=self.heads, key_dim=list(self.key_dims))
        for exponent, words in EXPONENTS.items():
            yield from self._logits(words, law.sel(logit_exponent=exponent), logits.sel(logit_exponent=exponent))

    def _kernels(self, where: str, limit: st.Data, found: xr.DataArray) -> st.Claims:
        first, largest = self.heads_counts[0], self.heads_counts[-1]
        squares = _squares(limit["kernel"], found)
        correction = float(np.log((1 + 2 / first) / (1 + 2 / largest)) / np.log(largest / first))
        yield st.Claim(
            f"{where}: the mean square deviation of a network's residual kernel from the limit scales as 1/H",
            st.exponent(squares, "heads", "H", "mean square deviation of the residual kernel"),
            st.near(-1, correction),
            f"a correction 1 + 2/H of the square moves the exponent by {correction:.2f} over these sizes",
        )
        yield st.Claim(
            f"{where}: the root mean square deviation of a network's residual kernel scales as 1/H",
            st.exponent(squares**0.5, "heads", "H", "root mean square deviation of the residual kernel"),
            st.near(-1, 0.25),
            "half way to H^(-1/2), which is derived here",
            expected="refuted",
        )
        for name, words, expected in (
            ("kernel", "infinitely many heads", "holds"),
            ("uniform", "uniform attention", "refuted"),
        ):
            draws = limit[name].transpose("prediction", *ROWS).values[slice(None if name == "kernel" else 1)]
            size, most = float(np.sqrt((draws.mean(0) ** 2).mean())), 2 / largest
            networks = found.sel(heads=largest).values.reshape(-1, *draws.shape[1:])
            yield st.Claim(
                f"{where}: at H={largest} the mean kernel is within {most:.2g} of that of {words}",
                st.Root.of(squared_distance(networks / size, draws / size), self.networks),
                st.near(0, (math.inf, most)),
                "relative: c/H, the second order of fluctuations, with c of order one, at most 2; attention is uniform "
                "at infinite N only",
                "distance of the means",
                expected,
            )

    def _logits(self, where: str, law: st.Data, found: st.Data) -> st.Claims:
        yield st.Claim(
            f"{where}: the variance of attention logits over heads scales as N^{float(law['power']):g}",
            st.exponent(found["variance"].mean("network"), "key_dim", "N"),
            st.near(law["power"], 0.05),
            "exact in every block of a normalized stream; a tenth of the difference to N^(-1/2) is allowed",
        )
        gaussian = logits_law.gaussian_below(0.0, 1.0)
        for size in (self.key_dims[0], self.key_dims[-1]):
            here, theirs = found.sel(key_dim=size), law.sel(key_dim=size)
            yield st.Claim(
                f"{where}, N={size}: the excess kurtosis of attention logits over heads is 6/N",
                here["excess"].mean("network"),
                st.near(theirs["kurtosis"], logits_law.excess_kurtosis(size) / 2),
                "half of it: a Gaussian and the kurtosis of twice as small an N are both outside",
                "excess kurtosis",
            )
            below = here["below"].values.reshape(-1, len(gaussian))
            yield st.Claim(
                f"{where}, N={size}: attention logits of single heads have the law of q . k, both Gaussian",
                st.Root.of(squared_distance(below, theirs["below"].values[None]), self.networks),
                st.near(0, (math.inf, GAUSSIAN / 2)),
                "root mean square over levels of shares below them: half a per cent of probability",
                "distance of the means",
            )
            apart = math.sqrt(((logits_law.product_below(size) - gaussian) ** 2).mean())
            yield st.Claim(
                f"{where}, N={size}: attention logits of single heads are Gaussian",
                st.Root.of(squared_distance(below, gaussian[None]), self.networks),
                st.near(0, (math.inf, GAUSSIAN)),
                "root mean square over levels: one per cent of probability",
                "distance of the means",
                "holds" if apart < GAUSSIAN else "refuted",
            )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        gaussian = xr.DataArray(logits_law.gaussian_below(0.0, 1.0), dims="level")
        plots = {
            (words, f"N={size}"): {
                "networks": trained["below"].sel(logit_exponent=exponent, key_dim=size, heads=self.heads),
                "law of q . k": theory["below"].sel(key_dim=size).isel(prediction=[0]),
                "Gaussian": gaussian,
            }
            for exponent, words in EXPONENTS.items()
            for size in self.key_dims
        }
        labels = "Attention logits of single heads before training", "logit over N^(1/2 - alpha_A)"
        note = "Heads, blocks, samples and pairs of tokens together; bands range over replicates."
        yield logits_law.densities(*labels, plots, note)

    def problem(self) -> Problem:
        """Return the inputs and the architecture; nothing is trained."""
        return digits_problem(steps=1, depth=self.depth, branch=self.branch, norm=True)


def _squares(draws: xr.DataArray, found: xr.DataArray) -> xr.DataArray:
    """Return mean square deviations of single networks' kernels from the limit, without the noise of its draws."""
    noise = float(draws.var("prediction", ddof=1).mean()) / draws.sizes["prediction"]
    return ((found - draws.mean("prediction")) ** 2).mean(("network", *ROWS)) - noise
