import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.errors import UsageError
from manyheads.study import Cell, grid

values = st.one_of(
    st.integers(-(10**9), 10**9),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.text("ab.+-_", min_size=1),
)
cells = st.dictionaries(st.sampled_from(["heads", "depth", "rate"]), values)


@given(cells, cells)
def test_equal_cells_have_equal_slugs_and_different_cells_different_ones(first, second):
    one, other = Cell(**first), Cell(**second)
    assert pickle.loads(pickle.dumps(one)) == one
    assert "/" not in one.slug
    if list(first.items()) == list(second.items()) and list(map(type, first.values())) == list(
        map(type, second.values())
    ):
        assert one.slug == other.slug
    if one.slug == other.slug:
        assert [str(value) for value in first.values()] == [str(value) for value in second.values()]


def test_grid_is_the_product_in_order():
    assert [tuple(cell.values()) for cell in grid(a=(1, 2), b=("x", "y"))] == [(1, "x"), (1, "y"), (2, "x"), (2, "y")]


@pytest.mark.parametrize("bad", ["a/b", "", "a b", "é", (1,), None])
def test_values_that_are_no_folder_names_are_refused(bad):
    with pytest.raises(UsageError, match="cell value"):
        Cell(name=bad)
