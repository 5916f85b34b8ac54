"""`meanfield/prompt-length`: loss of the linear-attention transformer against the number of pairs in a prompt."""

import jax
import numpy as np

import manyheads.study as st
from manyheads.theory.meanfield.incontext import prompt_length
from manyheads.theory.meanfield.incontext.task import FeatureTask, circle_task, harmonics
from manyheads.theory.papers import KIM

SIGNAL, FOREIGN, THIRD = np.diag([0.3, 0.03]), 0.6, 0.3  # amplitudes of the representation's harmonics 2, 1 and 3
FEWEST = 1 << 13  # prompts of a cell


class PromptLength(st.Study):
    """Loss of drawn prompts of n pairs, beside the exact L + c/n and the bound of the paper.

    The representation is fixed: two target harmonics, one of them weak, and four foreign ones; the attention is the
    best one at infinite prompts.
    """

    name = "meanfield/prompt-length"
    claim = "With n pairs in a prompt the loss exceeds its limit by exactly c/n"
    source = KIM.at("|L_n - L| <~ sqrt(log k / n); the exact c/n and its bound are derived here")
    revision = 2
    grid = {"length": "lengths"}

    lengths: tuple[int, ...] = st.sweep((4, 16, 64, 256, 1024), "pairs n of a prompt", small=(2, 4))
    pairs: int = st.setting(
        1 << 21, f"pairs drawn in a cell of a replicate; at least {FEWEST} prompts are", least=1, small=1, full=1 << 24
    )

    def predict(self, key: st.Key) -> st.Record:
        task, h = representation()
        attention = prompt_length.solve_attention(task, h)
        exact = [prompt_length.prompt_loss(task, h, attention.weights, length) for length in self.lengths]
        best = [prompt_length.solve_attention(task, h, length).loss for length in self.lengths]
        most = 0.5 * task.features * float((task.targets**2).sum(1).max())
        paper = np.sqrt(np.log(task.features) / np.asarray(self.lengths))
        return {
            "loss": ("length", exact, "loss at the attention of infinite prompts"),
            "best": ("length", best, "loss at the best attention for n pairs"),
            "limit": ((), attention.loss, "loss of infinite prompts"),
            "coefficient": ((), prompt_length.length_coefficient(task, h, attention.weights), "c of L + c/n"),
            "largest": ((), most, "largest c of any representation"),
            "paper": ("length", paper, "bound of the paper, up to a factor"),
            "length": ("length", list(self.lengths), "pairs of a prompt"),
        }

    def train(self, key: st.Key, length: int) -> st.Record:
        task, h = representation()
        attention = prompt_length.solve_attention(task, h).weights
        key = jax.random.fold_in(key, length)
        drawn = prompt_length.draw_prompt_losses(task, h, attention, length, max(FEWEST, self.pairs // length), key)
        return {
            "raw": ((), drawn.raw.mean(), "mean loss of drawn tasks, pairs and queries"),
            "averaged": ((), drawn.averaged.mean(), "mean loss of drawn pairs"),
            "prompts": ((), len(drawn.raw), "prompts"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        excess = trained["averaged"] - theory["limit"]
        error = 2.0 / np.sqrt(FEWEST)  # of a chi-squared variable's mean, with one degree of freedom
        power = st.exponent(excess, "length", "n", "excess of the loss", theory["loss"] - theory["limit"])
        text = "The loss on drawn tasks, prompts and queries is the exact L + c/n (ratio, averaged over n)"
        basis = f"three standard errors of {FEWEST} squared errors, twice those of a normal error's square"
        quantity = "loss, measured over predicted"
        yield st.Claim(text, (trained["raw"] / theory["loss"]).mean("length"), st.near(1, 3 * error), basis, quantity)
        yield st.Claim(
            "The excess over infinite prompts is c/n with c in closed form (ratio, averaged over n)",
            (excess * trained["length"] / float(theory["coefficient"])).mean("length"),
            st.near(1, 3 * error),
            f"three standard errors of {FEWEST} quadratic forms",
            "excess, measured over predicted",
        )
        yield st.Claim(
            "The excess of the loss at n pairs decreases as 1/n",
            power,
            st.near(-1, 3 * error / np.log(self.lengths[-1] / self.lengths[0]) * np.sqrt(2)),
            "the same error of the logarithms at both ends, over the logarithm of their ratio",
        )
        text = "|L_n - L| decreases at least as fast in n as the paper's bound sqrt(log k / n) (exponent at most -1/2)"
        basis = "the bound's dependence on n, which is not tight; its dependence on k is not tested"
        yield st.Claim(text, power, st.below(-0.5), basis)
        yield st.Claim(
            "At the attention of infinite prompts the excess is at most k max|f|^2 / 2n (share of it)",
            (excess * trained["length"]).max("length") / float(theory["largest"]),
            st.below(1),
            "the variance of a mean of n pairs is at most its second moment; without a logarithm of k",
            "excess over the bound",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        fixed, best = (theory[name] - theory["limit"] for name in ("loss", "best"))
        exact, paper = {"attention of infinite prompts": fixed, "attention optimized for n": best}, theory["paper"]
        bound = {"bound sqrt(log k / n), through the first point": paper * float(fixed[0] / paper[0])}
        title = "Exact excess over the loss of infinite prompts, and the rate of the paper's bound"
        yield st.lines(title, "length", "loss minus that of infinite prompts", {}, exact, bound, log="xy")


def representation() -> tuple[FeatureTask, np.ndarray]:
    """Return the task on the circle and the representation at its nodes."""
    task = circle_task((2, 2))
    angles = np.arctan2(task.inputs[:, 1], task.inputs[:, 0])
    return task, task.targets @ SIGNAL + FOREIGN * harmonics(1, angles) + THIRD * harmonics(3, angles)
