r"""Attention statistics of all rows out of fused kernels, without the n x m pattern.

The flash kernel of the CPU returns an output and the log-sum-exp of every row. With the keys as values it returns
:math:`E_p[k]`, so

.. math:: E_p[s] = \mathrm{scale}\; q \cdot E_p[k], \qquad H = \mathrm{lse} - E_p[s];

a further value column with the position gives the mean attended position. A second call at twice the scale gives

.. math:: \sum_j p_j^2 = e^{\mathrm{lse}(2s) - 2 \mathrm{lse}(s)}, \qquad \max_j s_j \le \mathrm{lse}(2s) / 2,

and the largest logit is exact: rows are evaluated in falling order of that bound until the best logit found is no
smaller than the next bound. Heads near uniform attention, as in untrained models, need most of the rows. H cancels,
with an error of a few eps max(1, max |s|), eps that of float32.

On a GPU the kernel of `flash_kernel` gives all of it in one pass, the attention's output too if values are given.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from manyheads.attention.flash_kernel import attend, runs_on
from manyheads.models.torch.lazy_torch import Tensor, torch
from manyheads.probe.attention.interface import AttentionCall
from manyheads.probe.attention.row_statistics import fold_sink, summarize_mask

PADDING = 8  # columns that carry the position: heads of queries, keys and values must be equally wide
SLACK = 1e-5  # relative, for the rounding of the bound on a row's largest logit: some 80 eps of float32
WIDTHS = (16, 128)  # rows evaluated at a time in search of the largest logit, at first and at most

Pair = tuple[Tensor, Tensor]


def fused_statistics(
    call: AttentionCall, figures: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor | None]:
    """Compute statistics of all rows of a fusable call.

    Of "collision", "max_logit" and "distance", which cost more, those in `figures` are computed; the others always.
    Returned as by `row_statistics` for all rows, without max_logit, but with the largest logit of each head over the
    batch and the rows that count, (H,), or None.
    """
    if runs_on(call.query.device):
        return kernel_statistics(call, figures)[1:]
    rows = torch.arange(call.query.shape[2], device=call.query.device)
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    query, key = call.query.to(dtype), call.key.to(dtype)
    if (shared := query.shape[1] // key.shape[1]) > 1:
        key = key.repeat_interleave(shared, dim=1)
    summary = summarize_mask(call, rows, dtype)
    counted, mask = summary.counted, None
    if call.mask is not None:
        hidden = ~call.allowed(rows)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=query.device).masked_fill_(hidden, torch.finfo(dtype).min)
    if summary.own is not None and "distance" in figures:
        padded = _pad(key)
        padded[..., key.shape[-1]] = torch.arange(key.shape[2], device=key.device, dtype=key.dtype)
        value, lse = _attend(_pad(query), _pad(key), padded, call.scale, call.causal, mask)
    else:
        value, lse = _attend(query, key, key, call.scale, call.causal, mask)
    mean = (query * value[..., : query.shape[-1]]).sum(-1) * call.scale
    columns = summary.first.expand(*query.shape[:2], -1)[..., None].expand(-1, -1, -1, key.shape[3])
    first_key = key[:, :, :1] if call.mask is None else torch.gather(key, 2, columns)
    statistics = {
        "entropy": lse - mean,
        "logsumexp": lse,
        "mean_logit": mean,
        "first_mass": ((query * first_key).sum(-1) * call.scale - lse).exp(),
    }
    if summary.own is not None and value.shape[-1] > query.shape[-1]:
        statistics["distance"] = summary.own - value[..., query.shape[-1]]
    bound = largest = None
    if "collision" in figures or "max_logit" in figures:
        double = _attend(query, key, key, 2 * call.scale, call.causal, mask)[1]
        statistics["collision"] = (double - 2 * lse).exp()
        bound = torch.where(counted, double / 2 + SLACK * (1 + double.abs()), -torch.inf)
    statistics = {name: torch.where(counted, found, 0.0) for name, found in statistics.items()}
    if call.sink is not None:
        statistics = fold_sink(statistics, call.sink.to(dtype))
    if bound is not None and "max_logit" in figures:
        largest = largest_logit(call, query * call.scale, key, bound)
    levels = {name: level for name, level in summary.levels(call.sink is not None).items() if name in statistics}
    return statistics, levels, counted, largest


def attend_call(
    call: AttentionCall, value: Tensor | None, statistics: Collection[str], first: Tensor | None = None
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return output and statistics of a call by the kernel of GPUs."""
    score = {"mask": call.mask, "bias": call.bias, "softcap": call.softcap, "sink": call.sink}
    options: dict[str, Any] = score | {"scale": call.scale, "causal": call.causal, "offset": 0, "first": first}
    return attend(call.query, call.key, value, statistics, **options)


def kernel_statistics(
    call: AttentionCall, figures: Collection[str], value: Tensor | None = None
) -> tuple[Tensor | None, dict[str, Tensor], dict[str, Tensor], Tensor, Tensor | None]:
    """Compute the same by the kernel of GPUs, and with values the output (B, n, H, d) and its `output_square`.

    Without a mask, levels and the rows that count stand on the CPU.
    """
    if call.query.element_size() > 4:
        call = replace(call, query=call.query.float(), key=call.key.float())
    device = call.query.device
    rows = torch.arange(call.query.shape[2], device="cpu" if call.mask is None else device)
    summary = summarize_mask(call, rows, torch.float32)
    asked = {"entropy", "logsumexp", "first_mass", "output_square"} | {"collision"} & set(figures)
    asked |= {"column"} if summary.own is not None and "distance" in figures else set()
    first = None if call.mask is None else summary.first
    value = None if value is None else value.to(call.key.dtype)
    output, statistics = attend_call(call, value, asked, first)
    top = statistics.pop("max_logit")
    if (column := statistics.pop("column", None)) is not None:
        statistics["distance"] = torch.arange(len(rows), device=device) - column
        if summary.own is not None and call.mask is not None:
            statistics["distance"] = summary.own - column
        elif call.key.shape[2] != len(rows):
            statistics["distance"] += call.key.shape[2] - len(rows)
    if call.mask is not None:
        top = torch.where(summary.counted, top, -torch.inf)
        statistics = {name: torch.where(summary.counted, found, 0.0) for name, found in statistics.items()}
    if call.sink is not None:
        square = {name: statistics.pop(name) for name in ("output_square",) if name in statistics}
        statistics = fold_sink(statistics, call.sink.float()) | square
    largest = top.amax((0, 2)) if "max_logit" in figures else None
    levels = {name: level for name, level in summary.levels(call.sink is not None).items() if name in statistics}
    return output, statistics, levels, summary.counted, largest


def largest_logit(call: AttentionCall, query: Tensor, key: Tensor, bound: Tensor) -> Tensor:
    """Find the largest logit of each head from upper bounds on those of the rows.

    Query (B, H, n, d) is scaled, key (B, H, m, d), and `bound` (B, H, n) no smaller than the largest logit of each row,
    -inf for rows that do not count. The result (H,) is -inf if no row counts, NaN where logits are.
    """
    B, H, n = bound.shape
    order = bound.flatten(0, 1).argsort(dim=-1, descending=True)
    bound, query, key = bound.flatten(0, 1), query.flatten(0, 1), key.flatten(0, 1)
    columns = torch.arange(key.shape[1], device=key.device)
    mask = None if call.mask is None else call.mask.expand(B, -1, n, -1)
    best = bound.new_full((H,), -torch.inf)
    members = torch.arange(B * H, device=bound.device)  # sequences and heads that may hold something larger
    start, width = 0, WIDTHS[0]
    while start < n:
        members = members[bound[members, order[members, start]] > best[members % H]]
        if not len(members):
            break
        rows = order[members, start : start + width]  # (members, rows)
        logits = query[members[:, None], rows] @ key[members].transpose(-1, -2)
        if call.causal:
            logits = logits.masked_fill(columns > rows[..., None], -torch.inf)
        elif mask is not None:
            head = (members % H)[:, None] if mask.shape[1] > 1 else torch.zeros_like(rows)
            logits = logits.masked_fill(~mask[(members // H)[:, None], head, rows], -torch.inf)
        top = torch.where(torch.gather(bound[members], 1, rows).isinf(), -torch.inf, logits.amax(-1))
        best = best.scatter_reduce(0, members % H, top.amax(-1), "amax")
        start, width = start + width, min(2 * width, WIDTHS[1])
    return best.masked_fill(bound.isnan().any(-1).view(B, H).any(0), torch.nan)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Pair:
    """Return output (B, H, n, d) and log-sum-exp (B, H, n) of the flash kernel of the CPU."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = flash(query, key, value, 0.0, causal, attn_mask=mask, scale=scale)
    return output, lse if lse.shape == query.shape[:3] else lse.transpose(1, 2)


def _pad(array: Tensor) -> Tensor:
    return torch.nn.functional.pad(array, (0, PADDING))
