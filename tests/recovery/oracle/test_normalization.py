"""What stands in front of a layer, and what of the layer it hides."""

import numpy as np
import pytest

from manyheads.attention import AttentionLayer
from manyheads.errors import ShapeError
from manyheads.recovery import compare_layers, evaluate_layer, gpt_layer
from manyheads.recovery.oracle.normalization import Normalization, projected

DIM = 7


@pytest.mark.parametrize("centred", [True, False])
def test_the_projected_layer_is_the_same_function(rng, centred):
    layer, gain, shift = gpt_layer(rng, DIM, 2, rank=2), rng.uniform(0.5, 2, DIM), rng.standard_normal(DIM)
    u = Normalization(centred, 1e-3)(rng.standard_normal((3, 6, DIM)))
    found = evaluate_layer(projected(layer, gain, shift, centred=centred), u)
    np.testing.assert_allclose(found, evaluate_layer(layer, gain * u + shift), rtol=1e-9, atol=1e-9)


def test_layers_of_the_same_function_have_the_same_projected_form(rng):
    layer = gpt_layer(rng, DIM, 2, rank=2)
    ones = np.ones(DIM)
    moved = AttentionLayer(
        layer.theta + np.outer(ones, rng.standard_normal(DIM)) + np.outer(rng.standard_normal(DIM), ones),
        layer.projection + np.outer(ones, rng.standard_normal(DIM)),
        layer.key_bias + 3 * ones,
        layer.bias,
        True,
    )
    one, two = (projected(each, ones) for each in (layer, moved))
    assert compare_layers(one, two).worst < 1e-10


def test_normalization_against_its_definition(rng):
    x = 3 + 2 * rng.standard_normal((4, DIM))
    plain, root = Normalization(True, 0.0)(x), Normalization(False, 0.5)(x)
    np.testing.assert_allclose(plain.mean(-1), 0, atol=1e-12)
    np.testing.assert_allclose(plain.var(-1), 1, rtol=1e-12)
    np.testing.assert_allclose(root[0], x[0] / np.sqrt(np.mean(x[0] ** 2) + 0.5), rtol=1e-12)


def test_weights_of_another_dimension_are_refused(rng):
    with pytest.raises(ShapeError, match=r"expected \(7,\)"):
        projected(gpt_layer(rng, DIM, 1), np.ones(3))
