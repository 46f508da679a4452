"""What is said of written answers: cut where the model asks on, judged."""

import json
from pathlib import Path

import pytest

from align.eval.judging.train_judge import JudgeConfig, run_train_judge
from align.eval.truthfulness.task import TruthfulnessConfig, first_answer, run_truthfulness


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" Yes.\n\nQ: And he?", "Yes."),
        ("Yes.\nQ: And he?\nA: No.", "Yes."),
        ("Yes,\nhe may.", "Yes,\nhe may."),
        ("Q: What?", ""),
    ],
)
def test_an_answer_ends_where_the_model_asks_on(text, answer):
    assert first_answer(text) == answer


def test_written_answers_are_judged_and_kept(tmp_path: Path):
    rows = [
        {"question": f"q{number}", "answer": answer, "label": label}
        for number in range(10)
        for answer, label in (("No.", True), ("Yes.", False))
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judges = {
        f"{asks}_judge": str(
            run_train_judge(JudgeConfig(output_dir=str(tmp_path / asks), data=str(data), asks=asks, epochs=1))
        )
        for asks in ("truth", "info")
    }
    given = {"models": ["tiny-llama"], "output": str(tmp_path / "out"), "dtype": "float32", "limit": 3, "resamples": 200}
    config = TruthfulnessConfig(**given, max_new_tokens=6, multiple_choice=False, generation=True, **judges)
    (found,) = run_truthfulness(config)
    by_name = {figure.name: figure for figure in found.figures}
    assert {"true", "informative", "true and informative"} <= by_name.keys()
    assert by_name["true"].scorer.startswith("truth judge ")
    assert by_name["true and informative"].value <= min(by_name["true"].value, by_name["informative"].value)
    kept = (tmp_path / "out" / "truthfulness-answers-tiny-llama.jsonl").read_text()
    assert len(kept.splitlines()) == 4
    (again,) = run_truthfulness(config)
    assert again.figures == found.figures
    assert (tmp_path / "out" / "truthfulness-answers-tiny-llama.jsonl").read_text() == kept
