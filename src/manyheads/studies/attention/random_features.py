"""`attention/random-features`: error of the softmax kernel estimated from random features, by lemma 2 of Performer."""

import jax
import jax.numpy as jnp
import numpy as np

import manyheads.study as st

LAWS = {"positive": "exp(|q + k|^2) - 1", "trigonometric": "2 sinh(|q - k|^2 / 2)^2"}  # m times the error


class RandomFeatures(st.Study):
    """Estimates of exp(q.k) from m Gaussian features w, for a query and a key of one length at an angle.

    With s = |q + k|^2 and d = |q - k|^2 the estimators and their relative mean square errors are

    ============= ============================================ ====================
    positive      mean of exp(w.(q + k) - (|q|^2 + |k|^2) / 2) (exp(s) - 1) / m
    trigonometric exp((|q|^2 + |k|^2) / 2) mean cos(w.(q - k)) 2 sinh(d / 2)^2 / m
    ============= ============================================ ====================
    """

    name = "attention/random-features"
    claim = "Positive random features err less than trigonometric ones where attention is small"
    source = st.Source(
        "choromanski2021performer",
        "Rethinking Attention with Performers",
        "Krzysztof Choromanski and others",
        2021,
        identifier="2009.14794",
        locus="lemma 2",
    )
    vectorized = True
    grid = {"kind": LAWS, "cosine": "cosines", "features": "features"}

    features: tuple[int, ...] = st.sweep((64, 256, 1024), "Features m", small=(8, 32), full=(64, 256, 1024, 4096))
    cosines: tuple[float, float] = st.setting((-0.8, 0.8), "Cosine of query and key: opposite first, aligned last")
    length: float = st.setting(0.5, "Length of query and key", above=0)
    trials: int = st.setting(8000, "Estimates of a replicate", least=10, small=500)

    def predict(self, key: st.Key) -> st.Record:
        total, gap = (2 * self.length**2 * (1 + sign * np.asarray(self.cosines)) for sign in (1, -1))  # s, d
        errors = np.stack([np.expm1(total), 2 * np.sinh(gap / 2) ** 2])[..., None] / np.asarray(self.features)
        return {"error": (("kind", "cosine", "features"), errors, "relative mean square error")}

    def train(self, key: st.Key, kind: str, cosine: float, features: int) -> st.Record:
        """Estimate the kernel many times; features count in the plane of query and key alone."""
        query, other = self.length * jnp.array([[1.0, 0.0], [cosine, (1 - cosine**2) ** 0.5]])
        w = jax.random.normal(key, (self.trials, features, 2), jnp.float64)
        if kind == "positive":
            estimates = jnp.exp(w @ (query + other) - self.length**2).mean(1)
        else:
            estimates = jnp.exp(self.length**2) * jnp.cos(w @ (query - other)).mean(1)
        error = jnp.mean((estimates / jnp.exp(query @ other) - 1) ** 2)
        return {"error": ((), error, "relative mean square error")}

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        for kind, law in LAWS.items():
            error = trained["error"].sel(kind=kind, cosine=self.cosines[0])
            yield st.Claim(
                f"The relative mean square error of {kind} features falls as 1/m",
                st.exponent(error, "features", "m"),
                st.near(-1, 0.05),
                "exact at every m; the Monte Carlo error of a slope is about 0.01 at the default number of trials",
            )
            yield st.Claim(
                f"The relative mean square error of {kind} features is ({law}) / m",
                st.log_ratio(error, theory["error"].sel(kind=kind, cosine=self.cosines[0]), "features"),
                st.near(0, 0.05),
                "exact; the Monte Carlo error of a cell is 2 to 4% at the default number of trials",
                "error, measured over predicted (ln)",
            )
        for name, cosine, word, region in zip(
            ("opposite", "aligned"), self.cosines, ("smaller", "larger"), (st.below(0), st.above(0)), strict=True
        ):
            last = trained["error"].sel(cosine=cosine).isel(features=-1)
            yield st.Claim(
                f"For {name} tokens the error of positive features is {word}",
                st.log_ratio(last.sel(kind="positive"), last.sel(kind="trigonometric")),
                region,
                "an inequality: |q + k| < |q - k| for opposite tokens, and the reverse for aligned ones",
                "error of positive over that of trigonometric features (ln)",
            )
