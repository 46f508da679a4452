import sys

import pytest

from align.core.errors import UserError
from align.ppo.reward_functions import WeightedFunction, call_reward_function, load_functions
from tests.refusals import refusal

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
    ("text", "why"),
    [
        ("no_such_module_anywhere:f", "No module named 'no_such_module_anywhere'"),
        ("align.ppo.toy_rewards:no_such_function", "module 'align.ppo.toy_rewards' has no attribute 'no_such_function'"),
        ("align.ppo.toy_rewards", "module 'align.ppo.toy_rewards' has no attribute ''"),
        ("align.ppo.toy_rewards:", "module 'align.ppo.toy_rewards' has no attribute ''"),
        (":f", "Empty module name"),
        ("", "Empty module name"),
        ("align.ppo.toy_rewards:brevity=much", "could not convert string to float: 'much'"),
        (
            ".toy_rewards:brevity",
            "TypeError: the 'package' argument is required to perform a relative import for '.toy_rewards'",
        ),
    ],
)
def test_a_wrong_specification_is_one_line_that_repeats_it(text, why):
    message = refusal(load_functions, [text])
    assert message == f"reward function '{text}': {why}; write module:function or module:function=weight"


def test_a_module_that_does_not_import_is_one_line(own_module):
    own_module("own_rewards_d", "def score(prompts, responses:\n")
    with pytest.raises(UserError, match=r"^reward function 'own_rewards_d:score': SyntaxError[^\n]*$"):
        load_functions(["own_rewards_d:score"])
    with pytest.raises(UserError, match="'math:pi': pi is float, not a function"):
        load_functions(["math:pi"])


def test_a_score_that_is_none_a_function_that_exits_and_a_weight_that_is_not_finite_are_one_line():
    with pytest.raises(UserError, match="reward function 'own' gave nan for the response 'second'"):
        call_reward_function(weighted(lambda prompts, responses: [1.0, float("nan")]), [PROMPT] * 2, ["first", "second"])
    with pytest.raises(UserError, match="reward function 'own' failed: SystemExit: 3"):
        call_reward_function(weighted(lambda prompts, responses: sys.exit(3)), [PROMPT], ["a"])
    with pytest.raises(UserError, match="brevity=nan': its weight must be a finite number"):
        load_functions(["align.ppo.toy_rewards:brevity=nan"])
