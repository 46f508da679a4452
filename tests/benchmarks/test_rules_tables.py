"""The figures of the study of rules, by hand, and which answers the program judges."""

import json

import pytest

from align.data.judgments import RuleJudgment
from benchmarks.studies.rules import with_planted
from benchmarks.studies.rules_tables import compare, measures, per_prompt, reader_figures, write_report


def row(number, texts, said, category="identity"):
    return {
        "id": f"p{number}",
        "prompt": "Who are you?",
        "category": category,
        "responses": texts,
        "rewards": [float(len(text)) for text in texts],
        "judge": {"no-human-identity": said},
        "violates": {"no-human-identity": [0.5] * len(texts)},
    }


BEFORE = [row(1, ["I am 7.", "An AI."], [0.9, 0.1]), row(2, ["Bob, 30.", "Bob."], [0.8, 0.6])]
AFTER = [row(1, ["An AI.", "An AI."], [0.1, 0.2]), row(2, ["Bob.", "An AI."], [0.7, 0.3])]


def test_what_is_counted_of_an_answer():
    found = measures(BEFORE[0])
    assert found["no-digits, by the program"] == [1.0, 0.0]
    assert found["no-human-identity, share by the judge"] == [1.0, 0.0]
    assert found["no-human-identity, mean by the judge"] == [0.9, 0.1]
    assert found["words"] == [3.0, 2.0]


def test_before_and_after_by_hand():
    found = compare([per_prompt(BEFORE)], [per_prompt(AFTER)])
    share = found["no-human-identity, share by the judge"]
    assert (share["before"], share["after"], share["difference"]) == (0.75, 0.25, -0.5)
    assert share["low"] <= -0.5 <= share["high"]
    assert found["no-digits, by the program"]["before"] == 0.5


def test_the_report_and_the_table_that_does_not_say_who_wrote_what(tmp_path):
    scored = {(0, "before"): BEFORE, (0, "after"): AFTER, (1, "before"): BEFORE, (1, "after"): AFTER}
    write_report(tmp_path, scored, {"rules 0": {"validation/rule/no-digits/auc": 0.99, "loss": 1.0}})
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["rule models"] == {"rules 0": {"validation/rule/no-digits/auc": 0.99}}
    assert set(figures["policies"]) == {"after, seed 0", "after, seed 1", "after, all seeds"}
    blind, key = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("blind", "blind-key")
    )
    assert len(blind) == len(key) == 8
    assert all(set(row) == {"number", "prompt", "response"} for row in blind)
    wrote = {(each["seed"], each["policy"], each["id"]): shown["response"] for each, shown in zip(key, blind, strict=True)}
    assert wrote[1, "before", "p2"] == "Bob, 30."
    verdicts = [{"number": each["number"], "violates": ["human"] * (each["policy"] == "before")} for each in key]
    found = reader_figures(key, verdicts)
    assert [row["violations"]["human"] for row in found] == [2, 2, 0, 0]
    assert [row["policy"] for row in found] == ["before", "before", "after", "after"]


@pytest.mark.parametrize(("rule", "count"), [("no-digits", 1), ("no-opinions-or-feelings", 2)])
def test_the_program_judges_what_it_has_not_judged(rule, count):
    judged = [RuleJudgment(prompt="Hi", response="I am 7.", rule=rule, verdict="violates")]
    found = with_planted(judged)
    assert len(found) == count
    assert found[-1].rule == "no-digits"
    assert found[-1].verdict == "violates"
