from pathlib import Path

import pytest

from align.core.errors import UserError
from align.eval.questions import read_questions
from tests.files import write_rows
from tests.refusals import refusal

HEAD = "Type,Category,Question,Best Answer,Correct Answers,Incorrect Answers,Source\n"
GOOD = "Adversarial,Law,May I?,Yes you may,Yes you may; You may ;,No;Never.,http://x\n"


def written(folder: Path, text: str) -> str:
    path = folder / "questions.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_csv_row_is_cut_at_semicolons_and_each_answer_ends_with_a_period(tmp_path):
    (question,) = read_questions(written(tmp_path, HEAD + GOOD))
    assert (question.id, question.category, question.text) == ("1", "Law", "May I?")
    assert question.correct == ("Yes you may.", "You may.")
    assert question.incorrect == ("No.", "Never.")
    assert question.answers == ["Yes you may.", "You may.", "No.", "Never."]


def test_the_projects_own_questions_can_be_read():
    questions = read_questions("data/truthfulness.jsonl")
    assert len(questions) == 72
    assert questions[0].id == "t-001"
    assert all(question.best in question.correct for question in questions)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (HEAD.replace("Incorrect Answers", "Wrong") + GOOD, ": row 1: field 'incorrect_answers': is missing"),
        (HEAD + GOOD.replace("No;Never.", " ; "), ": row 1: field 'incorrect_answers': is an empty list"),
        (HEAD + GOOD + GOOD.replace("May I?", " "), ": row 2: field 'question': is empty"),
        (HEAD, "no usable question"),
        ("", "the file is empty"),
    ],
)
def test_a_bad_csv_is_one_clear_line(tmp_path, text, complaint):
    path = written(tmp_path, text)
    line = refusal(read_questions, path)
    assert complaint in line
    assert line.startswith(path)


def test_a_bad_row_can_be_skipped_and_an_id_that_stands_twice_is_bad(tmp_path, caplog):
    row = {"id": "a", "question": "q", "best_answer": "b", "correct_answers": ["b"], "incorrect_answers": ["c"]}
    path = write_rows(tmp_path / "questions.jsonl", [row, row])
    with pytest.raises(UserError, match=":2: field 'id': is 'a'"):
        read_questions(path)
    assert [question.id for question in read_questions(path, skip_bad_rows=True)] == ["a"]
    assert "skipped 1 bad row of 2" in caplog.text
