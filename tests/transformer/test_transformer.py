"""The finite transformer against loops in NumPy, and the properties that its theories rely on."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from manyheads.errors import ShapeError, UsageError
from manyheads.transformer.config import TransformerConfig
from manyheads.transformer.inputs import PatchInput, TokenInput, VectorInput
from manyheads.transformer.scaling import ROLES, Scaling, standard_scaling
from manyheads.transformer.shape import Shape
from manyheads.transformer.transformer import Transformer, initialize
from manyheads.transformer.weights import roles, shapes

SHAPE = Shape(key_dim=3, heads=2, depth=2)
BASE = TransformerConfig(SHAPE, TokenInput(7), length=5, outputs=4)
CONFIGS = {
    "tokens, pooled": BASE,
    "causal, per token": dataclasses.replace(BASE, causal=True, read_out="token", activation="relu"),
    "patches, biases, RMS": dataclasses.replace(
        BASE, inputs=PatchInput(4), biases=True, centred=False, read_out="last", activation="tanh", mlp_ratio=1
    ),
    "vectors, post, erf": dataclasses.replace(
        BASE, inputs=VectorInput(6), norm="post", biases=True, activation="erf", causal=True
    ),
    "attention only": dataclasses.replace(BASE, norm="none", positions="none", mlp_ratio=0, inputs=PatchInput(4)),
    "no gains": dataclasses.replace(BASE, gains=False, activation="identity", epsilon=0.0),
    "silu": dataclasses.replace(BASE, activation="silu", read_out="last"),
}
ACTIVATIONS = {
    "gelu": lambda z: z * stats.norm.cdf(z),
    "relu": lambda z: np.maximum(z, 0),
    "erf": np.vectorize(math.erf),
    "tanh": np.tanh,
    "silu": lambda z: z / (1 + np.exp(-z)),
    "identity": lambda z: z,
}


def random_scaling(rng):
    """All scales different and none trivial."""
    draw = {name: {role: float(rng.uniform(0.5, 1.5)) for role in ROLES} for name in ("initial", "multiplier")}
    return Scaling(
        **draw,
        logit_prefactor=float(rng.uniform(0.5, 2)),
        logit_exponent=float(rng.uniform(0.3, 1)),
        branch=float(rng.uniform(0.3, 2)),
        output=float(rng.uniform(0.3, 2)),
    )


def random_model(config, rng, scaling=None):
    """Every array random, gains and biases too, in float64 NumPy."""
    weights = jax.tree.map(
        lambda shape: rng.normal(size=shape) * 0.6, shapes(config), is_leaf=lambda node: type(node) is tuple
    )
    return Transformer(weights, scaling or random_scaling(rng), config)


def random_input(config, rng, batch=(2,), tokens=None):
    tokens = tokens or config.length
    if isinstance(config.inputs, TokenInput):
        return rng.integers(0, config.inputs.vocabulary, (*batch, tokens))
    return rng.normal(size=(*batch, tokens, config.inputs.dim))


def by_loops(model, x):
    """One sequence, token by token and head by head, from the formula of the configuration."""
    w, s, c = model.weights, model.scaling, model.config
    m, b = s.multiplier, w.blocks
    n, heads, depth = c.shape.key_dim, c.shape.heads, c.shape.depth

    def norm(v, gain, shift, role):
        v = v - v.mean() if c.centred else v
        v = v / math.sqrt((v**2).mean() + c.epsilon)
        v = v if gain is None else v * (m[role] * gain)
        return v if shift is None else v + m[role] * shift

    def add(v, bias, role="bias"):
        return v if bias is None else v + m[role] * bias

    def at(array, layer):
        return None if array is None else array[layer]

    stream = []
    for place, token in enumerate(x):
        if isinstance(c.inputs, TokenInput):
            start = m["embedding"] * w.embedding[token]
        elif isinstance(c.inputs, PatchInput):
            start = m["embedding"] * (w.embedding.T @ token)
        else:
            start = token.copy()
        stream.append(start if w.positional is None else start + m["positional"] * w.positional[place])
    for layer in range(depth):
        gain, shift = at(b.attention_gain, layer), at(b.attention_shift, layer)
        z = [norm(v, gain, shift, "norm") for v in stream] if c.norm == "pre" else list(stream)
        added = [np.zeros(c.shape.width) for _ in stream]
        for head in range(heads):
            q = [
                add(m["query"] * b.query[layer, head].T @ v, at(at(b.query_bias, layer), head), "logit_bias") for v in z
            ]
            k = [add(m["key"] * b.key[layer, head].T @ v, at(at(b.key_bias, layer), head), "logit_bias") for v in z]
            v_ = [add(m["value"] * b.value[layer, head].T @ v, at(at(b.value_bias, layer), head)) for v in z]
            for i in range(len(z)):
                seen = range(i + 1) if c.causal else range(len(z))
                logits = np.array([s.logit_prefactor / n**s.logit_exponent * (q[i] @ k[j]) for j in seen])
                p = np.exp(logits) / np.exp(logits).sum()
                added[i] += m["output"] * b.output[layer, head].T @ sum(p[j] * v_[j] for j in seen)
        stream = [v + s.branch * add(a, at(b.output_bias, layer)) for v, a in zip(stream, added, strict=True)]
        stream = [norm(v, gain, shift, "norm") for v in stream] if c.norm == "post" else stream
        if c.mlp_ratio == 0:
            continue
        gain, shift = at(b.mlp_gain, layer), at(b.mlp_shift, layer)
        for i, v in enumerate(stream):
            z_i = norm(v, gain, shift, "norm") if c.norm == "pre" else v
            hidden = ACTIVATIONS[c.activation](add(m["mlp_in"] * b.mlp_in[layer].T @ z_i, at(b.mlp_in_bias, layer)))
            v = v + s.branch * add(m["mlp_out"] * b.mlp_out[layer].T @ hidden, at(b.mlp_out_bias, layer))
            stream[i] = norm(v, gain, shift, "norm") if c.norm == "post" else v
    if c.norm == "pre":
        stream = [norm(v, w.final_gain, w.final_shift, "final_norm") for v in stream]
    outputs = [m["unembedding"] * w.unembedding.T @ v for v in stream]
    outputs = np.array([s.output * add(o, w.unembedding_bias, "unembedding_bias") for o in outputs])
    return {"token": outputs, "mean": outputs.mean(0), "last": outputs[-1]}[c.read_out]


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_equals_loops(name, rng):
    config = CONFIGS[name]
    model = random_model(config, rng)
    x = random_input(config, rng)
    outputs = model(x)
    assert isinstance(outputs, np.ndarray)
    assert outputs.dtype == np.float64
    expected = np.array([by_loops(model, sequence) for sequence in x])
    # Sums of a few hundred products of order one, amplified by normalization: 1e-10 leaves four decades.
    np.testing.assert_allclose(outputs, expected, rtol=1e-10, atol=1e-10 * np.abs(expected).max())


def test_float32_follows_to_its_rounding(rng):
    model = random_model(BASE, rng)
    x = random_input(BASE, rng)
    single = Transformer(jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), model.weights), model.scaling, BASE)
    outputs = single(jnp.asarray(x))
    assert outputs.dtype == jnp.float32
    expected = model(x)
    assert np.abs(outputs - expected).max() < 1e-4 * max(1, np.abs(expected).max())


def test_leading_axes_are_batch_axes_and_shorter_sequences_fit(rng):
    model = random_model(BASE, rng)
    x = random_input(BASE, rng, batch=(2, 3), tokens=4)
    whole = model(x)
    assert whole.shape == (2, 3, 4)
    np.testing.assert_allclose(whole[1, 2], by_loops(model, x[1, 2]), rtol=1e-10)


def test_record_holds_what_the_formula_uses(rng):
    config = CONFIGS["causal, per token"]
    model = random_model(config, rng)
    x = random_input(config, rng)
    record = model.record(x, patterns=True)
    layers = record.layers
    np.testing.assert_allclose(record.outputs, model(x), rtol=1e-13)
    assert model.record(x).layers.patterns is None
    # The stream adds up out of the branches.
    below = np.concatenate([record.start[None], layers.stream[:-1]])
    np.testing.assert_allclose(
        layers.stream, below + model.scaling.branch * (layers.attention + layers.mlp), rtol=1e-12
    )
    # The patterns come from the recorded logits.
    logits = record.logit * np.einsum("lbhqn,lbhkn->lbhqk", layers.queries, layers.keys)
    raised = np.exp(logits) * np.tril(np.ones((5, 5)))
    np.testing.assert_allclose(layers.patterns, raised / raised.sum(-1, keepdims=True), rtol=1e-10)
    assert layers.hidden.shape == (2, 2, 5, config.hidden)
    assert (layers.hidden >= 0).all()
    np.testing.assert_allclose(record.logit, model.scaling.logit(3))


def test_causal_outputs_ignore_the_future(rng):
    config = CONFIGS["causal, per token"]
    model = random_model(config, rng)
    x = random_input(config, rng)
    for cut in range(1, 5):
        changed = x.copy()
        changed[:, cut:] = (changed[:, cut:] + 1) % 7
        before, after = model(x), model(changed)
        assert np.array_equal(before[:, :cut], after[:, :cut])
        assert (np.abs(before[:, cut:] - after[:, cut:]).max(-1) > 1e-8).all()


def test_without_positions_and_mask_order_does_not_matter_and_with_them_it_does(rng):
    x = random_input(BASE, rng)
    x[:, 0], x[:, 1] = 0, 1  # two tokens that differ
    swapped = x[:, [1, 0, *range(2, 5)]]
    blind = random_model(dataclasses.replace(BASE, positions="none"), rng)
    np.testing.assert_allclose(blind(x), blind(swapped), rtol=1e-9)
    seeing = random_model(BASE, rng)
    assert np.abs(seeing(x) - seeing(swapped)).max() > 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_multiplier_form_equals_effective_form(name, rng):
    """m W with multiplier m is the same function as W' = m W with multiplier one."""
    config = CONFIGS[name]
    model = random_model(config, rng)
    multiplier = model.scaling.multiplier
    weights = jax.tree.map(lambda role, array: multiplier[role] * array, roles(model.weights), model.weights)
    plain = Scaling(
        model.scaling.initial,
        dict.fromkeys(ROLES, 1.0),
        model.scaling.logit_prefactor * 3 ** (1 - model.scaling.logit_exponent),
        1.0,
        model.scaling.branch,
        model.scaling.output,
    )
    x = random_input(config, rng)
    np.testing.assert_allclose(Transformer(weights, plain, config)(x), model(x), rtol=1e-11, atol=1e-12)


def test_roles_cover_every_leaf_and_every_role_is_used():
    everything, scaling = dataclasses.replace(BASE, biases=True), standard_scaling(SHAPE, BASE.inputs)
    model = jax.eval_shape(lambda key: initialize(everything, scaling, key), jax.random.key(0))
    found = roles(model.weights)
    assert jax.tree.structure(found) == jax.tree.structure(model.weights)
    assert set(jax.tree.leaves(found)) == set(ROLES)


def test_initial_spread_by_role(seed, rng):
    """Each role's variance against its chi-square interval at 1e-6, ten tests: false alarm 1e-5."""
    config = TransformerConfig(Shape(8, 4, 2), TokenInput(40), length=30, outputs=40, biases=True)
    scaling = random_scaling(rng)
    model = initialize(config, scaling, jax.random.key(seed))
    leaves = zip(jax.tree.leaves(roles(model.weights)), jax.tree.leaves(model.weights), strict=True)
    for (path, array), (role, _) in zip(jax.tree_util.tree_leaves_with_path(model.weights), leaves, strict=True):
        name, level = path[-1].name, np.float32(scaling.initial[role])
        if name.endswith("gain"):
            assert (np.asarray(array) == level).all()
        elif name.endswith(("shift", "bias")):
            assert (np.asarray(array) == 0).all()
        else:
            sum_of_squares = float(np.square(np.asarray(array, float) / level).sum())
            low, high = stats.chi2.interval(1 - 1e-6, array.size)
            assert low < sum_of_squares < high, name


def test_arrays_are_independent_and_parts_keep_theirs(seed):
    key, scaling = jax.random.key(seed), standard_scaling(SHAPE, BASE.inputs)
    full = initialize(BASE, scaling, key).weights
    assert not np.array_equal(full.blocks.query, full.blocks.key)
    fewer = initialize(dataclasses.replace(BASE, mlp_ratio=0, positions="none"), scaling, key).weights
    assert np.array_equal(full.blocks.value, fewer.blocks.value)
    assert np.array_equal(full.unembedding, fewer.unembedding)


@pytest.mark.slow
def test_gradients_equal_finite_differences(rng):
    config = CONFIGS["causal, per token"]
    config = dataclasses.replace(config, activation="gelu", biases=True)
    model = random_model(config, rng)
    x = random_input(config, rng)
    target = rng.normal(size=(2, 5, 4))
    directions = jax.tree.map(lambda array: rng.normal(size=array.shape), model.weights)

    @jax.jit
    def loss(weights):
        return jnp.square(Transformer(weights, model.scaling, config)(x) - target).sum()

    with jax.enable_x64(True):
        gradient = jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(model.weights))
        flat, rebuild = jax.tree.flatten(model.weights)
        for place, (array, direction, slope) in enumerate(
            zip(flat, jax.tree.leaves(directions), jax.tree.leaves(gradient), strict=True)
        ):
            step = 1e-4

            def along(t, place=place, array=array, direction=direction):
                moved = jax.tree.unflatten(rebuild, [*flat[:place], array + t * direction, *flat[place + 1 :]])
                return float(loss(moved))

            # Fourth-order differences: error O(step^4) times the fifth derivative, plus rounding 1e-16 / step.
            d = (8 * (along(step) - along(-step)) - (along(2 * step) - along(-2 * step))) / (12 * step)
            assert d == pytest.approx((slope * direction).sum(), rel=1e-6, abs=1e-6 * float(loss(model.weights)))


@pytest.mark.slow
def test_one_compilation_serves_all_scalings_and_maps_over_seeds(rng, seed):
    traces = []
    x = jnp.asarray(random_input(BASE, rng))

    @jax.jit
    def outputs(scaling, keys):
        traces.append(1)
        return jax.vmap(lambda key: initialize(BASE, scaling, key)(x))(keys)

    keys = jax.random.split(jax.random.key(seed), 3)
    first, second = random_scaling(rng), random_scaling(rng)
    mapped = outputs(first, keys)
    assert np.abs(outputs(second, keys) - mapped).max() > 1e-6
    assert len(traces) == 1
    for place in range(3):
        np.testing.assert_allclose(mapped[place], initialize(BASE, first, keys[place])(x), rtol=2e-4, atol=2e-4)


def test_wrong_configurations_are_refused():
    for change, says in (
        ({"read_out": "first"}, "read_out"),
        ({"norm": "batch"}, "norm"),
        ({"length": 0}, "length"),
        ({"mlp_ratio": -1}, "mlp_ratio"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"inputs": VectorInput(5)}, "width 6"),
    ):
        with pytest.raises(UsageError, match=says):
            dataclasses.replace(BASE, **change)
    with pytest.raises(UsageError, match="heads=0"):
        Shape(2, 0, 1)
    with pytest.raises(UsageError, match="missing"):
        Scaling({}, dict.fromkeys(ROLES, 1.0))
    with pytest.raises(UsageError, match="enable_x64"):
        initialize(BASE, standard_scaling(SHAPE, BASE.inputs), jax.random.key(0), np.float64)
    for kind, size in ((TokenInput, "vocabulary"), (PatchInput, "dim"), (VectorInput, "dim")):
        with pytest.raises(UsageError, match=size):
            kind(0)


def test_wrong_inputs_are_refused(rng):
    model = random_model(BASE, rng)
    with pytest.raises(ShapeError, match="length=5"):
        model(np.zeros((1, 6), int))
    with pytest.raises(ShapeError, match="integers"):
        model(np.zeros((1, 5)))
    patches = random_model(CONFIGS["attention only"], rng)
    for x in (np.zeros((5, 3)), np.zeros((5, 4), int), np.zeros(4)):
        with pytest.raises(ShapeError, match="real numbers"):
            patches(x)


@pytest.mark.slow
def test_standard_scaling_starts_with_order_one_logits(seed):
    """Queries, keys and the stream of a wide pre-norm network start with entries of order one."""
    config = TransformerConfig(Shape(32, 8, 1), TokenInput(50), length=16, outputs=50)
    model = initialize(config, standard_scaling(config.shape, config.inputs), jax.random.key(seed))
    record = model.record(jnp.arange(16)[None])
    # 16 x 256 entries, correlated through one weight matrix of 256^2: spread within 20 % by more than 6 sigma.
    assert np.asarray(record.layers.queries).std() == pytest.approx(1, rel=0.2)
    logits = float(record.logit) * jnp.einsum("lbhqn,lbhkn->lbhqk", record.layers.queries, record.layers.keys)
    assert 0.5 < float(logits.std()) < 2


PADDED = {
    "causal, last": dataclasses.replace(
        BASE, causal=True, read_out="last", norm="post", activation="relu", biases=True
    ),
    "pooled": BASE,
    "patches": CONFIGS["patches, biases, RMS"],
}
FIRST, *MORE = PADDED
LEFT, RIGHT = np.array([False, False, True, True, True]), np.array([True, True, True, False, False])


@pytest.mark.parametrize("name", [FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
@pytest.mark.parametrize("shown", [LEFT, RIGHT, np.ones(5, bool)], ids=["left", "right", "none"])
def test_padding_has_no_influence_and_every_token_has(name, shown, rng):
    config = PADDED[name]
    model = random_model(config, rng)
    x, rows = random_input(config, rng), np.stack([shown] * 2)
    before = model(x, rows)
    for place in range(5):
        changed = x.copy()
        changed[:, place] = (changed[:, place] + 1) % 7 if isinstance(config.inputs, TokenInput) else 0
        after = model(changed, rows)
        moved = np.abs(after - before).max(-1)
        assert (moved > 1e-8).all() if shown[place] else (moved == 0).all()
        recorded = model.record(changed, patterns=True, padding_mask=rows)
        np.testing.assert_allclose(recorded.outputs, after, rtol=1e-12)
        assert (recorded.layers.patterns[..., ~shown] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", PADDED)
def test_padding_is_the_shorter_sequence(name, rng):
    """Padding behind leaves the sequence in its places; padding in front moves it, which only positions can tell."""
    config = PADDED[name]
    model = random_model(config, rng)
    x = random_input(config, rng)
    np.testing.assert_allclose(model(x, np.stack([RIGHT] * 2)), model(x[:, :3]), rtol=1e-10)
    blind = random_model(dataclasses.replace(config, positions="none"), rng)
    np.testing.assert_allclose(blind(x, np.stack([LEFT] * 2)), blind(x[:, 2:]), rtol=1e-10)
    np.testing.assert_allclose(model(x, np.ones((2, 5), bool)), model(x), rtol=1e-12)


@pytest.mark.slow
def test_gradients_stay_finite_where_padding_sees_nothing(rng, seed):
    config = dataclasses.replace(BASE, shape=Shape(2, 1, 1), causal=True, read_out="last", norm="none", mlp_ratio=0)
    model = initialize(config, standard_scaling(config.shape, config.inputs), jax.random.key(seed))
    x = jnp.asarray(random_input(config, rng))
    shown = jnp.asarray(np.stack([LEFT, np.zeros(5, bool)]))  # and a sequence without any token
    gradient = jax.grad(lambda weights: Transformer(weights, model.scaling, config)(x, shown).sum())(model.weights)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient))


def test_a_mask_that_does_not_fit_is_refused(rng):
    model = random_model(BASE, rng)
    x = random_input(BASE, rng)
    for shown in (np.ones((2, 4), bool), np.ones(5, bool), np.ones((2, 5), int)):
        with pytest.raises(ShapeError, match="booleans of shape"):
            model(x, shown)
