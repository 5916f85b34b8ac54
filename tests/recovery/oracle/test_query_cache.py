"""Stored answers: nothing is asked twice, nobody's answers are mixed, and what is damaged is left as it is."""

import hashlib

import numpy as np
import pytest

from manyheads.errors import FileRefused
from manyheads.recovery.oracle.oracle import Budget, Oracle, OracleSettings
from manyheads.recovery.oracle.query_cache import QueryCache
from manyheads.recovery.refusals import BudgetSpent, OracleError
from manyheads.study.store.disk import StoreDamaged


def state(folder):
    """Return the content of every file."""
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


class Recorder:
    """A function that remembers how many sequences of which length it was asked."""

    def __init__(self, function):
        self.function, self.asked = function, []

    def __call__(self, x):
        self.asked.append(x.shape[:2])
        return self.function(x)


PROBES = [(1, 1), (1, 2), (1, 5)]


def test_nothing_is_asked_twice_whatever_the_batches(tmp_path, rng):
    x, z = rng.normal(size=(10, 3, 4)), rng.normal(size=(3, 2, 4))
    first = Oracle(np.tanh, 4, store=tmp_path)
    whole, last = first(x, read="all"), first(z)
    function = Recorder(np.tanh)
    again = Oracle(function, 4, OracleSettings(batch=6), tmp_path)
    assert np.array_equal(again(x, read="all"), whole)
    assert np.array_equal(again(z), last)
    assert function.asked == PROBES
    assert again.total.calls == first.total.calls - len(PROBES)  # the first one asked the probes twice
    counts = again.counts["other"]
    assert (counts.calls, counts.stored, counts.tokens, counts.numbers) == (13, 13, 36, 132)
    more = rng.normal(size=(2, 3, 4))
    assert np.array_equal(again(np.concatenate([x[:3], more]), read="all")[3:], np.tanh(more))


def test_the_same_question_asked_again_is_asked_again(tmp_path, rng):
    noise = np.random.default_rng(rng.integers(2**32))
    x = rng.normal(size=(2, 3, 4))

    def answers(folder):
        oracle = Oracle(lambda x: x + 1e-3 * noise.normal(size=x.shape), 4, store=folder)
        return [oracle(x), oracle(x), oracle(x[:1], read="all")[:, -1]]

    one = answers(tmp_path)
    assert not np.array_equal(one[0], one[1])
    for before, after in zip(one, answers(tmp_path), strict=True):
        assert np.array_equal(before, after)


def test_answers_keep_their_dtype_and_the_residual_is_taken_off_afterwards(tmp_path, rng):
    def function(x):
        return (x + np.sin(x)).astype(np.float32)

    x = rng.normal(size=(3, 2, 4))
    stored = Oracle(function, 4, store=tmp_path)(x, read="all")
    plain = Oracle(function, 4, OracleSettings(residual=True), tmp_path)(x, read="all")
    assert np.array_equal(stored - x, plain)


@pytest.mark.parametrize(
    ("function", "dim", "settings", "word"),
    [
        (np.sin, 4, OracleSettings(), "another state of it"),
        (lambda x: np.tanh(x) * (1 + 1e-9), 4, OracleSettings(), "another state of it"),
        (np.tanh, 5, OracleSettings(), "dim is 4 there and 5 here"),
        (np.tanh, 4, OracleSettings(dtype="float32"), "tokens is 'float64' there and 'float32' here"),
        (lambda x: np.tanh(x).astype(np.float32), 4, OracleSettings(), "dtype is 'float64' there and 'float32' here"),
    ],
)
def test_answers_of_another_oracle_are_refused_and_left(tmp_path, function, dim, settings, word):
    Oracle(np.tanh, 4, store=tmp_path)(np.ones((2, 2, 4)))
    before = state(tmp_path)
    with pytest.raises(FileRefused, match=word):
        Oracle(function, dim, settings, tmp_path)(np.ones((2, 2, dim)))
    assert state(tmp_path) == before


@pytest.mark.parametrize("damage", ["flip", "remove", "header", "header gone", "add"])
def test_a_damaged_store_is_named_and_left(tmp_path, damage):
    Oracle(np.tanh, 4, store=tmp_path)(np.ones((2, 2, 4)))
    data = next(tmp_path.glob("batches/*/answers.safetensors"))
    header = tmp_path / "oracle.json"
    if damage == "flip":
        raw = bytearray(data.read_bytes())
        raw[-1] ^= 1
        data.write_bytes(raw)
    elif damage == "remove":
        data.unlink()
    elif damage == "header":
        header.write_text(header.read_text().replace('"dim": 4', '"dim": 3'))
    elif damage == "header gone":
        header.unlink()
    else:
        (data.parent / "more.safetensors").write_bytes(data.read_bytes())
    before = state(tmp_path)
    with pytest.raises(StoreDamaged, match=str(tmp_path)):
        Oracle(np.tanh, 4, store=tmp_path)(np.ones((2, 2, 4)))
    assert state(tmp_path) == before


def test_a_folder_of_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(FileRefused, match="no stored answers"):
        QueryCache(tmp_path)


@pytest.mark.parametrize("ending", ["raises", "budget"])
def test_what_was_answered_before_a_failure_stays(tmp_path, rng, ending):
    x = rng.normal(size=(6, 2, 3))
    calls = Recorder(np.tanh)

    def fails(y):
        if len(calls.asked) == 6 + 2:
            raise ConnectionError("the far end hung up")
        return calls(y)

    budget = Budget(calls=6 + 5) if ending == "budget" else Budget()
    oracle = Oracle(calls if ending == "budget" else fails, 3, OracleSettings(batch=4, budget=budget), tmp_path)
    with pytest.raises(BudgetSpent if ending == "budget" else OracleError):
        oracle(x)
    function = Recorder(np.tanh)
    again = Oracle(function, 3, OracleSettings(batch=4), tmp_path)
    assert np.array_equal(again(x), np.tanh(x[:, -1]))
    assert function.asked == [*PROBES, (2, 2)]


def test_of_two_that_ask_the_same_the_first_one_wins(tmp_path):
    x = np.ones((2, 2, 3))
    Oracle(np.tanh, 3, store=tmp_path)(2 * x)
    one, two = QueryCache(tmp_path), QueryCache(tmp_path)
    one_key, two_key = one.keys(x, "last"), two.keys(x, "last")
    assert np.array_equal(one.keep(one_key, x[:, -1]), x[:, -1])
    assert np.array_equal(two.keep(two_key, 5 * x[:, -1]), x[:, -1])
    assert len(QueryCache(tmp_path)) == len(one) == len(two) == 4


def test_a_file_is_no_store(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileRefused, match="is a file"):
        QueryCache(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
