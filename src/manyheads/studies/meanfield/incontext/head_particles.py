"""`meanfield/head-particles`: error of H averaged attention heads against the limit of many heads."""

import jax.numpy as jnp
import numpy as np

import manyheads.study as st
from manyheads.errors import CertificateError
from manyheads.theory.meanfield.incontext import head_particles as system
from manyheads.theory.meanfield.incontext.task import gaussian_points

OUTPUTS = ("averaged", "summed")


class HeadParticlesStudy(st.Study):
    """Fluctuation and bias of logits and loss of H heads around the limit, and a sum of heads as a control."""

    name = "meanfield/head-particles"
    claim = "Logits of H averaged heads deviate from their mean-field limit by H^(-1/2)"
    source = st.Source(
        "huan2026crossentropy",
        "A Mean-Field Analysis of Multi-Head Self-Attention under Cross-Entropy Training",
        "Cheng Huan and Hongwei Yuan",
        2026,
        kind="misc",
        venue="arXiv",
        identifier="2606.10469",
        locus="abstract: heads as particles, finite heads against the limit; rate, constant and task are derived here",
    )
    grid = {"output": OUTPUTS, "heads": "heads"}

    heads: tuple[int, ...] = st.sweep((16, 64, 256), "heads H", small=(4, 16))
    drawn: int = st.setting(24_576, "heads that a replicate draws at every H, in systems of H", small=64)
    reference: int = st.setting(16_384, "heads at points of low discrepancy for the limit, a power of two", small=512)
    prompts: int = st.setting(12, "fixed prompts trained on", least=1, small=3)
    length: int = st.setting(4, "labelled inputs of a prompt", least=1, small=3)
    learning_rate: float = st.setting(1.0, "step of gradient descent in the time of the limit")
    steps: int = st.setting(20, "steps of gradient descent", least=1, small=3)

    def check(self) -> None:
        if self.drawn < 2 * self.heads[-1]:
            raise st.UsageError(f"heads={self.heads}, drawn={self.drawn}: expected two systems of the last size")

    def predict(self, key: st.Key) -> st.Record:
        prompts = self._prompts()
        variance = system.initial_variance(prompts)
        points = [gaussian_points(system.PARAMETERS, self.reference, np.random.default_rng(seed)) for seed in (0, 1)]
        pair = self._train(np.stack(points), prompts)
        error = float(np.sqrt(np.mean((pair[0] - pair[1]) ** 2)) / 2)  # of the mean of two
        threshold = float(np.sqrt(variance.mean() / self.heads[-1])) / 8
        if error > threshold:
            raise CertificateError(
                f"two references of {self.reference} heads differ too much to measure the error of {self.heads[-1]}; "
                "raise reference",
                measured=error,
                threshold=threshold,
            )
        logits = pair.mean(0)
        return {
            "variance": ("prompt", variance, "variance of f at initialization"),
            "error": ((), error, "rms error of the reference"),
            "logit": (("step", "prompt"), logits, "logit of the reference"),
            "loss": ("step", np.asarray(system.cross_entropy(jnp.asarray(logits), prompts.answer)), "loss", "nat"),
            "step": ("step", np.arange(self.steps + 1), "updates"),
            "heads": ("heads", list(self.heads), "heads H"),
        }

    def train(self, key: st.Key, output: str, heads: int) -> st.Record:
        prompts, rng = self._prompts(), st.generator(key, heads, int(output == "summed"))
        points = rng.standard_normal((self.drawn // heads, heads, system.PARAMETERS))
        logits = self._train(points, prompts, output == "summed")
        loss = np.asarray(system.cross_entropy(jnp.asarray(logits[:, -1]), prompts.answer))
        return {
            "initial_square": ("prompt", (logits[:, 0] ** 2).mean(0), "mean square of the logit at initialization"),
            "mean": ("prompt", logits[:, -1].mean(0), "mean logit after training"),
            "spread": ("prompt", logits[:, -1].var(0, ddof=1), "variance of the logit after training"),
            "loss_mean": ((), loss.mean(), "mean loss after training", "nat"),
            "loss_spread": ((), loss.std(ddof=1), "standard deviation of the loss after training", "nat"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        first, second = self.heads[:2]
        squares = ((trained["mean"] - theory["logit"].isel(step=-1)) ** 2 + trained["spread"]).mean("prompt")
        averaged, summed = (squares.sel(output=output) ** 0.5 for output in OUTPUTS)
        heads = trained.sel(output="averaged")
        bias = (heads["loss_mean"] - theory["loss"].isel(step=-1, drop=True)) * heads["heads"]
        near, nearer = (bias.sel(heads=size, drop=True) for size in (first, second))
        yield st.Claim(
            "At initialization H times the mean squared logit equals the variance of one head's output (ratio)",
            (heads["initial_square"].mean("prompt") * heads["heads"]).mean("heads") / theory["variance"].mean(),
            st.near(1, 0.1),
            "Monte Carlo error of a mean of squares over systems and replicates; the law itself is exact",
            "squared logit, measured over predicted",
        )
        yield st.Claim(
            "After training the rms error of logits falls as H^(-1/2)",
            st.exponent(averaged, "heads", "H", "rms error of logits"),
            st.near(-0.5, 0.05),
            f"the squared error has corrections of relative order 1/H: of relative size 4/H at H = {first} "
            "they move the exponent by 0.04; the reference moves it by less than 0.01",
        )
        text = "After training the loss fluctuates over systems by H^(-1/2)"
        basis = f"corrections of relative order 1/H to the variance, as above at H = {first}"
        yield st.Claim(text, st.exponent(heads["loss_spread"], "heads", "H"), st.near(-0.5, 0.05), basis)
        yield st.Claim(
            f"The bias of the loss falls as 1/H (relative change of H times the bias, H = {first} to {second})",
            (nearer - near) / abs(near.mean()),
            st.near(0, 0.5 * ((second / first) ** 0.5 - 1)),
            "half the change that a bias in proportion to H^(-1/2) would make",
            "relative change of H times the bias",
        )
        yield st.Claim(
            "Logits of heads that are summed instead of averaged approach the limit as H^(-1/2)",
            st.exponent(summed, "heads", "H", "rms error of logits"),
            st.near(-0.5, 0.05),
            "the same tolerance; the logit of a sum has the variance H Var f at initialization",
            expected="refuted",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        heads = trained.sel(output="averaged")
        bias = abs((heads["loss_mean"] - theory["loss"].isel(step=-1, drop=True)).mean("replicate"))
        found = {"standard deviation over systems": heads["loss_spread"], "bias, absolute value": bias}
        law = {"1/H": float(bias[0]) * self.heads[0] / heads["heads"]}
        title, what = "Loss of H averaged heads: fluctuation and bias", "deviation of the loss [nat]"
        note = f"H times the bias: {', '.join(f'{each:.3g}' for each in (bias * heads['heads']).values)}."
        shows = ("The bias of the loss",)
        yield st.lines(title, "heads", what, found, reference=law, log="xy", note=note, shows=shows)

    def _prompts(self) -> system.LabelledPrompts:
        return system.draw_labelled_prompts(np.random.default_rng(0), self.prompts, self.length)

    def _train(self, points: np.ndarray, prompts: system.LabelledPrompts, summed: bool = False) -> np.ndarray:
        heads, rate = system.HeadParticles.of(points), self.learning_rate
        logits = system.train_head_particles(heads, prompts, learning_rate=rate, steps=self.steps, summed=summed)
        return np.asarray(logits)
