"""The counted oracle: what it counts, what it allows, and the word it has for each way of failing."""

import ml_dtypes
import numpy as np
import pytest

from manyheads.attention import AttentionLayer
from manyheads.errors import UsageError
from manyheads.recovery import ExtractionOptions, evaluate_layer, gpt_layer
from manyheads.recovery.oracle.oracle import Budget, Counts, Oracle, OracleSettings
from manyheads.recovery.refusals import BudgetSpent, OracleError


def test_a_layer_in_numpy_is_the_layer(rng):
    layer, x = gpt_layer(rng, 8, 2), rng.normal(size=(3, 5, 8))
    y = layer(x)
    assert np.allclose(evaluate_layer(layer, x), y, rtol=0, atol=1e-12)
    assert np.allclose(Oracle.of(layer, residual=True)(x, read="all"), y, rtol=0, atol=1e-12)
    assert Oracle.of(layer).causal
    # With everything visible, the last row of a causal layer is every row, its own token put last.
    both = gpt_layer(rng, 8, 2, causal=False)
    turned = [both.theta, both.projection, both.key_bias, both.bias]
    last = [
        evaluate_layer(AttentionLayer(*turned, causal=True), x[:, [*range(r), *range(r + 1, 5), r]])[:, -1]
        for r in range(5)
    ]
    assert np.allclose(evaluate_layer(both, x), np.stack(last, 1), rtol=0, atol=1e-12)
    assert not Oracle.of(both).causal


def test_counts_are_of_stages_and_add_up(rng):
    oracle = Oracle(lambda x: 2 * x, 3, OracleSettings(batch=7))
    with oracle.stage("a"):
        oracle(rng.normal(size=(10, 2, 3)), read="last")
        with oracle.stage("b"):
            oracle(np.full((4, 5, 3), 2.0), read="all")
        oracle(rng.normal(size=(1, 1, 3)))
    a, b = oracle.counts["a"], oracle.counts["b"]
    assert (a.calls, a.tokens, a.numbers) == (11, 21, 33)
    assert (b.calls, b.tokens, b.numbers, b.largest_norm) == (4, 20, 60, pytest.approx(12**0.5))
    assert oracle.total.calls == 15
    assert oracle.total.tokens == 41
    assert Counts(1, 2, 3, 4.0, 0, 1.0, 1.0) + Counts(1, 1, 1, 5.0) == Counts(2, 3, 4, 5.0, 0, 1.0, 1.0)


def test_time_inside_the_oracle_is_told_from_time_outside(rng):
    def slow(x):
        for _ in range(40):
            np.linalg.svd(rng.normal(size=(40, 40)))
        return x

    oracle = Oracle(slow, 2)
    with oracle.stage("a"):
        oracle(np.ones((1, 1, 2)))
    counts = oracle.counts["a"]
    assert counts.oracle_seconds > 2 * counts.own_seconds >= 0


def test_batches_hold_so_many_tokens_and_the_function_may_overwrite_them(rng):
    shapes = []

    def double(x):
        shapes.append(x.shape)
        x *= 2
        return x

    x = rng.normal(size=(5, 3, 2))
    before = x.copy()
    assert np.array_equal(Oracle(double, 2, OracleSettings(batch=7))(x, read="all"), 2 * before)
    assert shapes == [(2, 3, 2), (2, 3, 2), (1, 3, 2)]
    assert np.array_equal(x, before)


class Tensor:
    """Stand-in for a PyTorch tensor, with the attributes that an oracle reads."""

    def __init__(self, x, dtype):
        self.x, self.dtype = x, dtype

    def detach(self):
        return self

    cpu = detach

    def float(self):
        return Tensor(self.x, "torch.float32")

    def __array__(self, dtype=None, copy=None):
        if self.dtype == "torch.bfloat16":
            raise TypeError("got unsupported ScalarType BFloat16")
        return self.x


@pytest.mark.parametrize(
    "answer",
    [
        lambda x: x.astype(np.float32),
        lambda x: x.astype(ml_dtypes.bfloat16),
        lambda x: x.tolist(),
        lambda x: Tensor(x, "torch.float64"),
        lambda x: Tensor(x.astype(np.float32), "torch.bfloat16"),
    ],
)
def test_answers_may_come_in_any_floating_point_type(answer, rng):
    x = rng.integers(-4, 4, (2, 3, 4)).astype(float)
    y = Oracle(answer, 4)(x, read="all")
    assert y.dtype == np.float64
    assert np.array_equal(y, x)


def fail(x):
    raise RuntimeError("no memory on device")


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (fail, "RuntimeError on sequences of shape .*no memory on device"),
        (lambda x: x[:, -1], r"with shape \(2, 4\): expected the same shape"),
        (lambda x: x.astype(int), "int64: expected real floating-point numbers"),
        (lambda x: x + 1j, "complex128: expected real"),
        (lambda x: np.where(x > 0, x, np.nan), "NaN or infinite"),
        (lambda x: None, "object"),
        (lambda x: [[1.0], [1.0, 2.0]], "ValueError"),
    ],
)
def test_a_bad_answer_is_named(function, word):
    with pytest.raises(OracleError, match=word):
        Oracle(function, 4)(np.arange(-12, 12.0).reshape(2, 3, 4))


def test_an_oracle_that_changes_its_dtype_is_named():
    kinds = iter([np.float32, np.float64])
    oracle = Oracle(lambda x: x.astype(next(kinds)), 2)
    oracle(np.ones((1, 1, 2)))
    with pytest.raises(OracleError, match="float64, and in float32 before"):
        oracle(np.ones((1, 1, 2)))


@pytest.mark.parametrize(
    ("budget", "word"),
    [(Budget(calls=9), "9 calls"), (Budget(tokens=17), "17 tokens"), (Budget(seconds=1e-9), "seconds")],
)
def test_a_budget_is_never_overdrawn(budget, word):
    asked = []
    oracle = Oracle(lambda x: asked.append(x.shape) or x, 2, OracleSettings(batch=4, budget=budget))
    with pytest.raises(BudgetSpent, match=word):
        oracle(np.ones((10, 2, 2)))
    assert sum(shape[0] for shape in asked) == (0 if budget.seconds else 8)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Oracle(3, 2),
        lambda: Oracle(fail, 0),
        lambda: Oracle(fail, True),
        lambda: Oracle(fail, 2)(np.ones((2, 2))),
        lambda: Oracle(fail, 2)(np.ones((0, 1, 2))),
        lambda: Oracle(fail, 2)(np.ones((1, 1, 2)), read="first"),
        lambda: OracleSettings(batch=0),
        lambda: OracleSettings(dtype="int32"),
        lambda: OracleSettings(dtype="no dtype"),
        lambda: Budget(calls=0),
    ],
)
def test_what_cannot_be_meant_is_refused(wrong):
    with pytest.raises(UsageError):
        wrong()


def test_budgets_may_be_infinite_and_others_are_refused_by_the_name_that_was_written():
    oracle = Oracle(lambda x: x, 2, OracleSettings(budget=Budget(calls=np.inf, tokens=np.inf, seconds=np.inf)))
    assert oracle(np.ones((3, 1, 2))).shape == (3, 2)
    ExtractionOptions(most_calls=np.inf, most_tokens=np.float32(np.inf), most_seconds=float("inf"))
    for name in ("most_calls", "most_tokens", "most_seconds"):
        for wrong in (0, -1.0, np.nan, "many"):
            with pytest.raises(UsageError, match=f"{name}=.*expected a positive number, or None for no limit"):
                ExtractionOptions(**{name: wrong})


@pytest.mark.parametrize("dtype", [np.float32, "f4", "single", np.dtype("float32"), "float32"])
def test_every_spelling_of_a_dtype_is_the_dtype(dtype):
    given = []
    Oracle(lambda x: given.append(x.dtype) or x, 2, OracleSettings(dtype=dtype))(np.ones((1, 1, 2)))
    assert given == [np.float32]
    assert OracleSettings(dtype=dtype).dtype == ExtractionOptions(dtype=dtype).dtype == "float32"
    assert np.dtype(OracleSettings(dtype="longdouble").dtype) == np.longdouble


def test_a_question_that_is_not_finite_never_reaches_the_function():
    with pytest.raises(FloatingPointError):
        Oracle(fail, 1)(np.full((1, 1, 1), np.nan))


def test_progress_is_shown_on_standard_error_or_not_at_all(capfd):
    for progress in (False, True):
        oracle = Oracle(lambda x: x, 2, OracleSettings(progress=progress))
        with oracle.showing(), oracle.stage("pairs"):
            oracle(np.ones((3, 1, 2)))
        out, err = capfd.readouterr()
        assert out == ""
        assert bool(err.strip()) is progress
