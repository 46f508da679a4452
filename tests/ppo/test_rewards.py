import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from align.batches.encoding import records_of
from align.core.errors import UserError
from align.data.records import Prompt
from align.ppo.records import Rollout
from align.ppo.reward_functions import WeightedFunction, call_reward_function, load_functions
from align.ppo.rewards import MissingEos, Rewards, combine_rewards
from align.tokenization.encoded import EncodedPrompt
from tests.refusals import refusal

PROMPT = ({"role": "user", "content": "Hi"},)


def weighted(function, name="own", weight=1.0):
    return WeightedFunction(name, weight, function)


def rollout(*texts):
    rows = len(texts)
    return Rollout([EncodedPrompt(PROMPT, [1])] * rows, [[2]] * rows, [True] * rows, list(texts))


def test_a_function_replaces_no_other_no_metric_of_the_score_and_no_reward_model():
    """`reward/mean` and `reward/std` are the score's, `reward/model` is the reward model's."""
    names = ("mean", "std", "mean", "model")
    functions = [weighted(lambda p, r, size=size: [size] * len(r), name) for size, name in enumerate(names)]
    result = Rewards([lambda responses: [5.0] * len(responses)], functions)(rollout("abc", "a"))
    scores, parts = result.total, result.components
    found = {name: float(part[0]) for name, part in parts.items()}
    assert found == {"model": 5.0, "mean_2": 0.0, "std_2": 1.0, "mean_3": 2.0, "model_2": 3.0}
    assert scores.tolist() == [11.0, 11.0]


def test_the_score_is_the_weighted_sum_and_each_part_is_kept():
    rewards = Rewards(
        [],
        [
            weighted(lambda p, r: [len(text) for text in r], "length", 0.5),
            weighted(lambda p, r: [float(text == "abc") for text in r], "exact", -3.0),
        ],
    )
    result = rewards(rollout("abc", "a"))
    scores, parts = result.total, result.components
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
    scores = Rewards([], [weighted(editing, "editing"), weighted(reading, "reading")])(answers).total
    assert scores.tolist() == [3 + 20, 1 + 20]
    assert (answers.texts, answers.prompts[0].conversation) == (["abc", "a"], PROMPT)
    assert PROMPT[0]["content"] == "Hi"


def test_an_ensemble_counts_as_one_reward_and_names_its_members():
    models = [lambda found: [1.0] * len(found), lambda found: [4.0, 1.0][: len(found)]]
    rewards = Rewards(models, [weighted(lambda p, r: [0.5] * len(r), "disagreement")], ensemble="wco")
    result = rewards(rollout("x", "y"))
    scores, parts = result.total, result.components
    assert scores.tolist() == [1.5, 1.5]
    assert {name: part.tolist() for name, part in parts.items()} == {
        "model": [1.0, 1.0],
        "model_1": [1.0, 1.0],
        "model_2": [4.0, 1.0],
        "disagreement": [1.5, 0.0],  # half of the difference
        "disagreement_2": [0.5, 0.5],
    }


REWARDS = torch.tensor([[1.0, -2.0], [2.0, -2.0], [6.0, -2.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("rule", "weight", "expected"),
    [
        ("mean", 9.0, [3.0, -2.0]),
        ("wco", 9.0, [1.0, -2.0]),
        # Variance over members: (4 + 1 + 9) / 3 = 14/3; where all agree nothing is taken off.
        ("uwo", 0.3, [3.0 - 0.3 * 14 / 3, -2.0]),
        ("uwo", 0.0, [3.0, -2.0]),
    ],
)
def test_rules_by_hand(rule, weight, expected):
    assert combine_rewards(REWARDS, rule, weight).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("penalty", "score", "expected"),
    [
        (None, -1.0, [3.0, -1.0, -1.0]),
        (None, 0.5, [3.0, 0.5, 0.5]),
        (None, 0.0, [3.0, 0.0, 0.0]),
        (1.0, None, [3.0, 1.0, -6.0]),  # 2 - 1 and -5 - 1
        (0.0, None, [3.0, 2.0, -5.0]),
        (None, None, [3.0, 2.0, -5.0]),
    ],
)
def test_penalties_for_a_missing_end(penalty, score, expected):
    scores = torch.tensor([3.0, 2.0, -5.0])
    assert MissingEos(penalty, score).apply(scores, torch.tensor([True, False, False])).tolist() == expected


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
    assert message.startswith(f"reward function '{text}': {why}")
    assert "module:function=weight" in message


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


ROWS = [{"answer": "4", "level": 1}, {"answer": "5", "level": 2}]


def test_a_function_gets_the_columns_that_it_has_parameters_for():
    seen = {}

    def exact(prompts, responses, answer, missing=None):
        seen["missing"] = missing
        return [float(text == right) for text, right in zip(responses, answer, strict=True)]

    def all_columns(prompts, responses, **columns):
        seen["columns"] = columns
        return [0.0] * len(responses)

    assert call_reward_function(weighted(exact), [PROMPT] * 2, ["4", "4"], ROWS) == [1.0, 0.0]
    call_reward_function(weighted(all_columns), [PROMPT] * 2, ["4", "4"], ROWS)
    assert seen == {"missing": None, "columns": {"answer": ["4", "5"], "level": [1, 2]}}
    call_reward_function(weighted(all_columns), [PROMPT], ["4"], [{"advice": "a", "collective": True}])
    assert seen["columns"] == {"advice": ["a"], "collective": [True]}, "names of parameters of `call_own_code`"


def test_a_function_in_the_form_of_grpo_is_called_by_names():
    def of_completions(completions, level, **columns):
        assert columns == {"answer": ["4", "5"], "prompts": [PROMPT] * 2}
        return [len(text) + number for text, number in zip(completions, level, strict=True)]

    def of_both(prompts, completions):
        return [float(len(prompt)) for prompt in prompts]

    assert call_reward_function(weighted(of_completions), [PROMPT] * 2, ["a", "abc"], ROWS) == [2.0, 5.0]
    assert call_reward_function(weighted(of_both), [PROMPT] * 2, ["a", "abc"], ROWS) == [1.0, 1.0]


def test_an_async_function_is_awaited_also_inside_an_event_loop():
    async def slow(prompts, responses, level):
        await asyncio.sleep(0)
        return [None if number == 1 else 2.0 for number in level]

    async def notebook():
        return call_reward_function(weighted(slow), [PROMPT] * 2, ["a", "b"], ROWS)

    async def failing(prompts, responses):
        raise RuntimeError("the server said no")

    assert call_reward_function(weighted(slow), [PROMPT] * 2, ["a", "b"], ROWS) == [0.0, 2.0]
    with ThreadPoolExecutor(1) as pool:  # a browser of another test leaves an event loop in the main thread
        assert pool.submit(lambda: asyncio.run(notebook())).result() == [0.0, 2.0]
    with pytest.raises(UserError, match=r"'own' failed: RuntimeError: the server said no .*test_rewards\.py"):
        call_reward_function(weighted(failing), [PROMPT] * 2, ["a", "b"])


def test_a_function_that_does_not_apply_adds_nothing():
    rewards = Rewards([], [weighted(lambda p, r: [None, 1.0], "rare", 2.0), weighted(lambda p, r: [3.0, 3.0], "usual")])
    scores = rewards(rollout("abc", "a"))
    assert scores.total.tolist() == [3.0, 5.0]
    assert scores.components["rare"].tolist() == [0.0, 2.0]


def test_columns_of_a_file_reach_the_function(tmp_path):
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt": "2+2?", "answer": "4", "id": "a"}\n{"prompt": "x", "answer": null}\n'
    )
    prompts = records_of(str(tmp_path / "prompts.jsonl"), Prompt, False)
    assert [dict(prompt.columns) for prompt in prompts] == [{"answer": "4", "id": "a"}, {"answer": None}]
