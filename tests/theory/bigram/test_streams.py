"""Streams: which places are samples, how much lags say, and targets that depend on known lags."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.special import xlogy

from manyheads.errors import ShapeError, UsageError
from manyheads.theory.bigram import plant_lags
from manyheads.theory.bigram.lags.streams import lag_information, read_streams


def test_samples_of_several_sessions_do_not_reach_into_each_other(rng):
    sessions = [rng.integers(0, 5, size) for size in (9, 3, 12)]
    data = read_streams(sessions, lags=4, vocabulary=5)
    expected = [
        ([session[place - lag] for lag in range(4)], session[place + 1])
        for session in sessions
        for place in range(3, len(session) - 1)
    ]
    assert data.windows.tolist() == [window for window, _ in expected]
    assert data.targets.tolist() == [target for _, target in expected]
    assert data.queries.tolist() == [window[0] for window, _ in expected]


def test_the_two_parts_of_a_split_share_no_symbol(rng):
    data = read_streams(rng.integers(0, 3, 200), lags=5)
    first, second = data.split(0.25)
    assert len(first) == 195 - 49  # a quarter of 195 samples, rounded
    assert second.places[0] - 4 > first.places[-1]
    assert second.places[-1] == data.places[-1]


def containers(codes, gap):
    """Return the same stream in every container that can hold a gap."""
    numbers, letters = codes.tolist(), ["abcd"[code] for code in codes]

    def put(labels, hole, dtype=object):
        row = np.empty(len(labels), object)
        row[:] = [hole() if missing else label for label, missing in zip(labels, gap, strict=True)]
        return row.tolist() if dtype is list else pd.Series(row, dtype=dtype) if isinstance(dtype, str) else row

    return {
        "list": put(numbers, lambda: None, list),
        "list of text": put(letters, lambda: float("nan"), list),
        "objects, every NaN its own": put(numbers, lambda: float("nan")),
        "object text": put(letters, lambda: None),
        "tuples": put(list(zip(letters, numbers, strict=True)), lambda: None),
        "float": np.where(gap, np.nan, codes),
        "masked": np.ma.masked_array(codes, gap),
        "masked text": np.ma.masked_array(letters, gap),
        "StringDType": np.array(put(letters, lambda: np.nan, list), dtype=np.dtypes.StringDType(na_object=np.nan)),
        **{kind: put(numbers, lambda: pd.NA, kind) for kind in ("object", "Int64", "Float64", "category")},
        "string": put(letters, lambda: pd.NA, "string"),
        "categories of text": put(letters, lambda: None, "category"),
    }


def test_a_gap_ends_a_session_in_every_container(rng):
    codes, gap = rng.integers(0, 4, 3000), rng.random(3000) < 0.05
    targets = np.where(rng.random(3000) < 0.8, np.roll(codes, 2), rng.integers(0, 4, 3000))
    ends = np.flatnonzero(np.diff(gap, prepend=True, append=True))
    sessions = [
        part
        for start, stop in zip(ends[::2], ends[1::2], strict=True)
        if stop - start >= 4
        for part in [(codes[start:stop], targets[start:stop])]
    ]
    expected = read_streams([one for one, _ in sessions], 4, [other for _, other in sessions])
    bits = lag_information([one for one, _ in sessions], 4, targets=[other for _, other in sessions])
    complete = containers(targets, np.zeros(3000, bool))
    for name, stream in containers(codes, gap).items():
        found = lag_information(stream, 4, targets=complete[name])
        np.testing.assert_allclose(found, bits, atol=1e-12, err_msg=name)
    own = read_streams(np.where(gap, np.nan, codes), 4)
    assert own.windows.tolist() == read_streams([one for one, _ in sessions], 4).windows.tolist()
    missing = rng.random(3000) < 0.1
    assert len(read_streams(codes, 4, np.where(missing, np.nan, targets))) == (~missing[3:]).sum()
    assert expected.vocabulary == own.vocabulary == 4


@pytest.mark.parametrize(
    ("stream", "lags", "message"),
    [
        ([], 2, "empty"),
        ([0, 1, 0], 0, "lags=0"),
        ([0, 1, 0], 4, "4 lags reach beyond the stream: its 3 symbols"),
        ([0, 1, 7, 1, 0], 2, "from 0 to 7: a vocabulary of 3"),
        ([0, -1, 1, 0], 2, "from -1 to 1"),
        ([2, 2, 2, 2, 2], 2, "all 5 symbols are 2"),
        ([0, 2, 2, 2, 2], 2, "all 3 targets are 2"),
    ],
)
def test_streams_that_are_none_are_refused_with_the_figure(stream, lags, message):
    with pytest.raises(UsageError, match=message):
        read_streams(stream, lags, vocabulary=3)


def test_a_stream_that_never_changes_says_nothing_of_any_target(rng):
    with pytest.raises(UsageError, match="all 50 symbols are 0"):
        read_streams(np.zeros(50, int), 2, targets=rng.integers(0, 2, 50))


def test_pairs_and_mixed_types_are_labels():
    pairs = np.empty(6, object)
    pairs[:] = [("a", 1), ("b", 2), ("c", 3)] * 2
    assert read_streams(pairs, 2).labels.tolist() == [("a", 1), ("b", 2), ("c", 3)]
    mixed = read_streams(["a", 1, "1", 2] * 3, 2)
    assert mixed.labels.tolist() == ["a", 1, "1", 2]
    assert mixed.symbols[:4].tolist() == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="lags"):
        read_streams([0, 1, 0, 1], 2.5)


def test_arrays_that_are_no_streams_are_refused():
    with pytest.raises(ShapeError, match="row of labels"):
        read_streams(np.zeros((2, 3)), 1)
    with pytest.raises(UsageError, match="infinite"):
        read_streams([0.5, 1.5, np.inf], 1)
    with pytest.raises(UsageError, match="only missing values"):
        read_streams([None, np.nan], 1)
    with pytest.raises(UsageError, match="its 2 symbols between gaps"):
        read_streams([0, 1, None, 1, 0, None], 2)
    with pytest.raises(UsageError, match="2 labels occur, and vocabulary=3"):
        read_streams(["a", "b", "a"], 1, vocabulary=3)
    with pytest.raises(ShapeError, match="shape of the streams"):
        read_streams([0, 1, 0, 1], 2, targets=[0, 1])


def test_mutual_information_is_the_sum_of_entropies(rng):
    stream = rng.choice(4, 3000, p=[0.4, 0.3, 0.2, 0.1])
    targets = (stream + rng.choice(4, 3000, p=[0.7, 0.1, 0.1, 0.1])) % 4
    data = read_streams(stream, 3, targets)

    def entropy(*columns):
        shares = np.unique(np.stack(columns), axis=1, return_counts=True)[1] / len(data)
        return -xlogy(shares, shares).sum() / np.log(2)

    for lag, found in enumerate(lag_information(stream, 3, targets=targets)):
        symbols = data.windows[:, lag]
        exact = entropy(data.targets) + entropy(symbols) - entropy(data.targets, symbols)
        np.testing.assert_allclose(found, exact - 9 / (2 * len(data) * np.log(2)), atol=1e-12)


def test_planted_targets_have_the_planted_law(rng):
    stream, table = rng.integers(0, 3, 30_000), rng.dirichlet(np.ones(3), size=3).T
    lags, weights = np.array([[0, 3], [1, 2], [2, 5]]), np.array([[0.5, 0.5], [0.3, 0.7], [0.9, 0.1]])
    targets = plant_lags(rng, stream, table, lags, weights)
    assert (targets[:5] == -1).all()
    places = np.arange(5, len(stream))
    queries = stream[places]
    law = sum(
        weights[queries, m][:, None] * table[:, stream[places - lags[queries, m]]].T for m in range(2)
    )  # (samples, 3)
    counts = np.bincount(targets[places], minlength=3)
    deviation = (counts - law.sum(0)) / np.sqrt((law * (1 - law)).sum(0))
    assert np.abs(deviation).max() < stats.norm.isf(1e-6)
    for query in range(3):  # and by query, at the lag that weighs most
        rows = queries == query
        seen = np.eye(3)[targets[places][rows]]
        gap = (seen - law[rows]).mean(0) * np.sqrt(rows.sum()) / 0.5
        assert np.abs(gap).max() < stats.norm.isf(1e-6)


@pytest.mark.parametrize(
    ("table", "lags", "weights", "message"),
    [
        (np.full((2, 2), 0.4), [[0], [1]], [[1.0], [1.0]], "columns of transition sum to 0.8"),
        (np.eye(2), [[0], [1]], [[0.5], [1.0]], "rows of weights sum to 0.5"),
        (np.eye(2), [[0], [9]], [[1.0], [1.0]], "from 0 to 9: the stream has 4"),
    ],
)
def test_planting_refuses_laws_that_are_none(rng, table, lags, weights, message):
    with pytest.raises(UsageError, match=message):
        plant_lags(rng, [0, 1, 1, 0], table, lags, weights)
