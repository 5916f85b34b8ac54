r"""Scores that are no forms of the tokens, and the forms behind them: soft caps, and norms of queries and keys.

From the score S of a key and S_2 of twice the key:

* a form: S_2 = 2 S;
* a soft cap, S = cap tanh(u / cap): 2 S - S_2 = S^2 S_2 / cap^2;
* a norm of the keys, S = u / n(x): S_2 = S, but for the epsilon of the norm.

Norms: the scores of a key x with several queries are Theta x / n(x), with Theta the same for all keys. For a key h and
another x those of h + x are a combination of theirs,

.. math:: S(h + x) = \frac{n(h)}{n(h + x)} S(h) + \frac{n(x)}{n(h + x)} S(x),

so the ratio of the coefficients is n(x) / n(h), and with it Theta x is known up to the one constant n(h): n is then
read off the scores of any key, and its square is a quadratic form and a constant, the epsilon. The same with queries
and keys exchanged. Derived here.
"""

from dataclasses import dataclass, replace

import numpy as np

from manyheads.recovery._types import Array
from manyheads.recovery.layers.scores import token_norms
from manyheads.recovery.queries.logits.ledger import Ledger
from manyheads.recovery.queries.rotary.forms import extend, solve_scaled
from manyheads.recovery.refusals import FitError

READ = 9.0  # scores beyond leave weights too small to be read
LINEAR = 1e-5  # of the scores, that the score of twice a key may be from twice its score
SAME = 0.02  # of the scores, that the score of twice a key may be from its own behind a norm, whose epsilon shows


@dataclass(frozen=True)
class Link:
    """What stands between the forms and the scores: a cap, and squares of norms Q (m, d + 1, d + 1)."""

    cap: float | None = None
    query_norm: Array | None = None
    key_norm: Array | None = None

    def forms(self, ledger: Ledger) -> Ledger:
        """Return a ledger of what the forms give, from one of scores."""
        values, tokens = self.remove_cap(ledger.logits), extend(ledger.tokens)[None]
        if self.query_norm is not None:
            values = values * token_norms(self.query_norm, tokens)[:, 0, ledger.query].T
        if self.key_norm is not None:
            values = values * token_norms(self.key_norm, tokens)[:, 0, ledger.key].T
        return replace(ledger, logits=values)

    def remove_cap(self, scores: Array) -> Array:
        """Return scores before the cap."""
        if self.cap is None:
            return scores
        return self.cap * np.arctanh(np.clip(scores / self.cap, -1 + 1e-12, 1 - 1e-12))


def classify(once: Array, twice: Array, noise: float) -> tuple[str, float | None]:
    """Tell "form", "cap" (with the cap) or "norm" from the scores of keys, and of twice these keys."""
    read = np.abs(twice) < READ
    once, twice = once[read], twice[read]
    size = float(np.linalg.norm(once))
    bent = 2 * once - twice
    if np.linalg.norm(bent) <= max(LINEAR, 1e3 * noise) * size:
        return "form", None
    if np.linalg.norm(twice - once) <= SAME * size:
        return "norm", None
    cubic = once**2 * twice
    inverse = float((cubic * bent).sum() / (cubic**2).sum())
    rest = float(np.linalg.norm(bent - inverse * cubic) / np.linalg.norm(bent))
    if inverse <= 0 or rest > 1e-3:
        raise FitError("twice a key scores neither twice, nor the same, nor capped: scores of another kind", rest, 1e-3)
    return "cap", inverse**-0.5


def relative_norms(hub: Array, alone: Array, together: Array) -> tuple[Array, float]:
    """Return n(x) / n(h) (N, m) of tokens x from scores of h (n, m), of x, and of h + x (n, N, m); and the misfit."""
    count = alone.shape[1]
    columns = np.stack([np.tile(hub[:, None], (1, count, 1)), alone], axis=-1)  # (n, N, m, 2)
    columns, targets = np.moveaxis(columns, 0, 2), np.moveaxis(together, 0, 2)  # (N, m, n, 2), (N, m, n)
    found = np.einsum("amkn,amn->amk", np.linalg.pinv(columns), targets)
    rest = np.linalg.norm(targets - np.einsum("amnk,amk->amn", columns, found), axis=-1)
    rest /= np.linalg.norm(targets, axis=-1) + np.finfo(np.float64).tiny
    return found[..., 1] / found[..., 0], float(np.median(rest))


def fit_norm(tokens: Array, values: Array, space: Array) -> tuple[Array, float]:
    """Fit Q (d + 1, d + 1) of one head to its norms (N,) at tokens (N, d): a form on a space (d, r), and a constant."""
    inside = tokens @ space
    first, second = np.triu_indices(space.shape[1])
    features = np.concatenate([inside[:, first] * inside[:, second], np.ones((len(tokens), 1))], axis=1)
    features /= values[:, None] ** 2
    found, left = solve_scaled(features, np.ones(len(tokens)))
    form = np.zeros((space.shape[1],) * 2)
    form[first, second] = found[:-1] / 2
    form = form + form.T
    whole = np.zeros((tokens.shape[1] + 1,) * 2)
    whole[:-1, :-1] = space @ form @ space.T
    whole[-1, -1] = max(found[-1], 0.0)
    return whole, float(np.sqrt(np.mean(left**2)))
