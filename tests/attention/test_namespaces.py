"""One layer in NumPy, PyTorch and JAX: the definition, the caller's kind of array, derivatives, and no JAX needed."""

import importlib.util
import pickle
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from manyheads._namespaces import in_common_dtype, kind, like, namespace
from manyheads._trees import Tree, leaves_of, map_leaves, static
from manyheads.attention import (
    AttentionLayer,
    MultiHeadAttention,
    attention_entropy,
    causal,
    masked_softmax,
    padding,
    sliding_window,
)

needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs the extra jax")
KINDS = ["numpy", pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=needs_jax)]
WEIGHTS = ("theta", "projection", "key_bias", "query", "key", "value", "output", "query_bias", "value_bias", "bias")


@pytest.fixture(params=KINDS)
def array(request):
    """Return the function that makes arrays of one kind; JAX computes in double precision."""
    if request.param == "torch":
        import torch

        yield lambda values: torch.from_numpy(np.array(values))
    elif request.param == "jax":
        import jax

        with jax.enable_x64(True):
            yield jax.numpy.asarray
    else:
        yield np.asarray


def merged(rng, array=np.asarray):
    theta, projection = rng.normal(size=(2, 3, 6, 6)) / 3
    beta, bias = rng.normal(size=(3, 6)), rng.normal(size=6)
    return AttentionLayer(array(theta), array(projection), array(beta), array(bias), causal=True)


def grouped(rng, array=np.asarray):
    matrices = [rng.normal(size=(heads, 6, 3)) for heads in (4, 2, 2)]
    biases = {f"{name}_bias": array(rng.normal(size=(n, 3))) for name, n in (("query", 4), ("key", 2), ("value", 2))}
    output, bias = rng.normal(size=(4, 3, 6)), rng.normal(size=6)
    return MultiHeadAttention(*map(array, (*matrices, output)), **biases, bias=array(bias), causal=True)


forms = pytest.mark.parametrize("make", [merged, grouped])


def by_loops(layer, x, keep, added=0.0):
    """Apply a causal layer by its definition, head by head and row by row."""
    heads = layer.merged() if isinstance(layer, MultiHeadAttention) else layer
    y = np.zeros_like(x)
    for sequence, row in np.ndindex(x.shape[:2]):
        tokens = x[sequence]
        seen = [key for key in range(row + 1) if keep[sequence, key]]
        if not seen:
            continue
        for theta, projection, beta in zip(heads.theta, heads.projection, heads.key_bias, strict=True):
            logits = tokens[seen] @ (tokens[row] @ theta + beta) + np.broadcast_to(added, (len(tokens),) * 2)[row, seen]
            weights = np.exp(logits - logits.max())
            y[sequence, row] += weights / weights.sum() @ tokens[seen] @ projection
        y[sequence, row] += heads.bias
    return y


@forms
def test_every_namespace_computes_the_definition_and_keeps_its_arrays(make, array, rng):
    seed, x, lengths = int(rng.integers(1000)), rng.normal(size=(3, 5, 6)), np.array([5, 2, 0])
    keep = np.arange(5) < lengths[:, None]
    expected = by_loops(make(np.random.default_rng(seed)), x, keep)
    layer, tokens = make(np.random.default_rng(seed), array), array(x)
    found = layer(tokens, padding(array(lengths)))
    assert type(found) is type(tokens)
    assert found.dtype == tokens.dtype
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-13)
    for mask in (
        padding(lengths),
        keep[:, None, :],
        array(keep[:, None, :]),
        array(np.where(keep, 0.0, -np.inf)[:, None]),
    ):
        np.testing.assert_array_equal(np.asarray(layer(tokens, mask)), np.asarray(found))
    pattern = layer.weights(tokens)
    assert type(pattern) is type(tokens)
    np.testing.assert_allclose(np.asarray(pattern).sum(-1), 1, rtol=0, atol=1e-14)


@forms
def test_a_bias_is_added_in_every_namespace(make, array, rng):
    seed, x, bias = int(rng.integers(1000)), rng.normal(size=(2, 5, 6)), rng.normal(size=(5, 5))
    expected = by_loops(make(np.random.default_rng(seed)), x, np.ones((2, 5), bool), bias)
    found = make(np.random.default_rng(seed), array)(array(x), array(bias))
    np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=1e-13)


@forms
def test_sequences_do_not_see_each_other_however_many_are_computed_at_once(make, rng):
    layer, x, lengths = make(rng), rng.normal(size=(40, 2, 30, 6)), rng.integers(0, 31, size=(40, 1))
    whole = layer(x, padding(lengths))
    for place in (0, 17, 39):
        alone = layer(x[place], padding(lengths[place]))
        np.testing.assert_allclose(whole[place], alone, rtol=0, atol=1e-13)
    cross = layer(x[:, :, -3:], keys=x, values=x[..., ::-1])
    np.testing.assert_allclose(cross[39], layer(x[39, :, -3:], keys=x[39], values=x[39, ..., ::-1]), rtol=0, atol=1e-13)


@forms
def test_conversions_stay_in_their_namespace(make, array, rng):
    layer, x = make(rng, array), array(rng.normal(size=(2, 5, 6)))
    twin = layer.merged() if make is grouped else layer.factored(6)
    for weight in leaves_of(twin):
        assert weight is None or type(weight) is type(x)
    np.testing.assert_allclose(np.asarray(twin(x)), np.asarray(layer(x)), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", [None, causal, causal & sliding_window(9)])
def test_entropy_is_its_definition_for_every_block(array, rule, rng):
    q, k = rng.normal(size=(2, 2, 3, 70, 8))
    logits = q @ k.swapaxes(-1, -2) * 8**-0.5
    allowed = np.ones((70, 70), bool) if rule is None else rule.allowed(None, (70, 70))
    p = np.where(allowed, np.exp(logits), 0)
    total = p.sum(-1, keepdims=True)
    expected = -(p / total * np.log(np.where(p > 0, p / total, 1))).sum(-1)
    for block in (1, 8, 128, 4096):
        entropy, logsumexp = attention_entropy(array(q), array(k), mask=rule, block=block)
        assert type(entropy) is type(logsumexp) is type(array(q))
        np.testing.assert_allclose(np.asarray(entropy), expected, rtol=0, atol=1e-13)
        np.testing.assert_allclose(np.asarray(logsumexp), np.log(total[..., 0]), rtol=0, atol=1e-13)


def test_the_mask_alone_may_bring_the_leading_axes(array, rng):
    q, layer = rng.normal(size=(5, 6)), merged(rng)
    entropy, _ = attention_entropy(array(q), array(q), mask=padding([5, 2]))
    expected = attention_entropy(q, q[:2])[0]
    np.testing.assert_allclose(np.asarray(entropy)[1], expected, rtol=0, atol=1e-13)
    found = map_leaves(lambda leaf: None if leaf is None else array(leaf), layer).weights(array(q)[None], padding([2]))
    np.testing.assert_array_equal(np.asarray(found)[..., 2:], 0)


def test_softmax_of_extreme_rows(array):
    logits = array(np.array([[3e300, 0.0, -3e300], [-np.inf, 0.0, -740.0], [-np.inf] * 3, [np.nan, 0.0, 0.0]]))
    found = np.asarray(masked_softmax(logits, array(np.array([[True] * 3] * 3 + [[False, True, True]]))))
    np.testing.assert_array_equal(found[0], [1, 0, 0])
    assert found[1, 2] < 1e-300
    np.testing.assert_array_equal(found[1, :2], [0, 1])
    np.testing.assert_array_equal(found[2:], [[0, 0, 0], [0, 0.5, 0.5]])


def test_arguments_are_never_overwritten(rng):
    layer, x, logits, bias = (
        merged(rng),
        rng.normal(size=(2, 4, 6)),
        rng.normal(size=(2, 3, 3)),
        rng.normal(size=(4, 4)),
    )
    before = [array.copy() for array in (x, logits, bias, layer.theta)]
    masked_softmax(logits)
    masked_softmax(logits, np.tri(3, dtype=bool))
    layer(x, bias)
    attention_entropy(x, x, mask=bias)
    attention_entropy(x, x, mask=causal)
    for array, copy in zip((x, logits, bias, layer.theta), before, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.torch
@forms
def test_torch_derivatives_are_finite_differences_across_empty_rows(make, rng):
    import torch

    layer = make(rng)
    names = [name for name in WEIGHTS if getattr(layer, name, None) is not None]
    weights = [torch.from_numpy(np.array(getattr(layer, name))).requires_grad_() for name in names]
    x = torch.from_numpy(rng.normal(size=(2, 4, 6))).requires_grad_()
    mask = np.tri(4, k=-1, dtype=bool)  # the first row attends to nothing

    def apply(x, *weights):
        return type(layer)(**dict(zip(names, weights, strict=True)), causal=True)(x, mask)

    assert torch.autograd.gradcheck(apply, (x, *weights))


@pytest.mark.torch
@pytest.mark.parametrize("block", [2, 128])
def test_torch_derivatives_of_entropy_and_softmax(block, rng):
    import torch

    q, k = (torch.from_numpy(array).requires_grad_() for array in rng.normal(size=(2, 2, 5, 3)))
    bias = torch.from_numpy(rng.normal(size=(5, 5))).requires_grad_()
    assert torch.autograd.gradcheck(lambda q, k: attention_entropy(q, k, mask=causal, block=block), (q, k))
    assert torch.autograd.gradcheck(lambda q, b: attention_entropy(q, q, mask=causal & b, block=block), (q, bias))
    allowed = torch.tensor([[True, False, True], [False, False, False]])
    logits = torch.tensor([[0.3, np.inf, 1.0], [np.nan, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    masked_softmax(logits, allowed)[0, 0].backward()
    p = 1 / (1 + np.exp(0.7))
    np.testing.assert_allclose(logits.grad, [[p * (1 - p), 0, -p * (1 - p)], [0, 0, 0]], rtol=1e-14)


@pytest.mark.torch
def test_constants_follow_a_tensor_and_its_precision(rng):
    import torch

    layer, x = merged(rng), torch.from_numpy(rng.normal(size=(2, 4, 6)))
    np.testing.assert_allclose(layer(x), layer(x.numpy()), rtol=0, atol=1e-14)
    assert layer(x.float()).dtype == torch.float64  # as the weights
    assert layer(torch.zeros(2, 6, dtype=torch.int64)).dtype == torch.float64
    half = merged(rng, lambda array: torch.from_numpy(np.asarray(array)).bfloat16())
    assert half(x.bfloat16(), padding([4, 2])).dtype == torch.bfloat16
    assert attention_entropy(x.bfloat16(), x.bfloat16())[0].dtype == torch.float32
    assert like(x, np.zeros(2, ml_dtypes.bfloat16)).dtype == torch.bfloat16
    assert torch.equal(like(x, np.arange(3.0)[::-1]), torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64))


def test_numpy_computes_narrow_floats_in_single_precision(rng):
    for dtype in (np.float16, np.float32, ml_dtypes.bfloat16):
        layer = merged(rng, lambda array, dtype=dtype: np.asarray(array).astype(dtype))
        x = rng.normal(size=(3, 6)).astype(dtype)
        assert layer(x).dtype == layer(np.ones((3, 6), np.int64)).dtype == dtype
        single = map_leaves(lambda leaf: leaf.astype(np.float32), layer)(x.astype(np.float32))
        np.testing.assert_array_equal(layer(x), single.astype(dtype))
        assert attention_entropy(x, x)[0].dtype == np.float32
    (arrays,), dtype = in_common_dtype([np.ones(1, np.float16), np.ones(1, ml_dtypes.bfloat16), np.ones(1, bool)])
    assert dtype == np.float32
    assert [each.dtype for each in arrays] == [np.float32] * 3
    assert [kind(np.zeros(1, each)) for each in (bool, np.int8, np.uint8, complex, ml_dtypes.int4)] == list("biuci")


def test_layers_and_rules_are_pickled_and_shown(rng):
    layer, x = grouped(rng), rng.normal(size=(5, 6))
    again, rule = pickle.loads(pickle.dumps((layer, causal & padding(3))))
    np.testing.assert_array_equal(again(x, rule), layer(x, causal & padding(3)))
    assert repr(layer).startswith("MultiHeadAttention(query=float64[4, 6, 3], key=float64[2, 6, 3]")
    with pytest.raises(AttributeError):
        layer.causal = False


class Pair(Tree):
    first: object
    second: object = None
    name: str = static(default="pair")

    def __post_init__(self):
        if isinstance(self.first, str):
            raise ValueError("refused")


def test_trees_keep_structure_and_identity():
    pair = Pair(np.ones(2), {"a": [1.0, Pair(2.0)]})
    assert [repr(leaf) for leaf in leaves_of(pair)] == ["array([1., 1.])", "1.0", "2.0", "None"]
    assert map_leaves(lambda leaf: leaf, pair) is pair
    doubled = map_leaves(lambda leaf: leaf if leaf is None else 2 * leaf, pair)
    assert doubled.second["a"][1].first == 4.0
    assert namespace(pair) is np
    with pytest.raises(ValueError, match="refused"):
        Pair("refused")


@needs_jax
def test_trees_are_pytrees_of_jax():
    import jax

    pair = Pair(np.ones(2), Pair(1.0, name="inner"))
    leaves, structure = jax.tree.flatten(pair)
    assert len(leaves) == 2
    assert structure == jax.tree.structure(Pair(0, Pair(0, name="inner")))
    assert structure != jax.tree.structure(Pair(0, Pair(0)))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(pair)]
    assert paths == [".first", ".second.first"]
    assert jax.tree.unflatten(structure, ["refused", 0]).first == "refused"  # rebuilt without checks
    assert jax.jit(lambda pair: pair.first + pair.second.first)(pair).tolist() == [2.0, 2.0]


LATER = """
import sys, numpy as np
from manyheads.attention import AttentionLayer, attention_entropy, causal
layer = AttentionLayer(np.zeros((1, 2, 2)), np.eye(2)[None], causal=True)
expected = layer(np.eye(2)), attention_entropy(np.eye(2), np.eye(2), mask=causal)
assert "jax" not in sys.modules
import jax
{touch}
np.testing.assert_allclose(jax.jit(lambda layer, x: layer(x))(layer, np.eye(2)), expected[0])
np.testing.assert_allclose(attention_entropy(jax.numpy.eye(2), np.eye(2), mask=causal), expected[1], rtol=1e-6)
"""


@needs_jax
@pytest.mark.parametrize("touch", ["layer(np.eye(2))", "AttentionLayer(layer.theta, layer.projection)"])
def test_jax_may_be_imported_later(touch):
    subprocess.run([sys.executable, "-c", LATER.format(touch=touch)], check=True)
