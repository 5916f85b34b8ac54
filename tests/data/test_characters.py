from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.alphabet import ALPHABET

from manyheads.data.characters import UNKNOWN, build_vocabulary, read_characters, split_tokens
from manyheads.errors import UsageError


@pytest.mark.parametrize(
    "alphabet", [ALPHABET, pytest.param(st.characters(), marks=pytest.mark.slow)], ids=["some", "all"]
)
@given(data=st.data())
def test_full_vocabulary_round_trips(alphabet, data):
    content = data.draw(st.text(alphabet, min_size=1))
    vocabulary = build_vocabulary(content)
    tokens = vocabulary.encode(content)
    assert tokens.dtype == np.int32
    assert tokens.shape == (len(content),)
    assert vocabulary.decode(tokens) == content
    assert len(vocabulary) == len(set(content) - {UNKNOWN}) + 1


@given(st.text(alphabet="abcdefgé漢😀", min_size=1), st.integers(2, 8))
def test_cap_keeps_the_most_frequent_and_maps_the_rest_to_unknown(content, size):
    vocabulary = build_vocabulary(content, size)
    counts = Counter(content)
    kept = vocabulary.symbols[1:]
    assert len(vocabulary) == min(size, len(counts) + 1)
    assert min(counts[symbol] for symbol in kept) >= max(
        (counts[symbol] for symbol in set(counts) - set(kept)), default=0
    )
    expected = "".join(symbol if symbol in kept else UNKNOWN for symbol in content)
    assert vocabulary.decode(vocabulary.encode(content)) == expected


@given(st.permutations("aabbccd"))
def test_vocabulary_does_not_depend_on_the_order_of_the_text(content):
    assert build_vocabulary("".join(content)) == build_vocabulary("aabbccd")


def test_characters_outside_are_unknown():
    assert build_vocabulary("ab").encode("a😀\x00b").tolist() == [1, 0, 0, 2]


def test_wrong_use_is_refused():
    vocabulary = build_vocabulary("ab")
    with pytest.raises(UsageError, match="0 to 2"):
        vocabulary.decode(np.array([3]))
    with pytest.raises(UsageError, match="0 to 2"):
        vocabulary.decode(np.array([-1]))
    with pytest.raises(UsageError, match="size=1"):
        build_vocabulary("ab", 1)


@given(st.integers(2, 200), st.floats(0.01, 0.99))
def test_split_is_contiguous_and_complete(n, fraction):
    tokens = np.arange(n)
    if not 0 < n - round(fraction * n) < n:
        with pytest.raises(UsageError, match="empty"):
            split_tokens(tokens, fraction)
        return
    train, validation = split_tokens(tokens, fraction)
    assert np.array_equal(np.concatenate([train, validation]), tokens)
    assert abs(len(validation) - fraction * n) <= 0.5


def test_split_refuses_fractions_outside():
    with pytest.raises(UsageError, match="fraction"):
        split_tokens(np.arange(9), 1.0)


def test_the_vocabulary_is_that_of_the_training_part(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("ab" * 450 + "z" * 100)
    vocabulary, (training, validation) = read_characters(path)
    assert "z" not in vocabulary.symbols
    assert len(training) == 900
    assert (validation == 0).all()
