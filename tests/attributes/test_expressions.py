"""Expressions over attributes: LaMDA's ranking by hand, filters, and what is refused."""

import pytest

from align.attributes.expressions import Condition, Expression, choose
from align.core.errors import UserError

NAMES = ["sensible", "specific", "interesting", "unsafe", "no-digits"]


def candidate(sensible, specific, interesting, unsafe=0.0):
    return {"sensible": sensible, "specific": specific, "interesting": interesting, "unsafe": unsafe, "no-digits": 0.5}


def test_lamdas_ranking_by_hand():
    rank = Expression("3*sensible+specific+interesting", NAMES, "rank")
    candidates = [candidate(0.9, 0.2, 0.1), candidate(0.5, 0.9, 0.9), candidate(0.8, 0.8, 0.8)]
    assert [rank(values) for values in candidates] == pytest.approx([3.0, 3.3, 4.0])
    assert choose(candidates, None, rank) == 2


def test_an_unsafe_candidate_is_dropped_however_good():
    rank, condition = Expression("3*sensible+specific+interesting", NAMES, "rank"), Condition("unsafe<0.2", NAMES, "filter")
    candidates = [candidate(0.8, 0.8, 0.8, 0.1), candidate(1, 1, 1, unsafe=0.2)]
    assert rank(candidates[1]) == 5.0
    assert choose(candidates, condition, rank) == 0
    assert choose(candidates[1:], condition, rank) is None
    assert choose(candidates, condition, None) == 0


def test_names_with_hyphens_brackets_and_several_conditions():
    values = candidate(0.5, 0.25, 1.0, 0.1)
    assert Expression("2*(no-digits - specific)/-sensible", NAMES, "rank")(values) == pytest.approx(-1.0)
    assert Expression("no-digits-0.5", NAMES, "rank")(values) == 0.0
    assert Condition("0.1 <= no-digits < 0.6, sensible>=0.5", NAMES, "filter").holds(values)
    assert not Condition("sensible+specific>1, unsafe<0.2", NAMES, "filter").holds(values)


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (Expression, "3*sensibel", "no attribute 'sensibel' among sensible, specific, .*; did you mean sensible"),
        (Expression, "3*", "cannot be read"),
        (Expression, "__import__('os')", r"write numbers, attributes, \+ - \* / and brackets alone"),
        (Expression, "sensible**9999", r"write numbers"),
        (Expression, "unsafe<0.2", r"write numbers"),
        (Expression, "'a'", r"write numbers"),
        (Condition, "unsafe", "write comparisons such as"),
        (Condition, "unsafe == 0", "write comparisons such as"),
        (Condition, "unsafe<0.2, open('x')<1", "write numbers"),
    ],
)
def test_anything_else_is_refused(kind, text, says):
    with pytest.raises(UserError, match=says):
        kind(text, NAMES, "rank")


def test_a_division_by_zero_is_one_line():
    with pytest.raises(UserError, match="divides by zero"):
        Expression("1/unsafe", NAMES, "rank")(candidate(1, 1, 1))
