import numpy as np
import pytest

from manyheads.attention import MultiHeadAttention
from manyheads.errors import ShapeError, UsageError


def draw_layer(rng, heads=4, groups=2, dim=5, key_dim=3, value_dim=2, biased=True, **options):
    def draw(*shape):
        return rng.normal(size=shape) / 2

    matrices = draw(heads, dim, key_dim), draw(groups, dim, key_dim), draw(groups, dim, value_dim)
    biases = {}
    if biased:
        biases = {"query_bias": draw(heads, key_dim), "key_bias": draw(groups, key_dim)}
        biases |= {"value_bias": draw(groups, value_dim), "bias": draw(dim)}
    return MultiHeadAttention(*matrices, draw(heads, value_dim, dim), **biases, **options)


def by_loops(layer, x, mask, of_keys=None, of_values=None):
    """The definition, head by head and row by row."""
    of_keys = x if of_keys is None else of_keys
    of_values = of_keys if of_values is None else of_values
    zero = {"query_bias": np.zeros((layer.heads, 1)), "key_bias": np.zeros((layer.groups, 1))}
    bias = {name: zero[name] if getattr(layer, name) is None else getattr(layer, name) for name in zero}
    value_bias = np.zeros((layer.groups, 1)) if layer.value_bias is None else layer.value_bias
    y = np.zeros_like(x)
    for head in range(layer.heads):
        group = head // (layer.heads // layer.groups)
        queries = x @ layer.query[head] + bias["query_bias"][head]
        keys = of_keys @ layer.key[group] + bias["key_bias"][group]
        values = of_values @ layer.value[group] + value_bias[group]
        for row in np.flatnonzero(mask.any(axis=1)):
            chosen = np.flatnonzero(mask[row])
            weights = np.exp([layer.scale * (queries[row] @ keys[j]) for j in chosen])
            y[row] += weights / weights.sum() @ values[chosen] @ layer.output[head]
    if layer.bias is not None:
        y[mask.any(axis=1)] += layer.bias
    return y


@pytest.mark.parametrize("biased", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_layer_is_its_definition(rng, groups, biased):
    layer = draw_layer(rng, groups=groups, biased=biased, causal=True)
    x, mask = rng.normal(size=(2, 6, 5)), rng.random((6, 6)) < 0.7
    for number in range(2):
        expected = by_loops(layer, x[number], mask & np.tri(6, dtype=bool))
        np.testing.assert_allclose(layer(x, mask)[number], expected, rtol=0, atol=1e-13)


def test_queries_keys_and_values_come_from_sequences_of_their_own(rng):
    layer = draw_layer(rng)
    x, keys, values, mask = rng.normal(size=(3, 5)), *rng.normal(size=(2, 7, 5)), rng.random((3, 7)) < 0.7
    additive = np.where(mask, 0.0, -np.inf)
    for given in ({"keys": keys}, {"keys": keys, "values": values}):
        expected = by_loops(layer, x, mask, *given.values())
        for form in (layer, layer.merged()):
            for allowed in (mask, additive):
                np.testing.assert_allclose(form(x, allowed, **given), expected, rtol=0, atol=1e-13)
    assert layer.weights(x, mask, keys=keys).shape == (4, 3, 7)
    decoding = draw_layer(rng, causal=True)  # the queries are the last of the keys
    np.testing.assert_allclose(decoding(keys[-2:], keys=keys), decoding(keys)[-2:], rtol=0, atol=1e-13)
    with pytest.raises(ShapeError, match="a value for every key"):
        layer(x, keys=keys, values=values[:2])
    with pytest.raises(ShapeError, match="real sequences"):
        layer(x, keys=keys[:, :2])


def test_grouped_heads_are_plain_heads_with_shared_keys(rng):
    layer = draw_layer(rng)
    repeated = {name: getattr(layer, name).repeat(2, axis=0) for name in ("key", "value", "key_bias", "value_bias")}
    rest = {name: getattr(layer, name) for name in ("query", "output", "query_bias", "bias")}
    x = rng.normal(size=(6, 5))
    np.testing.assert_allclose(MultiHeadAttention(**repeated, **rest)(x), layer(x), rtol=0, atol=1e-13)


def test_key_bias_is_invisible(rng):
    layer = draw_layer(rng)
    names = ("query", "key", "value", "output", "query_bias", "value_bias", "bias")
    weights = {name: getattr(layer, name) for name in names}
    x = rng.normal(size=(6, 5))
    shifted = MultiHeadAttention(**weights, key_bias=rng.normal(size=(2, 3)))
    np.testing.assert_allclose(shifted(x), layer(x), rtol=0, atol=1e-12)


def test_scale_is_the_inverse_root_of_the_key_dimension_unless_given(rng):
    layer = draw_layer(rng)
    assert layer.scale == 3**-0.5
    weights = {name: getattr(layer, name) for name in ("query", "key", "value", "output")}
    x = rng.normal(size=(6, 5))
    mild = MultiHeadAttention(**weights | {"query": layer.query / 10})
    np.testing.assert_allclose(mild(x), MultiHeadAttention(**weights, scale=3**-0.5 / 10)(x), rtol=0, atol=1e-13)
    for scale in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(UsageError, match="positive"):
            MultiHeadAttention(**weights, scale=scale)


def test_flat_matrices_are_cut_into_heads(rng):
    heads, groups, dim, key_dim, value_dim = 4, 2, 5, 3, 2
    sizes = [(dim, heads * key_dim), (dim, groups * key_dim), (dim, groups * value_dim), (heads * value_dim, dim)]
    matrices = tuple(rng.normal(size=size) for size in sizes)
    biases = tuple(rng.normal(size=size[1]) for size in sizes)
    layer = MultiHeadAttention.from_matrices(matrices, heads, groups=groups, biases=biases)
    x = rng.normal(size=(6, dim))
    query, key, value = (x @ matrix + bias for matrix, bias in zip(matrices[:3], biases[:3], strict=True))
    mixed = []
    for head in range(heads):
        wide, narrow = slice(3 * head, 3 * head + 3), slice(3 * (head // 2), 3 * (head // 2) + 3)
        weights = np.exp(query[:, wide] @ key[:, narrow].T / np.sqrt(key_dim))
        mixed.append(weights / weights.sum(1, keepdims=True) @ value[:, 2 * (head // 2) : 2 * (head // 2) + 2])
    expected = np.concatenate(mixed, axis=1) @ matrices[3] + biases[3]
    np.testing.assert_allclose(layer(x), expected, rtol=0, atol=1e-12)


def test_weights_that_do_not_fit_are_refused(rng):
    layer = draw_layer(rng, biased=False)
    weights = {name: getattr(layer, name) for name in ("query", "key", "value", "output")}
    for name, wrong, says in [
        ("query", np.zeros((4, 5)), r"expected \(H, d, N\)"),
        ("key", np.zeros((3, 5, 3)), "multiple"),
        ("key", np.zeros((2, 5, 2)), "key of shape"),
        ("value", np.zeros((1, 5, 2)), "value of shape"),
        ("output", np.zeros((4, 3, 5)), "output of shape"),
    ]:
        with pytest.raises(ShapeError, match=says):
            MultiHeadAttention(**weights | {name: wrong})
    for name, size in [("query_bias", (4, 2)), ("key_bias", (4, 3)), ("value_bias", (2, 3)), ("bias", (4,))]:
        with pytest.raises(ShapeError, match=name):
            MultiHeadAttention(**weights, **{name: np.zeros(size)})
    with pytest.raises(ShapeError, match="does not split into 4 heads"):
        MultiHeadAttention.from_matrices((np.zeros((6, 6)),) * 4, heads=4)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("causal", [False, True])
def test_torch_module_computes_the_same(rng, causal):
    import torch

    dim, heads, length = 8, 4, 6
    module = torch.nn.MultiheadAttention(dim, heads, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.from_numpy(rng.normal(size=tuple(parameter.shape))))
    packed, packed_bias = module.in_proj_weight.detach().numpy(), module.in_proj_bias.detach().numpy()
    matrices = (*(part.T for part in np.split(packed, 3)), module.out_proj.weight.detach().numpy().T)
    biases = (*np.split(packed_bias, 3), module.out_proj.bias.detach().numpy())
    layer = MultiHeadAttention.from_matrices(matrices, heads, biases=biases, causal=causal)
    x, lengths = rng.normal(size=(3, length, dim)), np.array([6, 4, 1])
    tokens = torch.from_numpy(x)
    forbidden = torch.from_numpy(~np.tri(length, dtype=bool)) if causal else None
    padded = torch.from_numpy(np.arange(length) >= lengths[:, None])
    with torch.no_grad():
        y, pattern = module(
            tokens, tokens, tokens, attn_mask=forbidden, key_padding_mask=padded, average_attn_weights=False
        )
    mask = np.arange(length) < lengths[:, None, None]
    np.testing.assert_allclose(layer(x, mask), y.numpy(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(layer.weights(x, mask), pattern.numpy(), rtol=0, atol=1e-12)


@pytest.mark.torch
def test_torch_fused_attention_computes_the_same_for_grouped_heads(rng):
    import torch

    layer = draw_layer(rng, value_dim=3, biased=False, causal=True)
    x = rng.normal(size=(2, 6, 5))
    heads = (
        torch.from_numpy(np.einsum("bkd,hdn->bhkn", x, weight)) for weight in (layer.query, layer.key, layer.value)
    )
    mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True).numpy()
    expected = np.einsum("bhkn,hnd->bkd", mixed, layer.output)
    np.testing.assert_allclose(layer(x), expected, rtol=0, atol=1e-12)
