"""Joint fit of rotary layers: derivatives, conversion, and the error of the function against sigma^2 p / n."""

import numpy as np
import pytest

from manyheads.errors import UsageError
from manyheads.recovery import ExtractionOptions, extract_layer
from manyheads.recovery.fit.variable_projection import Examples
from manyheads.recovery.layers.rotary import RotaryLayer
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.queries.refinement import fitted_weights, refine_layer, refinement_work
from manyheads.recovery.queries.rotary.tangent import RotaryTangent, RotaryWeights
from manyheads.studies.recovery.noisy_extraction import Server, build_layer, least_calls


def random_weights(rng, biases=1, rank=4):
    def draw(*shape):
        return rng.standard_normal(shape) / 2

    rows = 6 + biases
    generator = rng.standard_normal((2, rank // 2, 3)) / 2
    generator[0, 0] = 0.0, 1e-3, -1e-3
    return RotaryWeights(draw(2, rows, rank), draw(2, rows, rank), generator, draw(2, 6, 3), draw(2, 3, 6), draw(6))


@pytest.mark.parametrize("biases", [0, 1])
def test_the_tangent_is_that_of_the_layer(rng, biases):
    weights = random_weights(rng, biases)
    x = rng.standard_normal((5, 4, 6))
    here = RotaryTangent.at(Examples(x, rng.standard_normal(x.shape)), weights)
    np.testing.assert_allclose(here.residual.reshape(x.shape), here.examples.y - weights.layer()(x), atol=1e-12)
    change, rows, step = rng.standard_normal(weights.flat().size), rng.standard_normal(here.residual.shape), 1e-6
    by_differences = (here.move(-step * change).residual - here.move(step * change).residual) / (2 * step)
    np.testing.assert_allclose(here.forward(change), by_differences, atol=1e-6)
    np.testing.assert_allclose(here.jacobian() @ change, here.forward(change).ravel(), atol=1e-10)
    np.testing.assert_allclose(here.jacobian().T @ rows.ravel(), here.vjp(rows), atol=1e-10)


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_weights_of_a_layer_are_those_of_its_forms(rng, family):
    layer = build_layer(family, rng, 8, 2)
    weights = RotaryWeights.of(layer)
    x = rng.standard_normal((6, 20, 8))
    np.testing.assert_allclose(weights.layer()(x), layer(x), atol=1e-10)
    with pytest.raises(UsageError, match="offset by offset"):
        RotaryWeights.of(RotaryLayer(layer.forms, layer.projection))


def test_free_parameters_are_counted(rng):
    """Of each head Q and K up to a complex number for each plane, the frequencies, and W of its rank; c."""
    dim, heads, rank = 8, 2, 4
    turned = 2 * dim * rank - rank + rank // 2
    expected = heads * (turned + 2 * dim * rank - rank**2) + dim
    assert fitted_weights(build_layer("llama", rng, dim, heads)) == expected


@pytest.mark.parametrize("family", ["llama", "qwen"])
@pytest.mark.parametrize("noise", [1e-4, 1e-2])
def test_the_error_of_the_function_is_that_of_least_squares(rng, family, noise):
    """From weights that are off by 3%, the error is sigma^2 p / n, n numbers in the labels."""
    for_layer, for_server, for_queries = rng.spawn(3)
    weights = RotaryWeights.of(layer := build_layer(family, for_layer, 8, 2))
    flat = weights.flat()
    start = weights.like(flat + 0.03 * flat.std() * for_queries.standard_normal(flat.size)).layer()
    server = Server(layer, 8, for_server, noise)
    refined = refine_layer(Oracle(server, 8), start, for_queries, excess=24)
    assert refined.kept
    assert server.error(start) > 100 * server.error(refined.layer)
    bound = least_calls(family, for_layer, (8, 2), 4, 1.0, 160) * noise**2  # Cramer-Rao, of another such layer
    assert 0.5 < server.error(refined.layer) / (bound / (24 * fitted_weights(layer) / 32)) < 2
    assert refined.predicted == pytest.approx(noise**2 / 24, rel=0.3)


def test_an_extraction_behind_noise_is_refined(rng):
    layer = build_layer("llama", rng, 8, 2)
    for_noise = np.random.default_rng(5)

    def noisy(x):
        y = layer(x)
        return y + 1e-6 * for_noise.standard_normal(y.shape)

    options = ExtractionOptions(progress=False, rotary=True, stochastic=True, tolerance=1e-6, verify=100)
    found = extract_layer(noisy, 8, options=options)
    figures = {stage.name: stage.figures for stage in found.stages}["refinement"]
    assert figures["kept"] == 1.0
    assert figures["after"] < 0.2 * figures["before"]
    x = rng.standard_normal((50, 32, 8))
    rest = found.layer(x) - layer(x)
    assert np.mean(rest**2) < 0.5 * 1e-12


def test_the_work_of_a_refinement_is_counted():
    """200 products with the Jacobian, each of four d x d maps of every token of every head, at two operations."""
    dim, heads, excess = 64, 4, 12
    weights = heads * (2 * dim**2 + dim) + dim
    sequences = -(-excess * weights // (4 * dim))
    assert refinement_work(dim, heads, excess) == 200 * (4 * sequences) * heads * 4 * (2 * dim**2)
