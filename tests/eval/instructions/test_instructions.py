"""`align eval instructions`: figures by hand, and from prompts in a file to the figures of two models."""

import json

import pytest

from align.core.errors import UserError
from align.eval.core.results import read_evaluations
from align.eval.instructions.constraints import Constraint
from align.eval.instructions.task import InstructionsConfig, instruction_figures, read_constraints, run_instructions


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_figures_by_hand():
    """Shares 1, 0.5 and 0: mean 0.5; of the two word counts 0.75."""
    constraints = {"1": Constraint("word_count", 2), "3": Constraint("lowercase"), "4": Constraint("word_count", 5)}
    obeyed = {"1": [True, True], "3": [False, False], "4": [True, False]}
    (figure,), tables = instruction_figures(constraints, obeyed)
    assert (figure.value, figure.n, figure.scorer) == (0.5, 3, "checks by program")
    assert 0 <= figure.low < 0.5 < figure.high <= 1
    assert tables["By kind of check"] == [
        {"kind": "lowercase", "prompts": 1, "answers that obey": 0.0},
        {"kind": "word_count", "prompts": 2, "answers that obey": 0.75},
    ]


def test_two_models_answer_only_prompts_with_a_check(sharp_folders, tmp_path):
    rows = [{"prompt": "Hi"}, {"prompt": "Say no.", "check": {"kind": "max_words", "value": 99}}, {"prompt": "Who?"}]
    rows.append({"prompt": "One word.", "check": {"kind": "json", "value": ["a"]}})
    models = [sharp_folders["tiny-gpt2"], sharp_folders["tiny-t5"]]
    config = InstructionsConfig(
        models=models,
        prompts=write(tmp_path / "prompts.jsonl", rows),
        samples=2,
        max_new_tokens=6,
        dtype="float32",
        resamples=100,
        output=str(tmp_path / "out"),
    )
    evaluations = run_instructions(config)
    assert read_evaluations(tmp_path / "out" / "instructions.json") == evaluations
    for evaluation in evaluations:
        stored = (tmp_path / "out" / f"instructions-{evaluation.model}.jsonl").read_text().splitlines()[1:]
        texts = {row["item"]: row["texts"] for row in map(json.loads, stored)}
        assert list(texts) == ["2", "4"]
        by_hand = [sum(bool(text.strip()) and any(map(str.isalnum, text)) for text in texts["2"]) / 2, 0.0]
        assert evaluation.figures[0].value == pytest.approx(sum(by_hand) / 2)
        assert [row["check"] for row in evaluation.tables["First answers"]] == ["max_words 99", "json ['a']"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "Hi"}], "no prompt has a check"),
        ([{"prompt": "Hi"}, {"prompt": "A", "check": {"kind": "words"}}], "prompt 2: check.kind is 'words'"),
    ],
)
def test_a_file_without_checks_or_with_a_wrong_one(rows, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_constraints(write(tmp_path / "prompts.jsonl", rows))
