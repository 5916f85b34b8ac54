"""`limits/infinite-key-dim`: convergence of networks to the mean-field limit of infinite key dimension."""

import manyheads.study as st
from manyheads.scaling.checks.coordinate_check import finite_size_bias
from manyheads.studies.dmft.shared import mean_field
from manyheads.studies.dmft.shared.mean_field import DIMS, QUANTITIES
from manyheads.theory.dmft import Network, Problem
from manyheads.theory.papers import BORDELON


class InfiniteKeyDim(st.Study):
    """Single networks and their mean against the limit of infinite key dimension, for one head and for several."""

    name = "limits/infinite-key-dim"
    claim = "Training converges to its mean-field limit as N grows, for any number of heads"
    source = BORDELON.at("the limit of infinite key dimension; its solution and the rates are derived here")
    grid = {"key_dim": "key_dims", "heads": "heads_counts"}

    task: str = st.setting("digits", "pooled with squared loss, or text: causal, every token, cross-entropy")
    key_dims: tuple[int, ...] = st.sweep((4, 16, 64), "key dimensions N", small=(2, 4), full=(4, 16, 64, 256))
    heads_counts: tuple[int, ...] = st.setting(
        (1, 4), "numbers of heads H, for which the limit is the same", least=1, small=(2,)
    )
    depth: int = st.setting(2, "blocks", small=1, full=4)
    depth_exponent: float = st.setting(1.0, "exponent of the branch multiplier")
    norm: bool = st.setting(False, "whether streams are normalized")
    steps: int = st.setting(12, "steps of gradient descent", small=3)
    learning_rate: float = st.setting(0.25, "its learning rate")
    richness: float = st.setting(0.75, "richness of the training")
    momentum: float = st.setting(0.0, "its momentum")
    networks: int = st.setting(48, "networks of one replicate", least=2, small=2, full=32)

    def check(self) -> None:
        self.problem()

    def predict(self, key: st.Key) -> st.Record:
        """Solve the limit, and, to see what they are worth, the same equations without their response functions."""
        solved, without = (mean_field.solve_blocks(self.problem(), responses=responses) for responses in (True, False))
        return mean_field.record(mean_field.summarize(solved) | {"output_without": without.outputs})

    def train(self, key: st.Key, key_dim: int, heads: int) -> st.Record:
        return mean_field.train_ensemble(self.problem(), Network(key_dim, heads), key, self.networks)

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        largest, bias = self.key_dims[-1], -finite_size_bias(self.key_dims)
        for heads in self.heads_counts:
            found = trained.sel(heads=heads)
            for name, words in QUANTITIES.items():
                away = st.distance(found[name], theory[name], over=("network", *DIMS[name]))
                yield st.Claim(
                    f"H={heads}: the distance of single networks from the limit scales as N^(-1/2) ({words})",
                    st.exponent(away, "key_dim", "N", "distance of single networks"),
                    *mean_field.root_law("N", self.key_dims),
                )
            mean = found["output"].sel(key_dim=largest).mean("network")
            near, far = (st.distance(mean, theory[name]) for name in ("output", "output_without"))
            yield st.Claim(
                f"H={heads}: at N={largest} the mean network is nearer to the limit than to the equations without "
                "response functions (log ratio)",
                st.log(near / far),
                *mean_field.NEARER,
            )
            for when, words in (("start", "before"), ("end", "after")) if heads > 1 else ():
                yield st.Claim(
                    f"H={heads}: {words} training the variance of attention logits over heads scales as 1/N",
                    st.exponent(found[f"variance_{when}"].mean("network"), "key_dim", "N"),
                    st.near(-1, 2 * bias),
                    f"a correction 1 + N^(-1/2) moves the exponent by {bias:.2f} over these sizes, and that of a "
                    "square by twice as much",
                )

    def pictures(self, theory: st.Data, trained: st.Data) -> st.Panels:
        yield mean_field.first_output(
            theory["output"],
            {f"N={size}": trained["output"].sel(key_dim=size).isel(heads=-1) for size in self.key_dims},
            f"Networks with H={self.heads_counts[-1]}; bands range over all of them.",
        )

    def problem(self) -> Problem:
        return mean_field.problem_of(self)
