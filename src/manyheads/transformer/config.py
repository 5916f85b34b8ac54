"""Configuration of a transformer: everything that decides its shapes and its formula."""

from dataclasses import dataclass, field
from typing import Literal

from manyheads._constraints import CHECKED, Constraint, check_fields, constrained
from manyheads.errors import UsageError
from manyheads.transformer.inputs import Input, VectorInput
from manyheads.transformer.shape import Shape

Norm = Literal["pre", "post", "none"]
ReadOut = Literal["mean", "last", "token"]
Positions = Literal["learned", "none"]
Activation = Literal["gelu", "relu", "erf", "tanh", "silu", "identity"]


@dataclass(frozen=True)
class TransformerConfig:
    r"""Everything about a transformer but its weights and its scales.

    With :math:`\nu` the normalization, block :math:`l` of a pre-norm transformer is

    .. math::
        x \leftarrow x + b\,\mathrm{Attention}_l(\nu(x)), \qquad x \leftarrow x + b\,\mathrm{MLP}_l(\nu(x)),

    of a post-norm one :math:`x \leftarrow \nu(x + b\,\mathrm{Attention}_l(x))` and so on.

    Attributes
    ----------
    inputs
        `TokenInput(vocabulary)`, `PatchInput(dim)` or `VectorInput(dim)`.
    length
        The most tokens of a sequence; learned positions have this many rows.
    outputs
        Numbers that the read-out returns for each sequence, or for each token.
    causal
        A token attends to itself and the ones before it only.
    read_out
        `"mean"` pools the tokens, `"last"` takes the last one, `"token"` returns outputs for every token.
    positions
        `"learned"` adds a trained vector for each place, `"none"` nothing.
    norm
        `"pre"` (and once more before the read-out), `"post"` or `"none"`.
    gains
        Trained factors in the normalization.
    centred
        The normalization subtracts the mean over the stream (LayerNorm) or does not (RMS).
    epsilon
        Added to the variance in the normalization.
    biases
        Trained shifts in projections, MLP, normalization (where it has gains) and read-out.
    mlp_ratio
        Width of the hidden layer over d; 0 leaves the MLP out.
    activation
        Nonlinearity of the MLP; `"gelu"` is the exact one, `"erf"` is :math:`\mathrm{erf}(z)`.

    Examples
    --------
    >>> from manyheads.transformer.inputs import TokenInput
    >>> config = TransformerConfig(Shape(8, 2, 1), TokenInput(30), length=16, outputs=30, causal=True, read_out="token")
    >>> config.hidden
    64
    """

    shape: Shape
    inputs: Input
    length: int = constrained(rule=Constraint(least=1))
    outputs: int = constrained(rule=Constraint(least=1))
    causal: bool = False
    read_out: ReadOut = field(default="mean", metadata=CHECKED)
    positions: Positions = field(default="learned", metadata=CHECKED)
    norm: Norm = field(default="pre", metadata=CHECKED)
    gains: bool = True
    centred: bool = True
    epsilon: float = constrained(1e-6, Constraint(least=0))
    biases: bool = False
    mlp_ratio: int = constrained(4, Constraint(least=0))
    activation: Activation = field(default="gelu", metadata=CHECKED)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", Shape.of(self.shape))
        check_fields(self)
        other = self.shape.key_heads not in (None, self.shape.heads) or self.shape.hidden not in (None, self.hidden)
        if other or self.shape.query_rank or self.shape.key_value_rank:
            here = "here every head has keys and values, and the MLP is mlp_ratio times as wide"
            raise UsageError(f"{self.shape}: {here}; leave key_heads, hidden and ranks out")
        if isinstance(self.inputs, VectorInput) and self.inputs.dim != self.shape.width:
            given = f"vectors of {self.inputs.dim} numbers and a stream of width {self.shape.width}"
            raise UsageError(f"{given}: make them equal, or read the vectors in by PatchInput")

    @property
    def hidden(self) -> int:
        """Width of the hidden layer of the MLP, 0 without one."""
        return self.mlp_ratio * self.shape.width
