"""Inputs of a transformer: tokens of a vocabulary, patches with a linear embedding, or vectors."""

from dataclasses import dataclass

from manyheads._constraints import Constraint, check_fields, constrained
from manyheads._extras import Array
from manyheads.errors import ShapeError


@dataclass(frozen=True)
class TokenInput:
    """Integers below `vocabulary`; the stream starts from rows of a trained table (vocabulary, d)."""

    vocabulary: int = constrained(rule=Constraint(least=1))

    def __post_init__(self) -> None:
        check_fields(self, "TokenInput: ")

    fan_in = 1  # entries of the input that a coordinate of the stream sums over

    @property
    def rows(self) -> int:
        """Rows of the embedding."""
        return self.vocabulary


@dataclass(frozen=True)
class _Numbers:
    dim: int = constrained(rule=Constraint(least=1))

    def __post_init__(self) -> None:
        check_fields(self, f"{type(self).__name__}: ")


class PatchInput(_Numbers):
    """Vectors of `dim` numbers; the stream starts from x E with a trained E (dim, d)."""

    @property
    def rows(self) -> int:
        """Rows of the embedding, and entries of the input that a coordinate of the stream sums over."""
        return self.dim

    fan_in = rows


class VectorInput(_Numbers):
    """Vectors of `dim` numbers that are the stream itself: no embedding, and d must equal `dim`."""

    rows = 0
    fan_in = 1


Input = TokenInput | PatchInput | VectorInput


def embed(x: "Array", inputs: Input, table: "Array | None") -> "Array":
    """Start the residual stream (..., T, d) of tokens (..., T), or of patches and vectors (..., T, dim).

    The table of embeddings is (rows, d), None for vectors.

    Raises `ShapeError`: `x` has not the shape or the type that `inputs` says.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> embed(jnp.array([[2, 0]]), TokenInput(3), jnp.eye(3)).tolist()
    [[[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]]
    """
    import jax.numpy as jnp

    integers = jnp.issubdtype(x.dtype, jnp.integer)
    if isinstance(inputs, TokenInput):
        if not integers or x.ndim < 1:
            raise ShapeError(f"tokens of shape {x.shape} and type {x.dtype}: give (..., T) integers")
        assert table is not None
        return table[x]
    if integers or x.ndim < 2 or x.shape[-1] != inputs.dim:
        raise ShapeError(f"an input of shape {x.shape} and type {x.dtype}: give (..., T, {inputs.dim}) real numbers")
    return x if table is None else x @ table
