"""Audits: whether every parameter has the rate, epsilon and decay that it needs, and started where it should.

The comparison itself knows no framework: it takes what every parameter needs (`manyheads.limits.wants`) and what it
has. `audit_torch` reads the second off a model and its optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from manyheads._extras import require
from manyheads.errors import UsageError
from manyheads.limits.tables import OUTSIDE
from manyheads.limits.torch_groups import Reading, TorchModel, read_model, torch_wants
from manyheads.limits.wants import Tuned, Want, role_factors

if TYPE_CHECKING:
    from manyheads.limits.parametrization import Parametrization

FALSE_ALARM = 1e-6
"""Probability that the spread of a rightly drawn parameter is called wrong."""
ROUNDING = 1e-6
"""Relative difference of rates, epsilons and decays that is still called equal."""


@dataclass(frozen=True)
class Has:
    """What one parameter has; None for what there is none of, or what is not judged.

    Attributes
    ----------
    rate, epsilon, weight_decay
        Of the group it is in.
    spread, count
        Root mean square of its entries now, and how many they are; for gains the value of all of them.
    rounding
        Relative rounding of its number type.
    """

    rate: float | None = None
    epsilon: float | None = None
    weight_decay: float | None = None
    spread: float | None = None
    count: int = 0
    rounding: float = 0.0


@dataclass(frozen=True)
class Finding:
    """One number of one parameter that was judged.

    Attributes
    ----------
    name, role, quantity
        Which one; the quantity is `"initial"`, `"rate"`, `"epsilon"` or `"weight_decay"`.
    expected, actual, factor
        What it should be and is, and actual over expected (infinite where nothing was expected).
    right
        Whether they agree: to rounding, for spreads within their sampling error.
    meaning
        What a wrong one does, in words; empty for a right one.
    """

    name: str
    role: str
    quantity: str
    expected: float
    actual: float
    factor: float
    right: bool
    meaning: str = ""


@dataclass(frozen=True)
class Audit:
    """Everything that was judged, and what was not.

    Attributes
    ----------
    findings
        One for each number of each parameter.
    notes
        What was not judged, or is outside the theory.
    """

    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = field(default=OUTSIDE)

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are wrong."""
        return tuple(each for each in self.findings if not each.right)

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {"passed": self.passed, **asdict(self)}

    def __str__(self) -> str:
        """Lay out what is wrong; parameters with the same fault share a line."""
        parameters = len({each.name for each in self.findings})
        lines = [f"{parameters} parameters, {len(self.findings)} numbers, {len(self.faults)} wrong"]
        kinds: dict[tuple[str, ...], list[Finding]] = {}
        for each in self.faults:
            kinds.setdefault((each.role, each.quantity, f"{each.factor:.3g}", each.meaning), []).append(each)
        for (role, quantity, factor, meaning), same in kinds.items():
            first = same[0]
            others = f" and {len(same) - 1} more" if len(same) > 1 else ""
            lines.append(f"{first.name}{others} ({role}): {quantity} is {factor} times what it should be")
            lines.append(f"    expected {first.expected:.6g}, found {first.actual:.6g}: {meaning}")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def judge(wants: Iterable[Want], has: Mapping[str, Has], tuned: Tuned, tied: float = 1.0) -> tuple[Finding, ...]:
    """Compare what parameters have with what they need.

    Parameters
    ----------
    wants
        What they need.
    has
        Name → what they have; a parameter that is missing is trained by nothing.
    tuned
        What was tuned at the base, by which a forgotten factor is told from a doubled one.
    tied
        The unembedding's rate over the embedding's, by which a tied embedding that was scaled as both is recognised.

    Examples
    --------
    >>> from manyheads.limits.anatomy import Place
    >>> from manyheads.limits.wants import Factors
    >>> want = Want(Place("q", ("query",)), "query", Factors(0.5, 0.25, 0.25), None, 0.025, 2.5e-9, 0.0)
    >>> (finding,) = judge([want], {"q": Has(rate=0.1)}, Tuned(rate=0.1))
    >>> finding.factor, finding.meaning.partition(":")[0]
    (4.0, "it has the base's rate")
    """
    findings = []
    for want in wants:
        name = want.place.name
        if name not in has:
            meaning = "it is in no group: it is never trained"
            findings.append(Finding(name, want.role, "rate", want.rate, 0.0, 0.0, False, meaning))
            continue
        own = has[name]
        for quantity in ("rate", "epsilon", "weight_decay"):
            actual, expected = getattr(own, quantity), getattr(want, quantity)
            if actual is not None:
                right = abs(actual - expected) <= ROUNDING * abs(expected)
                words = "" if right else _explain(quantity, want, own, tuned, tied)
                findings.append(
                    Finding(name, want.role, quantity, expected, actual, _over(actual, expected), right, words)
                )
        if own.spread is not None and want.initial is not None:
            findings.append(_judge_start(want, own))
    return tuple(findings)


def audit_torch(
    p: Parametrization, model: Any, groups: Any, tuned: Tuned, reading: Reading | None = None, fresh: bool | None = None
) -> Audit:
    """Compare a model and its optimizer with what the parametrization wants.

    Parameters
    ----------
    model
        The model.
    groups
        Its torch.optim optimizer, or the list of groups; under a schedule the groups' `initial_lr` counts.
    fresh
        Whether the weights are as they started, so that their spreads can be judged; None: if the optimizer has not
        made a step. A spread is right within its sampling error at a false-alarm rate of 1e-6 a parameter.

    Raises
    ------
    UsageError
        No groups, an optimizer of the other kind, or groups that train another model.
    """
    reading = reading or Reading()
    read = read_model(model, reading)
    wants = torch_wants(p, read, tuned, reading.folded)
    rows, notes = _rows(p, groups, tuned)
    if fresh is None:
        fresh = not getattr(groups, "state", None)
    has, doubled = _collect(p, read, rows, fresh)
    factors = role_factors(p, read.anatomy.shape)
    tied = factors["unembedding"].rate / factors["embedding"].rate
    findings = judge(wants, has, tuned, tied) + doubled
    unknown = sorted({want.role for want in wants if want.initial is None})
    if not fresh:
        notes.append("initial spreads: not judged, the weights have been trained")
    elif unknown:
        notes.append(f"initial spreads of {', '.join(unknown)}: not judged, no spread at the base is known")
    if read.anatomy.post_norm:
        notes.append("post-norm: depth is outside the theory; width and key dimension are judged")
    return Audit(findings, (*notes, *OUTSIDE))


def _rows(p: Parametrization, groups: Any, tuned: Tuned) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Return the groups of an optimizer or of a list, completed, and what has to be said about them."""
    rows = getattr(groups, "param_groups", groups)
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not all(isinstance(row, Mapping) for row in rows):
        raise UsageError(
            f"{type(groups).__name__} has no parameter groups: give a torch.optim optimizer, or the list of groups "
            "(dictionaries with params, lr, eps, weight_decay) it was made from"
        )
    if not rows or not all("params" in row for row in rows):
        raise UsageError("no group with params: make the groups by Parametrization.torch_groups(model, tuned)")
    adam = any("eps" in row for row in rows)
    if rows is not groups and adam != (p.optimizer == "adam"):
        raise UsageError(
            f"{type(groups).__name__} is audited against optimizer={p.optimizer!r}: make the Parametrization with "
            f"optimizer={'adam' if adam else 'sgd'!r}"
        )
    notes = []
    coupled = rows is not groups and adam and not any(row.get("decoupled_weight_decay", True) for row in rows)
    if coupled and type(groups).__name__ != "AdamW" and tuned.weight_decay:
        notes.append("weight decay inside Adam's gradient is outside the theory: use AdamW, where it is decoupled")
    return list(rows), notes


def _collect(
    p: Parametrization, read: TorchModel, rows: Sequence[Mapping[str, Any]], fresh: bool
) -> tuple[dict[str, Has], tuple[Finding, ...]]:
    """Return what every parameter has, and those that are in more than one group."""
    names = {id(tensor): name for name, tensor in read.tensors.items()}
    parts = {place.name: place for place in read.anatomy.places}
    has: dict[str, Has] = {}
    doubled = []
    for number, row in enumerate(rows):
        tensors = row["params"]
        for tensor in [tensors] if hasattr(tensors, "requires_grad") else tensors:
            name = names.get(id(tensor))
            if name is None:
                if not tensor.requires_grad:
                    continue
                raise UsageError(
                    f"group {number} holds a tensor of shape {tuple(tensor.shape)} that is no trained parameter of "
                    "this model: audit the model together with the optimizer that trains it"
                )
            rate = row.get("initial_lr", row.get("lr"))
            if name in has:
                meaning = "it is in two groups: every step is made twice"
                role = "+".join(parts[name].parts)
                doubled.append(Finding(name, role, "rate", 1.0, 2.0, 2.0, False, meaning))
                continue
            start = _measure(tensor, parts[name].start, read.padding.get(name)) if fresh else {}
            epsilon = row.get("eps") if p.optimizer == "adam" else None
            has[name] = Has(rate, epsilon, row.get("weight_decay"), **start)
    return has, tuple(doubled)


def _measure(tensor: Any, start: str, padding: int | None) -> dict[str, Any]:
    """Return the root mean square of a parameter and its count; of gains, the entry farthest from their mean."""
    if tensor.is_meta:
        return {}
    values = tensor.detach()
    if padding is not None and not bool(values[padding].any()):  # a row that is zero by design
        keep = [row for row in range(values.shape[0]) if row != padding % values.shape[0]]
        values = values[keep]
    if start == "one":
        flat = values.double().flatten()
        spread = float(flat[(flat - flat.mean()).abs().argmax()])
    else:
        spread = math.sqrt(float(values.double().square().mean()))
    rounding = float(require("torch").finfo(values.dtype).eps)
    return {"spread": spread, "count": values.numel(), "rounding": rounding}


def _judge_start(want: Want, own: Has) -> Finding:
    """Judge the initial spread by its sampling error, gains and zeros by rounding."""
    from scipy.stats import chi2

    expected, actual = want.initial or 0.0, own.spread or 0.0
    if want.place.start == "random" and expected:
        # Sum of squares over the variance: chi-square with as many degrees of freedom as entries, their mean being 0.
        low, high = (math.sqrt(chi2.ppf(q, own.count) / own.count) for q in (FALSE_ALARM / 2, 1 - FALSE_ALARM / 2))
        right = low - own.rounding <= actual / expected <= high + own.rounding
    else:
        right = abs(actual - expected) <= 4 * own.rounding * abs(expected)
    factor = _over(actual, expected)
    words = "" if right else _explain_start(want, factor)
    return Finding(want.place.name, want.role, "initial", expected, actual, factor, right, words)


def _over(actual: float, expected: float) -> float:
    return actual / expected if expected else (math.inf if actual else 1.0)


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 10 * ROUNDING * abs(other)


def _explain(quantity: str, want: Want, own: Has, tuned: Tuned, tied: float) -> str:
    """Say what a wrong rate, epsilon or decay is, and does."""
    actual = getattr(own, quantity)
    factor = _over(actual, getattr(want, quantity))
    own_factor = 1 / want.factors.rate if quantity == "weight_decay" else getattr(want.factors, quantity)
    base = getattr(tuned, quantity)
    if quantity == "rate" and want.place.tied and _near(actual, want.rate * tied):
        cause = "a tied embedding treated twice, as embedding and as unembedding"
    elif _near(actual, base) and not _near(own_factor, 1):
        cause = f"it has the base's {quantity.replace('_', ' ')}: its group was forgotten, or not rescaled"
    elif _near(actual, base * own_factor**2):
        cause = "it was scaled twice"
    else:
        cause = "its factor is another one"
    if quantity == "rate":
        return f"{cause}; every step moves it {factor:.3g} times as far as at the base"
    if quantity == "epsilon":
        damped = "small gradients are damped that were not" if factor > 1 else "noise is amplified that was damped"
        return f"{cause}; beside its gradients epsilon is {factor:.3g} times what it was at the base: {damped}"
    share = _over((own.rate or 0.0) * actual, tuned.rate * tuned.weight_decay)
    return f"{cause}; with its rate, a step takes away {share:.3g} times the share of the weight that it took"


def _explain_start(want: Want, factor: float) -> str:
    if want.place.start == "zero":
        return "it should start at zero: it adds a fixed random shift"
    if want.place.start == "one":
        return f"a gain that starts at {factor:.3g} times what it should: so does what is behind it"
    if _near_spread(want.factors.initial):
        cause = "it starts with another spread"
    elif _near_spread(factor * want.factors.initial):
        cause = "it starts with the base's spread"
    elif _near_spread(factor / want.factors.initial):
        cause = "its spread was scaled twice"
    else:
        cause = "it starts with another spread"
    if set(want.role.split("+")) <= {"query", "key"}:
        return f"{cause}: the first logits are {factor:.3g} times those wanted"
    if want.role == "unembedding":
        return f"{cause}: the first outputs are {factor:.3g} times those of the base"
    if want.role in ("embedding", "positional"):
        return f"{cause}: the stream starts at {factor:.3g} times the base's, beside which the blocks' share changes"
    return f"{cause}: what it computes starts at {factor:.3g} times the base's"


def _near_spread(ratio: float) -> bool:
    """Whether a ratio of spreads is one, as well as a sample of some hundred numbers can tell."""
    return 0.8 < ratio < 1.25
