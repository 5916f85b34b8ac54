"""`bigram/softmax`: softmax and linear attention, trained on the same samples, for equal and unequal planted weights.

The same samples train a linear head and three softmax heads: with the learning rate scaled by the largest weight, with
Adam, and with logits of tokens beside those of positions. Every query attends to two positions, with equal or unequal
weights.
"""

import math
from dataclasses import replace

import numpy as np

import manyheads.study as st
from manyheads.theory.bigram import draw_bigram_task, setups
from manyheads.theory.bigram.training import softmax_training
from manyheads.theory.bigram.training.proximal_sgd import initial_state
from manyheads.theory.bigram.training.record import record
from manyheads.theory.papers import REN

HEADS = {"linear": "linear", "softmax": "softmax", "adam": "softmax, Adam", "tokens": "softmax, tokens too"}
RECORDS = 40
NEAR = 0.9  # of the initial loss: the end of the early phase
HALF = 0.5  # of its planted value: a larger second weight is found


class Softmax(st.Study):
    """Early training and final weights of softmax and linear heads, by the larger of two planted weights."""

    name = "bigram/softmax"
    revision = 3
    claim = "Softmax and linear heads train alike early, and to the end for equal weights"
    source = REN
    grid = {"head": HEADS, "share": "shares"}

    shares: tuple[float, ...] = st.sweep(
        (0.5, 0.52, 0.62), "planted first weights, from .5 (equal) up", least=0.5, below=0.85, small=(0.5, 0.62)
    )
    length: int = st.setting(256, "T", small=24, full=1000)
    vocabulary: int = st.setting(3, "N")
    batch: int = st.setting(512, "samples of a step", small=8, full=1024)
    steps: int = st.setting(400, "steps of a run", least=RECORDS, small=40, full=2000)
    growth: float = st.setting(0.05, "growth per step of the linear model; all values have its rate", full=0.02)
    adam_learning_rate: float = st.setting(0.03, "learning rate of Adam for the logits")

    def check(self) -> None:
        if self.shares[0] != 0.5:
            raise st.UsageError(f"shares={self.shares}: give 0.5 first")

    def predict(self, key: st.Key) -> st.Record:
        pairs = [(share, 1 - share) for share in self.shares]
        runner = [softmax_training.predict_second_weight(self.length, *pair) for pair in pairs]
        alone = [0.0 if larger == smaller else smaller**2 / (larger**2 + smaller**2) for larger, smaller in pairs]
        return {
            "runner_up": ("share", runner, "second weight at the blow-up of the first"),
            "excess": ("share", alone, "excess loss of the first position alone"),
        }

    def train(self, key: st.Key, head: str, share: float) -> st.Record:
        seed, by_token = setups.replicate_seed(key), 0.0
        drawn = draw_bigram_task(np.random.default_rng([*seed, 3]), self.vocabulary, self.length, 2)  # for all cells
        task = replace(drawn, weights=np.tile([share, 1 - share], (self.vocabulary, 1)))
        rates, every = setups.steps_of(task, self.growth, self.batch), self.steps // RECORDS
        if head == "linear":
            seen = record(task, initial_state(task), rates, RECORDS * every, RECORDS, seed=seed)
            losses, state = seen.excess, seen.state
        else:
            settings = softmax_training.SoftmaxSettings(
                self.batch, rates.value_learning_rate, rates.attention_learning_rate, token_logits=head == "tokens"
            )
            if head == "adam":
                settings = replace(settings, attention_learning_rate=self.adam_learning_rate, rule="adam")
            losses, end = softmax_training.record_softmax(task, settings, every, RECORDS, seed=seed)
            state, by_token = softmax_training.as_linear(end), float(np.abs(end.tokens).max())
        weights = np.take_along_axis(state.attention.astype(float), task.positions, axis=1)  # (N, 2), larger first
        larger, smaller = weights.T if share != 0.5 else (weights.max(1), weights.min(1))
        samples = np.arange(RECORDS + 1) * every * self.batch
        return {
            "progress": ("progress", samples, "samples drawn"),
            "excess": ("progress", losses, setups.EXCESS),
            "reached": ((), _first_below(losses, samples), f"samples to {NEAR:g} of the loss"),
            "larger": ((), larger.mean(), "first weight"),
            "smaller": ((), smaller.mean(), "second weight"),
            "found": ((), (smaller > HALF * task.weights.min(1)).mean(), "second positions found"),
            "by_token": ((), by_token, "largest logit of a token"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        last = self.shares[-1]
        unequal = f"q = ({last:g}, {1 - last:g})"
        reached, found = trained["reached"].sel(share=0.5), trained["found"]
        smaller, final = trained["smaller"].sel(share=last), trained["excess"].sel(share=last).isel(progress=-1)
        alone = theory["excess"].sel(share=last)
        yield st.Claim(
            "For equal weights softmax and linear attention need the same samples to reduce the loss by "
            f"{1 - NEAR:.0%} (log2 ratio)",
            np.log2(reached.sel(head="softmax") / reached.sel(head="linear")),
            st.near(0, math.log2(1.25)),
            "both obey the same equations while the weights of a row are equal and below one: a quarter for the finite "
            "step, of size eta ln 2, and for noise that separates the two weights",
            "samples of softmax over those of linear attention (log2)",
            resolution=setups.ROUNDING,
        )
        yield st.Claim(
            f"Softmax attention learns the weights of linear attention (ratio of the second ones, {unequal})",
            smaller.sel(head="softmax") / smaller.sel(head="linear"),
            st.near(1, 0.5),
            "a half of the weight of the linear head, either way",
            "second weight of softmax over that of linear attention",
            "refuted",
        )
        yield st.Claim(
            f"For {unequal} the second softmax weight remains 1/(T(1 - q2/q1)) after the blow-up of the first (log2 "
            "ratio)",
            np.log2(smaller.sel(head="softmax") / theory["runner_up"].sel(share=last)),
            st.near(0, 2),
            "a factor of four: the blow-up is that of constant values, the values grow meanwhile, and afterwards the "
            "weight grows at a rate of its square",
            "second weight, measured over predicted (log2)",
        )
        text = f"For {unequal} the softmax head keeps the excess loss q2^2/(q1^2 + q2^2) of its first position alone"
        basis = "closed form; noise of values and attention adds a few hundredths"
        quantity = "relative excess loss"
        yield st.Claim(text, final.sel(head="softmax"), st.near(alone, 0.1), basis, quantity)
        for words, head, share, basis in (
            ("equal weights the softmax head", "softmax", 0.5, ""),
            (f"{unequal} the linear head", "linear", last, ", whose weights grow in proportion"),
            (
                f"{unequal} a softmax head trained by Adam",
                "adam",
                last,
                ": Adam moves logits by the sign of their gradient",
            ),
        ):
            yield st.Claim(
                f"For {words} finds both positions",
                found.sel(head=head, share=share),
                st.near(1, 0.5),
                f"in more than half of the queries{basis}",
                "share of queries with both positions",
                bounds=(0, 1),
                resolution=1 / (self.vocabulary * 2),
            )
        yield st.Claim(
            f"For {unequal} additional logits of tokens do not change the final excess loss of the softmax head",
            final.sel(head="tokens"),
            st.near(alone, 0.1),
            "the same closed form, 1 without knowledge and 0 for both positions: the token at a position does not tell "
            "whether the query attends to it",
            "relative excess loss",
        )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        for share, shows in ((0.5, "For equal weights softmax"), (self.shares[-1], "the softmax head keeps")):
            title = f"Loss with weights {share:g} and {1 - share:g}"
            found = {label: trained["excess"].sel(share=share, head=head) for head, label in HEADS.items()}
            yield st.lines(title, "progress", setups.EXCESS_AXIS, found, log="y", shows=(shows,))


def _first_below(losses: np.ndarray, samples: np.ndarray) -> float:
    """Return the samples at which the loss first passes `NEAR`, by linear interpolation."""
    below = np.flatnonzero(losses < NEAR)
    if not below.size:
        return float(samples[-1])
    right = int(below[0])
    span = (losses[right - 1] - NEAR) / (losses[right - 1] - losses[right])
    return float(samples[right - 1] + span * (samples[right] - samples[right - 1]))
