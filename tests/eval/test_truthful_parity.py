"""Log-likelihoods and measurements against what lm-eval 0.4.13 itself gave for the same questions (see parity_model.py)."""

import json
from pathlib import Path

import pytest

from align.eval.answers import open_accelerator, open_models
from align.eval.truthfulness import QuestionFormat, TruthfulnessConfig, multiple_choice, read_questions, score_choices
from tests.eval.parity_model import build

CSV = Path(__file__).parents[3] / "shared" / "data" / "TruthfulQA.csv"
FIXTURE = Path(__file__).with_name("lm_eval_truthful.json")


@pytest.mark.skipif(not CSV.exists(), reason="../shared/data is absent")
def test_every_answer_and_every_figure_is_lm_evals(tmp_path):
    expected = json.loads(FIXTURE.read_text())
    by_id = {question.id: question for question in read_questions(str(CSV))}
    questions = [by_id[number] for number in expected["questions"]]
    assert len(questions) == 50
    config = TruthfulnessConfig(models=[str(build(tmp_path / "model"))], questions=str(CSV), dtype="float32")
    accelerator = open_accelerator(config.dtype)
    question_format = QuestionFormat.from_settings(config.prompt, config.few_shot, config.chat)
    evaluated = next(open_models(config.models, config, accelerator))
    rows = score_choices(evaluated, questions, question_format, config.batch_tokens, config.questions)
    for number, row in enumerate(rows):
        assert [row["best"], *row["incorrect"]] == pytest.approx(expected["mc1"]["log_likelihoods"][number], rel=0, abs=1e-3)
        both = [*row["correct"], *row["incorrect"]]
        assert both == pytest.approx(expected["mc2"]["log_likelihoods"][number], rel=0, abs=1e-3)
        found = multiple_choice(row["best"], row["correct"], row["incorrect"])
        assert found["mc1"] == expected["mc1"]["acc"][number]
        assert found["mc2"] == pytest.approx(expected["mc2"]["acc"][number], rel=0, abs=1e-4)
    assert len({round(row["best"], 2) for row in rows}) > 40
