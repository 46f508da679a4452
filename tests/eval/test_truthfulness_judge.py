import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from align.core.errors import UserError
from align.core.statistics import calibration_error, roc_auc
from align.eval.truthfulness_judge import (
    JudgeConfig,
    LabeledAnswer,
    held_out_metrics,
    load_judge,
    read_labeled_answers,
    run_train_judge,
    split_by_question,
    word_features,
)
from tests.files import write_rows

OWN = Path(__file__).parents[3] / "shared" / "data" / "truthfulqa-finetune-truth.jsonl.gz"


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
        ([{"question": "q", "answer": "a", "label": 1}], ":1: field 'label': is 1; write true or false"),
        ([{"question": "q", "label": True}], ":1: field 'answer': is missing"),
        ([{"question": "q", "answer": "a", "label": True}], "needs answers of both labels"),
        ([{"prompt": "Q: q\nA: a\nTrue:", "completion": " maybe"}], "field 'completion': is 'maybe'"),
    ],
)
def test_bad_rows_are_one_clear_line(tmp_path, rows, complaint):
    with pytest.raises(UserError, match=complaint):
        read_labeled_answers(write_rows(tmp_path / "rows.jsonl", rows), "truth")


def test_words_of_an_answer_count_whatever_stands_beside_it():
    """Of "< no ! >", each of 4 words and 3 pairs weighs 1 / sqrt(7)."""
    texts = ["No!", "Yes", ""]
    together = word_features(texts)
    assert sorted(together[0].data) == pytest.approx([7**-0.5] * 7)
    assert [word_features([text]).toarray().tolist() for text in texts] == [[row] for row in together.toarray().tolist()]


def test_a_judge_learns_is_saved_and_loads_again_and_another_or_none_is_refused(tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", answers())
    folder = run_train_judge(JudgeConfig(output_dir=str(tmp_path / "run"), data=data))
    judge = load_judge(str(folder), "truth")
    metadata = json.loads((folder / "judge.json").read_text())
    metrics = metadata["metrics"]
    assert metrics["auc"] > 0.9  # on questions that it has not seen
    assert metadata["held_out"] == 24
    no, yes = judge.probabilities(["No, never.", "Yes, always."])
    assert no > 0.5 > yes
    _, held_out = split_by_question(read_labeled_answers(data, "truth"), 0.2, 0)
    found = judge.probabilities([row.answer for row in held_out])
    again = held_out_metrics(np.log(found) - np.log1p(-np.array(found)), held_out)
    assert again["calibration_error"] == pytest.approx(metrics["calibration_error"], abs=1e-4)
    with pytest.raises(UserError, match="this judge was trained for truth, not for info"):
        load_judge(str(folder), "info")
    with pytest.raises(UserError, match="not a judge"):
        load_judge(str(tmp_path), "truth")
    (folder / "judge_head.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="is broken"):
        load_judge(str(folder), "truth")


@pytest.mark.skipif(not OWN.exists(), reason="../shared/data is absent")
def test_words_alone_tell_true_answers_to_questions_not_seen(tmp_path):
    config = JudgeConfig(output_dir=str(tmp_path / "run"), data=str(OWN))
    metrics = json.loads((run_train_judge(config) / "judge.json").read_text())["metrics"]
    assert metrics["auc"] > 0.79  # 0.807 was seen
