r"""Blocks that Muon orthogonalizes: their sides, the learning rate that follows, the shape factors in use.

Muon replaces the momentum of a matrix by its polar factor P, whose singular values are one. With inputs of root mean
square one in the row space of a block of r rows and c columns, :math:`|Px| = |x|`, so that the outputs move by the root
mean square :math:`(c/r)^{1/2}` at rate one, and by one at the rate :math:`(r/c)^{1/2}`.

* Blocks below each other (heads of :math:`W_Q, W_K, W_V`) do not meet. Blocks side by side (heads of :math:`W_O`)
  are summed: H terms that one backward signal aligns, and the rate carries :math:`1/H`.
* A head's block of N rows takes up the share min(1, N/n) of inputs that fill n directions. The table has n fixed, as
  in the limits; if n grows with D, the power of H is between :math:`H^{-1/2}` and one (`PerHead`).
* :math:`\Delta q_h` lies in the span of the keys of its head, so that a logit moves by :math:`N^{1-\alpha_A}`: queries
  and keys carry :math:`N^{\alpha_A-1}`, as under Adam.
* The polar factor forgets the size of the gradient, so the rate is the update: :math:`L^{\alpha_L-1}` in a block.
* :math:`P(cG) = P(G)`: a factor folded into a weight goes into init and rate, as under Adam.

Derived here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.errors import UsageError
from manyheads.scaling.parametrization.power_laws import (
    HIDDEN_WIDTH,
    KEY_VALUE_RANK,
    KEYS,
    ONE,
    QUERIES,
    QUERY_RANK,
    WIDTH,
    Power,
)
from manyheads.transformer.shape import Shape

Split = Literal["whole", "fused", "heads-in", "heads"]
SPLITS: tuple[str, ...] = get_args(Split)
MLP_RATIO = 4  # hidden width over the stream's where a shape does not say it


class Block(NamedTuple):
    """Sides of one orthogonalized block, fan-out by fan-in, and how many blocks are summed in an output."""

    rows: Power
    cols: Power
    summed: Power = ONE

    @property
    def learning_rate(self) -> Power:
        """Rate at which what the block computes moves by one."""
        return (self.rows / self.cols) ** 0.5 / self.summed


HEAD = Power(key_dim=1)
_MLP = {"mlp_in": Block(HIDDEN_WIDTH, WIDTH), "mlp_out": Block(WIDTH, HIDDEN_WIDTH)}
_OUTPUT = {"output": Block(WIDTH, QUERIES)}
_HEADS_IN = {role: Block(HEAD, WIDTH) for role in ("query", "key", "value")}
BLOCKS: Mapping[str, Mapping[str, Block]] = {
    "whole": {"query": Block(QUERIES, WIDTH), "key": Block(KEYS, WIDTH), "value": Block(KEYS, WIDTH)} | _OUTPUT | _MLP,
    # M + 2 M_k rows, in proportion to M as long as the heads of a group stay.
    "fused": {role: Block(QUERIES, WIDTH) for role in ("query", "key", "value")} | _OUTPUT | _MLP,
    "heads-in": _HEADS_IN | _OUTPUT | _MLP,
    "heads": _HEADS_IN | {"output": Block(WIDTH, HEAD, summed=Power(heads=1))} | _MLP,
}
"""How queries, keys, values and outputs are cut → role → block; `heads-in` keeps the output matrix whole."""

MUON_ROLES = tuple(BLOCKS["whole"])

LATENT_BLOCKS: Mapping[str, Block] = {
    "query_down": Block(QUERY_RANK, WIDTH),
    "query_up": Block(QUERIES, QUERY_RANK),
    "key_value_down": Block(KEY_VALUE_RANK, WIDTH),  # and the keys of positions, in proportion to them
    "key_value_up": Block(QUERIES, KEY_VALUE_RANK),
}
"""Low-rank factors of latent attention (MLA), whole under every split → block."""


class ShapeFactor(NamedTuple):
    """Factor that a Muon applies to its group's rate, from the r rows and c columns of a block."""

    formula: str
    at: Callable[[float, float], float]
    words: tuple[str, ...]  # framework:word, as frameworks call it


FACTORS: Mapping[str, ShapeFactor] = {
    "none": ShapeFactor("1", lambda rows, cols: 1.0, ("megatron:none", "normuon:preserve_norm", "shampoo")),
    "original": ShapeFactor(
        "√max(1, r/c)",
        lambda rows, cols: max(1.0, rows / cols) ** 0.5,
        ("torch:original", "optax:default", "megatron:shape_scaling"),
    ),
    "match_rms_adamw": ShapeFactor(
        "0.2 √max(r, c)",
        lambda rows, cols: 0.2 * max(rows, cols) ** 0.5,
        ("torch:match_rms_adamw", "optax:consistent_rms=0.2", "dion:rms_norm"),
    ),
    "sqrt(max(r,c))": ShapeFactor(
        "√max(r, c)", lambda rows, cols: max(rows, cols) ** 0.5, ("megatron:spectral", "optax:consistent_rms=1")
    ),
    "sqrt(r/c)": ShapeFactor(
        "√(r/c)", lambda rows, cols: (rows / cols) ** 0.5, ("megatron:unit_rms_norm", "dion:spectral_norm")
    ),
}
"""Shape factors by a name of torch where there is one, else by their formula.

Words of PyTorch 2.13 (`torch.optim.Muon`, `adjust_lr_fn`), optax 0.2 (`contrib.muon`, `consistent_rms`), Megatron-LM
and Emerging-Optimizers (`muon_scale_mode`), Dion (`adjust_lr`). `spectral` alone is two formulas, and no name."""


def _spell(formula: str) -> str:
    """Spell a formula of r rows and c columns in ASCII, with the operand of a root in parentheses."""
    plain = formula.lower().translate(str.maketrans("", "", " *"))
    return re.sub(r"√(max\(.*\))", r"sqrt(\1)", plain).replace("√", "sqrt")


def find_factor(word: str) -> str:
    """Return the name of a shape factor in `FACTORS` from a name, a formula or a framework's word, or refuse it."""
    for name, factor in FACTORS.items():
        if word in (name, factor.formula, *factor.words) or _spell(str(word)) == _spell(factor.formula):
            return name
    meant = [
        f"{each} for {factor.formula}" for factor in FACTORS.values() for each in factor.words if str(word) in each
    ]
    choices = meant if word and meant else [f"{name} for {factor.formula}" for name, factor in FACTORS.items()]
    raise UsageError(f"shape factor {word!r} is not known: choose one of {', '.join(choices)}")


PER_HEAD = (
    "Muon per head: the rates of head blocks fall with H by a power between 0 and 1/2 that depends on how many "
    "directions the inputs fill; the table takes 1/2, the safe side, and whole matrices have one power"
)
FUSED = (
    "Muon on fused queries, keys and values: the ratio of their updates is that of their gradients and has no power of "
    "its own; split the matrix"
)


@dataclass(frozen=True)
class Muon:
    r"""Variant of Muon: which blocks it orthogonalizes, and by what it multiplies the rate of a group.

    Attributes
    ----------
    split
        ``"whole"``: every matrix as it is, queries, keys and values apart. ``"fused"``: these three in one matrix.
        ``"heads-in"``: queries, keys and values head by head. ``"heads"``: the output matrix as well, by columns.
    factor
        Shape factor for r rows and c columns: ``"original"`` (Keller Jordan, `torch.optim.Muon`, optax),
        :math:`\max(1, r/c)^{1/2}`; ``"match_rms_adamw"`` (Moonlight), :math:`0.2 \max(r, c)^{1/2}`; ``"sqrt(r/c)"``,
        :math:`(r/c)^{1/2}`; ``"sqrt(max(r,c))"``, :math:`\max(r, c)^{1/2}`; ``"none"``; or a framework's word for one
        of these, such as ``"megatron:spectral"``, which is stored as its name here.

    Examples
    --------
    >>> Muon(factor="megatron:spectral").factor
    'sqrt(max(r,c))'
    """

    split: Split = constrained("whole", Constraint(choices=SPLITS))  # noqa: RUF009
    factor: str = "original"

    def __post_init__(self) -> None:
        check_fields(self)
        object.__setattr__(self, "factor", find_factor(self.factor))

    def block(self, role: str) -> Block:
        """Return the block of a role that is orthogonalized together."""
        return LATENT_BLOCKS[role] if role in LATENT_BLOCKS else BLOCKS[self.split][role]

    def rate_factor(self, role: str, shape: Shape, like: Shape | None = None) -> float:
        """Return the shape factor of a role at a shape, with the ratios of another one where the shape has none.

        Examples
        --------
        >>> Muon(factor="match_rms_adamw").rate_factor("mlp_in", Shape(8, 2, 1))
        1.6
        """
        block = self.block(role)
        sizes = _sizes(shape, like or shape)
        rows, cols = (_measure(side, sizes) for side in (block.rows, block.cols))
        if self.split == "fused" and role in _HEADS_IN:
            rows *= 1 + 2 * sizes["key_heads"] / sizes["heads"]
        return FACTORS[self.factor].at(rows, cols)

    def rate_factor_power(self, role: str, shape: Shape, base: Shape) -> Power | None:
        """Return the shape factor as a power between two shapes; None where its maximum changes sides."""
        block = self.block(role)
        ratio = (block.rows / block.cols) ** 0.5
        if self.factor in ("none", "sqrt(r/c)"):
            return ONE if self.factor == "none" else ratio
        taller = {_measure(block.rows / block.cols, _sizes(*pair)) >= 1 for pair in ((shape, base), (base, shape))}
        if len(taller) > 1:
            return None
        if self.factor == "original":
            return ratio if taller.pop() else ONE
        return (block.rows if taller.pop() else block.cols) ** 0.5

    @property
    def per_head(self) -> bool:
        """Whether heads have blocks of their own, so that the power of H depends on the data."""
        return self.split in ("heads-in", "heads")

    def dimensions(self, weights: Any) -> Any:
        """Say which axes of the library's weights optax orthogonalizes: its `muon_weight_dimension_numbers`.

        Without it `optax.contrib.muon` takes every array of two axes for a matrix, embedding and read-out included.
        Refused are fused queries, keys and values, which are three arrays here.

        Examples
        --------
        >>> import jax.numpy as jnp
        >>> from manyheads.transformer.weights import Blocks, Weights
        >>> weights = Weights(Blocks(*[jnp.zeros((1, 2, 6, 3))] * 4), unembedding=jnp.zeros((6, 5)))
        >>> found = Muon("heads-in").dimensions(weights)
        >>> found.blocks.query.output_axis, found.blocks.output.reduction_axis, found.unembedding
        (3, (1, 2), None)
        """
        import jax
        import optax

        from manyheads.transformer.weights import roles

        if self.split == "fused":
            raise UsageError(
                "Muon(split='fused'): queries, keys and values are three arrays here; choose another split"
            )
        numbers = optax.contrib.MuonDimensionNumbers
        inward = numbers(2, 3) if self.per_head else numbers(2, (1, 3))  # (L, H, d, N)
        outward = numbers(2, 3) if self.split == "heads" else numbers((1, 2), 3)  # (L, H, N, d)
        axes = dict.fromkeys(("query", "key", "value"), inward) | {"output": outward}
        axes |= dict.fromkeys(("mlp_in", "mlp_out"), numbers(1, 2))
        return jax.tree.map(lambda role: axes.get(role), roles(weights))

    def cuts(self, role: str) -> bool:
        """Whether a role is orthogonalized head by head."""
        return role in BLOCKS[self.split] and BLOCKS[self.split][role] != BLOCKS["whole"][role] and self.per_head

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what a table of this variant leaves undecided."""
        return ((PER_HEAD,) if self.per_head else ()) + ((FUSED,) if self.split == "fused" else ())


WHOLE = Muon()  # whole matrices with the shape factor of torch and optax


def _sizes(shape: Shape, like: Shape) -> dict[str, float]:
    """Return the sizes of a shape by the axes of a power."""
    group = shape.key_heads or shape.heads * like.group_heads / like.heads
    hidden = shape.hidden or shape.width * (like.hidden / like.width if like.hidden else MLP_RATIO)
    axes = {"key_dim": shape.key_dim, "heads": shape.heads, "stream": shape.width}
    ranks = {name: getattr(shape, name) or getattr(like, name) or 1 for name in ("query_rank", "key_value_rank")}
    return {**axes, **ranks, "key_heads": group, "hidden": hidden}


def _measure(side: Power, sizes: Mapping[str, float]) -> float:
    """Return a side of a block, or a quotient of sides, as a number."""
    return math.prod(size ** getattr(side, axis) for axis, size in sizes.items())
