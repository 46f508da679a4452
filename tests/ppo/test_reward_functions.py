"""Reward functions of a user: found, weighted and checked; mistakes are one line."""

import sys

import pytest

from align.core.errors import UserError
from align.ppo.reward_functions import WeightedFunction, call_reward_function, load_functions

PROMPT = ({"role": "user", "content": "Hi"},)


def weighted(function, name="own", weight=1.0):
    return WeightedFunction(name, weight, function)


def test_functions_are_found_with_their_weights(own_module):
    own_module("own_rewards_a", "def short(prompts, responses):\n    return [-len(r) for r in responses]\n")
    found = load_functions(
        ["own_rewards_a:short=0.5", "align.ppo.toy_rewards:share_of_e", "align.ppo.toy_rewards:brevity=-2"]
    )
    assert [(reward.name, reward.weight) for reward in found] == [("short", 0.5), ("share_of_e", 1.0), ("brevity", -2.0)]
    assert call_reward_function(found[0], [PROMPT] * 2, ["abc", ""]) == [-3.0, 0.0]
    assert call_reward_function(found[1], [PROMPT] * 2, ["eeab", ""]) == [0.5, 0.0]
    assert call_reward_function(found[2], [PROMPT] * 2, ["a b", ""]) == [0.98, 1.0]  # the weight is applied by Rewards


@pytest.mark.parametrize(
    "text",
    [
        "no_such_module_anywhere:f",
        "align.ppo.toy_rewards:no_such_function",
        "align.ppo.toy_rewards",
        "align.ppo.toy_rewards:",
        ":f",
        "",
        "align.ppo.toy_rewards:brevity=much",
        ".toy_rewards:brevity",
    ],
)
def test_a_wrong_specification_is_one_line_that_repeats_it(text):
    with pytest.raises(UserError) as caught:
        load_functions([text])
    message = str(caught.value)
    assert f"reward function '{text}'" in message
    assert "write module:function" in message
    assert "\n" not in message


def test_a_module_that_does_not_import_is_one_line(own_module):
    own_module("own_rewards_d", "def score(prompts, responses:\n")
    with pytest.raises(UserError, match=r"^reward function 'own_rewards_d:score': SyntaxError[^\n]*$"):
        load_functions(["own_rewards_d:score"])
    with pytest.raises(UserError, match="'math:pi': pi is float, not a function"):
        load_functions(["math:pi"])


@pytest.mark.parametrize(
    ("scores", "word"),
    [
        ([1.0], "gave 1 scores for 2 responses"),
        ([1.0, 2.0, 3.0], "gave 3 scores for 2 responses"),
        ([1.0, float("nan")], "gave nan for the response 'second'"),
        ([float("-inf"), 1.0], "gave -inf for the response 'first'"),
    ],
)
def test_wrong_scores_are_named(scores, word):
    with pytest.raises(UserError, match="reward function 'own' " + word):
        call_reward_function(weighted(lambda prompts, responses: scores), [PROMPT] * 2, ["first", "second"])


def test_a_function_that_exits_is_one_line():
    with pytest.raises(UserError, match="reward function 'own' failed: SystemExit: 3"):
        call_reward_function(weighted(lambda prompts, responses: sys.exit(3)), [PROMPT], ["a"])


def test_a_weight_that_is_not_finite_is_refused():
    with pytest.raises(UserError, match="brevity=nan': its weight must be a finite number"):
        load_functions(["align.ppo.toy_rewards:brevity=nan"])
