"""`joma/wide-networks`: lucky neurons of wide layers, whose random start is near what they learn.

Layers of many neurons with random weights are trained by SGD, with the constant gains of theorem 2, and with a loss
that the neurons share. Attention begins where the weights are large, or uniform; small weights are the control.
"""

import jax
import jax.numpy as jnp
import numpy as np

import manyheads.study as st
from manyheads.theory.joma.systems.networks.wide_layer import WideTraining, train_alone, train_together
from manyheads.theory.joma.theorems import lucky_neurons as lucky
from manyheads.theory.papers import TIAN

ALONE = {  # attention at the start, under a constant gain
    "aligned": "attention aligned with the weights",
    "uniform": "uniform attention",
    "small": "uniform attention, small weights",
}
FIGURES = {
    "first_time": "mean time until the first neuron is won",
    "weaker": "share of neurons that the weaker token wins",
    "some": "share of layers in which the weaker token wins a neuron",
    "luckiest": "share of the luckiest neuron in a shared output",
}
NEURONS = "neurons of the layer"
SMALL = 0.05  # standard deviation of small weights; 1 otherwise
HORIZON = 4.0  # of time, over the inverse of the larger gain
SAMPLED = 2048  # networks of the prediction of a shared loss


class WideNetworks(st.Study):
    """Neurons that are won by a token, and when, against the width of the layer."""

    name = "joma/wide-networks"
    claim = "The first of n neurons is won after a time ~ 1/(n + 1), if attention is aligned"
    source = TIAN.at("theorem 2; lucky neurons as reviews ask, derived here from it")
    grid = {"setting": (*ALONE, "shared"), "width": "widths"}

    widths: tuple[int, ...] = st.sweep((4, 16, 64), "neurons of a layer", small=(2, 8), full=(4, 16, 64, 256))
    # Of smaller widths there are more layers, with as many neurons in all.
    networks: int = st.setting(128, "layers of the largest width in each replicate", least=1, small=16)
    gain: float = st.setting(0.2, "gain of the weaker of two tokens; that of the other is 1", above=0, below=1)
    level: float = st.setting(4.0, "a neuron is won where a weight reaches this value", above=2, most=6)
    target: float = st.setting(8.0, "change of the output that a shared loss asks for", above=0)
    learning_rate: float = st.setting(5e-4, "learning rate of SGD", above=0, most=0.05, small=0.01, full=1e-4)
    batch: int = st.setting(16, "samples of an update", least=1)

    def predict(self, key: st.Key) -> st.Record:
        """Return mean times and shares by quadrature, and the luckiest neuron's share of a shared output by sampling.

        The last is the mean over `SAMPLED` random layers, each solved without training.
        """
        rng = np.random.default_rng(0)  # one set of layers: the prediction is one number
        times, shares, luckiest = [], [], []
        for attention, std in map(_start, ALONE):
            times.append([lucky.mean_first_time(width, 1.0, self.level, std, attention) for width in self.widths])
            shares.append(lucky.winning_probability((1.0, self.gain), self.level, HORIZON, std, attention))
        for width in self.widths:
            changes = lucky.shared_output(rng.normal(size=(SAMPLED, width)), self.target, level=6.0)
            luckiest.append((changes.max(1) / changes.sum(1)).mean())
        some, both = [lucky.some_neuron(share, np.array(self.widths)) for share in shares], ("setting", "width")
        return {
            "setting": ("setting", list(ALONE), "setting", None),
            "width": ("width", np.asarray(self.widths), "neurons"),
            "first_time": (both, times, FIGURES["first_time"]),
            "weaker": ("setting", shares, FIGURES["weaker"]),
            "some": (both, some, FIGURES["some"]),
            "luckiest": ("width", luckiest, FIGURES["luckiest"]),
        }

    def train(self, key: st.Key, setting: str, width: int) -> st.Record:
        for_init, for_batches = jax.random.split(key)
        steps = round(HORIZON / self.learning_rate)
        training = WideTraining(self.learning_rate, steps, self.batch, self.level)
        layers = self.networks * self.widths[-1] // width
        weights = _start(setting)[1] * jax.random.normal(for_init, (layers, width, 2), jnp.float64)
        first, weaker, some, luckiest = np.nan, np.nan, np.nan, np.nan
        if setting == "shared":
            changes = np.asarray(train_together(weights[..., 0], jnp.float64(self.target), training, for_batches))
            luckiest = (changes.max(1) / changes.sum(1)).mean()
        else:
            logits = weights**2 / 2 if setting == "aligned" else jnp.zeros_like(weights)
            times = np.asarray(train_alone(weights, logits, jnp.array([1.0, self.gain]), training, for_batches))
            # A layer without a winner counts with the horizon.
            first = np.minimum(times[..., 0].min(1), HORIZON).mean()
            won = times[..., 1] < times[..., 0]
            weaker, some = won.mean(), won.any(1).mean()
        values = first, weaker, some, luckiest
        return {name: ((), value, FIGURES[name]) for name, value in zip(FIGURES, values, strict=True)}

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        narrow, middle, widest = self.widths[0], self.widths[1], self.widths[-1]
        more = (trained["width"] + 1).assign_attrs(long_name="neurons of the layer + 1")
        times, laws = (data["first_time"].assign_coords(width=more) for data in (trained, theory))
        weaker, share = trained["weaker"].mean("width"), "share of neurons"
        luckiest = trained["luckiest"].sel(setting="shared")
        equality = "an equality up to the level, whose tail is below a hundredth, and the finite steps of SGD"
        falls = "as for aligned attention; Mills' ratio of the largest of n numbers falls as a logarithm"
        for setting, words, expected, basis in (
            ("aligned", "aligned attention", "holds", equality),
            ("uniform", "uniform attention at the start", "refuted", falls),
        ):
            yield st.Claim(
                f"With {words} the time until the first of n neurons is won scales as 1/(n + 1)",
                st.exponent(times.sel(setting=setting), "width", predicted=laws.sel(setting=setting)),
                st.near(-1, 0.1),
                basis,
                "exponent of the time in n + 1",
                expected,
            )
        yield st.Claim(
            "With uniform attention at the start the time until the first neuron is won is Mills' ratio of the "
            "largest weight",
            (times / laws).sel(setting="uniform").mean("width"),
            st.near(1, 0.05),
            "order statistics by quadrature; a percent of the sampling, and the finite steps of SGD: the shortest "
            "times are some eighty steps",
            "measured over predicted time",
        )
        yield st.Claim(
            f"With aligned attention a token of gain {self.gain:g} against 1 wins half of {self.gain:g} of the neurons",
            weaker.sel(setting="aligned"),
            st.near(self.gain / 2, 0.01),
            "a closed form: the ratio of two uniform numbers",
            share,
            bounds=(0.0, 1.0),
        )
        text = "With uniform attention at the start it wins the share beyond the separatrix of random starts"
        region = st.near(theory["weaker"].sel(setting="uniform"), 0.01)
        basis = "quadrature over random starts"
        yield st.Claim(text, weaker.sel(setting="uniform"), region, basis, share, bounds=(0.0, 1.0))
        some, predicted = (data["some"].sel(setting="aligned", width=middle) for data in (trained, theory))
        yield st.Claim(
            f"In layers of {middle} neurons it wins some neuron with 1 - (1 - p)^n",
            some,
            st.near(predicted, 0.04),
            "independent neurons; five standard errors of the layers of eight replicates",
            "share of layers",
            bounds=(0.0, 1.0),
            resolution=middle / (self.networks * widest),
        )
        text, region = "From small weights the weaker token wins no neuron", st.near(0, 0.001)
        basis, whole = "the control: without spread at the start there are no lucky neurons", (0.0, 1.0)
        yield st.Claim(text, weaker.sel(setting="small"), region, basis, share, bounds=whole, resolution=1e-9)
        yield st.Claim(
            f"From small weights the first neuron of {widest} is won as late as that of {narrow}",
            times.sel(setting="small").isel(width=-1) / times.sel(setting="small").isel(width=0),
            st.near(1, 0.15),
            "the control: starts that are two or three standard deviations up save a tenth of the time",
            "ratio of times",
            resolution=1e-9,
        )
        text = "Under a shared loss the luckiest neuron adds to the output what one accumulated gain for all predicts"
        basis = "an equality of the flow; two percent of the sampling of layers"
        quantity = "measured over predicted share"
        yield st.Claim(text, (luckiest / theory["luckiest"]).mean("width"), st.near(1, 0.05), basis, quantity)
        text = f"Under a shared loss the luckiest of {widest} neurons adds half of the output"
        basis = "an inequality: half is what the luckiest of four adds"
        quantity = "share of the output"
        yield st.Claim(text, luckiest.isel(width=-1), st.above(0.5), basis, quantity, "refuted", resolution=1e-9)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        for name, title, label, claim in (
            ("first_time", "Time until the first neuron is won", "mean time", "scales as 1/(n + 1)"),
            ("some", "Layers in which the weaker token wins a neuron", "share of layers", "wins some neuron"),
        ):
            both = (trained[name], theory[name])
            found, law = ({words: data.sel(setting=one) for one, words in ALONE.items()} for data in both)
            log, note = "xy" if name == "first_time" else "x", "Dashed: predicted. Bands range over replicates."
            yield st.lines(title, "width", label, found, law, log=log, x_label=NEURONS, note=note, shows=(claim,))
        shares = trained["luckiest"].sel(setting="shared"), theory["luckiest"]
        found, law = ({"one loss for all neurons": each} for each in shares)
        labels, shows = ("Share of the luckiest neuron in a shared output", "width", "share"), ("adds half",)
        yield st.lines(*labels, found, law, log="xy", x_label=NEURONS, note=note, shows=shows)


def _start(setting: str) -> tuple[str, float]:
    """Return the attention at the start, and the standard deviation of the weights."""
    return ("aligned" if setting == "aligned" else "uniform"), (SMALL if setting == "small" else 1.0)
