"""Attention calls: queries, keys, scale, mask, bias, soft-cap and sinks of one call, as the modules pass them.

    s_ij = cap tanh(scale q_i . k_j / cap) + bias_ij    over the allowed keys j; with no cap, scale q_i . k_j + bias_ij

Query (B, H, n, d) and key (B, G, m, d) arrive after rotary positions and query-key norms; head h reads the keys of
group h // (H / G). The mask depends on the implementation:

==============  ===============================  ======================================================================
sdpa            None, or booleans (B, 1, n, m)   None: causal if the call or the module says so and n > 1, and then the
                                                 keys beyond n are those of a cache that is not filled yet
eager           None, or numbers (B, 1, n, m)    0 or the smallest number of the dtype; other values are a bias
flex_attention  `BlockMask`                      its rule is evaluated on the rows that are measured
==============  ===============================  ======================================================================

Windows are part of the mask in all three. `position_bias`, `softcap` and `s_aux` (sinks) are keywords; sdpa ignores
sinks, and soft-caps before transformers refused them there: such a model is measured without them.
"""

import re
from dataclasses import dataclass
from typing import Any

from manyheads.models.torch.lazy_torch import Module, Tensor, torch

# Names of modules that attend to another sequence: `encoder_attn`, `crossattention`, `EncDecAttention`.
CROSS = re.compile(r"cross|encoder_attn|encdec", re.IGNORECASE)


@dataclass(frozen=True)
class AttentionCall:
    """One call of an attention function."""

    query: Tensor  # (B, H, n, d)
    key: Tensor  # (B, G, m, d)
    scale: float
    causal: bool  # row i sees the keys up to i; then mask is None
    mask: Any  # booleans (B or 1, H or 1, n or 1, m), a rule of rows and keys, or None: every key is allowed
    bias: Tensor | None  # numbers that broadcast to (B, H, n, m), or None
    softcap: float | None
    sink: Tensor | None  # learned logits (H,), or None
    cross: bool  # whether keys belong to another sequence than queries

    @property
    def fusable(self) -> bool:
        """Whether fused kernels can give the statistics: neither soft-cap, bias nor a rule for a mask, on the CPU."""
        return (
            self.softcap is None and self.bias is None and not callable(self.mask) and self.query.device.type == "cpu"
        )

    def allowed(self, rows: Tensor) -> Tensor:
        """Return which keys the rows may see: booleans (B or 1, H or 1, r, m)."""
        columns = torch.arange(self.key.shape[2], device=self.key.device)
        if self.causal:
            return (columns[None] <= rows[:, None])[None, None]
        if self.mask is None:
            return torch.ones(1, 1, len(rows), len(columns), dtype=torch.bool, device=self.key.device)
        if callable(self.mask):
            batch = torch.arange(self.query.shape[0], device=self.key.device)[:, None, None, None]
            found = self.mask(batch, torch.zeros_like(batch), rows[None, None, :, None], columns[None, None, None])
            return found.expand(len(batch), 1, len(rows), len(columns))
        return self.mask[:, :, rows] if self.mask.shape[2] > 1 else self.mask.expand(-1, -1, len(rows), -1)

    def own_column(self, rows: Tensor) -> Tensor | None:
        """Return the column of each row's own key; None where keys belong to another sequence.

        n queries are the last n of the m keys, except while a cache of fixed size is filled: then the last key that
        any of them may see is the last query's own.
        """
        n, m = self.query.shape[2], self.key.shape[2]
        if self.cross:
            return None
        offset = m - n
        if offset > 0 and self.mask is not None and not callable(self.mask):
            last = int(self.mask.flatten(0, 2).any(0).nonzero().max()) if bool(self.mask.any()) else m - 1
            offset = min(max(last - (n - 1), 0), offset)
        return rows + offset


def read_call(
    implementation: str, name: str, module: Module, arguments: tuple[Any, ...], keywords: Any
) -> AttentionCall:
    """Read one call of an attention function.

    `implementation` is "sdpa", "eager" or "flex_attention", `name` that of the module in the model; arguments are
    (query, key, value, mask, ...). Of the keywords `scaling`, `is_causal`, `position_bias`, `softcap` and `s_aux` are
    read; "sdpa" computes attention without the last two, whatever the module passes.
    """
    query, key, _, mask = (value.detach() if hasattr(value, "detach") else value for value in arguments[:4])
    n, m = query.shape[2], key.shape[2]
    scale, causal = keywords.get("scaling"), keywords.get("is_causal")
    causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
    causal = causal and n > 1 and mask is None and implementation != "eager"
    if causal:
        key, m = key[:, :, :n], min(n, m)
    allowed, bias = getattr(mask, "mask_mod", mask), None
    if hasattr(allowed, "dtype"):
        allowed = mask = mask[..., :m]
        if mask.dtype != torch.bool:
            allowed = mask > torch.finfo(mask.dtype).min / 2
            bias = torch.where(allowed, mask, 0.0)
            bias = bias if bool(bias.any()) else None
    position = keywords.get("position_bias")
    if position is not None:
        position = position.detach()[..., :m]
        bias = position if bias is None else bias + position
    softcap, sink = (None if implementation == "sdpa" else keywords.get(name) for name in ("softcap", "s_aux"))
    return AttentionCall(
        query=query,
        key=key,
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        causal=causal,
        mask=allowed,
        bias=bias,
        softcap=softcap,
        sink=None if sink is None else sink.detach(),
        cross=bool(CROSS.search(name)) or m < n,
    )
