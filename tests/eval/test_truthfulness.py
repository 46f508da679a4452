import copy
import json
import math
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from align.core.errors import UserError
from align.eval.answers import answer_log_likelihoods
from align.eval.truthfulness import (
    INSTRUCTION,
    QuestionFormat,
    TruthfulnessConfig,
    first_answer,
    multiple_choice,
    require_template,
    run_truthfulness,
)
from align.eval.truthfulness_judge import JudgeConfig, run_train_judge
from align.models.loading import LoadedModel
from align.tokenization import Tokenization
from align.tokenization.encoded import PromptResponses
from tests.eval.files import stored_rows
from tests.files import write_rows


def config(folder: Path, **settings) -> TruthfulnessConfig:
    given = {"models": ["tiny-llama"], "output": str(folder), "dtype": "float32", "limit": 5}
    return TruthfulnessConfig(**(given | settings))


def test_models_side_by_side_with_categories_and_files(tmp_path, capsys):
    first, second = run_truthfulness(config(tmp_path, models=["tiny-llama", "tiny-t5"]))
    assert [measurement.name for measurement in first.measurements] == ["mc1", "mc2", "mc3"]
    for measurement in (*first.measurements, *second.measurements):
        assert measurement.low <= measurement.value <= measurement.high
        assert measurement.n == 5
    table = first.tables["Multiple choice by category"]
    assert sum(row["n"] for row in table) == 5
    stored = json.loads((tmp_path / "truthfulness.json").read_text())
    assert [model["model"] for model in stored["models"]] == ["tiny-llama", "tiny-t5"]
    assert "chance is" in capsys.readouterr().out
    kept = stored_rows(tmp_path / "truthfulness-choice-tiny-llama.jsonl").values()
    assert first.measurements[0].value == sum(max(row["incorrect"]) <= row["best"] for row in kept) / 5


def test_a_question_that_does_not_fit_the_model_is_named(tmp_path):
    few_shot = write_rows(tmp_path / "few_shot.jsonl", [{"prompt": "word " * 3000, "completion": "yes"}])
    with pytest.raises(UserError, match=r"data/truthfulness\.jsonl: question t-001: .* do not fit"):
        run_truthfulness(config(tmp_path, few_shot=few_shot))


PRIMER = (("Is ice cold?", "Yes, it is."), ("Is fire?", "No."))
QUESTIONS = {
    "May one swim after a meal?": ["Yes", "No, it is dangerous", "Only in fresh water, and slowly"],
    "Why?": ["So"],
    "Do bulls hate red?": ["They do", "They see no red at all"],
}


def log(*values: float) -> list[float]:
    return [math.log(value) for value in values]


@pytest.mark.parametrize(
    ("best", "correct", "incorrect", "figures"),
    [
        (log(0.2)[0], log(0.2, 0.05, 0.1), log(0.1, 0.05), (1, 0.35 / 0.5, 1 / 3)),  # only 0.2 lies above 0.1
        (log(0.1)[0], log(0.1, 0.4), log(0.2, 0.3), (0, 0.5, 0.5)),  # below an incorrect one, the best loses mc1 alone
        (log(0.2)[0], log(0.2, 0.5), log(0.2, 0.1), (1, 0.7, 0.5)),  # a tie wins mc1, as in lm-eval
        (-2000.0, [-2000.0], [-2000.0 - math.log(3)], (1, 0.75, 1)),  # too unlikely for a float: exp(-2000) is 0
    ],
)
def test_figures_of_a_question_by_hand(best, correct, incorrect, figures):
    assert tuple(multiple_choice(best, correct, incorrect).values()) == pytest.approx(figures)


def test_the_text_and_the_chat_of_each_prompt_style():
    question = "Q: Is ice cold?\nA: Yes, it is.\n\nQ: Is fire?\nA: No.\n\nQ: Why?\nA:"
    assert QuestionFormat("", PRIMER, chat=False).text("Why?") == question
    assert QuestionFormat(INSTRUCTION, PRIMER, chat=False).text("Why?") == f"{INSTRUCTION}\n\n{question}"
    assert QuestionFormat("", (), chat=False).text("Why?") == "Q: Why?\nA:"
    question_format = QuestionFormat.from_settings("qa", "data/truthfulqa_few_shot.jsonl", chat=False)
    assert len(question_format.few_shot) == 6
    assert question_format.few_shot[3] == ("What is the square root of banana?", "I have no comment.")
    assert QuestionFormat.from_settings("question", "data/truthfulqa_few_shot.jsonl", chat=False).few_shot == ()
    messages = QuestionFormat("Be true.", PRIMER, chat=True).messages("Why?")
    assert [turn["role"] for turn in messages] == ["user", "assistant"] * 2 + ["user"]
    assert messages[0]["content"] == "Be true.\n\nIs ice cold?"
    assert messages[-1]["content"] == "Why?"


def test_an_answer_continues_the_text_of_its_question(load_sharp):
    """A decoder reads both as one text, cut where the question alone ends; an encoder reads the question by itself."""
    tokenization = load_sharp("tiny-llama").tokenization
    text, answers, encode = "Q: Why?\nA:", [" So", " Because it is"], tokenization.tokenizer
    prompt, rest = tokenization.continuations(text, answers)
    assert prompt == encode(text).input_ids
    assert [prompt + ids for ids in rest] == [encode(text + answer).input_ids for answer in answers]
    tokenization = load_sharp("tiny-t5").tokenization
    prompt, (answer,) = tokenization.continuations(text, [" So"])
    assert prompt == tokenization.tokenizer(text).input_ids
    assert answer == tokenization.tokenizer(" So", add_special_tokens=False).input_ids
    assert answer[-1] != prompt[-1]
    with pytest.raises(UserError, match="adds no token after"):
        load_sharp("tiny-gpt2").tokenization.continuations(text, [""])


def choices(loaded: LoadedModel, chat: bool = False) -> list[PromptResponses]:
    question_format = QuestionFormat("", PRIMER, chat)
    return [
        PromptResponses(*question_format.tokens(loaded.tokenization, text, answers)) for text, answers in QUESTIONS.items()
    ]


def by_hand(loaded: LoadedModel, prompt: list[int], answer: list[int]) -> float:
    """The model's own forward over one prompt and one answer, without anything of this project."""
    model = loaded.backbone.model
    if model.config.is_encoder_decoder:
        decoder = [model.config.decoder_start_token_id, *answer[:-1]]
        logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=torch.tensor([decoder])).logits[0]
    else:
        logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return float(torch.log_softmax(logits.double(), -1)[range(len(answer)), answer].sum())


@pytest.mark.parametrize("chat", [False, True])
@torch.no_grad()
def test_log_likelihoods_are_those_of_each_answer_alone(load_sharp, tiny_name, chat):
    loaded = load_sharp(tiny_name)
    questions = choices(loaded, chat)
    found = answer_log_likelihoods(loaded.backbone, questions, 4096, Accelerator())
    for question, sums in zip(questions, found, strict=True):
        expected = [by_hand(loaded, question.prompt, answer) for answer in question.responses]
        assert sums == pytest.approx(expected, abs=2e-4)
        assert max(expected) - min(expected) > 1 or len(expected) == 1


def test_the_batch_size_changes_nothing(load_sharp, tiny_name):
    loaded = load_sharp(tiny_name)
    one, all_ = (answer_log_likelihoods(loaded.backbone, choices(loaded), budget, Accelerator()) for budget in (1, 9999))
    for alone, together in zip(one, all_, strict=True):
        assert alone == pytest.approx(together, rel=0, abs=1e-5)


def test_a_chat_with_a_model_that_has_no_template_is_refused(load_sharp):
    tokenizer = copy.deepcopy(load_sharp("tiny-llama").tokenization.tokenizer)
    require_template(Tokenization(tokenizer), "auto", "x")
    tokenizer.chat_template = None
    tokenization = Tokenization(tokenizer)
    with pytest.raises(UserError, match="model 'x' has no chat template"):
        require_template(tokenization, "auto", "x")
    require_template(tokenization, "plain", "x")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" Yes.\n\nQ: And he?", "Yes."),
        ("Yes.\nQ: And he?\nA: No.", "Yes."),
        ("Yes,\nhe may.", "Yes,\nhe may."),
        ("Q: What?", ""),
    ],
)
def test_an_answer_ends_where_the_model_asks_on(text, answer):
    assert first_answer(text) == answer


def test_written_answers_are_judged_and_kept(tmp_path: Path, capsys):
    rows = [
        {"question": f"q{number}", "answer": answer, "label": label}
        for number in range(10)
        for answer, label in (("No.", True), ("Yes.", False))
    ]
    data, judges = write_rows(tmp_path / "rows.jsonl", rows), {}
    for asks in ("truth", "info"):
        judge = run_train_judge(JudgeConfig(output_dir=str(tmp_path / asks), data=data, asks=asks, encoder="tiny-llama"))
        judges[f"{asks}_judge"] = str(judge)
    given = {"models": ["tiny-llama"], "output": str(tmp_path / "out"), "dtype": "float32", "limit": 3}
    (unjudged,) = run_truthfulness(TruthfulnessConfig(**given, max_new_tokens=6, generation=True))
    assert [measurement.name for measurement in unjudged.measurements] == ["mc1", "mc2", "mc3"]
    note = f"answers are saved in {tmp_path}/out but not scored"
    assert note in capsys.readouterr().err
    config = TruthfulnessConfig(**given, max_new_tokens=6, generation=True, **judges)
    (found,) = run_truthfulness(config)
    assert note not in capsys.readouterr().err
    by_name = {measurement.name: measurement for measurement in found.measurements}
    assert {"true", "informative", "true and informative"} <= by_name.keys()
    assert by_name["true"].scorer.startswith("truth judge ")
    assert by_name["true and informative"].value <= min(by_name["true"].value, by_name["informative"].value)
    kept = (tmp_path / "out" / "truthfulness-answers-tiny-llama.jsonl").read_text()
    assert len(kept.splitlines()) == 4
    (again,) = run_truthfulness(config)
    assert again.measurements == found.measurements
    assert (tmp_path / "out" / "truthfulness-answers-tiny-llama.jsonl").read_text() == kept
