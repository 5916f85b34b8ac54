r"""Attention statistics of chosen rows: exact, from the logits of those rows, for every mask, bias, soft-cap and sink.

With x = s - max s, e = exp x and Z = sum e over the allowed keys of a row,

    lse = max s + log Z,   H = log Z - sum e x / Z,   E[s] = max s + sum e x / Z,   sum p^2 = sum e^2 / Z^2,

and no term cancels. Computed in float32, or in float64 where queries are. A learned sink is a further logit beta in the
softmax: with :math:`x = \mathrm{lse} - \beta` and :math:`g = \sigma(x)`, the mass on the keys,

.. math:: H' = g H + h(g), \quad h(g) = \log(1 + e^x) - g x, \quad \mathrm{lse}' = \log(e^{\mathrm{lse}} + e^\beta),

the collision probability is :math:`g^2 C + (1-g)^2`, the mass on the first key g P, and the sink holds 1 - g.
"""

from dataclasses import dataclass
from typing import Any

from manyheads.models.torch.lazy_torch import Tensor, torch
from manyheads.probe.attention.interface import AttentionCall

BLOCK = 128  # rows at a time: their logits are held for all heads


def row_statistics(call: AttentionCall, rows: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Compute statistics of the given rows.

    Returned are statistics by name, (B, H, r): entropy, logsumexp, mean_logit, max_logit, collision, first_mass,
    distance (not for cross attention), and with learned sinks sink_mass and key_entropy; the same at logits of zero,
    (B or 1, H or 1, r); and which rows see a key and are no padding, booleans (B or 1, H or 1, r).
    """
    *tables, counted = zip(*(_block(call, part) for part in rows.split(BLOCK)), strict=True)
    statistics, levels = (
        {name: torch.cat([each[name] for each in table], dim=-1) for name in table[0]} for table in tables
    )
    return statistics, levels, torch.cat(counted, dim=-1)


def _block(call: AttentionCall, rows: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    allowed = call.allowed(rows)
    logits = _logits(call, rows).masked_fill(~allowed, -torch.inf)
    top = logits.amax(-1)
    base = torch.where(torch.isfinite(top), top, 0.0)  # rows that see no key
    shifted = logits - base[..., None]
    weights = shifted.exp()
    total = weights.sum(-1).clamp_min(torch.finfo(weights.dtype).tiny)
    mean = torch.where(weights > 0, weights * shifted, 0.0).sum(-1) / total
    summary = summarize_mask(call, rows, logits.dtype)
    first = summary.first.expand(total.shape)[..., None]
    statistics = {
        "entropy": total.log() - mean,
        "logsumexp": base + total.log(),
        "mean_logit": base + mean,
        "max_logit": top,
        "collision": (weights * weights).sum(-1) / total**2,
        "first_mass": torch.gather(weights, -1, first)[..., 0] / total,
    }
    if summary.own is not None:
        positions = torch.arange(logits.shape[-1], device=logits.device, dtype=logits.dtype)
        statistics["distance"] = summary.own - weights @ positions / total
    if call.sink is not None:
        statistics = fold_sink(statistics, call.sink.to(logits.dtype))
    return statistics, summary.levels(call.sink is not None), summary.counted


def _logits(call: AttentionCall, rows: Tensor) -> Tensor:
    """Return the logits (B, H, r, m) of the rows, masked keys included."""
    B, H, _, d = call.query.shape
    G, m = call.key.shape[1:3]
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    query = call.query[:, :, rows].to(dtype).reshape(B, G, -1, d)  # the heads of a group one after the other
    logits = torch.matmul(query, call.key.to(dtype).transpose(-1, -2)).view(B, H, len(rows), m) * call.scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.bias is None:
        return logits
    return logits + (call.bias[:, :, rows] if call.bias.shape[2] > 1 else call.bias).to(dtype)


@dataclass(frozen=True)
class MaskSummary:
    """Keys that the mask allows to each row, as numbers."""

    count: Tensor  # number of keys that the row may see, (B or 1, H or 1, r)
    first: Tensor  # the first of them
    centre: Tensor  # their mean column
    # Whether the row sees a key and, where queries and keys are one sequence, its own: padded queries do not
    counted: Tensor
    own: Tensor | None  # column of the row's own key, (r,); None for cross attention

    def levels(self, sink: bool) -> dict[str, Tensor]:
        """Return the statistics of uniform attention, logits and sinks of zero: the largest entropy of the mask."""
        zero = torch.zeros_like(self.centre)
        count = self.count.clamp_min(1).to(zero.dtype)
        levels = {
            "entropy": count.log(),
            "logsumexp": count.log(),
            "mean_logit": zero,
            "max_logit": zero,
            "collision": 1 / count,
            "first_mass": 1 / count,
        }
        if self.own is not None:
            levels["distance"] = self.own - self.centre
        return fold_sink(levels, zero.new_zeros(1)) if sink else levels


def summarize_mask(call: AttentionCall, rows: Tensor, dtype: Any) -> MaskSummary:
    """Summarize the mask of a call at the given rows, some rows at a time; in closed form where there is no mask."""
    own = call.own_column(rows)
    if call.mask is None:
        count = (rows + 1 if call.causal else torch.full_like(rows, call.key.shape[2]))[None, None]
        first = torch.zeros_like(count)
        return MaskSummary(count, first, (count - 1).to(dtype) / 2, count > 0, own)
    positions = torch.arange(call.key.shape[2], device=rows.device, dtype=dtype)
    parts = []
    for place, part in enumerate(rows.split(BLOCK)):
        allowed = call.allowed(part)
        count, counted = allowed.sum(-1), allowed.any(-1)
        if own is not None:
            column = own.split(BLOCK)[place].expand(counted.shape)[..., None]
            counted = counted & torch.gather(allowed, -1, column)[..., 0]
        centre = allowed.to(dtype) @ positions / count.clamp_min(1)
        parts.append((count, allowed.int().argmax(-1), centre, counted))
    count, first, centre, counted = (torch.cat(each, dim=-1) for each in zip(*parts, strict=True))
    return MaskSummary(count, first, centre, counted, own)


def fold_sink(statistics: dict[str, Tensor], sink: Tensor) -> dict[str, Tensor]:
    """Include a learned sink.

    From statistics of the keys alone (B, H, r) and the sink's logit (H,) or (1,): the same names with the sink
    included, `sink_mass`, and `key_entropy`, the entropy among the keys. Logits and distances are those of the keys.
    """
    beta = sink.view(1, -1, 1)
    lse = statistics["logsumexp"]
    x = lse - beta
    mass = torch.sigmoid(x)
    rest = torch.sigmoid(-x)
    if "collision" in statistics:
        statistics = statistics | {"collision": mass * mass * statistics["collision"] + rest * rest}
    return statistics | {
        "entropy": mass * statistics["entropy"] + torch.nn.functional.softplus(x) - mass * x,
        "logsumexp": torch.logaddexp(lse, beta.expand_as(lse)),
        "first_mass": mass * statistics["first_mass"],
        "sink_mass": rest,
        "key_entropy": statistics["entropy"],
    }
