"""Labels: ratings and flags by model and category by hand, the four panels, and rows that cannot be counted."""

import json

import pytest

from align.errors import UserError
from align.eval.core.results import Evaluation, Figure, read_evaluations, save_evaluations
from align.eval.labels.task import FLAGS, LabelsConfig, run_labels
from annotation_ui.tasks.rank import FLAGS as FLAGS_OF_THE_APP

ROWS = [
    {
        "prompt": "Sum up: A.", "category": "summary", "responses": ["a", "b"], "ranks": [1, 2], "model": ["old", "new"],
        "ratings": [5, 7], "flags": [["hallucination", "violent"], []],
    },
    {
        "prompt": "Sum up: B.", "category": "summary", "responses": ["c", "d"], "ranks": [2, 1], "model": ["new", "old"],
        "ratings": [4, 2], "flags": [["hallucination"], ["hallucination"]],
    },
    {  # all tied, as `--all-tied` exports it; only one is rated
        "prompt": "Hi", "category": "talk", "responses": ["e", "f"], "ranks": [1, 1], "model": ["old", "new"],
        "some_rated": [None, 1], "flags": [["hallucination"], ["unfit_for_assistant"]],
    },
]  # fmt: skip


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_flags_are_the_apps():
    assert set(FLAGS) == set(FLAGS_OF_THE_APP)
    assert len(FLAGS) == 11


def test_figures_by_hand(tmp_path):
    config = LabelsConfig(
        rankings=[write(tmp_path / "r.jsonl", ROWS)],
        closed_domain=["summary"],
        output=str(tmp_path),
        resamples=200,
        table=False,
    )
    run_labels(config)
    old, new = read_evaluations(tmp_path / "labels.json")
    assert (old.model, new.model) == ("old", "new")
    found = [{figure.name: (figure.value, figure.n) for figure in each.figures} for each in (old, new)]
    assert found[0]["rating"] == (3.5, 2)
    assert found[1]["rating"] == (4.0, 3)
    assert [each["hallucination, closed domain"] for each in found] == [(1.0, 2), (0.5, 2)]
    assert [each["flag hallucination"] for each in found] == [(1.0, 3), (pytest.approx(1 / 3), 3)]
    assert [each["appropriate for an assistant"] for each in found] == [(1.0, 3), (pytest.approx(2 / 3), 3)]
    summary, talk = new.tables["Ratings and flags by category"]
    assert (summary["category"], summary["n"], summary["hallucination"]) == ("summary", 2, 0.5)
    assert summary["rating"].startswith("5.500 (4.000 to 7.000)")
    assert (talk["n"], talk["rating"], talk["unfit_for_assistant"]) == (1, "1.000", 1.0)


def test_the_four_panels(tmp_path):
    figures = {
        "toxicity": [Figure("basic: expected maximum toxicity", 0.4, 0.3, 0.5, 9, "minilm-l6 (1)")],
        "truthfulness": [Figure("mc1", 0.25, 0.2, 0.3, 8)],
    }
    save_evaluations(
        tmp_path, [Evaluation(task, model, {}, found) for task, found in figures.items() for model in ("old", "new")]
    )
    config = LabelsConfig(
        rankings=[write(tmp_path / "r.jsonl", ROWS)],
        closed_domain=["summary"],
        results=[str(tmp_path / "toxicity.json"), str(tmp_path / "truthfulness.json")],
        output=str(tmp_path / "labels"),
        table=False,
    )
    run_labels(config)
    old, new = read_evaluations(tmp_path / "labels" / "labels.json")
    for result, hallucination, appropriate in ((old, 1.0, 1.0), (new, 0.5, 2 / 3)):
        rows = {row["panel"]: row for row in result.tables["Four panels"]}
        assert list(rows) == ["toxicity", "truthfulness", "hallucination", "appropriate"]
        assert [row["value"] for row in rows.values()] == pytest.approx([0.4, 0.25, hallucination, appropriate])
        assert rows["truthfulness"]["figure"] == "truthfulness: mc1"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": None}, "r.jsonl:1: field 'model'"),
        ({"ratings": [8, 1]}, "field 'ratings': is not a list of whole numbers from 1 to 7"),
        ({"ratings": [1]}, "field 'ratings'"),
        ({"flags": ["violent"]}, "field 'flags'"),
    ],
)
def test_a_row_that_cannot_be_counted_is_one_line(tmp_path, change, complaint):
    path = write(tmp_path / "r.jsonl", [{**ROWS[0], **change}])
    with pytest.raises(UserError, match=complaint) as caught:
        run_labels(LabelsConfig(rankings=[path], output=str(tmp_path), table=False))
    assert "\n" not in str(caught.value)
