"""The pieces of the studies: what they count, what they compare, what they show."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import xarray as xr

from manyheads.costs import count
from manyheads.errors import UsageError
from manyheads.studies.attention.costs import Costs, _crossover_note, counted_crossover, meeting_point, seconds_of
from manyheads.studies.attention.order_blindness import MODELS, OrderBlindness
from manyheads.studies.attention.vanishing_gradients import VanishingGradients
from manyheads.study.execution.units import predict, train
from manyheads.transformer.losses import cross_entropy
from manyheads.transformer.training import count_weights, with_weights


@pytest.mark.parametrize("length", [8, 24])
def test_the_three_networks_have_equally_many_weights(length):
    study = OrderBlindness()
    sizes = [
        count_weights(jax.eval_shape(lambda kind=kind: study._model(kind, length, jax.random.key(0))))
        for kind in MODELS
    ]
    assert max(sizes) <= 1.01 * min(sizes)


@pytest.mark.parametrize(
    "kind", [kind if kind == "transformer" else pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS]
)
def test_announced_flops_are_those_of_the_training_step(kind):
    """The closed form against the counter on the step that is really taken; embeddings need no product."""
    study = OrderBlindness(lengths=(8,), batch=4)
    (cell,) = (cell for cell in study.cells() if cell["model"] == kind)
    model = study._model(kind, 8, jax.random.key(0))
    batch = (jax.ShapeDtypeStruct((4, 8), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32))

    def step(weights, tokens, answers):
        return jax.value_and_grad(lambda w: cross_entropy(with_weights(model, w), (tokens, answers)))(weights)

    exact = count(step, model.weights, *batch).flops
    assert study.flops(cell) == study.steps_per_token * 8 * exact


@pytest.mark.slow
def test_an_untrained_network_is_no_better_than_chance(seed):
    study = OrderBlindness(lengths=(8,))
    tokens, answers, _ = study_batch(seed)
    guesses = study._model("transformer", 8, jax.random.key(seed))(tokens).argmax(-1)
    # 4096 fresh sequences, an untrained guess is at most the order-blind ceiling of 0.27 by more than chance.
    assert float((guesses == answers).mean()) < 0.32


def study_batch(seed):
    from manyheads.data.recall import Recall

    return Recall(8).draw(jax.random.key(seed), 4096)


@pytest.mark.slow
def test_all_models_see_the_same_batches():
    """The batches come from the replicate's key alone, not from the model."""
    # The contract row's: compiled once for both.
    study = OrderBlindness(lengths=(6,), steps_per_token=5, key_dim=4, heads=2, depth=1, batch=8)
    with jax.enable_x64(True):
        runs = [train(study, jax.random.key(3), cell) for cell in study.cells()]
    sequences = [run["sequence"].values for run in runs]
    assert all((sequence == sequences[0]).all() for sequence in sequences)


@pytest.mark.slow
def test_weights_stay_single_precision_under_64_bit_types():
    study = OrderBlindness(lengths=(6,), key_dim=4)
    with jax.enable_x64(True):
        for kind in MODELS:
            model = study._model(kind, 6, jax.random.key(0))
            assert {leaf.dtype for leaf in jax.tree.leaves(model.weights)} == {jnp.dtype("float32")}


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(UsageError, match="above 4"):
        OrderBlindness(lengths=(4,))
    with pytest.raises(UsageError, match="20 steps or more"):
        OrderBlindness(lengths=(8,), steps_per_token=2)
    with pytest.raises(UsageError, match="three or more integers"):
        Costs(lengths=(4, 8, 8))


def test_crossover_solves_the_quadratic():
    lengths = (10, 20, 50, 90)
    flops = np.array([7 + 300 * n + 4 * n**2 for n in lengths])
    assert counted_crossover(lengths, flops) == pytest.approx(75)


def test_power_laws_meet_where_they_meet():
    lengths = (10, 100, 1000)
    rising, other = (np.array([c * n**p for n in lengths], float) for c, p in ((1e-3, 2), (0.05, 1)))
    assert meeting_point(lengths, rising, other) == pytest.approx(np.log2(50))
    assert meeting_point(lengths, other * np.power(lengths, 1e-6), 2 * other) == pytest.approx(1e6)
    with pytest.raises(UsageError, match="positive"):
        meeting_point(lengths, -rising, other)
    with pytest.raises(UsageError, match="meet at no length"):
        meeting_point(lengths, other, other)


def test_the_time_is_that_of_a_call(monkeypatch):
    ticks = iter(range(1000))
    monkeypatch.setattr("manyheads.studies.attention.costs.time.perf_counter", lambda: float(next(ticks)))
    assert seconds_of(lambda x: x, jnp.ones(1)) == 1.0


def test_refuted_counts_are_seen():
    """A counter that misses one FLOP refutes the first claim."""
    study = Costs(width=8, heads=2, lengths=(4, 8, 16))
    with jax.enable_x64(True):
        predicted = predict(study, jax.random.key(0))
    cells = study.cells()
    coords = {name: ("cell", [cell[name] for cell in cells]) for name in ("model", "length")}
    values = {
        name: [[int(predicted[name].sel(model=cell["model"], length=cell["length"]))] * 2 for cell in cells]
        for name in ("flops", "training_flops", "chain")
    }
    times = {name: np.full((len(cells), 2), 1.0) for name in ("seconds", "core_seconds", "rest_seconds")}
    times["core_seconds"] *= np.array([cell["length"] for cell in cells])[:, None]
    trained = xr.Dataset(
        {name: (("cell", "replicate"), value) for name, value in (values | times).items()}, coords=coords
    )
    assert study.compare(predicted, trained)[0].outcome == "holds"
    trained["flops"][4, 1] += 1
    assert study.compare(predicted, trained)[0].outcome == "refuted"


def test_the_caption_of_the_crossover_follows_the_measured_times():
    assert "56 over replicates, earlier than equal FLOPs, n = 96" in _crossover_note(np.log2([48, 56]), 96.0)
    assert "later than equal FLOPs" in _crossover_note(np.log2([100, 130]), 96.0)
    assert "at about the length of" in _crossover_note(np.log2([50, 130]), 96.0)


def test_squared_gradients_follow_a_network_with_fresh_weights_at_every_token(rng):
    """Mean-field theory against hand-written backward passes through independent Gaussian matrices."""
    study, width, runs, gain = VanishingGradients(tokens=8, drive=0.5), 100, 200, 1.3
    state, matrices, slopes = np.zeros((runs, width)), [], []
    for _ in range(study.tokens):
        matrices.append(gain / width**0.5 * rng.normal(size=(runs, width, width)))
        inputs = study.drive**0.5 * rng.normal(size=(runs, width))
        state = np.tanh(np.einsum("ri,rij->rj", state, matrices[-1]) + inputs)
        slopes.append(1 - state**2)
    back, squared = rng.normal(size=(runs, width)) / width**0.5, []
    for matrix, slope in zip(matrices[::-1], slopes[::-1], strict=True):
        back = back * slope
        squared.append((back**2).sum(1).mean())
        back = np.einsum("rij,rj->ri", matrix, back)
    # The relative variance of one run is 4.1/H a factor, by the formula of the module, and up to 5/H with the
    # fluctuations of the states before it. Five standard errors of the mean; its bias, of order 1/H, is below one.
    factors = np.arange(study.tokens, 0, -1)
    error = np.abs(squared[::-1] / study._theory(gain, 1) - 1)
    assert (error <= 5 * (5 * factors / (width * runs)) ** 0.5).all()
