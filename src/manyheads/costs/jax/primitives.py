"""The cost of each JAX primitive: a table of names, and what is counted from shapes.

Counted from shapes are matrix products, convolutions, and the three steps of dense linear algebra whose number of
multiply-adds is the same in every variant of the algorithm: LU, Cholesky and triangular solves (Golub & Van Loan,
sections 3.1, 3.2 and 4.2). Other decompositions and Fourier transforms depend on the data or on the library.
"""

import math

import numpy as np

from manyheads.costs.jax.jaxpr import Equation, Variable, inner_programs


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# One operation for each element of the result.
ELEMENTWISE = _names(
    "abs add add_any addupdate and ceil clamp clz conj div eq eq_to floor ge gt integer_pow is_finite le le_to lt lt_to"
    " max min mul mulhi ne neg nextafter not one_minus_square or population_count reciprocal reduce_precision"
    " rem round select_n shift_left shift_right_arithmetic shift_right_logical sign square sub xor"
)
# One evaluation for each element of the result.
TRANSCENDENTAL = _names(
    "acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos cosh cumlogsumexp digamma erf erf_inv"
    " erfc exp exp2 expm1 igamma igamma_grad_a igammac lgamma log log1p log2 logistic polygamma pow"
    " regularized_incomplete_beta rsqrt sin sinh sqrt tan tanh zeta"
)
# One operation for each element that is read.
REDUCTIONS = _names(
    "argmax argmin cummax cummin cumprod cumsum reduce reduce_and reduce_max reduce_min reduce_or reduce_prod"
    " reduce_sum reduce_xor"
)
# One operation for each update: the last operand.
SCATTERS = _names("scatter-add scatter-max scatter-min scatter-mul scatter-sub")
# Data movement and bookkeeping: nothing is computed.
FREE = _names(
    "after_all axis_index bitcast_convert_type broadcast_in_dim broadcast_to complex concatenate convert_element_type"
    " copy create_token dce_sink debug_callback debug_print device_put dim_as_value dimension_size dynamic_slice"
    " dynamic_update_slice empty empty2 empty_ref free_ref freeze from_edtype gather get imag inspect_sharding iota"
    " iota_2x32_shape layout_constraint masked_load masked_swap multiple_of name new_ref num_programs"
    " optimization_barrier pad pbroadcast pbroadcast_done pbroadcast_start pin platform_index program_id pvary real"
    " reduced_vary_cast_p reshape reshard rev scatter sharding_constraint slice split squeeze stack stop_gradient swap"
    " tie tile to_edtype transpose unpin unstack vary_unreduced_cast_p with_memory_space_constraint zeros_like"
)
# Comparisons, permutations and random draws, which are neither products nor arithmetic: said in a note.
NOTED = _names(
    "approx_top_k lu_pivots_to_permutation philox2x32 philox4x32 random_bits random_clone random_fold_in random_gamma"
    " random_seed random_split random_unwrap random_wrap rng_bit_generator rng_uniform select_and_gather_add"
    " select_and_scatter sort threefry2x32 threefry4x32 top_k"
)
SELECTED_SUMS = _names("select_and_scatter_add")
# Between devices, with `_start` and `_done` where they are split.
COLLECTIVES = _names(
    "all_gather all_gather_invariant all_gather_reduced all_to_all pmax pmin ppermute preduced precv psend psum"
    " psum_invariant ragged_all_to_all reduce_scatter unreduced_psum unreduced_reduce_scatter"
)
# Arithmetic whose amount the program does not determine: reported as unknown.
ITERATIVE = _names("eig eigh schur svd")
VARIANTS = _names(
    "cholesky_update fft geqp3 geqrf hessenberg householder_product ormqr polynomial qr spsolve symmetric_product"
    " tridiagonal tridiagonal_solve"
)
OUTSIDE = _names("call_exported ffi_call io_callback pure_callback")
KERNELS = _names("rnn_bwd rnn_fwd scaled_dot scaled_matmul scaled_matmul_wrapper")
SPARSE = ("bcoo_", "bcsr_", "coo_", "csr_")


def describe_uncounted(eqn: Equation) -> tuple[str, bool]:
    """Return why the work of a primitive is not counted, and whether that makes the cost unknown."""
    name = eqn.primitive.name
    reasons = (
        (NOTED, "compares, permutes or draws: not counted"),
        (SELECTED_SUMS, "compares, and adds what it selected: not counted"),
        (COLLECTIVES, "exchanges data between devices: its additions and its traffic are not counted"),
        (ITERATIVE, "iterates until it converges: how often depends on the data"),
        (VARIANTS, "takes as many operations as the library's own algorithm: no count is exact"),
        (OUTSIDE, "calls code outside of the program"),
        (KERNELS, "is one kernel of a library, whose operations are not in the program"),
    )
    plain = name.removesuffix("_start").removesuffix("_done")
    for names, reason in reasons:
        if plain in names:
            return f"{name} {reason}", names not in (NOTED, SELECTED_SUMS, COLLECTIVES)
    if name == "ragged_dot_general":
        why = "multiplies as many rows as its group sizes add up to, and their values are not read"
        return f"{name} {why}: at most {ragged_macs(eqn):,} multiply-adds", True
    if name.startswith(SPARSE):
        return f"{name} works on a sparse array: how many operations its stored elements take is not derived", True
    if name.startswith("dot_product_attention"):
        return f"{name} {reasons[-1][1]}", True
    if inner_programs(eqn):
        return f"{name} contains a program, and this counter does not know how often it runs", True
    return f"{name} has no rule in this counter", True


def ragged_macs(eqn: Equation) -> int:
    """Count the multiply-adds of `ragged_dot_general` whose groups take all rows."""
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batched) = numbers.dot_dimension_numbers
    taken = (*contracted, *batched, *numbers.rhs_group_dimensions)
    right = eqn.invars[1].aval.shape
    return size(eqn.invars[0]) * math.prod(extent for axis, extent in enumerate(right) if axis not in taken)


def size(var: Variable) -> int:
    """Count the elements of a variable (0 for a token)."""
    return math.prod(getattr(var.aval, "shape", (0,)))


def itemsize(var: Variable) -> int:
    """Bytes of an element."""
    return int(getattr(getattr(var.aval, "dtype", None), "itemsize", 0))


def inexact(var: Variable) -> bool:
    """Tell whether a variable holds real or complex numbers (bfloat16 and float8 included)."""
    import jax.numpy as jnp

    dtype = getattr(var.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, np.inexact)


def dot_macs(eqn: Equation) -> int:
    """Count the multiply-adds of `dot_general`: batch x rows x columns x contracted."""
    (_, contracted), (_, batched) = eqn.params["dimension_numbers"]
    right = eqn.invars[1].aval.shape
    free = math.prod(extent for axis, extent in enumerate(right) if axis not in (*contracted, *batched))
    return size(eqn.invars[0]) * free


def convolution_macs(eqn: Equation) -> int:
    """Count the multiply-adds of `conv_general_dilated` that meet a real element of the input.

    Products with padding, and with the zeros that dilation inserts, are left out. Each (output, tap, input) triple then
    appears once in the product and once in each of its two gradients.
    """
    params = eqn.params
    left, right = (var.aval.shape for var in eqn.invars)
    out = eqn.outvars[0].aval.shape
    numbers = params["dimension_numbers"]
    pairs = 1
    for axis, stride in enumerate(params["window_strides"]):
        outputs, taps = out[numbers.out_spec[2 + axis]], right[numbers.rhs_spec[2 + axis]]
        steps = stride, params["rhs_dilation"][axis], params["lhs_dilation"][axis]
        pairs *= _valid_taps(outputs, taps, left[numbers.lhs_spec[2 + axis]], steps, params["padding"][axis][0])
    return pairs * out[numbers.out_spec[0]] * out[numbers.out_spec[1]] * right[numbers.rhs_spec[1]]


def _valid_taps(outputs: int, taps: int, inputs: int, steps: tuple[int, int, int], padding: int) -> int:
    """Count the pairs (output, tap) at `output * stride + tap * rhs_dilation - padding` that meet an element."""
    (stride, step, dilation), long, short = steps, outputs, taps
    if taps > outputs:  # the shorter axis is walked, the longer one counted
        stride, step, long, short = step, stride, taps, outputs
    common = math.gcd(stride, dilation)
    period = dilation // common
    inverse = pow(stride // common, -1, period)
    total = 0
    for start in range(-padding, short * step - padding, step):
        if start % common:
            continue
        first = max(0, -(start // stride))  # the first place that is not before the input
        last = min(long - 1, ((inputs - 1) * dilation - start) // stride)
        first += (-(start // common) * inverse - first) % period  # the first that meets no inserted zero
        total += max(0, (last - first) // period + 1)
    return total


def factorization(eqn: Equation) -> tuple[str, int, int, int] | None:
    """Return (row, multiply-adds, divisions, square roots) of an LU, Cholesky or triangular solve, otherwise None.

    Column `k` of an m x n LU is divided by its pivot, m - 1 - k numbers, and updates (m - 1 - k)(n - 1 - k) others; a
    Cholesky decomposition updates their lower triangle only. A triangular solve of `n` equations takes n (n - 1) / 2
    multiply-adds and `n` divisions for each right-hand side.
    """
    name, shape = eqn.primitive.name, eqn.invars[0].aval.shape
    if name not in ("lu", "cholesky", "triangular_solve"):
        return None
    (rows, columns), batch = shape[-2:], math.prod(shape[:-2])
    row = f"{name} {str(shape).replace(' ', '')}"
    if name == "triangular_solve":
        sides = size(eqn.invars[1]) // max(rows, 1)
        divisions = 0 if eqn.params["unit_diagonal"] else sides * rows
        return row, sides * (rows * (rows - 1) // 2), divisions, 0
    if name == "cholesky":
        below = rows * (rows - 1) // 2
        return row, batch * (below * (rows + 1) // 3), batch * below, batch * rows
    pivots = min(rows, columns)
    squares = (pivots - 1) * pivots * (2 * pivots - 1) // 6
    # Sum over k < p of (m - 1 - k)(n - 1 - k), from the last pivot on: (j + a)(j + b), a or b being zero.
    macs = squares + (max(rows, columns) - pivots) * (pivots * (pivots - 1) // 2)
    divisions = pivots * (rows - pivots) + pivots * (pivots - 1) // 2
    return row, batch * macs, batch * divisions, 0


def arithmetic(eqn: Equation) -> tuple[str, int, int] | None:
    """Return (row, elementwise, transcendental) of a primitive without inner program, or None if the table lacks it.

    Arithmetic on integers and Booleans (indices, masks, counters) counts nothing.
    """
    name = eqn.primitive.name
    if name in FREE:
        return "elementwise", 0, 0
    windows = ("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
    if name not in ELEMENTWISE | TRANSCENDENTAL | REDUCTIONS | SCATTERS and name not in windows:
        return None
    if not any(inexact(var) for var in (*eqn.invars, *eqn.outvars)):
        return "elementwise", 0, 0
    if name in TRANSCENDENTAL:
        return "transcendental functions", 0, size(eqn.outvars[0])
    if name in REDUCTIONS:
        return "reductions", size(eqn.invars[0]), 0
    if name in SCATTERS:
        return "reductions", size(eqn.invars[-1]), 0
    if name in windows:
        return "reductions", size(eqn.outvars[0]) * math.prod(eqn.params["window_dimensions"]), 0
    return "elementwise", size(eqn.outvars[0]), 0
