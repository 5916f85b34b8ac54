"""Sum of the output-value circuits, stage S0: with one token attention is 1, and the layer is x W_S + c."""

from typing import NamedTuple

import numpy as np

from manyheads.recovery._types import Array, Ask, Generator


class Sums(NamedTuple):
    """Sum of the projections W_S = sum_i W_i (d, d), and the output bias c (d,)."""

    projection: Array
    bias: Array

    def read(self, x: Array) -> Array:
        """Return x W_S + c, what one token (..., d) gives."""
        return x @ self.projection + self.bias

    def append(self, answers: Array, probes: Array) -> Array:
        """Append the answer v W_S of open gates to the answers (b, n, d) at probes v (b, d)."""
        return np.concatenate([answers, (probes @ self.projection)[:, None]], axis=1)

    def split(self, spaces: list[Array]) -> Array:
        """Return the projections W_i = W_S O^+_i O_i (m, d, d) of heads with output spaces O_i (r_i, d)."""
        cuts = np.cumsum([len(space) for space in spaces])[:-1]
        parts = np.split(self.projection @ np.linalg.pinv(np.concatenate(spaces)), cuts, axis=1)
        return np.array([part @ space for part, space in zip(parts, spaces, strict=True)])

    def curvature(self, ask: Ask, rng: Generator, count: int) -> float:
        """Return how far the answers to `count` random tokens are from affine in them, relative."""
        probe = rng.standard_normal((count, 1, len(self.bias)))
        expected = self.read(probe[:, 0])
        size = np.linalg.norm(expected - self.bias) + np.finfo(np.float64).tiny
        return float(np.linalg.norm(ask(probe, read="last") - expected) / size)


def read_sums(oracle: Ask, dim: int, reach: float = np.inf) -> Sums:
    r"""Read W_S and c from d + 1 sequences of one token, none longer than `reach`.

    .. math:: F(0) = c, \qquad F(\sqrt d\, e_a) = c + \sqrt d\, e_a W_S
    """
    scale = min(np.sqrt(dim), reach)  # the norm that tokens have in all stages
    answers = oracle(np.concatenate([np.zeros((1, dim)), scale * np.eye(dim)])[:, None], read="last")
    return Sums((answers[1:] - answers[0]) / scale, answers[0])
