"""`align eval truthfulness` from the command to its files, broken off and gone on with."""

import json
from pathlib import Path

import pytest

from align.core.errors import UserError
from align.eval.core.settings import take_evenly
from align.eval.truthfulness.task import TruthfulnessConfig, run_truthfulness

ROOT = Path(__file__).parents[3]


def config(folder: Path, **settings) -> TruthfulnessConfig:
    given = {"models": ["tiny-llama"], "output": str(folder), "dtype": "float32", "limit": 5, "resamples": 200}
    return TruthfulnessConfig(**(given | settings))


def rows(folder: Path, name: str) -> dict[str, dict]:
    lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return {line["item"]: line for line in lines if "item" in line}


def test_models_side_by_side_with_categories_and_files(tmp_path, capsys):
    first, second = run_truthfulness(config(tmp_path, models=["tiny-llama", "tiny-t5"]))
    assert [figure.name for figure in first.figures] == ["mc1", "mc2", "mc3"]
    for figure in (*first.figures, *second.figures):
        assert figure.low <= figure.value <= figure.high
        assert figure.n == 5
    table = first.tables["Multiple choice by category"]
    assert sum(row["n"] for row in table) == 5
    stored = json.loads((tmp_path / "truthfulness.json").read_text())
    assert [model["model"] for model in stored["models"]] == ["tiny-llama", "tiny-t5"]
    assert stored["models"][0]["settings"]["convention"] == "lm-eval"
    assert "guessing gives" in capsys.readouterr().out


def test_the_figures_are_those_of_the_rows(tmp_path):
    (found,) = run_truthfulness(config(tmp_path))
    kept = rows(tmp_path, "truthfulness-choice-tiny-llama.jsonl").values()
    wins = [max(row["incorrect"]) <= row["best"] for row in kept]
    assert found.figures[0].value == sum(wins) / 5


def test_a_run_that_was_broken_off_goes_on(tmp_path):
    run_truthfulness(config(tmp_path / "whole"))
    run_truthfulness(config(tmp_path / "part"))
    name = "truthfulness-choice-tiny-llama.jsonl"
    path = tmp_path / "part" / name
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]) + lines[3][:20])  # two questions and a half
    run_truthfulness(config(tmp_path / "part"))
    assert rows(tmp_path / "part", name).keys() == rows(tmp_path / "whole", name).keys()
    assert (tmp_path / "part" / name).read_text().startswith("".join(lines[:3]))
    whole, part = (
        json.loads((tmp_path / folder / "truthfulness.json").read_text())["models"] for folder in ("whole", "part")
    )
    assert whole[0]["figures"][0] == part[0]["figures"][0]


def test_the_conventions_differ_and_are_not_mixed_in_one_folder(tmp_path):
    (plain,) = run_truthfulness(config(tmp_path / "a"))
    (closed,) = run_truthfulness(config(tmp_path / "b", convention="original"))
    assert plain.figures[1].value != closed.figures[1].value
    with pytest.raises(UserError, match="convention 'lm-eval', not 'original'"):
        run_truthfulness(config(tmp_path / "a", convention="original"))


def test_a_question_that_does_not_fit_the_model_is_named(tmp_path):
    primer = tmp_path / "primer.jsonl"
    primer.write_text(json.dumps({"prompt": "word " * 3000, "completion": "yes"}) + "\n")
    with pytest.raises(UserError, match=r"data/truthfulness\.jsonl: question t-001: .* do not fit"):
        run_truthfulness(config(tmp_path, primer=str(primer)))


def test_a_limit_takes_questions_from_all_over():
    assert take_evenly(list(range(10)), 4) == [0, 2, 5, 7]
    assert take_evenly(list(range(3)), 0) == take_evenly(list(range(3)), 9) == [0, 1, 2]


def test_a_tokenizer_without_a_pad_token_will_do(tmp_path, sharp_folders):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "unpadded"
    AutoModelForCausalLM.from_pretrained(sharp_folders["tiny-llama"]).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(sharp_folders["tiny-llama"])
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    (without,) = run_truthfulness(config(tmp_path / "a", models=[str(folder)]))
    (with_pad,) = run_truthfulness(config(tmp_path / "b", models=[sharp_folders["tiny-llama"]]))
    assert without.figures == with_pad.figures
