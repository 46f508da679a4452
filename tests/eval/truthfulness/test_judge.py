"""A judge of answers: figures by hand, a split that leaks no question, and judges that learn, are saved and load again."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from align.core.errors import UserError
from align.core.statistics import calibration_error, roc_auc
from align.eval.truthfulness.judge import (
    JudgeModel,
    LabeledAnswer,
    WordBags,
    load_judge,
    read_labeled_answers,
    split_by_question,
)
from align.eval.truthfulness.train_judge import JudgeConfig, auc_interval, held_out_figures, run_train_judge

OWN = Path(__file__).parents[4] / "shared" / "data" / "truthfulqa-finetune-truth.jsonl.gz"


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def answers(questions: int = 30) -> list[dict]:
    """Answers that deny are true and those that affirm are not, to questions of different lengths."""
    rows = []
    for number in range(questions):
        asked = f"Is {'very ' * (number % 3)}number {number} odd?"
        rows += [{"question": asked, "answer": f"No, {word}.", "label": True} for word in ("never", "it is not")]
        rows += [{"question": asked, "answer": f"Yes, {word}.", "label": False} for word in ("always", "it is")]
    return rows


def test_auc_by_hand():
    """Yes at 3, 2, 1 and no at 2, 0: of six pairs 3>2, 3>0, 2=2, 2>0, 1<2, 1>0, which is 4.5 of 6."""
    assert roc_auc([3, 2, 1, 2, 0], [True, True, True, False, False]) == pytest.approx(4.5 / 6)
    assert roc_auc([1, 2], [True, True]) == 0.5


def test_calibration_error_by_hand():
    """Two rows at 0.25, one of them yes, and two at 0.9, both yes: 0.25 and 0.1 apart, half of the rows each."""
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
        read_labeled_answers(write(tmp_path / "rows.jsonl", rows), "truth")


def test_words_of_an_answer_count_whatever_stands_beside_it():
    model = JudgeModel(None, None, words=True)
    torch.nn.init.normal_(model.words.weight)
    texts = ["No, never.", "Yes", ""]
    together = model(None, WordBags.from_answers(texts))
    assert together.tolist() == pytest.approx([model(None, WordBags.from_answers([text])).item() for text in texts])
    assert together.unique().numel() == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"model": "none", "learning_rate": 0.1},
        {"model": "tiny-llama", "words": False, "learning_rate": 0.03},
        {"model": "tiny-t5", "words": False, "learning_rate": 0.03},
        pytest.param(
            {"model": "tiny-llama", "words": False, "lora_rank": 4, "learning_rate": 0.005, "epochs": 6},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["words", "frozen", "encoder-decoder", "lora"],
)
def test_a_judge_learns_is_saved_and_loads_again(tmp_path, settings):
    given = {"data": write(tmp_path / "rows.jsonl", answers()), "dtype": "float32", "epochs": 4, "batch_size": 8}
    folder = run_train_judge(JudgeConfig(output_dir=str(tmp_path / "run"), **(given | settings)))
    judge = load_judge(str(folder), "truth", Accelerator())
    assert judge.metadata["figures"]["auc"] > 0.9  # on questions that it has not seen
    assert judge.metadata["held_out"] == 24
    pairs = [("Is number 99 odd?", "No, never."), ("Is number 99 odd?", "Yes, always.")]
    no, yes = judge.probabilities(pairs, 4096, Accelerator())
    assert no > 0.5 > yes
    one_by_one = [judge.probabilities([pair], 4096, Accelerator())[0] for pair in pairs]
    assert one_by_one == pytest.approx([no, yes], rel=0, abs=1e-5)


def test_a_saved_judge_says_what_it_said_in_training(tmp_path):
    rows = answers()
    settings = {"model": "tiny-llama", "dtype": "float32", "lora_rank": 4, "learning_rate": 0.02, "epochs": 2}
    config = JudgeConfig(
        output_dir=str(tmp_path / "run"), data=write(tmp_path / "rows.jsonl", rows), batch_size=8, **settings
    )
    judge = load_judge(str(run_train_judge(config)), "truth", Accelerator())
    _, held_out = split_by_question([LabeledAnswer(row["question"], row["answer"], row["label"]) for row in rows], 0.2, 0)
    found = judge.probabilities([(row.question, row.answer) for row in held_out], 4096, Accelerator())
    figures = held_out_figures(torch.logit(torch.tensor(found, dtype=torch.float64)).tolist(), held_out)
    assert figures["loss"] == pytest.approx(judge.metadata["figures"]["loss"], abs=1e-4)


def test_a_judge_of_another_question_and_a_folder_without_one_are_refused(tmp_path):
    config = JudgeConfig(output_dir=str(tmp_path / "run"), data=write(tmp_path / "rows.jsonl", answers()), epochs=1)
    folder = run_train_judge(config)
    with pytest.raises(UserError, match="this judge was trained for truth, not for info"):
        load_judge(str(folder), "info", Accelerator())
    with pytest.raises(UserError, match="not a judge"):
        load_judge(str(tmp_path), "truth", Accelerator())
    (folder / "judge_head.safetensors").write_bytes(b"broken")
    with pytest.raises(UserError, match="is broken"):
        load_judge(str(folder), "truth", Accelerator())


@pytest.mark.skipif(not OWN.exists(), reason="../shared/data is absent")
def test_words_alone_tell_true_answers_to_questions_not_seen(tmp_path):
    config = JudgeConfig(output_dir=str(tmp_path / "run"), data=str(OWN), limit=3000, epochs=2)
    figures = load_judge(str(run_train_judge(config)), "truth", Accelerator()).metadata["figures"]
    assert figures["auc/low"] < figures["auc"] < figures["auc/high"]
    assert figures["auc"] > 0.68  # 0.73 was seen; 0.79 with all rows


def test_the_interval_of_an_auc_that_separates_has_a_width():
    """Four questions with yes, eight with no: the interval of 4 of 4, by Clopper and Pearson."""
    values, labels = np.arange(12.0), np.arange(12) >= 8
    questions = [str(number) for number in range(12)]
    assert auc_interval(values, labels, questions) == pytest.approx((0.025**0.25, 1.0))
    assert auc_interval(values, np.zeros(12, dtype=bool), questions) == (0.0, 1.0)
    values[0] = 20.0
    low, high = auc_interval(values, labels, questions)
    assert low < 28 / 32 < high
