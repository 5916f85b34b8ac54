"""Assumptions of the proofs, computed for a layer, each beside the range in which recovery is known to work.

The figures say what is likely to break; nothing is refused because of them. They can be computed for the true layer or
for a recovered one. The ranges were measured here, on layers that break one assumption each
(`manyheads.recovery.planted.violations`); the names are those of the assumptions of Chen and Li, whose constants are
not explicit.

References
----------
S. Chen, Y. Li, "Provably learning a multi-head attention layer", arXiv 2402.04084: assumptions on incoherence, ranks,
diagonals, norms, and lattices. The effective sum, the subset sums and all closed forms are derived here.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from manyheads._arrays import takes_arrays
from manyheads._extras import Figure
from manyheads._overview import Overview, Shown
from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery._types import Array
from manyheads.recovery.layers.evaluation import dense_weights
from manyheads.recovery.planted.task import Inputs
from manyheads.spectra import stable_rank

ENUMERATED = 16  # heads up to which all subsets are summed; beyond, an eigenvalue bounds their sums from below
ENTRIES = 4096  # entries of an attention matrix, at most, that are held against lattices
SPACINGS = 1500  # spacings that are scanned, between a tenth of the root mean square of the entries and all of it


@dataclass(frozen=True)
class Diagnostic:
    """One figure of a layer, the range in which it is healthy, and what breaks outside."""

    # The figure
    name: str
    value: float
    # The range; infinite where there is no bound on that side
    low: float
    high: float
    breaks: str  # what is likely to fail outside it

    @property
    def healthy(self) -> bool:
        """Whether the figure lies in the range; NaN does not."""
        return self.low <= self.value <= self.high

    @property
    def range(self) -> str:
        """The bound of the range, in signs."""
        return f">= {self.low:g}" if self.high == math.inf else f"<= {self.high:g}"


@dataclass(frozen=True, repr=False)
class Assumptions(Shown):
    """The diagnostics of one layer; `print` shows them as a table.

    Attributes
    ----------
    diagnostics
        All figures, in a fixed order.
    inputs
        The distribution of the tokens for which they were computed.
    """

    diagnostics: tuple[Diagnostic, ...]
    inputs: Inputs

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """The diagnostics outside their range."""
        return tuple(one for one in self.diagnostics if not one.healthy)

    def __getitem__(self, name: str) -> Diagnostic:
        """Return the diagnostic of that name."""
        for one in self.diagnostics:
            if one.name == name:
                return one
        raise UsageError(f"no diagnostic {name!r}: there are {', '.join(one.name for one in self.diagnostics)}")

    def __iter__(self) -> Iterator[Diagnostic]:
        """Go through the diagnostics in order."""
        return iter(self.diagnostics)

    def plot(self) -> "Figure":
        """Draw every figure over its bound, on a logarithmic axis from 0.01 to 100, over the range of healthy ones."""
        from manyheads.study.reporting.charts import Estimate, draw_intervals

        rows = []
        for one in self:
            bound = (one.high if math.isfinite(one.high) else one.low) or 1.0
            value = min(max(one.value / bound, 0.01), 100.0)
            rows.append(Estimate(one.name, value, (value, value), (one.low / bound, one.high / bound)))
        return draw_intervals(self._overview().title, "figure / bound of the healthy range", rows, log=True)

    def _overview(self) -> Overview:
        rows = [(one.name, one.value, one.low, one.high, "" if one.healthy else one.breaks) for one in self]
        rows.sort(key=lambda row: not row[-1])  # what is outside its range first
        title = f"Assumptions of the passive learner: {len(self.warnings)} of {len(rows)} outside their range"
        return Overview(title, ("assumption", "value", "low", "high", "breaks"), rows)

    def __str__(self) -> str:
        rows = [("assumption", "value", "healthy", "")]
        rows += [(one.name, f"{one.value:.3g}", one.range, "" if one.healthy else one.breaks) for one in self]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = (f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:<{widths[2]}}  {note}" for a, b, c, note in rows)
        return "\n".join(line.rstrip() for line in lines)


def assumptions(layer: AttentionLayer, inputs: Inputs = "boolean") -> Assumptions:
    r"""Compute the assumptions under which a layer can be learned from examples, or extracted.

    * coherence of attention, of projections: :math:`\max_{i<j} |\langle A_i, A_j\rangle| / (\|A_i\|_F \|A_j\|_F)`.
    * stable rank of attention, of projections: the least :math:`\|A_i\|_F^2 / \|A_i\|_{op}^2` over heads (a bound only
      for Boolean tokens).
    * diagonal share: largest :math:`\|\mathrm{diag}\, \Theta_i\|^2 / \|\Theta_i\|_F^2`.
    * trace share: largest :math:`(\mathrm{tr}\, \Theta_i)^2 / \|\Theta_i\|_{op}^2` in units of the stable rank, that
      is :math:`(\mathrm{tr}\, \Theta_i)^2 / \|\Theta_i\|_F^2`: above four, the logit of a token with itself is shifted
      by more than two standard deviations.
    * column share: largest :math:`\max_c \|\Theta_i e_c\|^2 / \|\Theta_i\|_F^2`.
    * ratio of attention norms, of projection norms: largest over smallest Frobenius norm.
    * effective sum: :math:`\|\sum_i W_i\|_F / (\sum_i \|W_i\|_F^2)^{1/2}`.
    * least subset sum: the smallest such ratio over all non-empty sets of heads. Where it is zero, two tokens do not
      determine the layer: the heads of that set may change the signs of :math:`\Theta_i`, :math:`\beta_i` and
      :math:`W_i` together. For more than 16 heads, the lower bound that the smallest eigenvalue of the projections'
      correlation matrix gives.
    * smallest logits, largest logits: least and largest standard deviation over heads of the logit between two
      independent tokens with centred, independent entries of variance one,
      :math:`(\|\Theta_i\|_F^2 + \|\beta_i\|^2)^{1/2}`.
    * distance from lattices (Boolean tokens only): see `lattice_distance`; the smallest over heads.

    Parameters
    ----------
    layer
        A layer, true or recovered.
    inputs
        Distribution of the tokens: "boolean" or "gaussian".

    Returns
    -------
    The figures with their ranges, and which of them warn.

    Raises
    ------
    UsageError
        Another distribution, or weights that are not finite.

    Examples
    --------
    >>> import numpy as np
    >>> from manyheads.recovery.planted.violations import deformed_layer
    >>> found = assumptions(deformed_layer(np.random.default_rng(0), "cancelled", 16, 2))
    >>> [one.name for one in found.warnings]
    ['coherence of projections', 'effective sum', 'least subset sum']
    >>> print(str(found).splitlines()[10])
    effective sum                    0  >= 0.2   the six stages: the sum of projections says nothing
    """
    if inputs not in ("boolean", "gaussian"):
        raise UsageError(f"inputs={inputs!r}: expected 'boolean' or 'gaussian'")
    theta, projection, beta, _ = dense_weights(layer)
    if not all(np.all(np.isfinite(weights)) for weights in (theta, projection, beta)):
        raise UsageError("the layer holds NaN or infinite weights: there is nothing to diagnose")
    rows = _rows(theta, projection, beta, inputs)
    return Assumptions(tuple(Diagnostic(*row) for row in rows), inputs)


@takes_arrays
def lattice_distance(matrix: Array) -> float:
    r"""Return how far the entries of a matrix are from the nearest lattice :math:`a\mathbb{Z}`.

    .. math:: \min_a \frac{\sqrt{12}}{a} \Big( \frac{1}{d^2} \sum_{bc} \mathrm{dist}(\Theta_{bc}, a\mathbb{Z})^2
              \Big)^{1/2}

    over spacings a from a tenth of the root mean square of the entries to all of it: 0 on a lattice, near 1 for entries
    that know of none. Scanned are a geometric grid and the largest entry divided by integers, which holds every exact
    lattice; each is refined by least squares. Of large matrices 4096 entries are used. A zero matrix is a lattice.
    """
    entries = np.ravel(np.asarray(matrix, np.float64))
    if entries.size > ENTRIES:  # spread by the golden ratio, so that no row or column is preferred
        entries = entries[(np.arange(ENTRIES) * 0.6180339887498949 % 1 * entries.size).astype(int)]
    size, largest = float(np.sqrt(np.mean(entries**2))), float(np.max(np.abs(entries)))
    if size == 0:
        return 0.0
    exact = largest / np.arange(1, math.floor(10 * largest / size) + 1)
    candidates = np.concatenate([np.geomspace(size / 10, size, SPACINGS), exact[exact <= size * (1 + 1e-12)]])
    best = math.inf
    for block in np.array_split(candidates, math.ceil(candidates.size * entries.size / 2**20)):
        steps = np.round(entries / block[:, None])  # (spacings, entries)
        squares = np.sum(steps**2, axis=1)
        refined = np.where(squares > 0, steps @ entries / np.maximum(squares, 1), block)
        distance = np.sqrt(12 * np.mean((entries - refined[:, None] * steps) ** 2, axis=1)) / refined
        best = min(best, float(distance.min()))
    return best


def _rows(
    theta: Array, projection: Array, beta: Array, inputs: Inputs
) -> Iterator[tuple[str, float, float, float, str]]:
    """Yield name, value, range and what breaks outside of every diagnostic."""
    norms, diagonals = _norms(theta), np.diagonal(theta, axis1=1, axis2=2)  # (m,), (m, d)
    squares, infinite = np.where(norms > 0, norms**2, 1.0), math.inf
    lost, weak = "the six stages: the sum of projections says nothing", "the weak head drowns: the six stages"
    yield "coherence of attention", _coherence(theta), 0.0, 0.99, "two heads cannot be told apart: the six stages"
    together = "values that depend on each other: extraction by pairs of tokens"
    yield "coherence of projections", _coherence(projection), 0.0, 0.99, together
    least, ranks = 1.5 if inputs == "boolean" else 0.0, "rank one: Boolean logits take few values"
    yield "stable rank of attention", _least_rank(theta), least, infinite, ranks
    yield "stable rank of projections", _least_rank(projection), least, infinite, "heads read one direction"
    share = float(np.max(np.sum(diagonals**2, axis=1) / squares))
    yield "diagonal share", share, 0.0, 0.5, "tokens that attend to themselves: the six stages"
    trace = float(np.max(np.sum(diagonals, axis=1) ** 2 / squares))
    yield "trace share", trace, 0.0, 4.0, "tokens that attend to themselves, or never: the crude sum"
    column = float(np.max(np.sum(theta**2, axis=1).max(axis=1) / squares))
    yield "column share", column, 0.0, 0.9, "one coordinate decides where a head looks"
    yield "ratio of attention norms", _ratio(norms), 1.0, 8.0, weak
    yield "ratio of projection norms", _ratio(_norms(projection)), 1.0, 8.0, weak
    flat = projection.reshape(len(projection), -1)
    gram = flat @ flat.T  # (m, m)
    total = float(np.trace(gram))
    effective = math.sqrt(max(0.0, float(np.sum(gram))) / total) if total > 0 else 0.0
    yield "effective sum", effective, 0.2, infinite, lost
    ambiguous = "two tokens do not determine the heads: any learner at length 2"
    yield "least subset sum", _least_subset(gram), 0.2, infinite, ambiguous
    deviations = np.sqrt(np.sum(theta**2, axis=(1, 2)) + np.sum(beta**2, axis=1))
    yield "smallest logits", float(deviations.min()), 0.4, infinite, "a flat head is a linear map: accuracy"
    yield "largest logits", float(deviations.max()), 0.0, 10.0, "a saturated head has no gradient: training"
    if inputs == "boolean":
        distance = min(lattice_distance(one) for one in theta)
        yield "distance from lattices", distance, 0.2, infinite, "Boolean logits take few values: uniqueness"


def _norms(matrices: Array) -> Array:
    return np.sqrt(np.sum(matrices**2, axis=(1, 2)))


def _coherence(matrices: Array) -> float:
    """Return the largest |cosine| between two heads; a head that is zero has no direction and none with others."""
    norms = _norms(matrices)
    unit = (matrices / np.where(norms > 0, norms, 1.0)[:, None, None]).reshape(len(matrices), -1)
    return max((float(abs(one @ other)) for one, other in itertools.combinations(unit, 2)), default=0.0)


def _least_rank(matrices: Array) -> float:
    return min(stable_rank(one).value for one in matrices)


def _ratio(norms: Array) -> float:
    return float(norms.max() / norms.min()) if norms.min() > 0 else math.inf


def _least_subset(gram: Array) -> float:
    """Return the least relative norm of a sum over a set of heads, or a bound below it where sets are too many."""
    heads, squares = len(gram), np.diag(gram)
    if not np.all(squares > 0):
        return 0.0  # a head that reads nothing is a set that sums to zero
    if heads > ENUMERATED:
        scale = np.sqrt(squares)
        return math.sqrt(max(0.0, float(np.linalg.eigvalsh(gram / np.outer(scale, scale))[0])))
    sets = (np.arange(1, 2**heads)[:, None] >> np.arange(heads) & 1).astype(np.float64)  # (sets, m)
    ratios = np.einsum("si,si->s", sets @ gram, sets) / (sets @ squares)
    return math.sqrt(max(0.0, float(ratios.min())))
