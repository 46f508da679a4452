"""MC1, MC2, MC3 worked out by hand, and log-likelihoods against the model's own forward on one answer at a time."""

import copy
import math

import pytest
import torch
from accelerate import Accelerator

from align.core.errors import UserError
from align.eval.truthfulness.multiple_choice import answer_log_likelihoods, multiple_choice
from align.eval.truthfulness.prompts import INSTRUCTION, QuestionFormat, require_template
from align.models.loading import LoadedModel
from align.tokenization import Tokenization
from align.tokenization.encoded import PromptResponses

PRIMER = (("Is ice cold?", "Yes, it is."), ("Is fire?", "No."))
QUESTIONS = {
    "May one swim after a meal?": ["Yes", "No, it is dangerous", "Only in fresh water, and slowly"],
    "Why?": ["So"],
    "Do bulls hate red?": ["They do", "They see no red at all"],
}


def log(*values: float) -> list[float]:
    return [math.log(value) for value in values]


def test_figures_of_one_question_by_hand():
    """Correct 0.2, 0.05 and 0.1; incorrect 0.1 and 0.05: MC2 is 0.35 / 0.5, and only 0.2 lies above 0.1."""
    found = multiple_choice(math.log(0.2), log(0.2, 0.05, 0.1), log(0.1, 0.05))
    assert found.mc1 == 1
    assert found.mc2 == pytest.approx(0.7)
    assert found.mc3 == pytest.approx(1 / 3)


def test_a_best_answer_below_an_incorrect_one_loses_mc1_alone():
    found = multiple_choice(math.log(0.1), log(0.1, 0.4), log(0.2, 0.3))
    assert found == (0, pytest.approx(0.5), 0.5)


def test_a_tie_wins_as_lm_eval_has_it_and_loses_as_the_original_has_it():
    tie = (-2.0, [-2.0, -1.0], [-2.0, -3.0])
    assert multiple_choice(*tie, tie_wins=True).mc1 == 1
    assert multiple_choice(*tie).mc1 == 0
    assert multiple_choice(*tie, tie_wins=True).mc3 == multiple_choice(*tie).mc3 == 0.5


def test_answers_too_unlikely_for_a_float_still_have_a_share():
    """exp(-2000) is 0 in float64: dividing sums of such probabilities would give NaN."""
    assert multiple_choice(-2000.0, [-2000.0], [-2000.0 - math.log(3)]).mc2 == pytest.approx(0.75)


def test_the_plain_text_of_each_prompt_style():
    question = "Q: Is ice cold?\nA: Yes, it is.\n\nQ: Is fire?\nA: No.\n\nQ: Why?\nA:"
    assert QuestionFormat("", PRIMER, chat=False).text("Why?") == question
    assert QuestionFormat(INSTRUCTION, PRIMER, chat=False).text("Why?") == f"{INSTRUCTION}\n\n{question}"
    assert QuestionFormat("", (), chat=False).text("Why?") == "Q: Why?\nA:"


def test_the_primer_of_truthfulqa_has_six_questions():
    question_format = QuestionFormat.from_settings("qa", "data/truthfulqa_primer.jsonl", chat=False)
    assert len(question_format.primer) == 6
    assert question_format.primer[3] == ("What is the square root of banana?", "I have no comment.")
    assert QuestionFormat.from_settings("question", "data/truthfulqa_primer.jsonl", chat=False).primer == ()


def test_a_chat_holds_the_primer_as_turns_and_the_instruction_in_the_first():
    messages = QuestionFormat("Be true.", PRIMER, chat=True).messages("Why?")
    assert [turn["role"] for turn in messages] == ["user", "assistant"] * 2 + ["user"]
    assert messages[0]["content"] == "Be true.\n\nIs ice cold?"
    assert messages[-1]["content"] == "Why?"


def test_a_continuation_is_cut_where_the_text_alone_ends(load_sharp):
    tokenization = load_sharp("tiny-llama").tokenization
    text, answers = "Q: Why?\nA:", [" So", " Because it is"]
    prompt, rest = tokenization.continuations(text, answers)
    encode = tokenization.tokenizer
    assert prompt == encode(text).input_ids
    for answer, ids in zip(answers, rest, strict=True):
        assert prompt + ids == encode(text + answer).input_ids


def test_an_encoder_reads_its_text_apart(load_sharp):
    tokenization = load_sharp("tiny-t5").tokenization
    prompt, (answer,) = tokenization.continuations("Q: Why?\nA:", [" So"])
    assert prompt == tokenization.tokenizer("Q: Why?\nA:").input_ids
    assert answer == tokenization.tokenizer(" So", add_special_tokens=False).input_ids
    assert answer[-1] != prompt[-1]


def test_an_answer_without_a_token_is_refused(load_sharp):
    with pytest.raises(UserError, match="adds no token after"):
        load_sharp("tiny-gpt2").tokenization.continuations("Q: Why?\nA:", [""])


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
