"""`recovery/layer-and-mlp`: an attention layer and the MLP behind it, learned together from examples.

Whether theories of feed-forward networks and of attention compose is an open question of the authors; this is an
example at small sizes. A student learns both from sequences and outputs alone, and each of them by itself beside it.
The six stages, whose certificates need labels in the simplex of projected tokens, are given the composed labels too.
"""

import itertools
import math

import numpy as np
import xarray as xr

import manyheads.study as st
from manyheads.recovery import RecoveryRefused, planted_layer, sequences
from manyheads.recovery._types import Array
from manyheads.recovery.examples.composed_student import Composed, draw_composed, evaluate_composed, fit_composed
from manyheads.recovery.examples.six_stages import learn_in_six_stages
from manyheads.theory.papers import CHEN_LI

# Fields that are given to the student, and so not learned
GIVEN: dict[str, tuple[str, ...]] = {
    "both": (),
    "layer": ("into", "bias", "out"),
    "mlp": ("theta", "projection"),
    "uniform": ("theta",),
}
TITLES = ("layer and MLP together", "layer, MLP given", "MLP, layer given", "both, attention held uniform")
FRESH = 1000  # sequences on which everything is tested
ENOUGH = 1e-12  # share of the variance, unexplained, at which a student is done
FIGURES = {
    "error": "unexplained share of the variance, fresh sequences",
    "theta": "relative error of the attention matrices",
    "projection": "relative error of the projections",
    "mapped": "relative error of the projections after a common linear map",
    "evaluations": "evaluations of the loss",
    "starts": "starts",
    "refused": "six stages refuse the labels",
}


class LayerAndMlp(st.Study):
    """A student learns an attention layer and the MLP behind it together, exactly and from few starts."""

    name = "recovery/layer-and-mlp"
    claim = "A layer and its MLP are learned together from examples, to rounding"
    source = CHEN_LI.at("closing question of the talk; the example is ours")
    unread_prediction = "what is expected is that nothing is left, and what is left is compared with bounds"
    grid = {"learned": GIVEN}  # all see the same layer, MLP, sequences and starts

    dim: int = st.setting(4, "token dimension", least=1, small=2, full=8)
    heads: int = st.setting(2, "heads", least=1, full=3)
    hidden: int = st.setting(6, "width of the MLP", least="dim", small=2, full=32)
    tokens: int = st.setting(2, "length of a sequence", least=2, full=3)
    count: int = st.setting(800, "sequences to learn from", least=1, small=100, full=6000)
    starts: int = st.setting(10, "random starts at most", least=1, small=1)
    evaluations: int = st.setting(2000, "evaluations of the loss in each start", least=1, small=300, full=10_000)

    def predict(self, key: st.Key) -> st.Record:
        return {"error": ((), 0.0, FIGURES["error"])}

    def train(self, key: st.Key, learned: str) -> st.Record:
        for_teacher, for_data, for_starts, for_stages = st.generator(key).spawn(4)
        layer = planted_layer(for_teacher, self.dim, self.heads)
        drawn = draw_composed(for_teacher, self.dim, self.heads, self.hidden)
        teacher = drawn._replace(theta=np.asarray(layer.theta), projection=np.asarray(layer.projection))
        x = sequences(for_data, self.count + FRESH, self.tokens, self.dim, distribution="gaussian")
        y = np.asarray(evaluate_composed(teacher, x))
        given = {name: getattr(teacher, name) for name in GIVEN[learned]}
        if learned == "uniform":
            given["theta"] = np.zeros_like(teacher.theta)
        sizes = self.dim, self.heads, self.hidden
        starts = [draw_composed(for_starts, *sizes)._replace(**given) for _ in range(self.starts)]
        if learned == "uniform":
            starts = starts[:2]  # the control is solved from no start: two show it
        fit = fit_composed(
            x[: self.count], y[: self.count], starts, held=GIVEN[learned], enough=ENOUGH, evaluations=self.evaluations
        )
        fresh, expected = x[self.count :], y[self.count :]
        left = np.mean((np.asarray(evaluate_composed(fit.weights, fresh)) - expected) ** 2) / np.var(expected)
        refused = self._refused(x, y, for_stages) if learned == "both" else math.nan
        values = {"error": left, "evaluations": fit.evaluations, "starts": fit.starts, "refused": refused}
        values |= compare_weights(teacher, fit.weights)
        return {name: ((), float(values[name]), words) for name, words in FIGURES.items()}

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        both = trained.sel(learned="both")

        def worst(name: str) -> xr.DataArray:
            return st.log(both[name].max(skipna=False) + 1e-40) / np.log(10)

        text = "A student learns the function of a layer and the MLP behind it from examples, in every replicate"
        basis = "log10 of the worst error on fresh sequences: a hundred times what ends the training"
        quantity = "unexplained share of the variance (log10), worst replicate"
        yield st.Claim(text, worst("error"), st.below(-10), basis, quantity)
        found = st.below(-4), "the square root of the function's error, with a factor of ten for its condition"
        quantity = "relative error of the attention matrices (log10), worst replicate"
        yield st.Claim("The student finds the attention matrices", worst("theta"), *found, quantity)
        text = "The student finds the projections up to one linear map, which the MLP takes back"
        quantity = "relative error of the projections after the best common map (log10), worst replicate"
        yield st.Claim(text, worst("mapped"), *found, quantity)
        text = "The student does not find the projections themselves"
        basis = "an inequality: the map is not near the identity"
        yield st.Claim(text, both["projection"], st.above(0.1), basis, "relative error of the projections")
        work = trained["evaluations"].sum("replicate")
        yield st.Claim(
            "Learning both takes at most five times the evaluations of the layer and the MLP by themselves",
            work.sel(learned="both") / (work.sel(learned="layer") + work.sel(learned="mlp")),
            st.below(5),
            "an inequality: five times the sum of the parts",
            "evaluations over those of both parts, all replicates",
        )
        text = "The six stages refuse the composed labels: their certificates need the layer's own"
        basis = "a refusal counts one"
        yield st.Claim(text, both["refused"].min(), st.near(1, 0), basis, "share of replicates refused")
        text = "Control: with attention held uniform the same student does not learn the function"
        basis = "an inequality: a hundredth of the variance, eight orders above what counts as learned"
        quantity = "unexplained share of the variance"
        yield st.Claim(text, trained["error"].sel(learned="uniform"), st.above(0.01), basis, quantity)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        placed, names = trained.assign_coords(learned=range(len(TITLES))), ("error", "theta", "mapped", "projection")
        left = {FIGURES[name]: st.log(placed[name].where(placed[name] > 0)) / np.log(10) for name in names}
        labels, shows = ("What is left", "learned", "log10 of the figure"), ("A student learns the function",)
        note = "Bars reach over replicates; what is given has no error, and no point."
        yield st.lines(*labels, left, x_label="student", note=note, shows=shows, x_ticks=TITLES)

    def _refused(self, x: Array, y: Array, rng: np.random.Generator) -> float:
        try:
            learn_in_six_stages((x, y), self.heads, rng=rng)
        except RecoveryRefused:
            return 1.0
        return 0.0


def compare_weights(teacher: Composed, found: Composed) -> dict[str, float]:
    """Return the errors of the heads under the best matching, and of the projections after the best common map."""
    heads, dim = teacher.theta.shape[:2]
    size, norm = np.linalg.norm(teacher.theta), np.linalg.norm(teacher.projection)
    orders = [list(order) for order in itertools.permutations(range(heads))]
    order = min(orders, key=lambda one: float(np.linalg.norm(found.theta[one] - teacher.theta)))
    projection = found.projection[order]
    stacked, wanted = (one.reshape(heads * dim, dim) for one in (projection, teacher.projection))
    mapped = stacked @ np.linalg.lstsq(stacked, wanted)[0]
    return {
        "theta": float(np.linalg.norm(found.theta[order] - teacher.theta) / size),
        "projection": float(np.linalg.norm(projection - teacher.projection) / norm),
        "mapped": float(np.linalg.norm(mapped - wanted) / norm),
    }
