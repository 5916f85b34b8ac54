"""`joma/winners`: winner-take-all attention of theorem 2, its blow-up time and the limits of the other weights.

The joint flow of logits and weights is integrated and compared with the erf law, for constant gradients as in the
theorem and for the gradient of a logistic loss, which fades while the layer learns.
"""

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from scipy.integrate import simpson
from scipy.special import erf, erfc

import manyheads.study as st
from manyheads.theory.joma.systems import gradient_flow as flows
from manyheads.theory.joma.systems import layer
from manyheads.theory.joma.task import Attention, JomaTask, Sizes, UpdateRule, draw_joma_task
from manyheads.theory.joma.theorems import winner_take_all as theorem
from manyheads.theory.papers import TIAN

KINDS = ("exp", "linear", "softmax")
EXACT, QUADRATURE = 1e-10, 1e-6
GAIN = "gain, in units that put the blow-up at time 1"
FRACTION = 0.98  # of the blow-up time, up to which trajectories are compared
FADING = flows.FixedSteps.until(20.0, 0.005, 4000)  # blow-up times of the initial gradient, every step kept
LONGEST = 400.0  # blow-up times; softmax attention needs as many to reach the level


class Winners(st.Study):
    """Token weights under a linear activation and constant gradients, beside the erf law."""

    name = "joma/winners"
    claim = "Under exp attention one token takes all at time sqrt(pi/2)/max|Delta|"
    source = TIAN.at("theorem 2; the blow-up time, the limits and the solution for linear attention are derived here")
    revision = 2  # gradients that fade
    # Not vectorized: one program per attention serves both of its flows and all replicates.
    tokens: int = st.setting(12, "tokens", least=2, small=3, full=40)
    contexts: int = st.setting(40, "contexts; softmax attention sees one", least=1, small=4, full=200)
    records: int = st.setting(40, "number of states kept", least=2, small=4)
    # Below, the flow ends before `FRACTION` of the blow-up time; above, the time left to it is below its rounding.
    level: float = st.setting(6.0, "largest weight, at which the flow ends", above=2.5, most=7, small=3.0)

    def cells(self) -> tuple[st.Cell, ...]:
        return st.grid(attention=KINDS, gradient=("constant",)) + st.grid(attention=("exp",), gradient=("fading",))

    def predict(self, key: st.Key) -> st.Record:
        left = float(erfc(self.level * 0.5**0.5))
        return {"left": ((), left, "fraction of the blow-up time that is left at the level")}

    def train(self, key: st.Key, attention: Attention, gradient: str) -> st.Record:
        rule, fading = UpdateRule(attention, "identity"), gradient == "fading"
        count, rng = 1 if attention == "softmax" else self.contexts, st.generator(key)
        sizes = Sizes(self.tokens, contexts=count, neurons=1, width=self.tokens + 1)
        task = draw_joma_task(sizes, rng)
        gradients = 0.5 + rng.normal(size=(count, 1))
        gains = (gradients * task.contexts).mean(0)  # (M,)
        if fading:
            gains = ((task.labels % 2 - 0.5)[:, None] * task.contexts).mean(0)
        # Gradients are scaled so that the blow-up time is one: every trajectory has the same times.
        scale = (np.pi / 2) ** 0.5 / np.abs(gains).max()
        loss = layer.LogisticLoss(scale) if fading else layer.LinearLoss(gradients * scale)
        start = np.full((1, self.tokens), float(attention == "linear")), np.zeros((sizes.width, 1))
        init = layer.LayerParameters(*start)

        def flow(horizon: float) -> flows.FlowTrajectory:
            steps = flows.AdaptiveSteps(horizon, self.records, 1e-12, 1e-14, limit=self.level)
            return flows.adaptive_gradient_flow(init, task, loss, rule, steps)

        near = flow(FRACTION)
        last = flows.gradient_flow(init, task, loss, rule, FADING) if fading else flow(LONGEST)
        total = _accumulate(last, task, loss, rule) if fading else gains * scale * float(last.times[-1])
        end = layer.token_weights(task, last.network.weights[-1])[:, 0]
        contexts, logits = jnp.asarray(task.contexts), jnp.asarray(last.network.logits[-1])
        shares = np.asarray(layer.attend(rule, logits, contexts)).mean(0)
        return {
            "time": ("time", np.linspace(0, FRACTION, self.records + 1), "time over blow-up time"),
            "token": ("token", np.arange(self.tokens), "token"),
            "gain": ("token", gains / np.abs(gains).max() * (np.pi / 2) ** 0.5, GAIN),
            "total": ("token", total, "gain accumulated to the end of the flow"),
            "weights": (("time", "token"), layer.token_weights(task, near.network.weights)[..., 0], "token weights"),
            "end": ("token", end, "final token weights"),
            "end_time": ((), last.times[-1], "final time over the blow-up time"),
            "reached": ((), last.stopped, "whether the level was reached", None),
            "shares": ("token", shares / shares.sum(), "final attention, normalized"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        exp, linear, softmax = (trained.sel(attention=kind, gradient="constant") for kind in KINDS)
        fading, last = trained.sel(attention="exp", gradient="fading"), exp["weights"].isel(time=-1)
        equality = st.near(0, EXACT), "an equality: the error of the integrator, 1e-12 per step, summed over the flow"
        no_constant, spread = (st.near(0, 0.1), "a tenth of the ratio itself"), "relative spread over tokens"
        text = "Under exp attention all weights follow erf(v/sqrt 2) = sqrt(2/pi) Delta t to 98% of the blow-up time"
        quantity = "largest distance of weights"
        yield st.Claim(text, abs(exp["weights"] - self._law(exp, "exp")).max(), *equality, quantity)
        same = "Under exp attention {} is the same for all tokens"
        text, found = same.format("erf(v/sqrt 2)/Delta"), _spread(exp["gain"], last)
        yield st.Claim(text, found.max(), *equality, spread)
        text, found = same.format("erf(v/2)/Delta"), _spread(exp["gain"], last, 0.5)
        yield st.Claim(text, found, *no_constant, spread, "refuted", resolution=EXACT)
        reaching = np.array([theorem.reaching_time(gain, self.level) for gain in exp["gain"].values])
        text = f"The weight of the largest gain reaches {self.level:g} at the time of the erf law"
        quantity = "relative error of the time"
        yield st.Claim(text, abs(exp["end_time"] / reaching - 1).max(), *equality, quantity)
        relative = exp["gain"] / abs(exp["gain"]).max("token")
        yield st.Claim(
            "The other weights converge to erf(v/sqrt 2) = Delta/max|Delta|",
            abs(erf(exp["end"].values * 0.5**0.5) - relative).max(),
            st.near(0, float(theory["left"]) + EXACT),
            "the fraction of the blow-up time left at the level where the flow ends, and the integrator",
            "largest distance",
        )
        text = "Exp attention becomes one-hot on the token of the largest gain"
        basis = "the other weights stay finite: their share is exp(-level^2/2) times that of gains equal to 1e-6"
        yield st.Claim(text, _winner(exp, "shares").min(), st.near(1, 0.01), basis, "smallest share of the winner")
        text = "Under linear attention the weights are sinh(Delta t), without blow-up or convergence"
        quantity = "largest relative error"
        yield st.Claim(text, abs(linear["weights"] - self._law(linear, "linear")).max(), *equality, quantity)
        yield st.Claim(
            "When the gradient fades, erf(v/sqrt 2) is sqrt(2/pi) times the gain accumulated over time",
            abs(erf(fading["end"].values * 0.5**0.5) - (2 / np.pi) ** 0.5 * fading["total"]).max(),
            st.near(0, QUADRATURE),
            "an equality: Simpson's rule between the states kept, every step of the flow",
            "largest distance",
        )
        text = "When the gradient fades, erf(v/sqrt 2)/Delta of the initial gain is the same for all tokens"
        quantity = "spread over tokens (relative)"
        found = _spread(fading["gain"], fading["end"])
        yield st.Claim(text, found, *no_constant, quantity, "refuted", resolution=EXACT)
        text = "When the gradient fades, exp attention becomes one-hot on the token of the largest initial gain"
        figure = _winner(fading, "shares")
        basis = "as for a constant gradient"
        quantity = "share of the winner"
        yield st.Claim(text, figure, st.near(1, 0.01), basis, quantity, "refuted", resolution=EXACT, bounds=(0.0, 1.0))
        text = "Under softmax attention with one context erf(v/sqrt 2)/Delta is the same for all tokens"
        found = _spread(softmax["gain"], softmax["end"])
        yield st.Claim(text, found, *no_constant, spread, "refuted", resolution=EXACT)
        text = "Under softmax attention with one context the token of the largest gain has the largest weight"
        basis = "the flow ends where the largest weight is at the level; this weight over it, worst replicate"
        quantity = "weight of the winner over the level, smallest"
        yield st.Claim(text, (abs(_winner(softmax, "end")) / self.level).min(), st.near(1, EXACT), basis, quantity)

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        shows = {"exp": "all weights follow erf", "linear": "Under linear attention", "softmax": "has the largest"}
        for kind, words in shows.items():
            part = trained.sel(attention=kind, gradient="constant").isel(replicate=[0])
            gain = part["gain"].values[0] / np.abs(part["gain"].values).max()
            order = np.argsort(-np.abs(gain))
            tokens = order[np.unique(np.linspace(0, len(order) - 1, 4).astype(int))].tolist()
            law = self._law(part, "linear" if kind == "linear" else "exp")
            both = [{f"gain {gain[k]:+.2f}": each.isel(token=k) for k in tokens} for each in (part["weights"], law)]
            note = f"First replicate. Dashed: {'sinh(gain t)' if kind == 'linear' else 'erf law of exp attention'}."
            title, x_label = f"{kind} attention: weights of four tokens", "time over the blow-up time of exp attention"
            yield st.lines(title, "time", "token weight v", *both, x_label=x_label, note=note, shows=(words,))

    def _law(self, part: st.Data, kind: str) -> xr.DataArray:
        """Return the token weights that the gains predict, before the blow-up."""
        times = part["time"].values
        law = [
            theorem.linear_attention_at(gain, times)[0]
            if kind == "linear"
            else theorem.weights_at(gain, np.minimum(times, 0.999 * theorem.blowup_time(gain)))
            for gain in part["gain"].values
        ]
        return part["weights"].copy(data=np.stack(law))


def _accumulate(path: flows.FlowTrajectory, task: JomaTask, loss: layer.Loss, rule: UpdateRule) -> np.ndarray:
    """Integrate the gains E[g x] of a single neuron along a trajectory, (M,)."""

    def gains(state: layer.LayerParameters) -> jax.Array:
        preactivations = layer.forward(state, task, rule)[1]
        gradient = jax.grad(lambda a: loss(rule.function(a), task))(preactivations)  # of the mean over samples
        return -gradient[:, 0] @ jnp.asarray(task.contexts)

    rates = jax.jit(jax.vmap(gains))(jax.tree.map(jnp.asarray, path.network))
    return np.asarray(simpson(np.asarray(rates), x=np.asarray(path.times), axis=0))


def _spread(gain: xr.DataArray, weights: xr.DataArray, scale: float = 0.5**0.5) -> xr.DataArray:
    """Return the range of erf(scale v)/gain over its mean, for every replicate."""
    found = [theorem.common_ratio(*row, scale) for row in zip(gain.values, weights.values, strict=True)]
    return xr.DataArray(found, dims="replicate")


def _winner(part: st.Data, name: str) -> xr.DataArray:
    """Return a variable at the token of the largest gain."""
    return part[name].isel(token=abs(part["gain"]).argmax("token"))
