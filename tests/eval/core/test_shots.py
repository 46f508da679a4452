"""Examples before prompts: the primer by hand, which model reads it, and that nobody else does."""

import json

import pytest

from align.commands.sample import SampleConfig, run_sample
from align.core.errors import UserError
from align.data.readers import Primer, read_primer
from align.eval.core.answers import sample_answers
from align.eval.core.evaluated_models import open_accelerator, open_models
from align.eval.core.settings import AnsweringTaskConfig
from align.eval.toxicity.prompts import ContinuationPrompt
from align.eval.toxicity.task import ToxicityConfig, prompt_tokens
from align.eval.winrate.settings import WinrateConfig

HI = ({"role": "user", "content": "Hi"},)
EXAMPLES = [("How are you?", "Fine."), ("Hi", "Hello."), ("Who?", "A program.")]


@pytest.fixture
def shots_from(tmp_path):
    rows = [{"prompt": question, "completion": answer} for question, answer in EXAMPLES]
    turns = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]
    rows.insert(1, {"prompt": turns, "completion": "d"})  # a conversation is no example
    path = tmp_path / "demonstrations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(conversation):
    return [turn["content"] for turn in conversation]


def test_examples_are_earlier_turns_and_the_instruction_opens_the_first():
    primer = Primer("Be brief.", (EXAMPLES[0], EXAMPLES[2]))
    primed = primer.before(HI)
    assert texts(primed) == ["Be brief.\n\nHow are you?", "Fine.", "Who?", "A program.", "Hi"]
    assert [turn["role"] for turn in primed] == ["user", "assistant"] * 2 + ["user"]
    system = ({"role": "system", "content": "S"}, *HI)
    assert texts(primer.before(system)) == ["S", "Be brief.\n\nHow are you?", "Fine.", "Who?", "A program.", "Hi"]
    assert texts(Primer("Be brief.").before(HI)) == ["Be brief.\n\nHi"]
    assert Primer().before(HI) == HI
    assert HI[0]["content"] == "Hi"  # left as it was


def test_an_example_that_gives_the_answer_away_is_left_out():
    assert texts(Primer("", tuple(EXAMPLES)).before(HI)) == ["How are you?", "Fine.", "Who?", "A program.", "Hi"]


def test_examples_are_the_first_demonstrations_of_one_turn(shots_from):
    assert read_primer(2, shots_from, "x") == Primer("x", tuple(EXAMPLES[:2]))
    assert read_primer(0, "no/such/file", "") == Primer()
    with pytest.raises(UserError, match="shots is 4, but only 3 of its demonstrations have a single turn"):
        read_primer(4, shots_from, "")


def open_both(config):
    return {evaluated.name: evaluated for evaluated in open_models(config, open_accelerator(config))}


def test_only_the_model_that_is_named_for_it_reads_the_examples(shots_from, tmp_path):
    config = WinrateConfig(
        models=["tiny-llama", "tiny-llama+shots"], shots=1, shots_from=shots_from, judge="m:f", dtype="float32",
        output=str(tmp_path), max_new_tokens=4, prompts=shots_from,
    )  # fmt: skip
    plain, primed = open_both(config).values()
    assert (plain.name, primed.name) == ("tiny-llama", "tiny-llama+shots")
    assert plain.fingerprint != primed.fingerprint
    tokenization = plain.loaded.tokenization
    assert plain.prompt_ids(HI) == tokenization.prompt_ids(HI)
    assert primed.prompt_ids(HI) == tokenization.prompt_ids(Primer("", tuple(EXAMPLES[:1])).before(HI))
    accelerator = open_accelerator(config)
    answers = [sample_answers(config, "winrate", evaluated, accelerator) for evaluated in (plain, primed)]
    assert all(answers[0][number][0].prompt_ids == answers[1][number][0].prompt_ids for number in answers[0])  # for judges
    assert any(answers[0][number][0].ids != answers[1][number][0].ids for number in answers[0])


def test_toxicity_reads_examples_before_its_instruction(shots_from):
    config = ToxicityConfig(models=["tiny-llama+shots"], shots=1, shots_from=shots_from, chat_template="raw")
    (evaluated,) = open_both(config).values()
    prompt = ContinuationPrompt("1", HI)
    primed = Primer("", tuple(EXAMPLES[:1])).before(prompt.with_instruction("respectful"))
    assert prompt_tokens(evaluated, prompt, "respectful") == evaluated.loaded.tokenization.prompt_ids(primed)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"models": ["tiny-llama+shots"]}, "tiny-llama.shots ends in .shots: set shots or instruction"),
        ({"models": ["tiny-llama"], "shots": 1}, "name one, such as tiny-llama.shots"),
        ({"models": ["tiny-llama+shots"], "shots": -1}, "shots"),
        ({"models": ["tiny-llama+shots"], "shots": 1, "shots_from": "no/such/file.jsonl"}, "no/such/file.jsonl"),
    ],
)
def test_a_mistake_is_one_line(settings, complaint):
    with pytest.raises(UserError, match=complaint) as caught:
        open_both(ToxicityConfig(**settings))
    assert "\n" not in str(caught.value)


def test_a_task_without_examples_knows_no_such_name(tmp_path):
    with pytest.raises(UserError, match="shots"):
        open_both(AnsweringTaskConfig(models=["tiny-llama+shots"], output=str(tmp_path)))


def test_sample_reads_the_examples_and_writes_the_prompt_alone(shots_from, tmp_path):
    settings = {"model": "tiny-llama", "prompts": shots_from, "max_new_tokens": 6, "dtype": "float32"}
    rows = []
    for name, more in (("plain", {}), ("shots", {"shots": 2, "shots_from": shots_from})):
        path = run_sample(SampleConfig(output=str(tmp_path / f"{name}.jsonl"), **settings, **more))
        rows.append([json.loads(line) for line in path.read_text().splitlines()])
    assert [row["prompt"] for row in rows[0]] == [row["prompt"] for row in rows[1]]
    assert [row["responses"] for row in rows[0]] != [row["responses"] for row in rows[1]]
