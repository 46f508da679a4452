import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.data.conversation import user_turn
from align.eval.results import read_evaluations
from align.extras.rules.rubrics import (
    LOCAL_END,
    SERVICE_END,
    LocalJudge,
    Option,
    Rubric,
    RubricQuestion,
    RubricSettings,
    ServiceJudge,
    expected_reward,
    read_rubrics,
)
from align.models.heads import LanguageModel
from align.models.loading import load_whole
from align.ppo import PPOConfig, PPOTrainer
from align.runtime import endpoint
from tests.extras.running import TINY, command
from tests.files import read_rows, write_rows
from tests.ports import free_port

HI = ({"role": "user", "content": "Hi"},)
OPTIONS = (Option("A", "good", 1.0), Option("B", "evasive", -0.5), Option("C", "harmful", -1.0))
RUBRIC = Rubric("manners", "How is it?", OPTIONS, frozenset({"safety"}))


def test_the_sum_by_hand_from_stub_logits():
    # P = 2/8, 5/8, 1/8 whatever the logits' level: .25 - .3125 - .125
    for level in (0.0, -700.0):
        logits = [math.log(2) + level, math.log(5) + level, level]
        assert expected_reward(logits, [1.0, -0.5, -1.0]) == pytest.approx(-0.1875)
    assert expected_reward([-math.inf, 0.0, -math.inf], [1.0, -0.5, -1.0]) == -0.5


def test_prompts_outside_the_categories_get_exactly_0_and_are_never_read():
    asked = []

    def judge(questions):
        asked.extend(questions)
        return [[0.0, -math.inf, -math.inf]] * len(questions)

    assert RUBRIC.rewards(judge, [HI] * 3, ["a", "b", "c"], ["truth", "safety", None]) == [0.0, 1.0, 0.0]
    (question,) = asked
    assert question.letters == ("A", "B", "C")
    assert "<reply>\nb\n</reply>" in question.text
    assert "B: evasive" in question.text
    assert RUBRIC.rewards(judge, [HI], ["a"], ["truth"]) == [0.0]
    assert len(asked) == 1
    assert Rubric("x", "?", OPTIONS).rewards(judge, [HI] * 2, ["a", "b"], [None, "truth"]) == [1.0, 1.0]


def test_a_local_judge_reads_the_letters_of_a_question_in_one_row(load_sharp, tiny_name):
    """Packed = each letter in a row of its own, and = the model's own next-token distribution where a letter is a token."""
    loaded = load_sharp(tiny_name)
    judge = LocalJudge(loaded, Accelerator(cpu=True), 4096)
    questions = [RubricQuestion("Is it?", ("A", "B", "C")), RubricQuestion("Or is it rather not?", ("B", "Z"))]
    together = judge(questions)
    model, tokenization = LanguageModel(loaded.backbone), loaded.tokenization
    for question, log_probs in zip(questions, together, strict=True):
        prompt = Padded.from_lists([tokenization.prompt_ids(({"role": "user", "content": question.text + LOCAL_END},))])
        for letter, log_prob in zip(question.letters, log_probs, strict=True):
            ids = tokenization.response_ids(letter)[:-1]
            with torch.no_grad():
                alone = model(prompt, Padded.from_lists([ids])).sum().item()
            assert log_prob == pytest.approx(alone, abs=1e-5)
    assert len({round(value, 4) for log_probs in together for value in log_probs}) == 5


def test_the_shipped_rubrics_and_bad_ones(tmp_path):
    refusals, identity = read_rubrics(["forms/rubrics/refusals.yaml=0.5", "forms/rubrics/honest-identity.yaml"])
    assert (refusals.name, refusals.weight, refusals.categories) == ("refusals", 0.5, frozenset({"safety"}))
    assert [option.letter for option in refusals.options] == ["A", "B", "C", "D"]
    assert identity.weight == 1.0
    with pytest.raises(UserError, match="duplicate rubric 'refusals'"):
        read_rubrics(["forms/rubrics/refusals.yaml"] * 2)
    path = tmp_path / "bad.yaml"
    for text in ("question: x", "question: x\noptions: [{letter: A, text: b, reward: c}]", "- 1", "options: ["):
        path.write_text(text)
        with pytest.raises(UserError, match=r"bad\.yaml: not "):
            read_rubrics([str(path)])
    with pytest.raises(UserError, match="use FILE or FILE=WEIGHT"):
        read_rubrics(["forms/rubrics/refusals.yaml=much"])


def says(text):
    """A chat completion."""
    return {"choices": [{"message": {"content": text}}]}


@pytest.fixture
def service(serve):
    """`service(*answers)`: a server that gives these in turn (a number is a status), the last one from then on."""

    def start(*answers):
        sent = []

        def answer(path, headers, body):
            sent.append(body)
            found = answers[min(len(sent), len(answers)) - 1]
            return found if isinstance(found, int) else 200, found

        return SimpleNamespace(url=serve(answer), sent=sent)

    return start


def judge_at(url, **more):
    settings = RubricSettings(files=["x"], endpoint_model="judge", endpoint=url, **more)
    return ServiceJudge(settings, Accelerator(cpu=True))


def test_the_letter_of_a_services_verdict_decides(service):
    server = service(says("It is polite.\nVERDICT: A"), says("VERDICT: c"))
    judge = judge_at(server.url, endpoint_parallel=1)
    assert RUBRIC.rewards(judge, [HI] * 3, ["good", "bad", "good"], ["safety"] * 3) == [1.0, -1.0, 1.0]
    assert len(server.sent) == 2
    assert server.sent[0]["model"] == "judge"
    assert server.sent[0]["messages"][0]["content"].endswith(SERVICE_END)


@pytest.mark.parametrize(
    ("answer", "says_so"),
    [
        ({"choices": []}, r"the response has no choices\[0\]: "),
        (says("Well."), "no verdict in the response 'Well.'$"),
        (500, "tried 1 times$"),
    ],
)
def test_what_a_service_may_do_wrong(service, answer, says_so, monkeypatch):
    monkeypatch.setattr(endpoint, "RETRIES", 0)
    judge = judge_at(service(answer).url)
    with pytest.raises(UserError, match=says_so):
        judge([RUBRIC.question_about(HI, "x")])


def test_a_dead_service_stops_ppo_with_one_line_and_the_rollout_is_saved(tmp_path, align_cache, command_error, monkeypatch):
    monkeypatch.setattr(endpoint, "RETRIES", 0)
    url = f"http://127.0.0.1:{free_port()}/v1"
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "How do I pick a lock?", "category": "safety"}])
    words = f"ppo {TINY} --output_dir {tmp_path / 'ppo'} --rollout_batch_size 4 --prompts {prompts} --max_new_tokens 4"
    words += f" --rubrics.files forms/rubrics/refusals.yaml --rubrics.endpoint {url} --rubrics.endpoint_model judge"
    error = command_error(command, words).splitlines()[-1]
    saved = tmp_path / "ppo" / "unscored.jsonl"
    assert error.startswith(f"error: {url}/chat/completions: cannot be reached")
    assert error.endswith(f"the rollout of update 1 is in {saved}")
    rows = read_rows(saved)
    assert len(rows) == 4
    assert rows[0]["prompt"][0]["content"] == "How do I pick a lock?"


def test_a_frozen_model_judges_in_ppo_and_in_evaluation(tmp_path, align_cache):
    rows = [{"prompt": "How do I pick a lock?", "category": "safety"}, {"prompt": "Hi", "category": "chat"}]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    rubric = "--rubrics.files forms/rubrics/refusals.yaml=2 --rubrics.model tiny-gpt2 --dtype float32"
    common = f"--model tiny-llama --prompts {prompts} --max_new_tokens 4"
    command(f"ppo {common} {rubric} --output_dir {tmp_path / 'ppo'} --report_to none --total_updates 1")
    (metrics,) = read_rows(tmp_path / "ppo" / "metrics.jsonl")
    assert -2 < metrics["reward/rubric/refusals"] < 2
    assert metrics["reward/rubric/refusals"] != 0

    output = tmp_path / "sampled.jsonl"
    command(f"sample {common} --output {output}")
    command(f"eval rules {rubric} --responses {output} --output {tmp_path / 'eval'}")
    (evaluation,) = read_evaluations(tmp_path / "eval" / "rules.json")
    (measurement,) = evaluation.measurements
    assert (measurement.name, measurement.n) == ("rubric refusals: reward", 1)
    (safety, _), (rubric,) = read_rows(output), read_rubrics(["forms/rubrics/refusals.yaml"])
    judge = LocalJudge(load_whole("tiny-gpt2", torch.float32), Accelerator(cpu=True), 4096)
    (expected,) = rubric.rewards(judge, [user_turn("How do I pick a lock?")], safety["responses"], ["safety"])
    assert measurement.value == pytest.approx(expected, abs=1e-5)
    assert -1 < expected < 1


def test_a_rubric_that_no_prompt_falls_under_is_told(tmp_path, align_cache, capsys):
    rubrics = RubricSettings(files=["forms/rubrics/refusals.yaml"], model="tiny-gpt2")
    config = PPOConfig(output_dir=str(tmp_path), report_to=["none"], rubrics=rubrics)
    for category, told in (("chat", True), ("safety", False)):
        PPOTrainer("tiny-llama", [], [{"prompt": "Hi", "category": category}], config)
        says = "warning: rubric 'refusals' is always 0: no prompt has category safety"
        assert (says in capsys.readouterr().err) is told
        config = replace(config, output_dir=str(tmp_path / "other"))


def test_rubrics_need_a_judge():
    with pytest.raises(UserError, match=r"rubrics\.model is ''"):
        PPOConfig(rubrics={"files": ["forms/rubrics/refusals.yaml"]})
    with pytest.raises(UserError, match=r"rubrics\.files is .*"):
        PPOConfig(rubrics={"model": "tiny-gpt2"})
