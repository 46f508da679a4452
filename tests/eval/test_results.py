import json
import re

import pytest
from accelerate import Accelerator

from align.core.errors import UserError
from align.eval.results import (
    Evaluation,
    Measurement,
    markdown_table,
    measurement_tables,
    notes,
    print_table,
    read_evaluations,
    save_evaluations,
)
from align.eval.store import compute_once, content_hash
from tests.eval.files import stored_rows
from tests.files import read_rows


def evaluations():
    first = [
        Measurement("MC1", 0.25, 0.2, 0.3, 72),
        Measurement("mean toxicity", 0.5, 0.4, 0.6, 40, "words 1 (abc)", "25 samples each"),
    ]
    second = [Measurement("MC1", 0.5, None, None, 72), Measurement("mean toxicity", None, None, None, 0, "words 1 (abc)")]
    return [Evaluation("mini", "a", {"seed": 1}, first, {"by category": [{"category": "x", "n": 2}]}),
            Evaluation("mini", "b", {"seed": 1}, second)]  # fmt: skip


def test_side_by_side(capsys):
    lines = markdown_table(evaluations()).splitlines()
    assert lines[0] == "| measurement | a | b | n | scorer |"
    assert lines[2] == "| mini: MC1 | 0.250 (0.200 to 0.300) | 0.500 | 72 |  |"
    assert lines[3] == "| mini: mean toxicity | 0.500 (0.400 to 0.600) | none | 40 / 0 | words 1 (abc) |"
    assert notes(evaluations()) == ["mini: mean toxicity: 25 samples each"]
    print_table(evaluations())
    out = capsys.readouterr().out
    for cell in ("mini: MC1", "0.250 (0.200 to 0.300)", "words 1 (abc)", "25 samples each"):
        assert cell in out


def test_tasks_on_the_same_models_share_a_table():
    def evaluated(task, *models):
        return [Evaluation(task, model, {}, [Measurement("x", 1.0, None, None, 3)]) for model in models]

    first, second = measurement_tables(
        [*evaluated("truth", "a", "b"), *evaluated("reward", "rm"), *evaluated("tox", "a", "b")]
    )
    assert first[0] == ["measurement", "a", "b", "n", "scorer"]
    assert [row[0] for row in first[1]] == ["truth: x", "tox: x"]
    assert second[0] == ["measurement", "rm", "n", "scorer"]


def test_saved_and_read_back(tmp_path):
    save_evaluations(tmp_path, evaluations())
    path = tmp_path / "mini.json"
    assert read_evaluations(path) == evaluations()
    assert re.match(r"\d+\.\d+", json.loads(path.read_text())["environment"]["packages"]["torch"])
    (tmp_path / "x.json").write_text('{"task": "x"}')
    with pytest.raises(UserError, match="not an evaluation result file"):
        read_evaluations(tmp_path / "x.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_is_a_number(value):
    with pytest.raises(UserError, match=r"'t' is (nan|inf): "):
        Measurement("t", value, None, None, 1)


def double(items):
    return [{"value": 2 * item} for item in items]


@pytest.fixture
def fill(tmp_path):
    """Compute results into one file, `fill(items)`; returns their values."""

    def fill(items, compute=double, settings=None, **more):
        settings = {"seed": 1, "top_p": 0.9} if settings is None else settings
        rows = compute_once(tmp_path / "sub" / "t-a.jsonl", settings, items, compute, Accelerator(cpu=True), **more)
        return [row["value"] for row in rows]

    fill.path = tmp_path / "sub" / "t-a.jsonl"
    return fill


def test_rows_are_computed_once(fill):
    items, asked = {"x": 1, "y": 2, "z": 3}, []

    def breaking(chunk):
        asked.extend(chunk)
        if 2 in chunk:
            raise KeyboardInterrupt
        return double(chunk)

    with pytest.raises(KeyboardInterrupt):
        fill(items, breaking, chunk=1)
    assert asked == [1, 2]
    with open(fill.path, "ab") as file:
        file.write(b'{"item": "y", "val')  # killed in the middle of a line
    asked.clear()
    assert fill(items, lambda chunk: asked.extend(chunk) or double(chunk)) == [2, 4, 6]
    assert asked == [2, 3]
    assert read_rows(fill.path) == [
        {"settings": {"seed": 1, "top_p": 0.9}},
        {"item": "x", "value": 2},
        {"item": "y", "value": 4},
        {"item": "z", "value": 6},
    ]


def test_a_result_of_other_content_is_computed_anew(fill):
    asked = []
    given = {"compute": lambda chunk: asked.extend(chunk) or double(chunk), "content": lambda item: [item]}
    fill({"x": 1, "y": 2}, **given)
    assert fill({"x": 1, "y": 5}, **given) == [2, 10]
    assert asked == [1, 2, 5]
    assert fill({"x": 1, "y": 5}, **given) == [2, 10]  # the later of two lines counts
    assert asked == [1, 2, 5]


def test_what_cannot_be_used_or_kept_is_one_line(fill):
    with pytest.raises(UserError, match="is NaN or infinite"):
        fill({"x": 1.0, "y": float("nan")})
    assert stored_rows(fill.path) == {"x": {"item": "x", "value": 2.0}}
    with pytest.raises(UserError, match=r"t-a.jsonl contains results with top_p 0.9, not 1.0"):
        fill({"x": 1}, settings={"seed": 1, "top_p": 1.0})
    fill.path.write_text('{"settings": {}}\nx\n{"item": "a"}\n')
    with pytest.raises(UserError, match=r"t-a.jsonl:2: not JSON"):
        fill({"x": 1}, settings={})


def test_the_content_of_half_a_surrogate_pair_has_a_hash():
    assert content_hash(["\ud83d"]) != content_hash(["\ud83e"])
