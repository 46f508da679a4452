import inspect
import json
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from align.core.errors import UserError
from align.core.plugins import call_own_code, checked_scores
from tests.refusals import refusal


@pytest.mark.parametrize(
    "given",
    [
        [0, 0.5, 1],
        (np.float32(0), np.float64(0.5), np.int64(1)),
        np.array([0, 0.5, 1], dtype=np.float16),
        [np.array(0.0), np.array(0.5), np.array(1)],
        torch.tensor([0, 0.5, 1], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(0), torch.tensor(0.5), torch.tensor(True)],
        (number for number in (Fraction(0), Decimal("0.5"), True)),
        [np.bool_(False), 0.5, np.bool_(True)],
    ],
    ids=["Python", "numpy scalars", "array", "arrays", "tensor", "tensors", "generator", "truth values"],
)
def test_every_real_number_is_a_score(given):
    scores = checked_scores(given, 3, "judge", low=0, high=1)
    assert scores == [0.0, 0.5, 1.0]
    assert {type(score) for score in scores} == {float}


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        (None, "j must return a list of numbers, but returned None; go on"),
        (0.5, "j must return a list of numbers, but returned 0.5; go on"),
        ({0: 0.5, 1: 1.0}, "j must return a list of numbers, but returned {0: 0.5, 1: 1.0}; go on"),
        ({0.5, 1.0}, "j must return a list of numbers, but returned {0.5, 1.0}; go on"),
        ("ab", "j must return a list of numbers, but returned 'a' for item 0; go on"),
        ([0.5, "1"], "j must return a list of numbers, but returned '1' for item 1; go on"),
        ([0.5, 1j], "j must return a list of numbers, but returned 1j for item 1; go on"),
        ([[0.5], 1], "j must return a list of numbers, but returned [0.5] for item 0; go on"),
        (torch.zeros(2, 2), "j must return a list of numbers, but returned tensor([0., 0.]) for item 0; go on"),
        ([0.5], "j returned 1 scores for 2 items; go on"),
        ([], "j returned 0 scores for 2 items; go on"),
        ([0.5, np.float32("nan")], "j gave nan for item 1, not a number from 0 to 1; go on"),
        ([np.float32(1.5), 1], "j gave 1.5 for item 0, not a number from 0 to 1; go on"),
    ],
)
def test_anything_else_is_one_clear_line(given, complaint):
    more = {"low": 0, "high": 1, "describe": lambda index: f"item {index}", "advice": "go on"}
    assert refusal(checked_scores, given, 2, "j", **more) == complaint


def test_without_a_range_any_finite_number_will_do():
    assert checked_scores([-7, 1e9], 2, "f") == [-7.0, 1e9]
    with pytest.raises(UserError, match=r"^f gave -inf, not a finite number$"):
        checked_scores([-np.inf], 1, "f")
    with pytest.raises(UserError, match=r"^f gave 2\.0: give 0 or 1$"):
        checked_scores([2], 1, "f", high=1, rule="give 0 or 1")


class Unreadable:
    """Fails below its own line when it is made, and when it is called."""

    def __init__(self, text="{"):
        self.read = json.loads(text)

    def __call__(self):
        json.loads("{")


@pytest.mark.parametrize(
    ("function", "at"),
    [(Unreadable, 4), (Unreadable("{}"), 7), (partial(Unreadable, "["), 4), (Unreadable("{}").__call__, 7)],
)
def test_an_error_names_the_line_of_the_users_own_class(function, at):
    line = inspect.getsourcelines(Unreadable)[1] + at
    assert refusal(call_own_code, "own", function).endswith(f" ({__file__}:{line})")
