"""`limits/weight-movement`: relative movement of the attention matrices against the depth L."""

import numpy as np

import manyheads.study as st
from manyheads.studies.dmft.shared import mean_field
from manyheads.theory.dmft.finite.ensembles import MATRICES, Network
from manyheads.theory.dmft.problem import Problem
from manyheads.theory.papers import BORDELON

EXPONENTS = {1.0: "depth exponent 1", 0.5: "depth exponent 1/2"}
LETTERS = {"query": "W_Q", "key": "W_K", "value": "W_V", "output": "W_O"}
NEXT = 0.25  # half of the difference between the exponents at the two depth exponents


class WeightMovement(st.Study):
    """Relative movement |W_t - W_0| / |W_0| of queries, keys, values and outputs after a fixed training, against L.

    Notes
    -----
    The gradient of a matrix inside a block is L^(-alpha_L) times one of order one, and its learning rate is
    L^(2 alpha_L - 1): the matrix moves by L^(alpha_L - 1), which is L^(-1/2) at alpha_L = 1/2 and of order one at 1.
    All L blocks together move the stream by L L^(-alpha_L) L^(alpha_L - 1), of order one at both. At fixed N the
    derivative of the softmax is random and of order one in N at the init, so queries and keys follow the same powers;
    at infinite N and alpha_L = 1/2 they would move by 1/L. (Derived here.)
    """

    name = "limits/weight-movement"
    claim = "Attention weights move by L^(-1/2) at depth exponent 1/2 and by order one at 1"
    source = BORDELON.at("figure 5 and its caption; the powers of single matrices are derived here")
    grid = {"depth_exponent": EXPONENTS, "depth": "depths"}

    task: str = st.setting("digits", "pooled with squared loss, or text: causal, every token, cross-entropy")
    depths: tuple[int, ...] = st.sweep(
        (4, 8, 16, 32), "numbers of blocks L", small=(1, 4), full=(4, 8, 16, 32, 64, 128)
    )
    key_dim: int = st.setting(4, "key dimension N", small=2)
    heads: int = st.setting(8, "number of heads H", small=2)
    activation: str = st.setting("none", "activation of an MLP after every attention; none for no MLP", full="gelu")
    norm: bool = st.setting(True, "whether streams are normalized")
    steps: int = st.setting(12, "steps of gradient descent", small=3)
    learning_rate: float = st.setting(0.25, "its learning rate")
    richness: float = st.setting(0.75, "richness of the training")
    networks: int = st.setting(8, "networks of one replicate", least=1, small=2, full=16)

    def check(self) -> None:
        self.network()
        self.problem(1.0, 1)

    def predict(self, key: st.Key) -> st.Record:
        powers = [power - 1 for power in EXPONENTS]
        return {
            "movement": ("depth_exponent", powers, "exponent of L in weights' movement"),
            "stream": ("depth_exponent", [0.0] * len(EXPONENTS), "exponent of L in the update of the kernel"),
        }

    def train(self, key: st.Key, depth_exponent: float, depth: int) -> st.Record:
        problem = self.problem(depth_exponent, depth)
        trained = mean_field.train_seeds(problem, self.network(), key, self.networks, movement=True)
        kernels = trained["stream"].values[:, [0, -1], -1]
        updates = np.sqrt(((kernels[:, 1] - kernels[:, 0]) ** 2).mean((-1, -2)))
        movement = np.exp(np.log(trained["movement"].values[:, -1]).mean(0))
        return {
            "movement": ("matrix", movement, "relative movement of the weights"),
            "stream": ((), float(np.exp(np.log(updates).mean())), "update of the kernel of the last stream"),
            "loss": ((), float(trained["loss"].values[:, -1].mean()), "loss"),
            "matrix": ("matrix", list(MATRICES), "matrix", None),
        }

    def claims(self, theory: st.Data, trained: st.Data) -> st.Claims:
        for exponent, words in EXPONENTS.items():
            law, found = (data.sel(depth_exponent=exponent) for data in (theory, trained))
            for matrix, letter in LETTERS.items():
                text = f"{words}: the relative movement of {letter} scales as L^{exponent - 1:g}"
                basis = "half of the difference between the powers at the two depth exponents"
                yield st.Claim(text, self._exponent(found, matrix, words), st.near(law["movement"], NEXT), basis)
            text = f"{words}: the update of the residual stream's kernel is independent of L"
            basis = "half of L^(-1/2), the movement of a single matrix at depth exponent 1/2"
            yield st.Claim(text, st.exponent(found["stream"], "depth", "L"), st.near(law["stream"], NEXT), basis)
        for matrix, letter in LETTERS.items():
            yield st.Claim(
                f"{EXPONENTS[0.5]}: the relative movement of {letter} is independent of L",
                self._exponent(trained.sel(depth_exponent=0.5), matrix, EXPONENTS[0.5]),
                st.near(0, NEXT),
                "the power at depth exponent 1, to half of the difference to that at 1/2",
                expected="refuted",
            )

    def network(self) -> Network:
        return Network(self.key_dim, self.heads, activation=None if self.activation == "none" else self.activation)

    def problem(self, depth_exponent: float, depth: int) -> Problem:
        return mean_field.problem_of(self, depth=depth, depth_exponent=depth_exponent)

    def _exponent(self, found: st.Data, matrix: str, where: str) -> st.Figure:
        what = f"relative movement of the weights, {where}"
        return st.exponent(found["movement"].sel(matrix=matrix), "depth", "L", what)
