"""Random draws that are cheap to run or to compile: uniform integers, vectors of several lengths."""

from functools import partial
from typing import TYPE_CHECKING

from manyheads._extras import jax, jnp
from manyheads.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax import Array
    from numpy.typing import DTypeLike

    Sampler = Callable[..., Array]  # (key, shape, dtype) -> numbers

SMALL = 16_384  # numbers of a vector that is drawn at the length of a longer one


def draw_integers(key: "Array", shape: tuple[int, ...], bound: int, bits: int = 32) -> "Array":
    r"""Draw integers from raw bits, where `jax.random.randint` takes two draws and two remainders.

    The integers go from 0 to `bound - 1`, each with probability within :math:`2^{-b}` of :math:`1/\text{bound}`.
    With :math:`u` uniform on the :math:`2^b` words of `bits` bits the draw is

    .. math:: \lfloor u\,\text{bound} / 2^b \rfloor,

    as int32. The total variation from the uniform distribution is below :math:`\text{bound}\,2^{-b-1}`, and it is zero
    when `bound` is a power of two. 16 bits cost half as much as 32.

    Raises `UsageError`: `bits` is neither 16 nor 32, or `bound` is not in 1 to :math:`2^{31}-1`, or :math:`2^{16}` for
    16 bits.

    Examples
    --------
    >>> import jax
    >>> draws = draw_integers(jax.random.key(0), (1000,), 7)
    >>> int(draws.min()), int(draws.max()), draws.dtype
    (0, 6, dtype('int32'))
    """
    if bits not in (16, 32):
        raise UsageError(f"bits={bits}: draw from words of 16 or of 32 bits")
    if not 1 <= bound <= (2**16 if bits == 16 else 2**31 - 1):
        raise UsageError(f"bound={bound} does not fit words of {bits} bits: it must lie in [1, 2^{bits - bits // 32}]")
    words = jax.random.bits(key, shape, jnp.uint16 if bits == 16 else jnp.uint32).astype(jnp.uint32)
    if bits == 16:
        return ((words * jnp.uint32(bound)) >> 16).astype(jnp.int32)
    # The high word of a 32 x 32 bit product, by halves: JAX has no 64-bit integers unless x64 is on.
    high, low = words >> 16, words & 0xFFFF
    bound_high, bound_low = jnp.uint32(bound >> 16), jnp.uint32(bound & 0xFFFF)
    middle = high * bound_low + ((low * bound_low) >> 16)
    carry = (middle & 0xFFFF) + low * bound_high
    return (high * bound_high + (middle >> 16) + (carry >> 16)).astype(jnp.int32)


def draw_vectors(
    sampler: "Sampler", keys: "Array", sizes: "Sequence[int]", dtype: "DTypeLike" = float
) -> "list[Array]":
    """Draw vectors of different lengths, vector i as `sampler(keys[i], (sizes[i],), dtype)` does.

    Every generator of random numbers takes long to compile. JAX's own counts the numbers of a key from the first one
    on, so a vector is the beginning of any longer one, and one generator draws all short vectors, one after the other,
    at the length of the longest. The equality holds for keys of the default generator and `jax.random.normal` or
    `uniform`.

    Examples
    --------
    >>> import jax
    >>> keys = jax.random.split(jax.random.key(0), 3)
    >>> [len(vector) for vector in draw_vectors(jax.random.normal, keys, (2, 5, 3))]
    [2, 5, 3]
    """
    longest = max((size for size in sizes if size <= SMALL), default=0)
    lengths = [max(size, longest) for size in sizes]
    drawn: dict[int, Array] = {}
    for length in sorted(set(lengths)):
        places = [place for place, each in enumerate(lengths) if each == length]
        rows = jax.lax.map(partial(sampler, shape=(length,), dtype=dtype), keys[jnp.array(places)])
        drawn |= {place: row[: sizes[place]] for place, row in zip(places, rows, strict=True)}
    return [drawn[place] for place in range(len(sizes))]
