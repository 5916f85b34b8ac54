"""Constraints of settings: what they refuse, in which words, and what they keep."""

from dataclasses import dataclass

import numpy as np
import pytest

from manyheads._constraints import Constraint, check_fields, constrained
from manyheads.errors import UsageError


@pytest.mark.parametrize(
    ("rule", "annotation", "value", "words"),
    [
        (Constraint(least=1), int, 0, "x=0: expected an integer of at least 1"),
        (Constraint(least=1, most=3), "int", 4, "x=4: expected an integer of at least 1 and at most 3"),
        (Constraint(), int, 1.5, "x=1.5: expected an integer"),
        (Constraint(), int, True, "x=True: expected an integer"),
        (Constraint(above=0), float, float("nan"), "x=nan: expected a positive number"),
        (Constraint(above=0, below=1), "float", 1.0, "x=1.0: expected a positive number below 1"),
        (Constraint(above=2), float, 2, "x=2: expected a number above 2"),
        (Constraint(), float, "a", "x='a': expected a number"),
        (Constraint(multiple=4), int, 6, "x=6: expected an integer, a multiple of 4"),
        (Constraint(least=8, multiple=4), int, 6, "x=6: expected an integer of at least 8 and a multiple of 4"),
        (Constraint(choices=("a", "b")), str, "c", "x='c': choose from a, b"),
        (Constraint(), "Literal['a', 'b']", "c", "x='c': choose from a, b"),
        (Constraint(), tuple[int, ...], (), r"x=\(\): expected one or more integers"),
        (Constraint(), tuple[int, ...], 3, "x=3: expected one or more integers"),
        (Constraint(), int, (3,), r"x=\(3,\): expected an integer"),
        (Constraint(), tuple[int, int], (1,), r"x=\(1,\): expected two integers"),
        (Constraint(least=2, count=2, order="rising"), tuple[int, ...], (4, 2), "two or more integers in rising order"),
        (Constraint(least=2, count=2, order="rising"), tuple[int, ...], (1, 2), "in rising order, each at least 2"),
        (Constraint(order="falling"), tuple[float, ...], (1.0, 1.0), "one or more numbers in falling order"),
        (Constraint(order="distinct"), tuple[float, ...], (1.0, 1.0), "one or more numbers, each once"),
        (Constraint(choices=(1.0, 0.5), count=2), tuple[float, ...], (1.0,), "choose from 1.0, 0.5, two or more"),
    ],
)
def test_each_message_says_what_was_expected(rule, annotation, value, words):
    with pytest.raises(UsageError, match=words):
        rule.kept("x", value, annotation)


def test_a_number_that_python_refuses_to_print_is_counted_in_bits():
    with pytest.raises(UsageError, match="x=an integer of 16610 bits: expected an integer of at most 9"):
        Constraint(most=9).kept("x", 10**5000, int)


@pytest.mark.parametrize(
    ("annotation", "value", "kept"),
    [
        (int, np.int32(3), 3),
        (float, np.float32(0.5), 0.5),
        (float, 1, 1),
        ("float | None", None, None),
        ("tuple[int, ...]", [np.int64(2), 3], (2, 3)),
        ("tuple[float, float]", (1, 2.0), (1, 2.0)),
        ("str", "a", "a"),
        ("bool", True, True),
        ("Literal['a', 'b']", "b", "b"),
    ],
)
def test_values_are_kept_as_pythons_own(annotation, value, kept):
    found = Constraint().kept("x", value, annotation)
    assert found == kept
    assert type(found) is type(kept)


@dataclass(frozen=True)
class Span:
    burn_in: int = constrained(0, Constraint(least=0, below="horizon"))
    horizon: float = constrained(3.0, Constraint(above=0))
    note: str = ""

    def __post_init__(self):
        check_fields(self, "Span: ")


def test_a_bound_may_be_another_field():
    assert Span(np.int8(2), 4).burn_in == 2
    with pytest.raises(UsageError, match=r"Span: burn_in=5: expected an integer of at least 0 and below horizon=3.0"):
        Span(5)
    with pytest.raises(UsageError, match="Span: burn_in=0"):
        Span(horizon="late")
