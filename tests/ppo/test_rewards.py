"""Reward functions of a user's own: found, weighted, checked, added up; mistakes are one line."""

import sys

import pytest
import torch

from align.core.errors import UserError
from align.ppo.records import Rollout
from align.ppo.rewards import Rewards, WeightedFunction, call_reward_function, load_functions
from align.ppo.setup import require_patience
from align.tokenization.encoded import EncodedPrompt

PROMPT = ({"role": "user", "content": "Hi"},)


def rollout(*texts):
    rows = len(texts)
    return Rollout([EncodedPrompt(PROMPT, [1])] * rows, [[2]] * rows, [True] * rows, list(texts))


def weighted(function, name="own", weight=1.0):
    return WeightedFunction(name, weight, function)


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """A module in the working directory, as a user would write it."""

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return write


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


def test_a_function_named_like_a_metric_of_the_score_keeps_its_own():
    """`reward/mean` and `reward/std` are the score's."""
    functions = [
        weighted(lambda p, r, size=size: [size] * len(r), name) for size, name in enumerate(("mean", "std", "mean"))
    ]
    _, parts = Rewards([], functions)(rollout("abc", "a"))
    assert {name: float(part[0]) for name, part in parts.items()} == {"mean_2": 0.0, "std_2": 1.0, "mean_3": 2.0}


def test_the_score_is_the_weighted_sum_and_each_part_is_kept():
    rewards = Rewards(
        [],
        [
            weighted(lambda p, r: [len(text) for text in r], "length", 0.5),
            weighted(lambda p, r: [float(text == "abc") for text in r], "exact", -3.0),
        ],
    )
    scores, parts = rewards(rollout("abc", "a"))
    # .5 x 3 - 3 x 1 = -1.5;  .5 x 1 - 3 x 0 = .5
    assert scores.tolist() == [-1.5, 0.5]
    assert {name: values.tolist() for name, values in parts.items()} == {"length": [1.5, 0.5], "exact": [-3.0, 0.0]}
    assert scores.dtype == torch.float32


def test_a_function_that_edits_what_it_gets_changes_nothing_for_the_next_one():
    def editing(prompts, responses):
        for number, text in enumerate(responses):
            responses[number] = text + "!!!"
            prompts[number][0]["content"] = "changed"
        prompts.clear()
        return [0.0] * len(responses)

    def reading(prompts, responses):
        return [len(text) + 10 * len(prompt[0]["content"]) for prompt, text in zip(prompts, responses, strict=True)]

    answers = rollout("abc", "a")
    scores, _ = Rewards([], [weighted(editing, "editing"), weighted(reading, "reading")])(answers)
    assert scores.tolist() == [3 + 20, 1 + 20]
    assert (answers.texts, answers.prompts[0].conversation) == (["abc", "a"], PROMPT)
    assert PROMPT[0]["content"] == "Hi"


def test_a_function_that_exits_is_one_line():
    with pytest.raises(UserError, match="reward function 'own' failed: SystemExit: 3"):
        call_reward_function(weighted(lambda prompts, responses: sys.exit(3)), [PROMPT], ["a"])


def test_a_function_named_model_does_not_replace_the_reward_model():
    rewards = Rewards([lambda found: [5.0] * len(found)], [weighted(lambda p, r: [1.0] * len(r), "model")])
    assert rewards(rollout("x"))[0].item() == 6.0


def test_an_ensemble_counts_as_one_reward_and_names_its_members():
    models = [lambda found: [1.0] * len(found), lambda found: [4.0, 1.0][: len(found)]]
    rewards = Rewards(models, [weighted(lambda p, r: [0.5] * len(r), "disagreement")], ensemble="wco")
    scores, parts = rewards(rollout("x", "y"))
    assert scores.tolist() == [1.5, 1.5]
    assert {name: part.tolist() for name, part in parts.items()} == {
        "model": [1.0, 1.0],
        "model_1": [1.0, 1.0],
        "model_2": [4.0, 1.0],
        "disagreement": [1.5, 0.0],  # half of the difference
        "disagreement_2": [0.5, 0.5],
    }


def test_processes_that_wait_for_a_reward_outlast_its_timeout():
    require_patience(299, 300)
    with pytest.raises(
        UserError, match=r"reward_timeout is 300, but the other processes wait for collective_timeout \(300 s\)"
    ):
        require_patience(300, 300)


def test_a_weight_that_is_not_finite_is_refused():
    with pytest.raises(UserError, match="brevity=nan': its weight must be a finite number"):
        load_functions(["align.ppo.toy_rewards:brevity=nan"])


def test_two_functions_of_one_name_both_count(own_module):
    own_module("own_rewards_b", "def score(prompts, responses):\n    return [1.0] * len(responses)\n")
    own_module("own_rewards_c", "def score(prompts, responses):\n    return [10.0] * len(responses)\n")
    scores, _ = Rewards([], load_functions(["own_rewards_b:score", "own_rewards_c:score"]))(rollout("x"))
    assert scores.item() == 11.0
