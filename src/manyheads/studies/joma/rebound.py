"""`joma/rebound`: drop and rebound of attention entropy and stable rank (figures 4 and 7).

In the flows components saturate at different rates, at one rate, or not at all. The networks are one layer of attention
under an MLP, trained by SGD: on a regression, whose targets are finite, and by cross-entropy, whose targets are not.
"""

from typing import Any

import jax
import numpy as np

import manyheads.study as st
from manyheads.curves.drop_and_rise import drop_and_rise
from manyheads.spectra.traced_ranks import traced_stable_rank
from manyheads.theory.joma.systems import rebound_networks as networks
from manyheads.theory.joma.systems.components import DYNAMICS, relax_layer
from manyheads.theory.joma.systems.rebound_networks import COMPONENTS, HORIZONS, RANDOM_HORIZONS, RECORDS, record_times
from manyheads.theory.joma.theorems import rebound as theorem
from manyheads.theory.joma.theorems.salient_first import EXP, REGRESSION, UNIFORM
from manyheads.theory.papers import TIAN

TRAINED = ("regression", "classification")
SYSTEMS = {
    **{name: f"flow: {label}" for name, label in DYNAMICS.items()},
    **{name: f"trained: {name}" for name in TRAINED},
}
RISE = 0.05  # smallest change of the stable rank that counts


class Rebound(st.Study):
    """Drop and rise of entropy and stable rank in flows with and without attention, and in trained networks."""

    name = "joma/rebound"
    claim = "Attention entropy and stable rank drop, then rebound, as components saturate"
    source = TIAN.at("section 4, figures 4 and 7; the conditions are derived here")
    revision = 3
    grid = {"system": SYSTEMS}
    # Not vectorized: its flows and networks are compiled once for all cells and replicates.
    vectors: int = st.setting(240, "targets of 2 to 19 components in [0.5, 3]", least=2, small=2, full=960)
    # Learning rate of the regression times the final rate of its fastest component.
    resolution: float = st.setting(0.25, "relative step of SGD", above=0, most=0.5, small=0.5, full=0.0625)
    steps: int = st.setting(6000, "updates of the classification", least=RECORDS, small=96, full=24000)

    def predict(self, key: st.Key) -> st.Record:
        """Return the side from which the entropy of each system approaches its limit (-1: it rebounds), and curves.

        The curves are exact, for one vector of targets at equal distances; of the trained networks, the regression has
        finite targets and its own rate law, and the cross-entropy has none, as a linear activation has none.
        """
        targets = np.linspace(*networks.SALIENCES, COMPONENTS)
        linear = theorem.linear_entropy_curve(targets, networks.blowup_fractions())
        above = int(np.sign(linear[-2] - linear[-1]))  # decreasing to the end
        laws = {"exp": EXP, "softmax": EXP, "uniform": UNIFORM, "regression": REGRESSION}
        sides = [theorem.predict_approach(targets, laws[name]) if name in laws else above for name in SYSTEMS]
        curves = [theorem.entropy_curve(targets, record_times(RANDOM_HORIZONS["exp"]), law) for law in (EXP, UNIFORM)]
        path, label = np.stack([*curves, linear]), "attention entropy of one vector of targets"
        return {
            "dynamics": ("dynamics", ["exp", "uniform", "linear"], "dynamics", None),
            "record": ("record", np.arange(RECORDS + 1), "record"),
            "side": ("system", sides, "side from which entropy approaches its limit"),
            "reference_entropy": (("dynamics", "record"), path, label, "nat"),
        }

    def train(self, key: st.Key, system: str) -> st.Record:
        rng = st.generator(key)
        entropies, line_error, rising, agreement = np.zeros((0, RECORDS + 1)), np.nan, np.nan, np.nan
        if system in DYNAMICS:
            entropies = networks.target_entropies(system, self.vectors, rng)
            target, init = networks.draw_layer(rng)
            weights = relax_layer(target, init, record_times(HORIZONS[system]), system)  # type: ignore[arg-type]
            logits = (weights**2).sum(1) / 2
            if system == "uniform":
                passed = -np.expm1(-record_times(HORIZONS[system]))[:, None, None]
                line_error = np.abs(weights - init - passed * (target - init)).max()
                rising, agreement = networks.straight_layers(rng, self.vectors)
        elif system == "regression":
            logits, weights = networks.train_regression(self.resolution, rng)
        else:
            logits, weights = networks.train_classification(self.steps, rng)
        entropy, rank = (np.asarray(curve) for curve in _curves(logits, weights))
        measured = drop_and_rise(entropies if len(entropies) else entropy)
        (drop, rise, _), (rank_drop, rank_rise, _) = (drop_and_rise(curve) for curve in (entropy, rank))
        share, size = (measured.rise > theorem.REBOUND).mean(), measured.rise.mean()
        return {
            "record": ("record", np.arange(RECORDS + 1), "record"),
            "entropy": ("record", entropy, "attention entropy", "nat"),
            "stable_rank": ("record", rank, "stable rank of the lower layer"),
            "rebounded": ((), share, f"share of entropies that rebound by {theorem.REBOUND:g} nat"),
            "mean_rise": ((), size, "mean rise of the entropy", "nat"),
            "drop": ((), drop, "drop of the layer's entropy", "nat"),
            "rise": ((), rise, "rise of the layer's entropy", "nat"),
            "rank_drop": ((), rank_drop, "drop of the stable rank"),
            "rank_rise": ((), rank_rise, "rise of the stable rank"),
            "line_error": ((), line_error, "distance of the weights from a straight line"),
            "rising": ((), rising, "share of layers without attention whose stable rank rises"),
            "agreement": ((), agreement, "share of layers whose final slope has the predicted sign"),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        exp, softmax, uniform, _, regression, classification = (trained.sel(system=name) for name in SYSTEMS)
        side = dict(zip(SYSTEMS, theory["side"].values.tolist(), strict=True))
        below, above = ([name for name in DYNAMICS if side[name] == sign] for sign in (-1, 1))

        def derived(system: str) -> dict[str, Any]:
            return {"expected": "holds" if side[system] == -1 else "refuted", "derived": True}

        yield st.Claim(
            f"Under exp attention the entropy rebounds by {theorem.REBOUND:g} nat for 97% of random targets",
            exp["rebounded"],
            st.near(0.97, (0.03, np.inf)),
            "97% +- 3%: at least 94%, as no share exceeds one; all rebound unless their targets are equal, "
            "and the share below this size was measured once",
            "share of targets that rebound",
            bounds=(0.0, 1.0),
            resolution=1e-9,
            **derived("exp"),
        )
        text = "Without attention, and under a linear activation, no entropy rebounds"
        basis = "entropy decreases while larger logits grow faster: proved for both"
        quantity = "largest share of targets that rebound"
        yield st.Claim(text, abs(trained["rebounded"].sel(system=above)).max(), st.near(0, 1e-12), basis, quantity)
        yield st.Claim(
            "Entropy rebounds for the same targets under softmax and exp attention",
            abs(exp["rebounded"] - softmax["rebounded"]).max(),
            st.near(0, 2.5 / self.vectors),
            "the minimum may lie between records: two vectors at the edge of the level",
            "difference of the shares that rebound",
        )
        yield st.Claim(
            "With attention the stable rank of the lower layer drops and rebounds",
            trained[["rank_rise", "rank_drop"]].sel(system=below).to_array().min(),
            st.above(RISE),
            "a sign: the smallest drop and rise over all replicates are far from zero",
            "smallest drop or rise of the stable rank",
        )
        text = "Without attention the lower layer moves on a straight line"
        basis = "one rate for all weights; the integrator has errors of 1e-8 per step"
        yield st.Claim(text, uniform["line_error"].max(), st.near(0, 1e-6), basis, "relative distance from the line")
        yield st.Claim(
            "Without attention the stable rank never rises",
            uniform["rising"],
            st.near(0, 0.1),
            "in theory half of the layers rise at the end, as the initialization is symmetric; a tenth is "
            "far from half",
            "share of targets with a rising stable rank",
            "refuted",
            bounds=(0.0, 1.0),
            resolution=1e-9,
        )
        yield st.Claim(
            "Without attention the final slope of the stable rank has the sign of u^T W v/sigma_1 - <B, W>/|B|^2 "
            "at the initialization W",
            uniform["agreement"].min(),
            st.near(1, 1.5 / self.vectors),
            "the sign of the slope at the end of a straight line; one layer of a replicate may be too close",
            "share of targets with the predicted sign",
        )
        yield st.Claim(
            "In a network trained on a regression entropy and stable rank drop and rebound",
            regression[["drop", "rise", "rank_drop", "rank_rise"]].to_array().min(),
            st.above(0.02),
            "a sign, beyond the noise of the batches",
            "smallest drop or rise",
            **derived("regression"),
        )
        yield st.Claim(
            "In a network trained by cross-entropy the entropy rebounds by a tenth of its drop",
            classification["rise"] / classification["drop"],
            st.above(0.1),
            "the noise of the batches is some hundredths; rebounds of the flows are a third or more",
            "rise over drop of the entropy",
            **derived("classification"),
        )
        text = "In a network trained by cross-entropy the entropy drops by a quarter of a nat"
        basis = "a sign: the missing rebound is not that of attention that does not change"
        yield st.Claim(text, classification["drop"], st.above(0.25), basis, "drop of the attention entropy (nat)")

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        flows = tuple(DYNAMICS), "flows", "record, logarithmic in time"
        for name, title, label, shows in (
            ("entropy", "Attention entropy", "entropy [nat]", ("Entropy rebounds for the same", "by a tenth of its")),
            ("stable_rank", "Stable rank of the lower layer", "stable rank", ("drops and rebounds", "on a regression")),
        ):
            for place, (systems, part, x) in enumerate((flows, (TRAINED, "trained networks", "record"))):
                found = {SYSTEMS[system]: trained[name].sel(system=system) for system in systems}
                note, words = "Records are fractions of the time of each system.", (shows[place],)
                note = f"Bands range over replicates. {note}"
                yield st.lines(f"{title}: {part}", "record", label, found, x_label=x, note=note, shows=words)
        law = {SYSTEMS[name]: theory["reference_entropy"].sel(dynamics=name) for name in theory["dynamics"].values}
        note = "Exact theory for targets at equal distances; the linear activation in fractions of its blow-up time."
        yield st.lines("Predicted attention entropy", "record", "entropy [nat]", {}, law, note=note)


# Entropy and stable rank in time, of logits (T, M) and weights (T, K, M).
_curves = jax.jit(lambda logits, weights: (theorem.entropy_of(logits), traced_stable_rank(weights)))
