from collections import Counter
from dataclasses import replace
from functools import partial

import numpy
import pytest
from datasets import Dataset

from align.batches.encoding import Limits, encode_demonstrations, encode_rankings
from align.batches.mixtures import MixedExamples, hold_out, seen_warning, split_by_opening
from align.core.errors import UserError
from align.dpo import DPOConfig, DPOTrainer
from align.extras.attributes import AttributeConfig, AttributeTrainer
from align.extras.distill import DistillConfig, DistillTrainer
from align.extras.rules import RuleConfig, RuleTrainer
from align.ppo import PPOConfig, PPOTrainer
from align.reward import RewardConfig, RewardTrainer
from align.sft import SFTConfig, SFTTrainer
from align.tokenization.encoded import EncodedDemonstration, EncodedRanking, opening_digest
from tests.data.rows import assistant, system, user
from tests.extras.rules.planted import RULES
from tests.refusals import refusal

PROMPTS = [f"prompt {n % 40}" for n in range(60)]


def example(text):
    return EncodedDemonstration([1], [2], [True], opening_digest((user(text),)))


EXAMPLES = [example(text) for text in PROMPTS]


def test_validation_examples_that_are_trained_on_are_counted():
    seen, other = EncodedDemonstration([1, 2], [3], [True]), EncodedDemonstration([1, 2], [4], [True])
    assert seen_warning([seen], [other]) == ""
    assert seen_warning([seen], [other, seen]).startswith("the training data contains 1 of 2 validation examples")
    ranking = EncodedRanking([1], [[2], [3]], [1, 2])
    assert "1 of 1 validation example" in seen_warning([ranking], [EncodedRanking([1], [[3], [2]], [2, 1])])


def test_validation_data_that_are_the_training_data_are_named(tmp_path, caplog):
    rows = [{"prompt": "Hi", "completion": "Hello."}, {"prompt": "Bye", "completion": "See you."}]
    config = SFTConfig(output_dir=str(tmp_path), report_to=["none"], dtype="float32")
    SFTTrainer("tiny-gpt2", rows, config, validation_data=rows)
    assert "the training data contains 2 of 2 validation examples" in caplog.text


def test_a_prompt_is_on_one_side_whatever_else_there_is():
    training, validation = split_by_opening(EXAMPLES, 0.3)
    assert len(training) + len(validation) == 60
    assert not {item.opening for item in training} & {item.opening for item in validation}
    assert 0.15 < len(validation) / 60 < 0.45
    _, again = split_by_opening([*map(example, ("new", "newer")), *reversed(EXAMPLES)], 0.3)
    for larger in (again, split_by_opening(EXAMPLES, 0.4)[1]):
        assert {item.opening for item in validation} <= {item.opening for item in larger}


def test_prompts_that_differ_in_white_space_are_one_prompt():
    first, second = example("Is 3\r\nodd? "), replace(example("Is 3 odd?"), prompt=[2])
    assert first.opening == second.opening
    assert "contains 1 of 1 validation example" in seen_warning([first], [second])


def test_the_share_is_that_of_many_prompts_at_least_one_and_not_all():
    many = [example(str(n)) for n in range(4000)]
    assert len(split_by_opening(many, 0.1)[1]) == pytest.approx(400, abs=60)
    assert split_by_opening(many, 0.0) == (many, [])
    assert len(split_by_opening([example("a"), example("b")], 1e-9)[1]) == 1
    assert refusal(split_by_opening, [example("a"), example("a")], 1e-9) == (
        "validation_split 1e-09 holds out 2 of 2 examples; lower it or add prompts"
    )


def test_the_sources_of_a_mixture_keep_their_weights():
    mixed = MixedExamples(EXAMPLES, [20, 40], [1.0, 3.0])
    found, validation = hold_out(mixed, 0.3)
    held_out = {item.opening for item in validation}
    assert found.sizes == [sum(item.opening not in held_out for item in part) for part in (EXAMPLES[:20], EXAMPLES[20:])]
    assert (sum(found.sizes), found.weights) == (len(found.examples), [1.0, 3.0])
    lowest = min(EXAMPLES, key=lambda item: item.opening)
    assert refusal(hold_out, MixedExamples([lowest, *EXAMPLES], [1, 60], [1.0, 1.0]), 1e-9) == (
        "validation_split 1e-09 holds out 1 of 1 example of a source; lower it"
    )


def test_turns_of_one_conversation_stay_together(load_sharp):
    """Each answer of a T5 model's conversation is an example with another prompt."""
    turns = [system("s"), user("1"), assistant("2"), user("3"), assistant("4")]
    found = encode_demonstrations([{"messages": turns}], load_sharp("tiny-t5"), Limits(200, 200), False)
    assert [item.opening for item in found] == [opening_digest((user("1"),))] * 2


def test_every_stage_holds_out_the_same_prompts(load_sharp, tmp_path):
    loaded, limits = load_sharp("tiny-gpt2"), Limits(100, 100)
    demonstrations = [{"prompt": text, "completion": "a"} for text in PROMPTS]
    rankings = [{"prompt": text, "chosen": "a", "rejected": "b"} for text in PROMPTS]
    expected = Counter(item.opening for item in split_by_opening(EXAMPLES, 0.3)[1])
    assert Counter(item.opening for item in encode_rankings(rankings, loaded, limits, False)) == Counter(
        item.opening for item in EXAMPLES
    )

    def settings(name):
        return {"output_dir": str(tmp_path / name), "report_to": ["none"], "validation_split": 0.3}

    ppo = PPOTrainer("tiny-gpt2", [lambda prompts, responses: [0.0]], demonstrations, PPOConfig(**settings("ppo")))
    held_out = [
        SFTTrainer("tiny-gpt2", demonstrations, SFTConfig(**settings("sft"))).held_out,
        RewardTrainer("tiny-gpt2", rankings, RewardConfig(**settings("reward"))).held_out,
        DPOTrainer("tiny-gpt2", rankings, DPOConfig(**settings("dpo"))).held_out,
        ppo.setup.validation,
    ]
    for found in held_out:
        assert Counter(item.opening for item in found) == expected


@pytest.mark.parametrize(
    ("config", "more"),
    [(SFTConfig, {"validation_data": "x"}), (PPOConfig, {"validation_prompts": "x"})],
)
def test_settings_that_exclude_a_split(config, more):
    with pytest.raises(UserError, match=r"validation_split is 0.1, but must be 0 with "):
        config(validation_split=0.1, **more)


@pytest.mark.parametrize(
    ("trainer", "config", "row"),
    [
        (SFTTrainer, SFTConfig, {"completion": "b"}),
        (RewardTrainer, RewardConfig, {"chosen": "b", "rejected": "c"}),
        (DPOTrainer, DPOConfig, {"chosen": "b", "rejected": "c"}),
        (DistillTrainer, DistillConfig, {"completion": "b"}),
        (RuleTrainer, partial(RuleConfig, rules=RULES), {"response": "b", "rule": "no-digits", "verdict": "follows"}),
        (AttributeTrainer, AttributeConfig, {"response": "b", "attributes": {"kind": 1}}),
    ],
)
@pytest.mark.parametrize("form", [numpy.array, Dataset.from_list], ids=["array", "dataset"])
def test_validation_data_may_be_an_array_or_a_dataset(trainer, config, row, form, tmp_path):
    """An array has no truth value."""
    settings, rows = config(output_dir=str(tmp_path), report_to=["none"]), [row | {"prompt": prompt} for prompt in "abcd"]
    for count in (2, 0):
        assert len(trainer("tiny-gpt2", rows, settings, validation_data=form(rows[:count])).held_out) == count
