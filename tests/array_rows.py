"""Every public function that takes arrays, with small arguments: one row each, and the reason of those without one.

A row names the function as ``wing.function`` or ``wing.Class.method`` (``wing.module.function`` for a wing without a
stub). Its first entry draws the arrays from a generator; its second returns the other arguments, fresh at every call,
``on`` being the object of a method. Kinds that a function admits beside real numbers stand in ADMITTED.
"""

import jax
import numpy as np

from manyheads import data, recovery, transformer
from manyheads.data.characters import Vocabulary
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.theory import bigram, dmft, meanfield
from manyheads.theory.bigram.theorems.gradient_noise import RowCoefficients, ValueNoise
from manyheads.theory.bigram.theorems.signal import SignalSystem
from manyheads.theory.joma.systems.gaussian_mixture import NONLINEARITIES, Mixture
from manyheads.theory.joma.task import Sizes, UpdateRule, draw_joma_task
from manyheads.theory.meanfield import ContrastiveTask

CIRCLE = meanfield.circle_task((1, 2), nodes=16)
PARTICLES = tuple(np.random.default_rng(0).normal(size=(2, 8, 2)))
TASK = bigram.draw_bigram_task(np.random.default_rng(0), 3, 8, 2)
ONE_BIT = meanfield.OneBitNetwork.published()
ONE_BIT_STEPS = {"transient": 400, "steps": 400, "record": 80}
LAYER = recovery.planted_layer(np.random.default_rng(0), dim=3, heads=2)
SEQUENCES = recovery.sequences(np.random.default_rng(1), 80, 3, 3)
SHAPE = transformer.Shape(key_dim=2, heads=2, depth=1)
TEXT = transformer.TransformerConfig(SHAPE, transformer.TokenInput(5), length=4, outputs=5, read_out="token")


def model():
    scaling = transformer.standard_scaling(SHAPE, TEXT.inputs)
    return transformer.initialize(TEXT, scaling, jax.random.key(0))


def rotary(rng):
    return recovery.RotaryLayer(rng.normal(size=(4, 2, 4, 4)), rng.normal(size=(2, 3, 3)))


def some(*shape):
    return lambda rng: rng.normal(size=shape)


def positive(*shape):
    return lambda rng: rng.uniform(0.5, 1.5, shape)


def tokens(bound, *shape):
    return lambda rng: rng.integers(0, bound, shape)


def signs(*shape):
    return lambda rng: 2.0 * rng.integers(0, 2, shape) - 1


def booleans(*shape):
    return lambda rng: rng.random(shape) < 0.8


def laws(*shape):
    return lambda rng: rng.dirichlet(np.ones(shape[-1]), shape[:-1])


def exactly(*values):
    return lambda rng: np.array(values)


def batch(rng):
    return TASK.draw(rng, 400)


def alternating(rng):
    return (np.arange(300) + (rng.random(300) < 0.05)) % 2


def of(values):
    return lambda rng: values


def generator(**others):
    return lambda: {"rng": np.random.default_rng(0), **others}


def fixed(**others):
    return lambda: dict(others)


TASKED = fixed(task=TASK)


def mixture(rng):
    return Mixture(rng.normal(size=(3, 2)), rng.dirichlet(np.ones(3)), rng.normal(size=3), std=0.5)


ROWS_OF_ATTENTION = RowCoefficients((TASK.weights**2).sum(1), (TASK.weights**2).sum(1))
SYSTEM = SignalSystem(
    0.2, 0.5, length=100, vocabulary=3, value_learning_rate=0.02, attention_learning_rate=0.05, batch=10
)
WEIGHTS = {"value": of(TASK.centred), "attention": of(TASK.attention)}
CLOUDS = {"mixture": mixture, "weights": positive(2)}
CONTRASTIVE = fixed(task=ContrastiveTask())
TWO_FEATURES = np.kron([[1.0, 1.0], [1.0, -1.0]], np.ones(10))
SNAP = {"distinct": exactly(0.4, 0.2), "common": exactly(0.4), "progress": exactly(0.0, 3.0)}

ROWS = {
    # attention
    "attention.AttentionLayer": (
        {"theta": some(2, 3, 3), "projection": some(2, 3, 3), "key_bias": some(2, 3), "bias": some(3)},
        fixed(),
    ),
    "attention.layers.Layer.__call__": ({"x": some(4, 3), "mask": booleans(4, 4)}, fixed(on=LAYER)),
    "attention.layers.Layer.weights": ({"x": some(4, 3), "mask": booleans(4, 4)}, fixed(on=LAYER)),
    "attention.MultiHeadAttention": (
        {name: some(2, 3, 2) for name in ("query", "key", "value")}
        | {"output": some(2, 2, 3), "query_bias": some(2, 2)},
        fixed(),
    ),
    "attention.MultiHeadAttention.from_matrices": (
        {"matrices": lambda rng: tuple(rng.normal(size=(4, 4, 4)))},
        fixed(heads=2),
    ),
    "attention.attention_entropy": ({"q": some(3, 4), "k": some(5, 4), "mask": booleans(3, 5)}, fixed()),
    "attention.masked_softmax": ({"logits": some(3, 4), "allowed": booleans(3, 4)}, fixed()),
    "attention.padding": ({"lengths": tokens(4, 3)}, fixed()),
    # transformer
    "transformer.Transformer.__call__": (
        {"x": tokens(5, 2, 4), "padding_mask": booleans(2, 4)},
        lambda: {"on": model()},
    ),
    "transformer.Transformer.record": ({"x": tokens(5, 2, 4), "padding_mask": booleans(2, 4)}, lambda: {"on": model()}),
    # data
    "data.TextWindows": ({"tokens": tokens(5, 30)}, fixed(length=4, size=2)),
    "data.TextWindows.cut": (
        {"starts": tokens(20, 2)},
        fixed(on=data.TextWindows(np.arange(30), length=4, size=2)),
    ),
    "data.characters.Vocabulary.decode": ({"tokens": tokens(3, 6)}, fixed(on=Vocabulary(("\ufffd", "a", "b")))),
    "data.digits.cut_patches": ({"images": some(2, 4, 4)}, fixed(size=2)),
    "data.ngrams.ngram_losses": ({"train": tokens(3, 40), "validation": tokens(3, 20)}, fixed(vocabulary=3, context=1)),
    "data.digits.normalize": ({"images": some(2, 4, 4)}, fixed()),
    "data.characters.split_tokens": ({"tokens": tokens(5, 30)}, fixed()),
    # spectra
    "spectra.coherence": ({"vectors": some(5, 3)}, fixed()),
    "spectra.bidiagonal.golub_kahan": ({"matrix": some(6, 4), "start": some(4)}, fixed(steps=3)),
    "spectra.levels.marchenko_pastur_density": ({"squares": positive(5)}, fixed(rows=8, columns=4)),
    "spectra.stable_rank": ({"matrix": some(6, 4)}, fixed()),
    "spectra.traced_ranks.traced_stable_rank": ({"matrix": some(6, 4)}, fixed()),
    # statistics
    "statistics.intervals.discrepancy_interval": ({"samples": some(6)}, fixed(prediction=0.0, standard_error=0.1)),
    "statistics.exponents.drift_test": (
        {"sizes": exactly(8.0, 16.0, 32.0), "optima": positive(6, 3)},
        fixed(tolerance=1.0),
    ),
    "statistics.fit_exponent": ({"sizes": exactly(8.0, 16.0, 32.0), "values": positive(6, 3)}, fixed()),
    "statistics.exponents.fit_exponent_to_means": (
        {"sizes": exactly(8.0, 16.0, 32.0), "means": positive(3), "errors": exactly(0.1, 0.2, 0.1)},
        fixed(),
    ),
    "statistics.mean_interval": ({"samples": some(6)}, fixed()),
    "statistics.verdicts.replicates_to_decide": ({"samples": some(8)}, fixed(target=0.0, tolerance=1.0)),
    "statistics.rank_correlation.spearman": ({"x": some(8), "y": some(8)}, fixed()),
    # meanfield
    "theory.meanfield.OneBitNetwork": (
        {name: signs(2, 3) for name in ("output", "query", "key", "value")} | {"positional": signs(3, 2, 1)},
        fixed(),
    ),
    "theory.meanfield.InContextRegression.loss": (
        {"circuit": some(4, 2, 2)},
        fixed(on=meanfield.InContextRegression((1.0, 0.5), 8)),
    ),
    "theory.meanfield.mean_field_trajectory": (
        {"beta": positive(2), "initial": exactly(1.0, -1.0, 0.5)},
        fixed(network=ONE_BIT, steps=3),
    ),
    "theory.meanfield.bifurcation_scan": ({"betas": exactly(0.5, 0.6)}, fixed(network=ONE_BIT, **ONE_BIT_STEPS)),
    "theory.meanfield.lyapunov_spectrum": (
        {"beta": exactly(0.5, 0.6), "gain": exactly(50.0, 60.0)},
        fixed(network=ONE_BIT, **ONE_BIT_STEPS),
    ),
    "theory.meanfield.simulate_network": (
        {"beta": positive(2), "neurons": exactly(30, 60), "initial": exactly(1.0, -1.0, 1.0)},
        generator(network=ONE_BIT, steps=3),
    ),
    "theory.meanfield.particle_flow": ({"times": exactly(0.0, 0.1)}, fixed(task=CIRCLE, particles=PARTICLES)),
    "theory.meanfield.prompt_loss": (
        {"representation": some(16, 2), "attention": some(2, 2)},
        fixed(task=CIRCLE, length=3),
    ),
    "theory.meanfield.saddle_levels": ({"covariance": of(np.diag([1.0, 0.5]))}, fixed()),
    # bigram
    "theory.bigram.BigramTask": (
        {name: of(getattr(TASK, name)) for name in ("transition", "stationary", "positions", "weights")},
        fixed(length=8),
    ),
    "theory.bigram.lags.result.LagFit.predict": (
        {"windows": tokens(2, 5, 2)},
        lambda: {"on": bigram.fit_lags(alternating(np.random.default_rng(0)), 2)},
    ),
    "theory.bigram.fit_lags": ({"streams": alternating}, fixed(lags=2)),
    "theory.bigram.lags.streams.lag_information": ({"streams": tokens(2, 200)}, fixed(lags=2)),
    "theory.bigram.plant_lags": (
        {
            "stream": tokens(2, 20),
            "transition": of(np.eye(2)),
            "lags": of(np.array([[2], [2]])),
            "weights": of(np.ones((2, 1))),
        },
        generator(),
    ),
    "theory.bigram.transfer.predict_transfer": ({"value": of(TASK.centred)}, TASKED),
    "theory.bigram.screen": ({"tokens": tokens(3, 60, 4), "queries": tokens(3, 60), "targets": tokens(3, 60)}, fixed()),
    "theory.bigram.transfer_test": ({"value": of(TASK.centred), "pilot": batch}, fixed(sparsity=2)),
    # meanfield
    "theory.meanfield.overlap_trajectory": ({"state": exactly(0.3, 0.2, 0.6), "times": exactly(0.1)}, CONTRASTIVE),
    "theory.meanfield.train_overlaps": (
        {"state": exactly([0.3, 0.2, 0.6]), "times": exactly(0.1)},
        generator(task=ContrastiveTask(), dimension=20),
    ),
    "theory.meanfield.contrastive.sgd.train_weights": (
        {"weights": positive(20), "features": of(TWO_FEATURES), "times": exactly(0.1)},
        generator(task=ContrastiveTask()),
    ),
    "theory.meanfield.contrastive.particles.simulate_particles": (
        {"weights": positive(20), "features": of(TWO_FEATURES)},
        fixed(task=ContrastiveTask(), horizon=0.1, key=jax.random.key(0), steps=4, records=1),
    ),
    "theory.meanfield.contrastive.stationary_states.find_basins": ({"states": exactly(0.3, 0.2, 0.6)}, CONTRASTIVE),
    "theory.meanfield.stationary_states": ({"starts": exactly([0.9, 0.0, 0.95])}, CONTRASTIVE),
    # bigram.theory
    "theory.bigram.theorems.frequencies.effective_vocabulary": ({"mean": some(TASK.vocabulary)}, TASKED),
    "theory.bigram.theorems.gradient_noise.ValueNoise.draw": (
        {"value": of(TASK.centred), "rows": of(ROWS_OF_ATTENTION)},
        lambda: {"on": ValueNoise(TASK, 64), "rng": np.random.default_rng(0)},
    ),
    "theory.bigram.theorems.gradient_noise.attention_noise": (
        {"value": of(TASK.centred), "rows": of(ROWS_OF_ATTENTION)},
        fixed(task=TASK, batch=64),
    ),
    "theory.bigram.theorems.population.excess": (WEIGHTS, TASKED),
    "theory.bigram.theorems.population.gradients": (WEIGHTS, TASKED),
    "theory.bigram.theorems.population.measure_overlaps": (WEIGHTS, TASKED),
    "theory.bigram.theorems.sample_complexity.ranking_probability": ({"ratios": exactly(1.0, 5.0)}, fixed(task=TASK)),
    "theory.bigram.theorems.signal.solve_signals": ({"times": exactly(0.0, 5.0)}, fixed(system=SYSTEM)),
    # joma
    "theory.joma.JomaTask": (
        {
            "contexts": laws(4, 3),
            "queries": tokens(2, 4),
            "labels": tokens(2, 4),
            "token_embeddings": of(np.eye(6)[:, :3]),
            "query_embeddings": of(np.eye(6)[:, 3:5]),
        },
        fixed(),
    ),
    "theory.joma.JomaTask.take": (
        {"rows": of(np.array([0, 2]))},
        fixed(on=draw_joma_task(Sizes(), np.random.default_rng(0))),
    ),
    "curves.summaries.within_group_spearman": ({"x": some(6), "y": some(6)}, fixed()),
    "curves.drop_and_rise.cross_fitted_rise": ({"curves": some(4, 6)}, fixed()),
    "curves.drop_and_rise.cross_fitted_drop_and_rise": ({"curves": some(4, 6)}, fixed()),
    "curves.drop_and_rise.drop_and_rise": ({"curves": some(4, 6)}, fixed()),
    "curves.drop_and_rise.replicated_drop_and_rise": ({"curves": some(4, 6)}, fixed()),
    "curves.drop_and_rise.forward_fill": ({"curves": some(4, 6)}, fixed()),
    "theory.joma.theorems.lucky_neurons.shared_output": ({"init": some(2, 3)}, fixed(target=4.0, level=8.0)),
    "theory.joma.theorems.lucky_neurons.some_neuron": ({"width": of(np.array([1, 2]))}, fixed(probability=0.25)),
    "theory.joma.theorems.lucky_neurons.winning_time": ({"init": some(4)}, fixed(gain=1.0, level=8.0)),
    "theory.joma.theorems.gaussian_mixture.mixture_coefficients": (CLOUDS, fixed(activation=NONLINEARITIES["square"])),
    "theory.joma.theorems.gaussian_mixture.expected_gradient": (CLOUDS, fixed(activation=NONLINEARITIES["square"])),
    "theory.joma.theorems.gaussian_mixture.gradient_covariance": (CLOUDS, fixed(activation=NONLINEARITIES["square"])),
    "theory.joma.theorems.gaussian_mixture.linear_noise_approximation": (
        {"mixture": mixture, "init": positive(2), "times": exactly(0.0, 0.1)},
        fixed(activation=NONLINEARITIES["identity"], weight_decay=1.0),
    ),
    "theory.joma.theorems.invariants.conserved_quantity": (
        {"logits": some(2, 4), "token_weights": some(4, 3)},
        fixed(rule=UpdateRule("exp")),
    ),
    "theory.joma.theorems.invariants.logit_side": ({"logits": some(2, 4)}, fixed(rule=UpdateRule("sigmoid"))),
    "theory.joma.theorems.invariants.per_query_quantity": (
        {"logits": some(2, 4), "token_weights": some(2, 4, 3)},
        fixed(rule=UpdateRule("exp", per_query_weights=True)),
    ),
    "theory.joma.theorems.invariants.decayed_quantity": (
        {"initial": some(4), "times": exactly(0.0, 1.0)},
        fixed(rule=UpdateRule("linear")),
    ),
    "theory.joma.theorems.invariants.drift": (
        {"times": exactly(0.0, 1.0, 2.0), "logits": some(3, 2, 4), "token_weights": some(3, 4, 3)},
        fixed(rule=UpdateRule("exp")),
    ),
    "theory.joma.theorems.invariants.softmax_relation": (
        {
            "times": exactly(0.0, 1.0, 2.0, 3.0),
            "logits": some(4, 1, 4),
            "token_weights": some(4, 4, 3),
            "mean_attention": laws(4, 4),
        },
        fixed(rule=UpdateRule("softmax")),
    ),
    "theory.joma.theorems.latent_tree.Tree": (
        {
            "parents": of(np.array([-1, 0])),
            "root": exactly(0.5, 0.5),
            "transitions": lambda rng: (None, rng.dirichlet(np.ones(2), 2)),
        },
        fixed(),
    ),
    "theory.joma.theorems.latent_tree.predict_cooccurrence": (
        {"correlation": exactly(0.5, 0.9), "height": of(np.array([1, 2])), "depth": of(np.array([3, 3]))},
        fixed(),
    ),
    "theory.joma.theorems.nearly_orthogonal.token_sum": (
        {"logits": some(2, 4), "weights": some(5, 3), "query_embedding": positive(5)},
        fixed(rule=UpdateRule("exp")),
    ),
    "theory.joma.theorems.nearly_orthogonal.drift_from_couplings": (
        {"gram": some(4, 4), "couplings": some(4, 4)},
        fixed(rule=UpdateRule("exp")),
    ),
    "theory.joma.theorems.nearly_orthogonal.drift_bound": (
        {"gram": some(4, 4), "paths": positive(4, 4)},
        fixed(rule=UpdateRule("exp")),
    ),
    "theory.joma.theorems.nearly_orthogonal.random_drift": (
        {"couplings": some(4, 4)},
        fixed(rule=UpdateRule("exp"), dimension=9),
    ),
    "theory.joma.theorems.rebound.entropy_curve": ({"targets": exactly(2.0, 1.0), "times": exactly(0.5, 1.0)}, fixed()),
    "theory.joma.theorems.rebound.entropy_of": ({"logits": some(2, 4)}, fixed()),
    "theory.joma.theorems.rebound.final_rank_slope": ({"target": some(4, 3), "init": some(4, 3)}, fixed()),
    "theory.joma.theorems.rebound.linear_entropy_curve": (
        {"targets": exactly(2.0, 1.0), "fractions": exactly(0.2, 0.5)},
        fixed(),
    ),
    "theory.joma.theorems.rebound.predict_approach": ({"targets": exactly(2.0, 1.0)}, fixed()),
    **{
        f"theory.joma.theorems.salient_first.{name}": ({"target": positive(3)}, fixed())
        for name in ("affine_offset", "final_rate")
    },
    "theory.joma.theorems.salient_first.deficit_ratio": (
        {"first": exactly(2.0), "second": exactly(1.0), "log_deficit": exactly(1.5)},
        fixed(),
    ),
    "theory.joma.theorems.salient_first.exact_time": ({"target": positive(3), "log_deficit": positive(3)}, fixed()),
    "theory.joma.theorems.salient_first.find_log_deficit": ({"target": positive(3), "time": positive(3)}, fixed()),
    "theory.joma.theorems.scan_and_snap.relative_gain": (
        {"start": some(3), "logits": some(2, 3)},
        fixed(first=0, second=1),
    ),
    "theory.joma.theorems.scan_and_snap.relative_gain_law": (
        {"start": some(3), "logits": some(2, 3)},
        fixed(first=0, second=1),
    ),
    "theory.joma.theorems.scan_and_snap.training_time": (SNAP, fixed(classes=2)),
    "theory.joma.theorems.scan_and_snap.reduced_trajectory": (SNAP, fixed(classes=2)),
    "theory.joma.theorems.winner_take_all.blowup_time": ({"gains": positive(3)}, fixed()),
    "theory.joma.theorems.winner_take_all.common_ratio": (
        {"gains": positive(3), "weights": positive(3)},
        fixed(scale=1.0),
    ),
    "theory.joma.theorems.winner_take_all.frozen_weights": ({"gains": positive(3)}, fixed()),
    "theory.joma.theorems.winner_take_all.linear_attention_at": (
        {"gains": positive(3), "times": exactly(0.0, 0.1)},
        fixed(),
    ),
    "theory.joma.theorems.winner_take_all.reaching_time": ({"gains": positive(3)}, fixed(level=1.5)),
    "theory.joma.theorems.winner_take_all.weights_at": ({"gains": positive(3), "times": exactly(0.0, 0.1)}, fixed()),
    # limits
    "theory.dmft.Problem": (
        {"inputs": some(2, 3, 4), "targets": some(2), "weights": positive(2)},
        fixed(steps=2, learning_rate=0.1),
    ),
    "theory.dmft.Problem.losses": (
        {"outputs": some(2, 2, 1)},
        fixed(on=dmft.Problem(np.ones((2, 3, 4)), np.ones(2), steps=2)),
    ),
    "scaling.checks.coordinate_check.check_growth": (
        {"values": positive(6, 3)},
        fixed(quantity="outputs", axis="heads", sizes=(4, 8, 16), required=0.0, tolerance=1.0),
    ),
    "scaling.checks.transfer_check.find_optimum": (
        {"learning_rates": exactly(0.01, 0.1, 1.0, 10.0), "losses": exactly(3.0, 1.0, 2.0, 4.0)},
        fixed(),
    ),
    "scaling.checks.transfer_check.search_optimum": (
        {"learning_rates": exactly(0.01, 0.1, 1.0, 10.0)},
        fixed(losses=lambda rates: (np.log(rates) + 1.3) ** 2),
    ),
    "scaling.transfer_check": (
        {"learning_rates": exactly(0.01, 0.1, 1.0, 10.0)},
        fixed(
            shapes=[transformer.Shape(4, heads, 1) for heads in (2, 4, 8)],
            losses=lambda shape, rates, seed: (np.log(rates) + 1.3 + 0.01 * seed) ** 2,
            seeds=(0, 1, 2, 3),
        ),
    ),
    # recovery
    "recovery.oracle.oracle.Oracle.__call__": ({"x": some(2, 4, 3)}, lambda: {"on": Oracle.of(LAYER)}),
    "recovery.oracle.oracle.Oracle.ask": ({"x": some(2, 4, 3)}, lambda: {"on": Oracle.of(LAYER)}),
    "recovery.RotaryLayer": ({"forms": some(4, 2, 4, 4), "projection": some(2, 3, 3), "bias": some(3)}, fixed()),
    "recovery.RotaryLayer.__call__": (
        {"x": some(2, 4, 3)},
        lambda: {"on": rotary(np.random.default_rng(0))},
    ),
    "recovery.RotaryLayer.logits": ({"x": some(2, 4, 3)}, lambda: {"on": rotary(np.random.default_rng(0))}),
    "recovery.RotaryLayer.weights": ({"x": some(2, 4, 3)}, lambda: {"on": rotary(np.random.default_rng(0))}),
    "recovery.RotaryLayer.of_projections": (
        {"query": some(2, 3, 2), "key": some(2, 3, 2), "projection": some(2, 3, 3), "frequencies": positive(1)},
        fixed(offsets=3),
    ),
    "recovery.evaluate_layer": ({"x": some(2, 4, 3)}, fixed(layer=LAYER)),
    "recovery.learn_layer": ({"x": of(SEQUENCES), "y": of(LAYER(SEQUENCES))}, fixed(heads=2)),
    # study
    "study.Verdict.from_samples": (
        {"samples": some(6)},
        fixed(claim="mean", target=0.0, tolerance=1.0, basis="drawn so"),
    ),
    "study.panels.spread_curve": ({"x": exactly(1.0, 2.0), "samples": some(4, 2)}, fixed(label="curve")),
}

# Functions that compile for a second or more: what they are given is looked at, and not what they return.
EXPENSIVE = {
    "theory.joma.theorems.gaussian_mixture.mixture_coefficients",
    "theory.joma.theorems.gaussian_mixture.expected_gradient",
    "theory.joma.theorems.gaussian_mixture.gradient_covariance",
    "theory.joma.theorems.gaussian_mixture.linear_noise_approximation",
    "theory.joma.theorems.rebound.entropy_curve",
    "theory.joma.theorems.rebound.entropy_of",
    "theory.joma.theorems.scan_and_snap.training_time",
    "theory.joma.theorems.scan_and_snap.reduced_trajectory",
    "theory.meanfield.bifurcation_scan",
    "theory.meanfield.contrastive.stationary_states.find_basins",
    "theory.meanfield.lyapunov_spectrum",
    "theory.meanfield.overlap_trajectory",
    "theory.meanfield.contrastive.particles.simulate_particles",
    "theory.meanfield.stationary_states",
    "theory.meanfield.train_overlaps",
    "theory.meanfield.contrastive.sgd.train_weights",
    "spectra.traced_ranks.traced_stable_rank",
    "transformer.Transformer.__call__",
    "transformer.Transformer.record",
}

TRACED = "called by compiled programs, on what their callers have checked"
OPAQUE = "takes no arrays: a model, a configuration, text or settings"
ASKED = "called by the oracle, on sequences and answers that it has checked"
FILES = "reads tensors from files; rows are whole numbers"
# Functions whose arrays may hold labels of any kind: text and objects are taken.
TAKES_LABELS = {
    "theory.bigram.fit_lags",
    "theory.bigram.lags.streams.lag_information",
    "theory.bigram.lags.result.LagFit.predict",
}

EXEMPT = {
    "study.Claim": "a word of a declaration: labelled arrays and values that the bench makes",
    "study.Study.claims": "a word of a declaration: labelled arrays and values that the bench makes",
    "study.Study.train": "a word of a declaration: labelled arrays and values that the bench makes",
    "study.lines": "a word of a declaration: labelled arrays and values that the bench makes",
    "study.near": "a word of a declaration: labelled arrays and values that the bench makes",
    "study.over_draws": "a word of a declaration: labelled arrays and values that the bench makes",
    "study.setting": "a word of a declaration: labelled arrays and values that the bench makes",
    "study.slope": "a word of a declaration: labelled arrays and values that the bench makes",
    "study.sweep": "a word of a declaration: labelled arrays and values that the bench makes",
    "study.trajectories": "a word of a declaration: labelled arrays and values that the bench makes",
    "theory.bigram.theorems.frequencies.place_equally": "hands its distributions on to the task, which has a row",
    "theory.joma.UpdateRule": "takes numbers",
    "theory.joma.theorems.nearly_orthogonal.with_gram": "takes the cosines that random_gram draws",
    "attention.AttentionLayer.logits": TRACED,
    "attention.AttentionLayer.read": TRACED,
    "attention.MultiHeadAttention.logits": TRACED,
    "attention.MultiHeadAttention.read": TRACED,
    "theory.bigram.theorems.population.check_weights": "refuses only",
    "theory.bigram.theorems.population.excess_of_signals": "arithmetic on signals that its callers have computed",
    "costs.count": "takes its arrays without names: tested in test_arrays.py",
    "scaling.Muon.dimensions": OPAQUE,
    "scaling.Parametrization.optax": OPAQUE,
    "theory.meanfield.ContrastiveTask": "takes numbers, and a loss that is called on arrays",
    "theory.meanfield.ContrastiveTask.loss": TRACED,
    "theory.joma.theorems.nearly_orthogonal.integrate_couplings": "takes what a flow has recorded, and a loss",
    "scaling.audit_model": OPAQUE,
    "scaling.infer_roles": OPAQUE,
    "scaling.initialize_model": OPAQUE,
    "scaling.torch_groups": OPAQUE,
    "models.open_checkpoint": OPAQUE,
    "models.shape_from_config": OPAQUE,
    "probe.AttentionRecord.attend": OPAQUE,
    "probe.AttentionRecord.observe": OPAQUE,
    "probe.AttentionRecorder": OPAQUE,
    "probe.qk_clip_factors": OPAQUE,
    "probe.head_spectra": OPAQUE,
    "probe.measure_checkpoints": "takes folders and token ids, which it checks itself",
    "probe.record_attention": OPAQUE,
    "recovery.ExtractionOptions": OPAQUE,
    "recovery.parity_layer": "hands its slopes on to `parity_system`",
    "recovery.ServerLimits": "takes settings, and a table of embeddings that it converts and checks itself",
    "recovery.ServerLimits.check": ASKED,
    "recovery.ServerLimits.fit": ASKED,
    "recovery.ServerLimits.round": ASKED,
    "recovery.ServerLimits.serve": OPAQUE,
    "recovery.ServerLimits.shortened": ASKED,
    "recovery.ServerLimits.spacing": OPAQUE,
    "recovery.ServerLimits.stretch": ASKED,
    "recovery.extract_layer": OPAQUE,
    "transformer.train": OPAQUE,
}
