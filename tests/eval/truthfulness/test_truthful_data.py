"""Questions from TruthfulQA's CSV and from JSON Lines, and every way in which a file can be bad."""

import json
from pathlib import Path

import pytest

from align.core.errors import UserError
from align.eval.truthfulness.questions import read_questions

HEAD = "Type,Category,Question,Best Answer,Correct Answers,Incorrect Answers,Source\n"
GOOD = "Adversarial,Law,May I?,Yes you may,Yes you may; You may ;,No;Never.,http://x\n"


def written(folder: Path, text: str, name: str = "questions.csv") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_csv_row_is_cut_at_semicolons(tmp_path):
    (question,) = read_questions(written(tmp_path, HEAD + GOOD))
    assert (question.id, question.category, question.text) == ("1", "Law", "May I?")
    assert question.correct == ("Yes you may", "You may")
    assert question.incorrect == ("No", "Never.")
    assert question.answers == ["Yes you may", "You may", "No", "Never."]


def test_a_full_stop_is_added_where_there_is_none(tmp_path):
    question = read_questions(written(tmp_path, HEAD + GOOD))[0].with_full_stops()
    assert question.best == "Yes you may."
    assert question.correct == ("Yes you may.", "You may.")
    assert question.incorrect == ("No.", "Never.")


def test_the_projects_own_questions_can_be_read():
    questions = read_questions("data/truthfulness.jsonl")
    assert len(questions) == 72
    assert questions[0].id == "t-001"
    assert all(question.best in question.correct for question in questions)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (HEAD.replace("Incorrect Answers,", "") + GOOD, "column 'Incorrect Answers' is missing"),
        (HEAD + GOOD.replace("No;Never.", " ; "), ":2: field 'incorrect_answers': is an empty list"),
        (HEAD + GOOD + GOOD.replace("May I?", ""), ":3: field 'question': is empty"),
        (HEAD, "no usable question"),
        ("", "column 'Category' is missing"),
    ],
)
def test_a_bad_csv_is_one_clear_line(tmp_path, text, complaint):
    path = written(tmp_path, text)
    with pytest.raises(UserError) as caught:
        read_questions(path)
    assert complaint in str(caught.value)
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


def test_bad_rows_can_be_skipped_and_are_counted(tmp_path, caplog):
    path = written(tmp_path, HEAD + GOOD.replace("No;Never.", "") + GOOD)
    (question,) = read_questions(path, skip_bad_rows=True)
    assert question.id == "2"
    assert "skipped 1 bad rows of 2" in caplog.text


def test_an_id_that_stands_twice_is_refused(tmp_path):
    row = {"id": "a", "question": "q", "best_answer": "b", "correct_answers": ["b"], "incorrect_answers": ["c"]}
    path = written(tmp_path, (json.dumps(row) + "\n") * 2, "questions.jsonl")
    with pytest.raises(UserError, match=":2: field 'id': 'a' appears twice"):
        read_questions(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.csv: cannot be read"):
        read_questions(str(tmp_path / "nowhere.csv"))
