"""Reading a run's files, and text and numbers as a page shows them."""

import math
from pathlib import Path

from align.eval.report.data import format_number, format_percent, load_run, visible_text
from tests.eval.report.example_run import make_runs


def test_a_killed_run_loses_only_its_last_line(tmp_path: Path) -> None:
    folder = make_runs(tmp_path / "run")
    for name in ("ppo/metrics.jsonl", "ppo/samples.jsonl"):
        with open(folder / name, "a", encoding="utf-8") as file:
            file.write('{"update": 4, "rew')
    runs = load_run(folder)
    assert sorted(runs.stages["ppo"].metrics) == [0, 1, 2, 3]
    assert sum(map(len, runs.samples.values())) == 12
    # 4 lines of metrics and 12 of samples are whole; the one after them is not.
    assert [text.split(": ")[1] for text in runs.problems if "cut off" in text] == [
        "row 5 is cut off or broken and left out.",
        "row 13 is cut off or broken and left out.",
    ]


def test_a_line_written_again_after_a_resume_replaces_the_older(tmp_path: Path) -> None:
    folder = make_runs(tmp_path / "run")
    with open(folder / "sft/metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"update": 2, "loss": 7.0}\n{"update": 4, "loss": NaN}\n')
    series = load_run(folder).stages["sft"].series("loss")
    assert (series.updates, series.values) == ((1, 2, 3), (3.0, 7.0, 1.0))  # and what is not a number is no point


def test_text_and_numbers_as_people_read_them() -> None:
    assert visible_text("a\x1b[31m\r\nb\tc\ud800\u2066") == "a␛[31m\nb\tc��"
    numbers = {None: "–", "as it is": "as it is", 0.12345: "0.123", -2.0: "−2", 12345.6: "12,346", 1e-7: "1e-07"}
    assert {value: format_number(value) for value in numbers} == numbers
    assert format_number(math.nan) == "not a number"
    assert format_number(0.5, sign=True) == "+0.5"
    assert format_percent(0.623) == "62.3 %"
    assert format_percent(-0.05, sign=True) == "−5.0 points"
