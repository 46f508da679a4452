"""Grounding: the shares by hand, majorities, and the whole way from a form in the app to the figures."""

import json

import pytest

from align.errors import UserError
from align.eval.core.results import read_evaluations
from align.eval.grounding.task import (
    GroundingConfig,
    MajorityAnswers,
    count_answers,
    grounding_figures,
    read_answers,
    run_grounding,
)
from annotation_ui import rule_sets
from annotation_ui.database import Database
from annotation_ui.export import Selection, rows_to_export
from annotation_ui.importing import NewBatch, import_rows
from annotation_ui.judgments import Judgments
from annotation_ui.leases import Leases
from tests.annotation_ui.running import add_users, do

YES, NO = "follows", "violates"


def response(number, claim, supported=NO, known=NO, cites=NO, **more):
    answers = {"makes-claim": claim}
    if claim == YES:
        answers |= {"supported": supported, "well-known": known, "cites": cites}
    return MajorityAnswers(str(number), {**answers, **more})


TEN = [
    response(1, YES, supported=YES, known=YES),
    response(2, YES, supported=YES, known=YES),
    response(3, YES, supported=YES, cites=YES),
    response(4, YES, cites=YES),
    response(5, YES),
    response(6, YES, supported="unsure", cites="unsure"),
    *(response(number, NO) for number in (7, 8, 9)),
    response(10, "unsure"),
]


def test_shares_by_hand():
    """10 responses, 6 claims, 3 of them supported, 2 well known, 2 of the other 4 cite."""
    grounded, informative, cited = grounding_figures(TEN)
    assert [each.name for each in (grounded, informative, cited)] == ["groundedness", "informativeness", "citation accuracy"]
    assert [each.value for each in (grounded, informative, cited)] == pytest.approx([0.5, 0.3, 0.5])
    assert [each.n for each in (grounded, informative, cited)] == [6, 10, 4]
    assert all(each.low < each.value < each.high for each in (grounded, informative, cited))
    assert count_answers(TEN)[0] == {"question": "makes-claim", "asked": 10, "yes": 6, "no": 3, "unsure": 1}


def test_helpful_is_a_part_of_informative_and_role_stands_apart():
    more = [{"helpful": YES, "in-role": YES}, {"helpful": NO, "in-role": YES}, {"helpful": YES, "in-role": NO}]
    responses = [
        response(1, YES, supported=YES, **more[0]),
        response(2, YES, supported=YES, **more[1]),
        response(3, NO, **more[2]),  # helpful, but it says nothing that a source could support
        response(4, NO, **{"in-role": YES}),
    ]
    figures = {each.name: each for each in grounding_figures(responses)}
    assert (figures["helpfulness"].value, figures["helpfulness"].n) == (pytest.approx(1 / 3), 3)
    assert (figures["role consistency"].value, figures["role consistency"].n) == (0.75, 4)


def test_nothing_to_divide_by_is_no_number():
    figures = grounding_figures([response(1, NO), response(2, NO)])
    assert [each.value for each in figures] == [None, 0.0, None]


def test_the_interval_draws_prompts_with_all_their_responses():
    """Both responses of a prompt agree, so four prompts hold no more than four responses do: the same interval."""
    one = [response(number, YES, supported=YES if number < 2 else NO) for number in range(4)]
    single, double = grounding_figures(one)[0], grounding_figures(one + one)[0]
    assert (double.value, double.n) == (single.value, 8)
    assert (double.low, double.high) == pytest.approx((single.low, single.high))


def rows(**verdicts):
    return [
        {"prompt": "p", "response": "r", "rule": rule, "verdict": each} for rule, given in verdicts.items() for each in given
    ]


def test_the_majority_decides_and_a_tie_is_unsure(tmp_path):
    path = tmp_path / "j.jsonl"
    found = rows(**{"makes-claim": [YES, YES, NO], "supported": [YES, NO], "no-threats": [NO]})
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    (only,) = read_answers([str(path)])
    assert only.answers == {"makes-claim": YES, "supported": "unsure"}


def test_judgments_of_other_rules_are_one_line(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_text(json.dumps(rows(**{"no-threats": [NO]})[0]) + "\n")
    with pytest.raises(UserError, match=r"j\.jsonl: holds no answer to makes-claim.*label with forms/rules/grounding\.yaml"):
        run_grounding(GroundingConfig(judgments=[str(path)], output=str(tmp_path)))


def test_from_the_form_in_the_app_to_the_figures(tmp_path):
    """Two labelers answer the form; one stops at its gate."""
    database = Database(f"sqlite:///{tmp_path}/app.db")
    database.upgrade()
    judgments = Judgments(Leases(database))
    with database.write() as session:
        rule_sets.store_shipped(session)
    row = {"prompt": "Who wrote it?", "response": "Ann did (https://example.org/a, and https://example.org/b)."}
    import_rows(database, NewBatch("b", "rules", overlap=3, rule_set="grounding"), [("f:1", row)])
    answers = {"makes-claim": YES, "supported": YES, "well-known": NO, "cites": YES}
    for user, given in zip(add_users(database, "ann", "bob", "eve"), (answers, {"makes-claim": NO}, answers), strict=True):
        do(judgments, user, "rules", {"verdicts": {rule: {"verdict": each, "note": ""} for rule, each in given.items()}})
    exported = rows_to_export(database, Selection("rule_judgments"))
    assert len(exported) == 4 + 1 + 4
    aggregated = rows_to_export(database, Selection("rule_judgments", aggregated=True))
    assert {each["rule"]: each["verdict"] for each in aggregated} == answers
    for name, found in (("raw", exported), ("aggregated", aggregated)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in found))
        config = GroundingConfig(judgments=[str(tmp_path / f"{name}.jsonl")], output=str(tmp_path / name), table=False)
        run_grounding(config)
        (result,) = read_evaluations(tmp_path / name / "grounding.json")
        assert [each.value for each in result.figures] == [1.0, 1.0, 1.0]
    database.close()
