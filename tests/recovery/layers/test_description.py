"""Words for the heads of a layer."""

from manyheads.recovery.layers.panels import say_ranks


def test_ranks_in_few_words():
    assert say_ranks([16, 16, 16]) == "16"
    assert say_ranks(iter([4, 3, 4])) == "3 to 4"
