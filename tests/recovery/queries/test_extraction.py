"""The front door: what is chosen, what is tried again, what is refused, and that nothing leaves unverified."""

import dataclasses
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import manyheads as mh
from manyheads.errors import UsageError
from manyheads.recovery import ExtractionOptions, compare_layers, evaluate_layer, extract_layer, gpt_layer
from manyheads.recovery.oracle.layer_oracle import LayerOracle
from manyheads.recovery.oracle.noise_estimate import oracle_noise
from manyheads.recovery.oracle.oracle import Oracle
from manyheads.recovery.oracle.query_cache import QueryCache
from manyheads.recovery.queries import extraction, methods
from manyheads.recovery.refusals import (
    BudgetSpent,
    FitError,
    NotALayer,
    OracleError,
    RankBudgetError,
    VerificationError,
)
from manyheads.recovery.result.certificates import Certificate, OracleErrors
from manyheads.recovery.result.results import Extracted

DIM = 16


@pytest.mark.parametrize(("away", "largest"), [(0.0, 0.04), (2.0, (0.2 + 1.0) ** 2), (np.nan, np.inf)])
def test_the_error_against_a_model_is_that_of_its_copy_and_their_distance(away, largest):
    """Root mean squares add: .2 of the copy, and `away` over the standard deviation 2 of the answers."""
    certificate = Certificate(
        largest_error=0.04, median_error=0.01, sequences=9, confidence=0.9, exceeding=0.1, tolerance=1.0, variance=4.0,
        distribution="",
    )  # fmt: skip
    target = LayerOracle(lambda x: x, 3, itself=(lambda x: x + away * (x > 0), "float16"))
    found = extraction._add_model_error(certificate, target, [np.ones((2, 5, 3)), -np.ones((2, 4, 3))])
    assert found.itself == pytest.approx(largest)


@pytest.fixture
def layer(rng):
    return gpt_layer(rng, DIM, 2)


@pytest.fixture
def function(layer):
    return lambda x: evaluate_layer(layer, x)


class Script:
    """Methods that do what a script says: return a layer this wrong, or raise."""

    def __init__(self, layer, monkeypatch, **script):
        self.layer, self.script, self.runs = layer, script, []
        runners = {name: self._runner(name) for name in methods.METHODS}
        monkeypatch.setattr(methods, "METHODS", runners)

    def _runner(self, name):
        def run(oracle, level, rng, accurate):
            self.runs.append((name, accurate))
            with oracle.stage("asking"):
                oracle(rng.standard_normal((3, 2, DIM)))
            outcome = self.script[name].pop(0)
            if isinstance(outcome, Exception):
                raise outcome
            bias = self.layer.bias + outcome  # a squared error of about outcome^2 everywhere
            return Extracted(dataclasses.replace(self.layer, bias=bias), acts_on="the tokens")

        return run


def refusal(kind):
    return kind("no", measured=1.0, threshold=0.5)


def test_a_right_layer_leaves_with_its_evidence(layer, function, monkeypatch):
    script = Script(layer, monkeypatch, subspaces=[0.0])
    found = extract_layer(function, DIM)
    assert found.layer.bias is not None
    assert found.certificate.accepted
    assert found.certificate.sequences == 400
    assert (found.method, found.heads) == ("subspaces", 2)
    assert "noise" in found.reason
    assert list(found.counts) == ["noise", "asking", "selection", "verification"]
    assert found.total.calls == sum(counts.calls for counts in found.counts.values()) > 423
    assert found.noise.level < 1e-14
    assert script.runs == [("subspaces", False)]
    assert mh.extract_layer is extract_layer


@pytest.mark.parametrize(
    ("outcomes", "runs"),
    [
        ([refusal(FitError), 1.0, 0.0], ["plain", "plain", "plain"]),
        ([1.0, np.linalg.LinAlgError("Singular matrix"), 1.0, 0.0], ["plain", "plain", "plain", "accurate"]),
        ([ValueError("array must not contain infs or NaNs"), FloatingPointError("overflow"), 0.0], ["plain"] * 3),
        ([np.nan, 0.0], ["plain", "plain"]),
    ],
)
def test_it_tries_again_and_says_so(layer, function, monkeypatch, outcomes, runs):
    script = Script(layer, monkeypatch, subspaces=list(outcomes))
    found = extract_layer(function, DIM)
    assert found.certificate.accepted
    assert [accurate for _, accurate in script.runs] == [run == "accurate" for run in runs]
    assert len(found.tried) == len(runs)
    assert found.tried[-1].endswith("heads, relative squared error 0")


@pytest.mark.parametrize(
    ("method", "step"),
    [
        ("subspaces", "subspaces.method.read_sums"),
        ("bounded", "bounded.method.assemble_layer"),
        ("sphere", "sphere.method.read_normalized_sums"),
        ("rotary", "rotary.method.find_counted_heads"),
    ],
)
@pytest.mark.parametrize("error", [np.linalg.LinAlgError, FloatingPointError])
def test_what_arithmetic_throws_is_a_refusal_of_every_method(rng, monkeypatch, method, step, error):
    def singular(*arguments, **settings):
        raise error("Singular matrix")

    monkeypatch.setattr(f"manyheads.recovery.queries.{step}", singular)
    oracle = Oracle.of(gpt_layer(rng, 8, 2))
    with pytest.raises(FitError, match=f"{method}.*Singular matrix") as refused:
        methods.run_method(methods.Attempt(method, False, "asked for"), oracle, 1e-15, rng)
    assert isinstance(refused.value.__cause__, error)


def test_what_is_wrong_is_refused_with_what_was_found(layer, function, monkeypatch):
    Script(layer, monkeypatch, subspaces=[1.0, 0.1, 0.3, 0.2])
    with pytest.raises(VerificationError) as caught:
        extract_layer(function, DIM)
    error = caught.value
    assert not error.result.certificate.accepted
    assert np.allclose(error.result.layer.bias, layer.bias + 0.1)  # the best of them
    assert error.measured == error.result.certificate.largest_error > error.threshold == 1e-6
    assert len(error.__notes__) == 5


def test_the_last_refusal_leaves_and_remembers_the_others(layer, function, monkeypatch):
    Script(layer, monkeypatch, subspaces=[refusal(FitError), refusal(NotALayer), refusal(FitError)])
    with pytest.raises(FitError) as caught:
        extract_layer(function, DIM)
    assert [note.split(":")[1] for note in caught.value.__notes__] == [" FitError", " NotALayer"]


def test_heads_without_room_go_to_the_bounded_design(layer, function, monkeypatch):
    script = Script(layer, monkeypatch, subspaces=[refusal(RankBudgetError)] * 3, bounded=[0.0])
    found = extract_layer(function, DIM)
    assert found.method == "bounded"
    assert "not disjoint" in found.reason
    assert [name for name, _ in script.runs] == ["subspaces"] * 3 + ["bounded"]
    Script(layer, monkeypatch, subspaces=[refusal(RankBudgetError)] * 3)
    with pytest.raises(RankBudgetError):
        extract_layer(function, DIM, method="subspaces")


def test_a_second_certificate_is_drawn_and_no_third(layer, function, monkeypatch):
    """Attempts that are right except on sequences that the selection is unlikely to meet."""

    class Wrong:
        def __init__(self, layer):
            self.layer = layer

        def __getattr__(self, name):
            return getattr(self.layer, name)

        def __call__(self, x):
            return evaluate_layer(self.layer, x) + np.where(np.abs(x[:, :1, :1]) > 3.0, 1.0, 0.0)  # one in 40 or so

    def almost(found):
        return dataclasses.replace(found, layer=Wrong(found.layer))

    script = Script(layer, monkeypatch, subspaces=[0.0] * 4)
    plain = methods.METHODS["subspaces"]
    monkeypatch.setitem(methods.METHODS, "subspaces", lambda *known: almost(plain(*known)))
    with pytest.raises(VerificationError) as caught:
        extract_layer(function, DIM)
    result = caught.value.result
    asked = result.counts["verification"].calls
    assert asked in (400, 800)
    assert len(script.runs) <= 4
    share = result.certificate.exceeding
    assert share == pytest.approx(1 - (1e-4 / 2) ** (1 / 400))


def test_a_mistake_of_ours_is_no_refusal(layer, function, monkeypatch):
    for error in (ValueError("operands could not be broadcast together"), np.exceptions.AxisError(3, 2)):
        Script(layer, monkeypatch, subspaces=[error])
        with pytest.raises(type(error), match=r"broadcast|out of bounds"):
            extract_layer(function, DIM)


@pytest.mark.parametrize(
    ("wrap", "options", "method"),
    [
        (lambda y, x: y.astype(np.float32), {}, "bounded"),
        (lambda y, x: y + x, {"residual": True}, "subspaces"),
        (lambda y, x: y, {"normalized": True}, "sphere"),
        (lambda y, x: y, {"rotary": True}, "subspaces"),  # no position shows: plain attention is tried first
    ],
)
def test_the_method_follows_what_is_measured_and_said(layer, function, monkeypatch, wrap, options, method):
    Script(layer, monkeypatch, **{method: [0.0]})
    assert extract_layer(lambda x: wrap(function(x), x), DIM, options=ExtractionOptions(**options)).method == method


def test_a_normalization_is_found_and_answered_for(layer, monkeypatch):
    def normalize(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True))

    Script(layer, monkeypatch, sphere=[0.0])
    plain = methods.METHODS["sphere"]
    monkeypatch.setitem(methods.METHODS, "sphere", lambda *a: dataclasses.replace(plain(*a), prepare=normalize))
    found = extract_layer(lambda x: evaluate_layer(layer, normalize(x)), DIM)
    assert found.method == "sphere"
    assert found.noise.normalized


@pytest.mark.parametrize(
    ("break_it", "kind", "word"),
    [
        (lambda f: lambda x: f(x)[:, -1], OracleError, "expected the same shape"),
        (lambda f: lambda x: np.full_like(x, np.nan), OracleError, "NaN"),
        (lambda f: lambda x: 1 / 0, OracleError, "ZeroDivisionError"),
        (lambda f: lambda x: f(x) * (1 + 0.1 * np.random.default_rng().random()), NotALayer, "differently"),
        (lambda f: lambda x: np.tanh(f(x)), NotALayer, "not affine"),
        (lambda f: lambda x: f(x + np.arange(x.shape[1])[:, None]), NotALayer, "positions"),
    ],
)
def test_bad_functions_are_named(function, break_it, kind, word):
    with pytest.raises(kind, match=word):
        extract_layer(break_it(function), DIM)


def test_what_contradicts_is_refused(function, rng):
    both = gpt_layer(rng, DIM, 2, causal=False)
    with pytest.raises(NotALayer, match="is not causal, and was said to be"):
        extract_layer(lambda x: evaluate_layer(both, x), DIM, options=ExtractionOptions(causal=True))
    with pytest.raises(NotALayer, match="is causal, and was said not to be") as refused:
        extract_layer(function, DIM, options=ExtractionOptions(causal=False))
    assert (refused.value.measured, refused.value.threshold) == (1.0, 0.0)
    for wrong in ({"method": "magic"}, {"noise": -1.0}, {"noise": 1.0}, {"seed": -1}, {"seed": 1.5}):
        with pytest.raises(UsageError):
            extract_layer(function, DIM, **wrong)
    bad = ({"tries": 0}, {"tries": 1.5}, {"verify": 0}, {"verify": 1.5}, {"tolerance": 0.0}, {"confidence": 1.0})
    for option in (
        *bad,
        {"batch": 0},
        {"dtype": "abc"},
        {"distribution": lambda rng, n, d: [np.full((n, 2, d), np.nan)]},
    ):
        with pytest.raises(UsageError):
            extract_layer(function, DIM, options=ExtractionOptions(**option))


def test_a_function_with_a_memory_is_refused(layer, function, monkeypatch):
    """All of the extraction sees one function, and the certificate another."""
    for outcome in (0.0, refusal(FitError)):
        asked = []

        def remembering(x, asked=asked):
            asked.append(len(x))
            return function(x) * (1 + 1e-9 * (len(asked) > 12))

        Script(layer, monkeypatch, subspaces=[outcome] * 3)
        with pytest.raises(NotALayer, match="have changed since"):
            extract_layer(remembering, DIM)


def test_a_rejection_counts_all_that_was_asked(layer, function, monkeypatch):
    """The certificate is drawn first, other attempts follow: what they asked is in the counts."""
    asked = np.zeros(2, int)

    def counting(x):
        asked[:] += len(x), x.shape[0] * x.shape[1]
        return function(x)

    Script(layer, monkeypatch, subspaces=[0.0, 1.0, 1.0, 1.0])
    chosen = iter([0.0, *[1.0] * 3])
    errors = extraction.oracle_errors

    def lucky(oracle, found, rng, count, draw):  # the selection likes the first attempt, which is wrong
        errors(oracle, found, rng, count, draw)
        return OracleErrors(np.full(count, next(chosen)), 1.0, 0.0)

    monkeypatch.setattr(extraction, "oracle_errors", lucky)
    monkeypatch.setattr(Extracted, "attention", lambda self, x: 2 * x)
    with pytest.raises(VerificationError) as caught:
        extract_layer(counting, DIM)
    total = caught.value.result.total
    assert [total.calls, total.tokens] == asked.tolist()
    assert len(caught.value.result.tried) == 5


@pytest.mark.parametrize("options", [{}, {"normalized": True}, {"rotary": True}])
def test_a_layer_that_ignores_its_tokens_is_named_by_every_method(options, rng):
    bias = rng.standard_normal(DIM)
    with pytest.raises(NotALayer, match="do not depend on the tokens"):
        extract_layer(lambda x: 0 * x + bias, DIM, options=ExtractionOptions(**options, tries=1))


def test_a_budget_ends_it(function):
    with pytest.raises(BudgetSpent, match="100 calls"):
        extract_layer(function, DIM, options=ExtractionOptions(most_calls=100))


def test_every_method_says_what_it_needs(layer, function):
    found = extract_layer(function, DIM)
    assert found.method == "subspaces"
    assert compare_layers(layer, found.layer).worst < 1e-6
    assert found.total.calls < 1000
    again = extract_layer(function, DIM)
    assert np.array_equal(found.layer.theta, again.layer.theta)


KILLED = """
import os, signal, sys
import numpy as np
from manyheads.recovery import ExtractionOptions, evaluate_layer, extract_layer, gpt_layer

seed, folder = int(sys.argv[1]), sys.argv[2]
layer, asked = gpt_layer(np.random.default_rng(seed), 16, 2), []

def function(x):
    asked.append(len(x))
    if len(asked) == 25:
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate_layer(layer, x)

extract_layer(function, 16, seed=seed, options=ExtractionOptions(store=folder))
"""


@pytest.mark.slow
def test_an_extraction_that_was_killed_goes_on_to_the_same_bits(tmp_path, seed):
    words = [sys.executable, "-c", KILLED, str(seed), str(tmp_path / "cut")]
    assert subprocess.run(words, env=os.environ | {"JAX_PLATFORMS": "cpu"}).returncode == -signal.SIGKILL
    stored = len(QueryCache(tmp_path / "cut"))
    assert stored > 50
    layer, asked = gpt_layer(np.random.default_rng(seed), 16, 2), []

    def function(x):
        asked.append(len(x))
        return evaluate_layer(layer, x)

    resumed, whole = (
        extract_layer(function, 16, seed=seed, options=ExtractionOptions(store=folder))
        for folder in (tmp_path / "cut", None)
    )
    for name in ("theta", "projection", "key_bias", "bias"):
        assert np.array_equal(getattr(resumed.layer, name), getattr(whole.layer, name))
    assert resumed.total.stored == stored
    probes = resumed.counts["fingerprint"].calls
    assert probes == 3
    assert resumed.total.calls == whole.total.calls + probes
    assert sum(asked) == 2 * whole.total.calls + probes - stored


@pytest.mark.parametrize(("tolerance", "method"), [(1e-2, "probes"), (1e-6, "bounded")])
def test_tolerance_decides_how_single_precision_is_extracted(rng, tolerance, method):
    """Fewer calls where their errors are accepted; the bounded method is tried where heads cannot be followed."""
    layer, options = gpt_layer(rng, 12, 2), ExtractionOptions(causal=True, tolerance=tolerance)
    oracle = Oracle(lambda x: evaluate_layer(layer, x).astype(np.float32), 12)
    measured = oracle_noise(oracle, rng)
    plan = methods.plan_attempts("auto", measured.level, measured, options)
    assert plan[0].method == method
    assert {(attempt.method, attempt.after) for attempt in plan} >= {("bounded", "refused")} or method == "bounded"
    assert not any(attempt.method == "probes" for attempt in methods.plan_attempts("auto", 1e-4, measured, options))
    if method == "probes":
        found = extract_layer(oracle.function, 12, options=options)
        assert found.method == "probes"
        assert compare_layers(layer, found.layer).theta < 1e-2


@pytest.mark.parametrize("level", [methods.EXACT * 0.99, methods.EXACT, methods.EXACT * 1.04])
def test_a_reason_shows_the_digits_of_its_comparison(rng, level):
    measured = oracle_noise(Oracle(lambda x: evaluate_layer(gpt_layer(np.random.default_rng(0), 8, 2), x), 8), rng)
    reason = methods.plan_attempts("auto", level, measured, ExtractionOptions())[0].reason
    shown, limit = (float(word) for word in reason.split() if word[0].isdigit())
    assert ("above" in reason) == (shown > limit) == (level > methods.EXACT)
