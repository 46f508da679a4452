"""Files of answers are scored as they are, interrupted and continued, and one bad row or score loses nothing."""

import csv
import json
import sys

import pytest

from align import cli
from align.core.errors import UserError
from align.data.records import Ranking
from align.extras import score
from align.extras.score import ScoreConfig, answers_of, score_file
from align.reward.text_scoring import TextAnswer, TextRewardModel
from tests.files import ROOT, read_rows, write_rows

FUNCTIONS = """
import os
def length(prompts, responses):
    return [float(len(text)) for text in responses]
def fails_later(prompts, responses):
    if any("stop" in text for text in responses) and not os.path.exists("repaired"):
        raise RuntimeError("the service is gone")
    with open("calls", "a") as file:
        file.write("x" * len(responses))
    return [1.0] * len(responses)
def not_a_number(prompts, responses):
    return [float("nan") if text == "bad" else 0.0 for text in responses]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "own_scores.py").write_text(FUNCTIONS)
    monkeypatch.delitem(sys.modules, "own_scores", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


LAYOUTS = [
    ({"prompt": "Q", "completion": "A"}, ["A"]),
    ({"prompt": "Q", "response": "A"}, ["A"]),
    ({"prompt": "Q", "response": "A", "rating": 3}, ["A"]),
    ({"prompt": "Q", "responses": ["A", "B", "C"]}, ["A", "B", "C"]),
    ({"prompt": "Q", "responses": ["A", "B"], "ranks": [2, 1]}, ["A", "B"]),
    ({"prompt": "Q", "responses": ["A", "B"], "model": ["m", "m"], "finish_reason": ["stop", "length"]}, ["A", "B"]),
    ({"prompt": "Q", "chosen": "A", "rejected": "B"}, ["A", "B"]),
    ({"chosen": "\n\nHuman: Q\n\nAssistant: A", "rejected": "\n\nHuman: Q\n\nAssistant: B"}, ["A", "B"]),
    ({"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}, ["A"]),
    ({"instruction": "Q", "input": "", "output": "A"}, ["A"]),
    ({"instruction": "Q", "context": "", "response": "A", "category": "c"}, ["A"]),
    ({"prompt": "Q", "response": "A", "rule": "polite", "verdict": "follows"}, ["A"]),
]


def test_a_system_turn_and_a_history_are_read_with_the_answer():
    turns = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    for more in ({"response": "D"}, {"responses": ["D"]}, {"completion": "D"}):
        (answer,) = answers_of({"system": "S", "history": [["A", "B"]], "prompt": "C", **more})
        assert [turn["content"] for turn in answer.prompt] == ["S", *(turn["content"] for turn in turns), "C"]
    with pytest.raises(UserError, match=r"finish_reason.* 1 entries for 2 responses"):
        answers_of({"prompt": "Q", "responses": ["A", "B"], "finish_reason": ["stop"]})


@pytest.mark.parametrize(("row", "texts"), LAYOUTS)
def test_the_answers_of_each_layout_are_found_in_their_order(row, texts):
    answers = answers_of(row)
    assert [answer.text for answer in answers] == texts
    assert all(answer.prompt == ({"role": "user", "content": "Q"},) for answer in answers)
    if "finish_reason" in row:
        assert [answer.ended for answer in answers] == [True, False]


def test_scores_are_those_of_the_reward_model_and_rows_keep_their_fields(folder, reward_model, capsys):
    rows = [
        {"prompt": "Name a moon.", "responses": ["Phobos.", "No."], "note": {"by": "ann"}},
        {"prompt": "What is rain?", "response": "Water.", "scores": {"earlier": 3}},
    ]
    config = ScoreConfig(
        file=write_rows(folder / "rows.jsonl", rows),
        reward_model=reward_model,
        reward_functions=["own_scores:length"],
        dtype="float32",
        output="out.jsonl",
    )
    found = read_rows(score_file(config))
    assert [{k: v for k, v in row.items() if k != "scores"} for row in found] == [
        {k: v for k, v in row.items() if k != "scores"} for row in rows
    ]
    model = TextRewardModel(reward_model, "float32")
    answers = [answer for row in rows for answer in answers_of(row)]
    expected = model(answers)
    assert found[0]["scores"]["reward"] == pytest.approx(expected[:2], abs=1e-5)
    assert found[1]["scores"] == {"earlier": 3, "reward": pytest.approx(expected[2], abs=1e-5), "length": 6.0}
    assert found[0]["scores"]["length"] == [7.0, 3.0]
    assert "mean" in capsys.readouterr().err
    assert not list(folder.glob("*.partial.jsonl"))
    assert [model([answer])[0] for answer in answers] == pytest.approx(expected, abs=1e-5), "alone as in a batch"


def test_a_table_keeps_its_columns_and_gets_one_for_each_score(folder):
    (folder / "answers.csv").write_text('question,reply,who\nHi?,"Yes, hi.",ann\nWhy?,So.,bob\n')
    source = "answers.csv[prompt=question, response=reply]"
    words = ["score", source, "--reward_functions", "own_scores:length", "--output", "out.csv"]
    cli.main(words)
    with open(folder / "out.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["question"], row["reply"], row["who"]) for row in rows] == [
        ("Hi?", "Yes, hi.", "ann"),
        ("Why?", "So.", "bob"),
    ]
    assert [float(row["score/length"]) for row in rows] == [8.0, 3.0]
    before = (folder / "out.csv").read_bytes()
    with pytest.raises(SystemExit):
        cli.main(words)  # the output exists
    assert (folder / "out.csv").read_bytes() == before


def test_an_interrupted_command_continues_where_it_stopped(folder, monkeypatch, capsys):
    monkeypatch.setattr(score, "CHUNK", 4)
    rows = [{"prompt": "Q", "response": f"text {number}"} for number in range(9)]
    rows.append({"prompt": "Q", "response": "stop"})
    source = write_rows(folder / "rows.jsonl", rows)
    config = {"file": source, "reward_functions": ["own_scores:fails_later"], "output": "out.jsonl"}
    with pytest.raises(UserError, match=r"the service is gone.*same command again") as stopped:
        score_file(ScoreConfig(**config))
    assert "\n" not in str(stopped.value)
    assert not (folder / "out.jsonl").exists()
    assert (folder / "calls").read_text() == "x" * 8
    (folder / "repaired").touch()
    assert len(read_rows(score_file(ScoreConfig(**config)))) == 10
    assert (folder / "calls").read_text() == "x" * 10, "finished rows are not scored again"


def test_a_score_that_is_not_a_number_names_its_row(folder):
    source = write_rows(folder / "rows.jsonl", [{"prompt": "Q", "response": text} for text in ("good", "bad")])
    with pytest.raises(UserError, match=r"not_a_number.*nan.*'bad'"):
        score_file(ScoreConfig(file=source, reward_functions=["own_scores:not_a_number"], output="out.jsonl"))
    assert not (folder / "out.jsonl").exists()


def test_a_broken_row_is_named_and_can_be_skipped(folder, caplog):
    good = json.dumps({"prompt": "Q", "response": "A"})
    (folder / "rows.jsonl").write_text(f'{good}\n{{"prompt": "Q", "respon\n{{"prompt": "Q"}}\n{good}\n')
    config = {"file": "rows.jsonl", "reward_functions": ["own_scores:length"], "output": "out.jsonl"}
    with pytest.raises(UserError, match=r"rows\.jsonl:2: .*skip_bad_rows"):
        score_file(ScoreConfig(**config))
    found = read_rows(score_file(ScoreConfig(**config, skip_bad_rows=True)))
    assert [row["scores"]["length"] for row in found] == [1.0, 1.0]
    assert "2 bad rows of 4" in caplog.text


def test_an_answer_that_is_too_long_names_its_row(folder, reward_model):
    source = write_rows(folder / "rows.jsonl", [{"prompt": "Q", "response": text} for text in ("short", "x" * 2000)])
    with pytest.raises(UserError, match=r"rows\.jsonl:2: \d+ tokens, and .* reads 1024"):
        score_file(ScoreConfig(file=source, reward_model=reward_model, output="out.jsonl"))


def test_published_files_are_scored(folder):
    for name, kind in (("rankings_heldout.jsonl", Ranking), ("rule_judgments.jsonl", None), ("demonstrations.jsonl", None)):
        path = ROOT / "data" / name
        config = ScoreConfig(file=str(path), reward_functions=["own_scores:length"], output=f"scored-{name}")
        found = read_rows(score_file(config))
        assert len(found) == len(read_rows(path))
        if kind is Ranking:
            assert all(len(row["scores"]["length"]) == len(row["responses"]) for row in found)


def test_a_rendered_text_is_scored_as_its_conversation(reward_model):
    model = TextRewardModel(reward_model, "float32")
    prompt, text = ({"role": "user", "content": "Name a moon."},), "Phobos."
    chat = model.tokenization.chat
    whole = chat.render((*prompt, {"role": "assistant", "content": text}), generation_prompt=False)
    start = chat.render(prompt, generation_prompt=True)
    expected = model([TextAnswer(prompt, text)])[0]
    assert model.score_rendered([whole.rstrip("\n")], [start])[0] == pytest.approx(expected, abs=1e-5)
    assert model.score_rendered([whole.rstrip("\n")])[0] == pytest.approx(expected, abs=1e-5)
