"""Figures, side-by-side tables, and rows that a crash does not lose."""

import json
import re

import pytest
from accelerate import Accelerator

from align.core.errors import UserError
from align.core.files import resolve_path
from align.eval.core.answers import open_accelerator
from align.eval.core.results import (
    Evaluation,
    Figure,
    ResultStore,
    markdown_table,
    notes,
    print_table,
    read_evaluations,
    save_evaluations,
)
from align.eval.reward.task import RewardEvalConfig
from align.eval.truthfulness.task import TruthfulnessConfig
from align.eval.winrate.task import WinrateConfig


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


def evaluations():
    first = [
        Figure("MC1", 0.25, 0.2, 0.3, 72),
        Figure("mean toxicity", 0.5, 0.4, 0.6, 40, "words 1 (abc)", "25 samples each"),
    ]
    second = [Figure("MC1", 0.5, None, None, 72), Figure("mean toxicity", None, None, None, 0, "words 1 (abc)")]
    return [Evaluation("mini", "a", {"seed": 1}, first, {"by category": [{"category": "x", "n": 2}]}),
            Evaluation("mini", "b", {"seed": 1}, second)]  # fmt: skip


def test_side_by_side():
    lines = markdown_table(evaluations()).splitlines()
    assert lines[0] == "| figure | a | b | n | scorer |"
    assert lines[2] == "| mini: MC1 | 0.250 (0.200 to 0.300) | 0.500 | 72 |  |"
    assert lines[3] == "| mini: mean toxicity | 0.500 (0.400 to 0.600) | none | 40 / 0 | words 1 (abc) |"
    assert notes(evaluations()) == ["mini: mean toxicity: 25 samples each"]


def test_the_terminal_shows_every_number_whole(capsys):
    print_table(evaluations())
    out = capsys.readouterr().out
    for cell in ("mini: MC1", "0.250 (0.200 to 0.300)", "words 1 (abc)", "25 samples each"):
        assert cell in out


def test_the_data_are_named_above_the_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own.jsonl"
    own.write_text(json.dumps({"prompt": "Hi"}) + "\n" + json.dumps({"prompt": "Who?"}) + "\n")
    rows = len(resolve_path("data/prompts_heldout.jsonl").read_text(encoding="utf-8").splitlines())
    built_in = f"prompts: built-in data/prompts_heldout.jsonl ({rows})"
    assert WinrateConfig(judge="a:b").data_lines() == [built_in]
    assert WinrateConfig(judge="a:b", prompts="own.jsonl").data_lines() == ["prompts: own.jsonl (2)"]
    assert WinrateConfig(judge="a:b", prompts="own.jsonl", limit=1).data_lines() == ["prompts: own.jsonl (1 of 2)"]
    assert WinrateConfig(comparisons=["own.jsonl"]).data_lines() == ["comparisons: own.jsonl (2)"]
    (preferences,) = RewardEvalConfig(reward_model="r").data_lines()
    assert preferences.startswith("preferences: built-in data/rankings_heldout.jsonl (")
    assert RewardEvalConfig(reward_model="r", models=["m"]).data_lines()[1] == built_in
    (questions,) = TruthfulnessConfig(models=["m"], limit=2).data_lines()
    assert questions.startswith("questions: built-in data/truthfulness.jsonl (2 of ")
    assert markdown_table(evaluations(), [built_in]).splitlines()[0] == built_in


def test_the_first_line_names_the_data(tmp_path, capsys):
    open_accelerator(WinrateConfig(judge="a:b", prompts=str(tmp_path / "none.jsonl")))
    printed = capsys.readouterr()
    assert (printed.out + printed.err).splitlines()[0] == f"prompts: {tmp_path / 'none.jsonl'}"


def test_saved_and_read_back(tmp_path):
    (path,) = save_evaluations(tmp_path, evaluations())
    assert path.name == "mini.json"
    assert read_evaluations(path) == evaluations()
    assert re.match(r"\d+\.\d+", json.loads(path.read_text())["environment"]["packages"]["torch"])


def test_a_file_of_something_else(tmp_path):
    (tmp_path / "x.json").write_text('{"task": "x"}')
    with pytest.raises(UserError, match="not the results of an evaluation"):
        read_evaluations(tmp_path / "x.json")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_is_a_number(value):
    with pytest.raises(UserError, match=r"'t' is (nan|inf): a scorer"):
        Figure("t", value, None, None, 1)


# ----------------------------------------------------------------------------------------------------------------- rows


def double(items):
    return [{"value": 2 * item} for item in items]


def test_rows_are_computed_once(tmp_path, accelerator):
    path, items, asked = tmp_path / "sub" / "t-a.jsonl", {"x": 1, "y": 2, "z": 3}, []

    def breaking(chunk):
        asked.extend(chunk)
        if 2 in chunk:
            raise KeyboardInterrupt
        return double(chunk)

    with pytest.raises(KeyboardInterrupt):
        ResultStore(path, {"seed": 1}, accelerator).fill(items, breaking, chunk=1)
    assert asked == [1, 2]
    with open(path, "ab") as file:
        file.write(b'{"item": "y", "val')  # killed in the middle of a line
    asked.clear()
    rows = ResultStore(path, {"seed": 1}, accelerator)
    assert rows.fill(items, lambda chunk: asked.extend(chunk) or double(chunk)) == [{"value": 2}, {"value": 4}, {"value": 6}]
    assert asked == [2, 3]
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"settings": {"seed": 1}},
        {"item": "x", "value": 2},
        {"item": "y", "value": 4},
        {"item": "z", "value": 6},
    ]


def test_a_result_of_other_content_is_computed_anew(tmp_path, accelerator):
    path, asked = tmp_path / "t-a.jsonl", []

    def fill(items):
        store = ResultStore(path, {}, accelerator)
        return store.fill(items, lambda chunk: asked.extend(chunk) or double(chunk), content=lambda item: [item])

    fill({"x": 1, "y": 2})
    assert [row["value"] for row in fill({"x": 1, "y": 5})] == [2, 10]
    assert asked == [1, 2, 5]
    assert [row["value"] for row in fill({"x": 1, "y": 5})] == [2, 10]  # the later of two lines counts
    assert asked == [1, 2, 5]


def test_other_settings_are_refused(tmp_path, accelerator):
    path = tmp_path / "t-a.jsonl"
    ResultStore(path, {"seed": 1, "top_p": 0.9}, accelerator).fill({"x": 1}, double)
    with pytest.raises(UserError, match=r"t-a.jsonl holds results with top_p 0.9, not 1.0; choose another output"):
        ResultStore(path, {"seed": 1, "top_p": 1.0}, accelerator)


def test_a_result_that_is_no_number_is_an_error_and_the_others_stay(tmp_path, accelerator):
    path = tmp_path / "t-a.jsonl"
    with pytest.raises(UserError, match="not a finite number"):
        ResultStore(path, {}, accelerator).fill({"x": 1.0, "y": float("nan")}, double)
    assert ResultStore(path, {}, accelerator).results == {"x": {"value": 2.0}}


def test_a_broken_line_is_named(tmp_path, accelerator):
    path = tmp_path / "t-a.jsonl"
    path.write_text('{"settings": {}}\nx\n{"item": "a"}\n')
    with pytest.raises(UserError, match=r"t-a.jsonl:2: not JSON"):
        ResultStore(path, {}, accelerator)
