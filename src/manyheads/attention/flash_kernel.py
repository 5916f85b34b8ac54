r"""Flash attention in Triton that returns the statistics of its rows: one pass, forward only.

In units of log 2, with x = s - m and e = 2^x, the sums z = sum e, t = sum e x and c = sum e^2 over the keys follow a
growing maximum m, :math:`\delta = m_{old} - m_{new} \le 0`, by

.. math:: t \leftarrow 2^{\delta} (t + z \delta) + \sum_j e_j x_j, \qquad z \leftarrow 2^{\delta} z + \sum_j e_j,
    \qquad c \leftarrow 4^{\delta} c + \sum_j e_j^2,

    \mathrm{lse} = m + \log_2 z, \quad E_p[s] = m + t / z, \quad H = \log_2 z - t / z, \quad \sum_j p_j^2 = c / z^2.

Every term of t is non-positive: nothing cancels. Flags drop what is not asked for, and then the kernel is plain flash
attention. It has run under Triton's interpreter on a CPU only: errors there stay within `BOUND` eps max(1, scale
|q| |k|), eps that of float32, |q| and |k| the largest norms. `serves` checks a small head on every device.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

from manyheads._namespaces import namespace

if TYPE_CHECKING:
    from torch import Tensor

try:
    import triton
    import triton.language as tl

    # Sizes are not compiled in: one program for all lengths.
    jit = functools.partial(
        triton.jit, do_not_specialize=["heads", "shared", "last", "keys", "offset", "window", "plane"]
    )
except ModuleNotFoundError:  # no GPU, or no PyTorch
    triton, tl = None, None

    def jit(kernel: Any) -> Any:  # type: ignore[misc]
        """Leave a kernel alone that nothing can compile."""
        return kernel


# Rows of the buffer of statistics, in the order of their addresses; `output_square` is the mean square of an output.
STATISTICS = ("entropy", "logsumexp", "mean_logit", "max_logit", "collision", "first_mass", "column", "output_square")
BOUND = 16


class Tiles(NamedTuple):
    """How a kernel is cut: rows and keys at a time, warps, and stages of the pipeline."""

    rows: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 3
    late: bool = False  # t after the product with the values
    lazy: bool = False  # sums of eight columns, reduced to rows at the end
    precision: str = "ieee"  # of products of float32: exact, or "tf32x3" on tensor cores


def tiles(width: int, wide: bool) -> Tiles:
    """Return the default for heads of a width; `wide` numbers have four bytes."""
    if wide:
        return Tiles(16, 16, 4, 1) if width > 128 else Tiles(32, 32, 8, 1)
    if width > 128:
        return Tiles(64, 64, 4, 2) if width <= 256 else Tiles(16, 16, 4, 1)  # shared memory: 227 KiB at most
    return Tiles(128, 64, 8, 3)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor | None = None,
    statistics: Collection[str] = ("logsumexp",),
    *,
    scale: float,
    causal: bool = False,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    offset: int | None = None,
    window: int | None = None,
    first: Tensor | None = None,
    cut: Tiles | None = None,
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the output (B, n, H, d), None without values, and statistics of the rows among the keys alone, (B, H, n).

    Query is (B, H, n, d), key and values (B, G, m, d); logits are cap tanh(scale q . k / cap) + bias. Mask and bias
    broadcast to (B, H, n, m). The output includes a learned sink. A causal row i sees the keys up to i + `offset`, by
    default m - n, and with `window` so many of them. `first` (B or 1, H or 1, n) are the first keys that rows see;
    None: those of the window, or the first.
    """
    torch, unit, query, key = namespace(query), scale, _rows(query), _rows(key)
    value = None if value is None else _rows(value)
    if unit < 0:  # a maximum of products is one of logits then
        query, unit = -query, -unit
    (B, H, n, d), (G, m) = query.shape, key.shape[1:3]
    deep = 0 if value is None else value.shape[-1]
    cut = cut or tiles(max(d, deep), query.element_size() > 2)
    found = torch.empty((len(STATISTICS), B, H, n), dtype=torch.float32, device=query.device)
    output = None if value is None else torch.empty((B, n, H, deep), dtype=query.dtype, device=query.device)
    mask, bias, first = (_spread(each, (B, H, n)) for each in (mask, bias, first))
    mask = None if mask is None else mask.view(torch.uint8)
    asked = set(statistics)
    none = (0, 0, 0, 0)
    block = {"BLOCK_M": cut.rows, "BLOCK_N": cut.keys, "BLOCK_D": _power(d), "BLOCK_V": _power(deep)}
    _kernel[(-(-n // cut.rows), B * H)](
        query, key, key if value is None else value, found if output is None else output, found,
        found if sink is None else sink, found if mask is None else mask, found if bias is None else bias,
        found if first is None else first, *query.stride()[:3], *key.stride()[:3],
        *(key if value is None else value).stride()[:3],
        *((0, 0, 0) if output is None else (output.stride(0), output.stride(2), output.stride(1))),
        *(none if mask is None else mask.stride()), *(none if bias is None else bias.stride()),
        *(none[:3] if first is None else first.stride()), H, H // G, n, m,
        m - n if offset is None else offset, window or 0, unit, softcap or 1.0,
        B * H * n, D=d, DV=deep or d, **block, CAUSAL=causal, WINDOW=window is not None,
        HAS_MASK=mask is not None, HAS_BIAS=bias is not None, HAS_SINK=sink is not None,
        HAS_FIRST=first is not None, SOFTCAP=softcap is not None, HAS_V=value is not None,
        MEAN=bool(asked & {"entropy", "mean_logit"}), COLLISION="collision" in asked,
        FIRST_MASS="first_mass" in asked, COLUMN="column" in asked, SUMS=bool(asked & {"logsumexp", "max_logit"}),
        SQUARE="output_square" in asked and value is not None, LATE=cut.late, LAZY=cut.lazy,
        PRECISION=cut.precision, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    pairs = ("entropy", "mean_logit"), ("logsumexp", "max_logit")
    asked |= {name for pair in pairs if asked & set(pair) for name in pair}
    asked -= {"output_square"} if value is None else set()
    return output, {name: found[place] for place, name in enumerate(STATISTICS) if name in asked}


def runs_on(device: Any) -> bool:
    """Whether the kernel runs on a device: a GPU, or any under Triton's interpreter."""
    return triton is not None and (device.type == "cuda" or triton.knobs.runtime.interpret)


def serves(query: Tensor) -> bool:
    """Whether the kernel serves queries: it runs on their device, and there has kept its bound for their dtype."""
    dtype = query.dtype if query.element_size() <= 4 else query[:0].float().dtype
    return runs_on(query.device) and _keeps_bound(query.device, dtype, query.shape[-1])


@functools.cache
def _keeps_bound(device: Any, dtype: Any, width: int) -> bool:
    """Hold the statistics of a small random head against float64, once on every device."""
    import torch

    draw = torch.Generator(device).manual_seed(0)
    query, key = torch.randn((2, 1, 1, 200, width), generator=draw, device=device).to(dtype)
    exact = (query.double() @ key.double().mT / width**0.5).masked_fill(
        torch.ones(200, 200, dtype=torch.bool, device=device).triu(1), -torch.inf
    )
    p, found = exact.softmax(-1), attend(query, key, None, STATISTICS[:4], scale=width**-0.5, causal=True)[1]
    figures = {"entropy": -torch.xlogy(p, p).sum(-1), "logsumexp": exact.logsumexp(-1), "max_logit": exact.amax(-1)}
    norms = (each.float().norm(dim=-1).max() for each in (query, key))
    bound = BOUND * 2.0**-23 * max(1.0, float(functools.reduce(torch.mul, norms)) * width**-0.5)
    return all(bool(((found[name] - figure).abs() <= bound).all()) for name, figure in figures.items())


def _rows(array: Tensor) -> Tensor:
    """Return an array whose rows are contiguous."""
    return array if array.stride(-1) == 1 else array.contiguous()


def _spread(array: Tensor | None, shape: tuple[int, int, int]) -> Tensor | None:
    """Broadcast an array over sequences, heads and rows, without a copy."""
    return None if array is None else array.expand(*shape, *array.shape[3:])


def _power(size: int) -> int:
    """Return the least power of two that is no smaller, 16 at least."""
    return max(16, 1 << (size - 1).bit_length()) if size else 16


@jit
def _step(  # type: ignore[no-untyped-def]
    start, acc, m, z, t, c, w, q, K, V, MASK, BIAS, sk, sv, mask_row, sm_m, bias_row, sb_m, rows, last, keys, offset,
    window, unit, softcap, D: tl.constexpr, DV: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr, PARTIAL: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr, HAS_V: tl.constexpr, MEAN: tl.constexpr, COLLISION: tl.constexpr,
    COLUMN: tl.constexpr, LATE: tl.constexpr, LAZY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to one block of keys."""
    columns = start + tl.arange(0, BLOCK_N)
    places = tl.arange(0, BLOCK_D)
    k_at = K + columns[None, :].to(tl.int64) * sk + places[:, None]
    if PARTIAL:
        k = tl.load(k_at, mask=(columns[None, :] < keys) & (places[:, None] < D), other=0.0)
    elif BLOCK_D != D:
        k = tl.load(k_at, mask=places[:, None] < D, other=0.0)
    else:
        k = tl.load(k_at)
    s = tl.dot(q, k, input_precision=PRECISION)
    if SOFTCAP:
        falling = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(s * unit / softcap))
        s = tl.where(s < 0, -1.0, 1.0) * softcap * 1.4426950408889634 * (1.0 - falling) / (1.0 + falling)
        factor = 1.0
    elif HAS_BIAS:
        s = s * (unit * 1.4426950408889634)
        factor = 1.0
    else:
        factor = unit * 1.4426950408889634
    if HAS_BIAS:
        inside = (rows[:, None] < last) & (columns[None, :] < keys)
        s += (
            tl.load(bias_row + columns[None, :].to(tl.int64) * sb_m, mask=inside, other=0.0).to(tl.float32)
            * 1.4426950408889634
        )
    if PARTIAL:
        allowed = (columns < keys)[None, :]
        if CAUSAL:
            allowed = allowed & (columns[None, :] <= (rows + offset)[:, None])
        if WINDOW:
            allowed = allowed & (columns[None, :] > (rows + offset - window)[:, None])
        if HAS_MASK:
            inside = (rows[:, None] < last) & (columns[None, :] < keys)
            allowed = allowed & (tl.load(mask_row + columns[None, :].to(tl.int64) * sm_m, mask=inside, other=0) != 0)
        s = tl.where(allowed, s, -float("inf"))
    top = tl.maximum(m, tl.max(s, 1) * factor)
    if PARTIAL:  # rows that have seen no key yet
        base = tl.where(top == -float("inf"), 0.0, top)
        delta = tl.where(m == -float("inf"), 0.0, m - base)
        x = s * factor - base[:, None]
        if MEAN:
            x = tl.where(x == -float("inf"), -1e4, x)  # -inf times 0 otherwise; NaN stays
    else:
        delta = tl.where(m == -float("inf"), 0.0, m - top) if MEAN else m - top
        x = s * factor - top[:, None]
    e = tl.exp2(x)
    alpha = tl.exp2(delta)
    if MEAN and not LATE:
        if LAZY:
            shaped = tl.reshape(e * x, (e.shape[0], BLOCK_N // 8, 8))
            t = (t + z * delta[:, None]) * alpha[:, None] + tl.sum(shaped, 1)
        else:
            t = (t + z * delta) * alpha + tl.sum(e * x, 1)
    before = z
    if LAZY:
        z = z * alpha[:, None] + tl.sum(tl.reshape(e, (e.shape[0], BLOCK_N // 8, 8)), 1)
    else:
        z = z * alpha + tl.sum(e, 1)
    if COLLISION:
        c = c * alpha * alpha + tl.sum(e * e, 1)
    if COLUMN:
        w = w * alpha + tl.sum(e * columns[None, :].to(tl.float32), 1)
    if HAS_V:
        across = tl.arange(0, BLOCK_V)
        v_at = V + columns[:, None].to(tl.int64) * sv + across[None, :]
        if PARTIAL:
            v = tl.load(v_at, mask=(columns[:, None] < keys) & (across[None, :] < DV), other=0.0)
        elif BLOCK_V != DV:
            v = tl.load(v_at, mask=across[None, :] < DV, other=0.0)
        else:
            v = tl.load(v_at)
        acc = tl.dot(e.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    if MEAN and LATE:
        if LAZY:
            shaped = tl.reshape(e * x, (e.shape[0], BLOCK_N // 8, 8))
            t = (t + before * delta[:, None]) * alpha[:, None] + tl.sum(shaped, 1)
        else:
            t = (t + before * delta) * alpha + tl.sum(e * x, 1)
    return acc, top, z, t, c, w


@jit
def _kernel(  # type: ignore[no-untyped-def]
    Q, K, V, OUT, STATS, SINK, MASK, BIAS, FIRST, sq_b, sq_h, sq_n, sk_b, sk_h, sk_n, sv_b, sv_h, sv_n, so_b, so_h,
    so_n, sm_b, sm_h, sm_n, sm_m, sb_b, sb_h, sb_n, sb_m, sf_b, sf_h, sf_n, heads, shared, last, keys, offset,
    window, unit, softcap, plane, D: tl.constexpr, DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_SINK: tl.constexpr, HAS_FIRST: tl.constexpr, SOFTCAP: tl.constexpr,
    HAS_V: tl.constexpr, MEAN: tl.constexpr, COLLISION: tl.constexpr, FIRST_MASS: tl.constexpr, COLUMN: tl.constexpr,
    SUMS: tl.constexpr, SQUARE: tl.constexpr, LATE: tl.constexpr, LAZY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with BLOCK_M rows of one head."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the rows with most keys first
    head, batch = (tl.program_id(1) % heads).to(tl.int64), (tl.program_id(1) // heads).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    wide = rows.to(tl.int64)
    places = tl.arange(0, BLOCK_D)
    Q += batch * sq_b + head * sq_h
    K += batch * sk_b + (head // shared) * sk_h
    V += batch * sv_b + (head // shared) * sv_h
    seen = (rows[:, None] < last) & (places[None, :] < D)
    q = tl.load(Q + wide[:, None] * sq_n + places[None, :], mask=seen, other=0.0)
    mask_row = MASK + batch * sm_b + head * sm_h + wide[:, None] * sm_n
    bias_row = BIAS + batch * sb_b + head * sb_h + wide[:, None] * sb_n
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    if LAZY:
        z = tl.zeros([BLOCK_M, 8], tl.float32)
        t = tl.zeros([BLOCK_M, 8], tl.float32)
    else:
        z = tl.zeros([BLOCK_M], tl.float32)
        t = tl.zeros([BLOCK_M], tl.float32)
    c = tl.zeros([BLOCK_M], tl.float32)
    w = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    # Keys [low, left) and [right, high) are seen by some of the rows, [left, right) by all.
    low = 0
    left = 0
    high = keys
    right = keys // BLOCK_N * BLOCK_N
    if CAUSAL:
        high = tl.minimum(keys, tl.maximum(tile * BLOCK_M + BLOCK_M + offset, 0))
        right = tl.minimum(keys, tl.maximum(tile * BLOCK_M + offset + 1, 0)) // BLOCK_N * BLOCK_N
    if WINDOW:
        low = tl.maximum(tile * BLOCK_M + offset - window + 1, 0) // BLOCK_N * BLOCK_N
        left = tl.maximum(tile * BLOCK_M + BLOCK_M + offset - window, 0)
        left = (left + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        right = tl.maximum(right, low)
        left = tl.minimum(left, right)
    if HAS_MASK:
        right = low
        left = low
    for part in tl.static_range(3):
        if (WINDOW or part > 0) and not (HAS_MASK and part == 1):
            begin = low if part == 0 else left if part == 1 else right
            end = left if part == 0 else right if part == 1 else high
            for start in range(begin, end, BLOCK_N):
                acc, m, z, t, c, w = _step(
                    start, acc, m, z, t, c, w, q, K, V, MASK, BIAS, sk_n, sv_n, mask_row, sm_m, bias_row, sb_m, rows,
                    last, keys, offset, window, unit, softcap, D, DV, BLOCK_N, BLOCK_D, BLOCK_V, part != 1, CAUSAL,
                    WINDOW, HAS_MASK, HAS_BIAS, SOFTCAP, HAS_V, MEAN, COLLISION, COLUMN, LATE, LAZY, PRECISION,
                )  # fmt: skip
    total = z
    mean = t
    if LAZY:
        total = tl.sum(z, 1)
        mean = tl.sum(t, 1)
    empty = (m == -float("inf")) & (total == 0.0)  # maxima pass by NaN, sums do not
    safe = tl.where(empty, 1.0, total)
    base = tl.where(empty, 0.0, m)
    plane = tl.cast(plane, tl.int64)
    out = STATS + (batch * heads + head) * last + wide
    here = rows < last
    if SUMS:
        tl.store(out + plane, tl.where(empty, m, (base + tl.log2(safe)) * 0.6931471805599453), mask=here)
        tl.store(out + 3 * plane, tl.where(total == total, m, total) * 0.6931471805599453, mask=here)
    if MEAN:
        tl.store(out, (tl.log2(safe) - mean / safe) * 0.6931471805599453, mask=here)
        tl.store(out + 2 * plane, (base + mean / safe) * 0.6931471805599453, mask=here)
    if COLLISION:
        tl.store(out + 4 * plane, c / (safe * safe), mask=here)
    if FIRST_MASS:
        if HAS_FIRST:
            first = tl.load(FIRST + batch * sf_b + head * sf_h + wide * sf_n, mask=here, other=0)
        elif WINDOW:
            first = tl.maximum(rows + offset - window + 1, 0)
        else:
            first = rows * 0
        first = tl.minimum(first, keys - 1).to(tl.int64)
        k = tl.load(K + first[:, None] * sk_n + places[None, :], mask=seen, other=0.0).to(tl.float32)
        s = tl.sum(q.to(tl.float32) * k, 1) * unit
        if SOFTCAP:
            falling = tl.exp2(-2.0 * 1.4426950408889634 * tl.abs(s / softcap))
            s = tl.where(s < 0, -1.0, 1.0) * softcap * (1.0 - falling) / (1.0 + falling)
        if HAS_BIAS:
            at = BIAS + batch * sb_b + head * sb_h + wide * sb_n + first * sb_m
            s += tl.load(at, mask=here, other=0.0).to(tl.float32)
        mass = tl.minimum(tl.exp2(s * 1.4426950408889634 - base), safe) / safe
        tl.store(out + 5 * plane, tl.where(empty, 0.0, mass), mask=here)
    if COLUMN:
        tl.store(out + 6 * plane, w / safe, mask=here)
    if HAS_V:
        if HAS_SINK:
            sink = tl.load(SINK + head).to(tl.float32) * 1.4426950408889634
            above = tl.maximum(m, sink)
            acc = (
                acc
                * (
                    tl.exp2(tl.where(empty, above, m) - above)
                    / (safe * tl.exp2(tl.where(empty, above, m) - above) + tl.exp2(sink - above))
                )[:, None]
            )
        else:
            acc = acc / safe[:, None]
        across = tl.arange(0, BLOCK_V)
        at = OUT + batch * so_b + head * so_h + wide[:, None] * so_n + across[None, :]
        tl.store(at, acc.to(OUT.dtype.element_ty), mask=here[:, None] & (across[None, :] < DV))
        if SQUARE:
            tl.store(out + 7 * plane, tl.sum(acc * acc, 1) / DV, mask=here)
