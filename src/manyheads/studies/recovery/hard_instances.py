"""`recovery/hard-instances`: a student on parity and wave layers, and on ordinary layers of equal size.

The same student, with the same number of heads, as many sequences and the same budget of work, meets a parity layer, a
wave layer, and for each a planted layer of its size. The Fourier weights of the hard layers by degree are known
exactly, and an algorithm that finds the hidden set is run beside the student, so that the hardness is that of the
learner and not of the data.
"""

from dataclasses import replace

import numpy as np

import manyheads.study as st
from manyheads.attention import AttentionLayer
from manyheads.recovery import evaluate_layer, planted_layer, sequences
from manyheads.recovery._types import Array
from manyheads.recovery.examples.student import StudentSettings, search
from manyheads.recovery.fit.variable_projection import Examples, Tangent
from manyheads.recovery.planted.attacks import unmask_parity, unmask_wave
from manyheads.recovery.planted.hard_instances import guarantees, parity_layer, wave_layer
from manyheads.theory.papers import CHEN_LI

LAYERS = {
    "parity": "parity layer",
    "parity-size": "ordinary layer, same size",
    "wave": "wave layer",
    "wave-size": "ordinary layer, size of the wave",
}
HARD, ORDINARY = ["parity", "wave"], ["parity-size", "wave-size"]
STUDENT = StudentSettings()
SOLVED = 1e-10  # unexplained share of the training labels at which no further start is tried


class HardInstances(st.Study):
    """A restarted student explains nothing of parity and wave layers in the work that solves ordinary ones."""

    name = "recovery/hard-instances"
    claim = "A restarted student fits ordinary layers and fails on parity and wave layers"
    revision = 4
    source = CHEN_LI.at("lower bounds: that hard instances exist; the two that are tried here are derived here")
    unread_prediction = "the Fourier weights say why a layer is hard; a student's error has no closed form"
    grid = {"layer": LAYERS}

    parity: tuple[int, int] = st.setting((16, 4), "Token dimension and heads of the parity layer", small=(6, 2))
    wave: tuple[int, int, int] = st.setting(
        (12, 6, 4), "Dimension, heads and hidden coordinates of the wave layer", small=(6, 4, 2), full=(24, 16, 12)
    )
    samples: int = st.setting(2500, "Sequences of two tokens to learn from", least=100, small=300, full=8000)
    evaluations: int = st.setting(500, "Evaluations of the loss over all starts", least=1, small=40, full=1500)

    def check(self) -> None:
        for name in HARD:  # refuses sizes that make no hard layer
            self._hard(name, np.random.default_rng(0))

    def predict(self, key: st.Key) -> st.Record:
        rng = np.random.default_rng(0)
        found = {name: guarantees(*self._hard(name, rng)) for name in HARD}
        weights = {
            f"{name}_weight": (f"{name}_degree", one.fourier_weights, "Fourier weight of the signal")
            for name, one in found.items()
        }
        family = [float(one.family) for one in found.values()]
        return weights | {
            "hard": ("hard", HARD, "hard layer", None),
            "family": ("hard", family, "layers that differ by the hidden set alone"),
        }

    def train(self, key: st.Key, layer: str) -> st.Record:
        """Teach one student, restarted within its budget, and look for the hidden set in the way that finds it."""
        for_layer, for_data, for_student, for_search = st.generator(key).spawn(4)
        planted, hidden = self._layer(layer, for_layer)
        x, fresh = (sequences(for_data, self.samples, 2, planted.dim) for _ in range(2))
        y, labels = evaluate_layer(planted, x), evaluate_layer(planted, fresh)
        signal, tested = _beyond_linear(x, y, x, y), _beyond_linear(x, y, fresh, labels)
        best, spent, starts = self._teach(x, y, planted.heads, SOLVED * signal / np.sum(y**2), for_student)
        unexplained = float(np.sum((evaluate_layer(best.layer, fresh) - labels) ** 2)) / tested
        learned = best.loss * float(np.sum(y**2)) / signal
        low = guarantees(planted, hidden).share_up_to(2 * len(hidden) - 2) if hidden else np.nan
        return {
            "unexplained": ((), unexplained, "unexplained share of the signal, fresh sequences"),
            "learned": ((), learned, "unexplained share of the signal, training sequences"),
            "spent": ((), float(spent), "evaluations of the loss", "evaluations"),
            "starts": ((), float(starts), "starts of the student"),
            "unmasked": ((), _unmask(layer, hidden, x, y, for_search), "hidden set found by the right question"),
            "low_share": ((), low, "share of the Fourier weight at degrees 1 to 2|S| - 2"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        unexplained, found = trained["unexplained"], trained["unmasked"].min("replicate")
        for name in HARD:
            yield st.Claim(
                f"The student leaves more than half of the signal of a {LAYERS[name]} unexplained",
                unexplained.sel(layer=name),
                st.near(1, (0.5, np.inf)),
                "half of the signal: the best predictor that a correlational learner can reach explains nothing of it",
                "share of the signal, unexplained",
                bounds=(0.0, np.inf),
            )
        text = "With the same budget the student learns every ordinary layer of the same sizes"
        basis = "log10 of the worst over replicates; a start that is stuck leaves about one in a hundred"
        quantity = "share of the signal, unexplained (log10), worst layer"
        yield st.Claim(text, st.log(unexplained.sel(layer=ORDINARY).max()) / np.log(10), st.below(-6), basis, quantity)
        text = f"All Fourier weight of the parity layer lies at degree {2 * self.parity[1] - 1} or above"
        basis = "the square of rounding error in the labels, with three orders to spare"
        quantity = "Fourier weight at lower degrees"
        yield st.Claim(text, trained["low_share"].sel(layer="parity").max(), st.near(0, (0, 1e-20)), basis, quantity)
        quantity, one = "share of replicates that find the set", st.near(1, 0)
        text = "Squares of the labels reveal the hidden set of a parity layer in every replicate"
        basis = "scores 4/m² apart with standard error 8/(m sqrt(samples))"
        yield st.Claim(text, found.sel(layer="parity"), one, basis, quantity)
        text = "Gaussian elimination finds the hidden set of a wave of period 4 in every replicate"
        basis = "labels without noise are linear equations over two elements"
        yield st.Claim(text, found.sel(layer="wave"), one, basis, quantity)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        places, weights = range(len(LAYERS)), {name: theory[f"{name}_weight"] for name in HARD}
        shares = {
            f"{words} sequences": (st.log(trained[name].clip(1e-20)) / np.log(10)).assign_coords(layer=places)
            for name, words in (("learned", "training"), ("unexplained", "fresh"))
        }
        title = "What a student leaves unexplained, within one budget"
        what = "log10 of the unexplained share of the signal"
        note, shows = "Bars reach over replicates.", ("leaves more than half", "With the same budget")
        yield st.lines(title, "layer", what, shares, note=note, shows=shows, x_ticks=tuple(LAYERS.values()))
        law = {LAYERS[name]: each.clip(1e-32).rename({f"{name}_degree": "degree"}) for name, each in weights.items()}
        labels, label = ("Where the signal is", "degree", "Fourier weight"), "degree in the hidden signs"
        note = "Exact. Zero is drawn at 1e-32; degree 0 is a linear function of the tokens."
        yield st.lines(*labels, {}, law, x_label=label, log="y", note=note, shows=("All Fourier weight",))

    def _teach(
        self, x: Array, y: Array, heads: int, enough: float, rng: np.random.Generator
    ) -> tuple[Tangent, int, int]:
        """Restart the student until it has learned the labels or spent its budget: best point, evaluations, starts."""
        examples, spent, starts = Examples(x, y), 0, 0
        best: Tangent | None = None
        while spent < self.evaluations and (best is None or best.loss > enough):
            left = replace(STUDENT, evaluations=self.evaluations - spent)
            found, used = search(examples, heads, rng, until=enough, settings=left)
            spent, starts = spent + used, starts + 1
            best = found if best is None or found.loss < best.loss else best
        assert best is not None
        return best, spent, starts

    def _layer(self, name: str, rng: np.random.Generator) -> tuple[AttentionLayer, tuple[int, ...]]:
        if name in HARD:
            return self._hard(name, rng)
        return planted_layer(rng, *getattr(self, name.removesuffix("-size"))[:2]), ()

    def _hard(self, name: str, rng: np.random.Generator) -> tuple[AttentionLayer, tuple[int, ...]]:
        dim, heads, size = (*self.parity, self.parity[1]) if name == "parity" else self.wave
        hidden = tuple(sorted(int(one) for one in 1 + rng.permutation(dim - 1)[:size]))
        return (parity_layer if name == "parity" else wave_layer)(dim, heads, hidden), hidden


def _beyond_linear(x: Array, y: Array, fresh: Array, labels: Array) -> float:
    """Return the squares of labels that the best linear function of both tokens, fitted to (x, y), leaves."""

    def both(x: Array) -> Array:  # every token beside the other one of its pair, (n k, 2 d)
        return np.concatenate([x, x[:, ::-1]], axis=-1).reshape(-1, 2 * x.shape[2])

    linear = np.linalg.lstsq(both(x), y.reshape(-1, x.shape[2]), rcond=None)[0]
    return float(np.sum((labels.reshape(-1, x.shape[2]) - both(fresh) @ linear) ** 2))


def _unmask(name: str, hidden: tuple[int, ...], x: Array, y: Array, rng: np.random.Generator) -> float:
    """Tell whether the question that suits the layer finds its hidden set; an ordinary layer has none."""
    if not hidden:
        return float("nan")
    try:
        found = unmask_wave(x, y, rng=rng) if name == "wave" else unmask_parity(x, y, len(hidden))
    except st.UsageError:
        return 0.0
    return float(found == hidden)
