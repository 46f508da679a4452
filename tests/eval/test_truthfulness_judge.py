import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from align.core.errors import UserError
from align.core.statistics import calibration_error, roc_auc
from align.eval.answer_features import AnswerFeatures
from align.eval.questions import read_questions
from align.eval.truthfulness_judge import (
    TREES,
    JudgeConfig,
    LabeledAnswer,
    _tree_inputs,
    fit_judge,
    is_reference,
    judge_logits,
    load_judge,
    match_references,
    read_labeled_answers,
    run_train_judge,
    split_by_question,
)
from tests.files import write_rows
from tests.research_data import ABSENT

TRUTHFUL_QUESTIONS = "data/truthfulness.jsonl"
TRUTHFULQA = Path(__file__).parents[3] / "shared" / "data"


def answers(true=("No, never.", "No, it is not."), false=("Yes, always.", "Yes, it is."), questions: int = 30) -> list[dict]:
    """Answers that deny are true and those that affirm are not, to questions of different lengths."""
    rows = []
    for number in range(questions):
        asked = f"Is {'very ' * (number % 3)}number {number} odd?"
        for label, texts in ((True, true), (False, false)):
            rows += [{"question": asked, "answer": text, "label": label} for text in texts]
    return rows


def test_auc_and_calibration_error_by_hand():
    """Yes at 3, 2, 1 and no at 2, 0: of six pairs 3>2, 3>0, 2=2, 2>0, 1<2, 1>0, which is 4.5 of 6."""
    assert roc_auc([3, 2, 1, 2, 0], [True, True, True, False, False]) == pytest.approx(4.5 / 6)
    assert roc_auc([1, 2], [True, True]) == 0.5
    # Two rows at 0.25, one of them yes, and two at 0.9, both yes: 0.25 and 0.1 apart, half of the rows each.
    assert calibration_error([0.25, 0.25, 0.9, 0.9], [True, False, True, True]) == pytest.approx(0.175)
    assert calibration_error([1.0], [True]) == 0


def test_no_question_is_in_both_parts():
    rows = [LabeledAnswer(row["question"], row["answer"], row["label"]) for row in answers()]
    learn, held_out = split_by_question(rows, 0.2, seed=3)
    assert {row.question for row in learn}.isdisjoint(row.question for row in held_out)
    assert len({row.question for row in held_out}) == 6
    assert len(learn) + len(held_out) == len(rows)
    assert split_by_question(rows, 0.2, seed=4)[1] != held_out


def test_truthfulqas_own_form_is_read(tmp_path):
    path = tmp_path / "truth.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"prompt": "Q: May I?\nA: No.\nB\nTrue:", "completion": " yes"}) + "\n")
        file.write(json.dumps({"prompt": "Q: May I?\nA: \nTrue:", "completion": " no"}) + "\n")
    assert read_labeled_answers(str(path), "truth") == [
        LabeledAnswer("May I?", "No.\nB", True),
        LabeledAnswer("May I?", "", False),
    ]
    with pytest.raises(UserError, match="use a file for the judge of info"):
        read_labeled_answers(str(path), "info")


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([{"question": "q", "answer": "a", "label": 1}], ":1: field 'label': is 1"),
        ([{"question": "q", "label": True}], ":1: field 'answer': is missing"),
        ([{"question": "q", "answer": "a", "label": True}], "needs answers with both labels"),
        ([{"prompt": "Q: q\nA: a\nTrue:", "completion": " maybe"}], "field 'completion': is 'maybe'"),
    ],
)
def test_bad_rows_are_one_clear_line(tmp_path, rows, complaint):
    with pytest.raises(UserError, match=complaint):
        read_labeled_answers(write_rows(tmp_path / "rows.jsonl", rows), "truth")


def test_the_saved_trees_give_the_logits_of_scikit_learn():
    """The regression on the text is refitted, so the comparison covers its logit as an input of the trees, too."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    random, rows = np.random.default_rng(0), 200  # fewer than scikit-learn's 255 bins: no value lies on a threshold
    features = AnswerFeatures(random.normal(size=(rows, 5)).astype(np.float32), csr_matrix(random.normal(size=(rows, 4))))
    labels = features.agreement[:, 0] * features.agreement[:, 1] + random.normal(size=rows) > 0
    questions = ["one question"] * rows  # no other question: the trees learn from the logits of the regression itself
    weights = fit_judge(features, labels, questions)
    inputs = _tree_inputs(features, features.text @ weights["text.weight"].astype(float) + float(weights["text.bias"][0]))
    expected = HistGradientBoostingClassifier(**TREES).fit(inputs, labels).decision_function(inputs)
    assert judge_logits(weights, features) == pytest.approx(expected, abs=1e-6)


def capitals(countries: int = 40) -> tuple[list[dict], list[dict]]:
    """Questions whose true answers no style tells from false ones, and their reference answers."""
    rows, questions = [], []
    for number in range(countries):
        asked, names = f"What is the capital of country {number}?", [f"Rado{number}", f"Velu{number}"]
        right, wrong = names if number % 2 else names[::-1]
        questions.append(
            {
                "question": asked,
                "best_answer": f"The capital is {right}.",
                "correct_answers": [f"The capital is {right}.", f"Its capital is called {right}."],
                "incorrect_answers": [f"The capital is {wrong}.", f"Its capital is called {wrong}."],
            }
        )
        for name, label in ((right, True), (wrong, False)):
            texts = (f"I think it is {name}.", f"{name}.", f"They named it {name} long ago.", f"The capital is {name}.")
            rows += [{"question": asked, "answer": text, "label": label} for text in texts]
    return rows, questions


def test_a_judge_compares_answers_to_questions_it_has_not_seen_with_their_references(tmp_path):
    rows, questions = capitals()
    data, known = write_rows(tmp_path / "rows.jsonl", rows), write_rows(tmp_path / "questions.jsonl", questions)
    metrics = {}
    for source in ("", known):
        config = JudgeConfig(output_dir=str(tmp_path / "run"), data=data, questions=source, encoder="tiny-llama")
        folder = run_train_judge(config)
        metadata = json.loads((folder / "judge.json").read_text())
        metrics[source] = metadata["metrics"]["auc"]
    assert metrics[""] < 0.7, "without references the label cannot be known"
    assert metrics[known] > 0.95
    assert metadata["held_out"] == 8 * 6, "two of the eight answers to each question are references themselves"
    judge = load_judge(str(folder), "truth")
    new = read_questions(known)[:1]
    right, wrong = (judge.probabilities(new, [f"It should be {name}0."])[0] for name in ("Velu", "Rado"))
    assert right > 0.5 > wrong


def test_reference_answers_are_matched_by_question(tmp_path, capsys):
    rows, questions = capitals(3)
    labeled = [LabeledAnswer(row["question"], row["answer"], row["label"]) for row in rows]
    known = match_references(labeled, write_rows(tmp_path / "questions.jsonl", questions[:2]))
    assert "no reference answers to 1 question, such as 'What is the capital of country 2?'" in capsys.readouterr().out
    assert sum(is_reference(row, known) for row in labeled) == 4
    assert match_references(labeled, "") == {}
    with pytest.raises(UserError, match=r"truthfulness\.jsonl contains none of the 3 questions"):
        match_references(labeled, "data/truthfulness.jsonl")


def test_a_judge_learns_is_saved_and_loads_again_and_another_or_none_is_refused(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", answers())
    folder = run_train_judge(JudgeConfig(output_dir=str(tmp_path / "run"), data=data, encoder="tiny-llama"))
    judge = load_judge(str(folder), "truth")
    metadata = json.loads((folder / "judge.json").read_text())
    metrics = metadata["metrics"]
    assert metrics["auc"] > 0.9  # on questions that it has not seen
    assert metadata["held_out"] == 24
    questions = 2 * read_questions(TRUTHFUL_QUESTIONS)[:1]
    no, yes = judge.probabilities(questions, ["No, never.", "Yes, always."])
    assert no > 0.5 > yes
    with pytest.raises(UserError, match="was trained for truth, not info"):
        load_judge(str(folder), "info")
    with pytest.raises(UserError, match="not a judge"):
        load_judge(str(tmp_path), "truth")
    (folder / "judge_head.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match=r"invalid judge_head\.safetensors"):
        load_judge(str(folder), "truth")


@pytest.mark.slow
@pytest.mark.skipif(not TRUTHFULQA.exists(), reason=ABSENT)
def test_a_judge_agrees_with_people_on_answers_to_questions_of_truthfulqa_not_seen(tmp_path):
    """Trained on every sixth question, which takes a sixth of the time."""
    with gzip.open(TRUTHFULQA / "truthfulqa-finetune-truth.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file]
    questions = sorted({row["prompt"].split("\n")[0] for row in rows})[::6]
    config = JudgeConfig(
        output_dir=str(tmp_path / "run"),
        data=write_rows(tmp_path / "truth.jsonl", [row for row in rows if row["prompt"].split("\n")[0] in questions]),
        questions=str(TRUTHFULQA / "TruthfulQA.csv"),
    )
    metrics = json.loads((run_train_judge(config) / "judge.json").read_text())["metrics"]
    assert metrics["auc"] > 0.85
