import json
import math

import pytest

from align.core.errors import UserError
from align.data.records import FLAGS
from align.eval.results import read_evaluations
from align.eval.verdicts import (
    ResponseVotes,
    VerdictsConfig,
    authorship_measurements,
    grounding_measurements,
    run_verdicts,
    verdict_table,
    violation_measurements,
)
from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.store import rule_sets
from annotation_ui.store.importing import NewBatch, import_rows
from annotation_ui.tasks import TASKS
from tests.annotation_ui.running import add_batch, add_users, do
from tests.eval.files import values
from tests.files import write_rows

YES, NO, UNSURE = "follows", "violates", "unsure"
RULES = ("no-insults", "on-topic")


def row(response, rule, verdict, prompt="p", **more):
    return {"prompt": prompt, "response": response, "rule": rule, "verdict": verdict, **more}


@pytest.fixture
def run(tmp_path):
    """Run the evaluation on rows of judgments or rankings; returns what the file holds."""

    def run_on(rows, kind="judgments", **settings):
        path = write_rows(tmp_path / f"{kind}.jsonl", rows)
        run_verdicts(VerdictsConfig(**{kind: [path]}, output=str(tmp_path / "out"), table=False, **settings))
        return read_evaluations(tmp_path / "out" / "verdicts.json")

    return run_on


def test_violations_by_rule_and_overall(run):
    """no-insults: one violates, two follow, one unsure. Any rule: one and three violate, two follows, four is unsure."""
    votes = {"one": ([NO, NO], [YES, YES]), "two": ([YES], [YES]), "three": ([YES, UNSURE], [NO]), "four": ([YES], [UNSURE])}
    by_rule = [(name, rule, given) for name, both in votes.items() for rule, given in zip(RULES, both, strict=True)]
    (found,) = run([row(name, rule, vote) for name, rule, given in by_rule for vote in given])
    expected = {"overall": 2 / 3, "no-insults": 1 / 3, "on-topic": 1 / 3}
    assert values(found.measurements) == pytest.approx({f"{name} violation rate": rate for name, rate in expected.items()})
    assert {measurement.n for measurement in found.measurements} == {3}
    assert found.model == "judgments"
    assert found.measurements[0].note == "excludes 1 of 4 unsure; including them, 0.500 to 0.750"
    assert (found.measurements[0].scorer, found.measurements[0].better) == ("people, majority of labelers", "lower")
    counts = {"question": "no-insults", "n": 4, "violates": 1, "unsure": 1, "follows": 2}
    assert found.tables["Verdicts by question"][0] == {**counts, "labelers agree": 0.5}
    assert violation_measurements([ResponseVotes("m", "p", {"r": [UNSURE]})], ["r"])[1].value is None
    assert ResponseVotes("m", "p", {"r": [YES, YES, NO], "s": [YES, NO]}).verdicts == {"r": YES, "s": UNSURE}


def response(number, claim, supported=NO, known=NO, cites=NO, **more):
    answers = {"makes-claim": claim}
    if claim == YES:
        answers |= {"supported": supported, "well-known": known, "cites": cites}
    return ResponseVotes("m", str(number), {question: [answer] for question, answer in {**answers, **more}.items()})


TEN = [
    response(1, YES, supported=YES, known=YES),
    response(2, YES, supported=YES, known=YES),
    response(3, YES, supported=YES, cites=YES),
    response(4, YES, cites=YES),
    response(5, YES),
    response(6, YES, supported=UNSURE, cites=UNSURE),
    *(response(number, NO) for number in (7, 8, 9)),
    response(10, UNSURE),
]


def test_grounding_by_hand():
    """10 responses, 6 claims, 3 of them supported, 2 well known, 2 of the other 4 cite."""
    grounded, informative, cited = grounding_measurements(TEN)
    assert [each.name for each in (grounded, informative, cited)] == ["groundedness", "informativeness", "citation accuracy"]
    assert [each.value for each in (grounded, informative, cited)] == pytest.approx([0.5, 0.3, 0.5])
    assert [each.n for each in (grounded, informative, cited)] == [6, 10, 4]
    assert all(each.low < each.value < each.high for each in (grounded, informative, cited))
    counts = {"question": "makes-claim", "n": 10, "follows": 6, "violates": 3, "unsure": 1, "labelers agree": None}
    assert {each["question"]: each for each in verdict_table(TEN)}["makes-claim"] == counts
    assert [each.value for each in grounding_measurements([response(1, NO), response(2, NO)])] == [None, 0.0, None]


def test_helpful_is_a_part_of_informative_and_role_stands_apart():
    more = [{"helpful": YES, "in-role": YES}, {"helpful": NO, "in-role": YES}, {"helpful": YES, "in-role": NO}]
    responses = [
        response(1, YES, supported=YES, **more[0]),
        response(2, YES, supported=YES, **more[1]),
        response(3, NO, **more[2]),  # helpful, but it says nothing that a source could support
        response(4, NO, **{"in-role": YES}),
    ]
    measurements = {each.name: each for each in grounding_measurements(responses)}
    assert (measurements["helpfulness"].value, measurements["helpfulness"].n) == (pytest.approx(1 / 3), 3)
    assert (measurements["role consistency"].value, measurements["role consistency"].n) == (0.75, 4)


def test_the_interval_draws_prompts_with_all_their_responses():
    """Both responses of a prompt agree, so four prompts hold no more than four responses do: the same interval."""
    one = [response(number, YES, supported=YES if number < 2 else NO) for number in range(4)]
    single, double = grounding_measurements(one)[0], grounding_measurements(one + one)[0]
    assert (double.value, double.n) == (single.value, 8)
    assert (double.low, double.high) == pytest.approx((single.low, single.high))


PERSON, MODEL = YES, NO


def said(*by_prompt):
    """One text for each prompt, from its answers (a person, a model, don't know)."""
    kinds = (PERSON, MODEL, UNSURE)
    answers = [[kind for kind, n in zip(kinds, given, strict=True) for _ in range(n)] for given in by_prompt]
    return [ResponseVotes("m", str(number), {"written-by-person": votes}) for number, votes in enumerate(answers)]


PEOPLE = said((3, 1, 0), (2, 0, 2))  # 6 answers decide, 5 of them are right
GOOD = said((2, 2, 0), (1, 1, 2))  # 6 decide, 3 say a model
CONTROL = said((0, 4, 0), (1, 3, 0))  # 8 decide, 7 say a model


def test_authorship_by_hand():
    measurements = authorship_measurements(GOOD, PEOPLE, CONTROL)
    assert values(measurements) == pytest.approx(
        {
            "judged rightly": (3 / 6 + 5 / 6) / 2,
            "called a model": 3 / 6,
            "people called people": 5 / 6,
            "don't know": 2 / 8,
            "judged rightly, minus control": (3 / 6 + 5 / 6) / 2 - (7 / 8 + 5 / 6) / 2,
        }
    )
    assert [each.n for each in measurements] == [12, 6, 6, 8, 14]
    control = authorship_measurements(CONTROL, PEOPLE, [])
    assert len(control) == 4
    assert values(control)["judged rightly"] == pytest.approx((7 / 8 + 5 / 6) / 2)
    nobody = values(authorship_measurements(said((0, 0, 4), (0, 0, 1)), PEOPLE, []))  # decides
    assert nobody == {
        "judged rightly": None, "called a model": None, "people called people": pytest.approx(5 / 6), "don't know": 1.0,
    }  # fmt: skip


def test_guessing_or_always_the_same_answer_is_right_in_half_of_the_cases():
    """However many texts there are of either."""
    always = authorship_measurements(said((0, 5, 0), (0, 1, 0)), said((0, 30, 0), (0, 4, 1)), [])
    guesses = authorship_measurements(said((2, 2, 0), (3, 3, 0)), said((9, 9, 9), (1, 1, 0)), [])
    assert values(always)["judged rightly"] == values(guesses)["judged rightly"] == 0.5


def test_intervals_are_at_least_as_wide_as_drawing_prompts_with_all_that_was_said_of_their_texts():
    """Two prompts: drawn are the first twice, the second twice, or both; the ends are those of the two extremes."""
    measurements = {each.name: each for each in authorship_measurements(GOOD, PEOPLE, CONTROL)}
    rightly = measurements["judged rightly"]
    first, second = (2 / 4 + 3 / 4) / 2, (1 / 2 + 2 / 2) / 2
    assert rightly.low <= first
    assert rightly.high >= second
    difference = measurements["judged rightly, minus control"]
    assert difference.low <= (2 / 4 - 4 / 4) / 2
    assert difference.high >= (1 / 2 - 3 / 4) / 2
    repeated = [said(*[(2, 2, 0), (1, 1, 2)] * 8), said(*[(3, 1, 0), (2, 0, 2)] * 8)]
    more = authorship_measurements(*repeated, [])[0]
    assert more.value == rightly.value
    assert more.high - more.low < rightly.high - rightly.low
    one = authorship_measurements(GOOD[:1], PEOPLE[:1], [])
    assert all(each.high - each.low > 0.5 for each in one)
    # Ten prompts, each with one answer that is right: Newcombe with 0.025 ** 0.1 = 0.6915 as both lower ends.
    sure = authorship_measurements(said(*[(0, 1, 0)] * 10), said(*[(1, 0, 0)] * 10), [])[0]
    assert (sure.value, sure.low, sure.high) == pytest.approx((1.0, 1 - math.hypot(0.3085, 0.3085) / 2, 1.0), abs=1e-4)


def judged(text, author, verdict, prompt="p", rule="written-by-person"):
    return row(text, rule, verdict, prompt, **({} if author is None else {"model": author}))


def test_answers_are_counted_by_author(run):
    given = [("a", "person", PERSON), ("a", "person", UNSURE), ("b", "m", MODEL), ("c", "m", PERSON), ("d", "m", MODEL)]
    rows = [*(judged(*each) for each in given), judged("b", "m", YES, rule="no-threats")]
    (found,) = run(rows)
    assert (found.model, values(found.measurements)["no-threats violation rate"]) == ("m", 0.0)
    assert found.tables["Answers by author"] == [
        {"author": "person", "texts": 1, "a person": 1, "a model": 0, "don't know": 1},
        {"author": "m", "texts": 3, "a person": 1, "a model": 2, "don't know": 0},
    ]


@pytest.mark.parametrize(
    ("rows", "settings", "says"),
    [
        ([judged("a", None, MODEL)], {}, r"field 'model' is missing for 'a': import the texts with their author"),
        ([judged("a", "m", MODEL)], {}, r"no text by person; the authors are m$"),
        ([judged("a", "person", MODEL)], {}, r"no text by a model; the authors are person$"),
        ([judged("a", "m", MODEL), judged("b", "person", MODEL)], {"control": "x"}, r"the control 'x'; the models are m$"),
        ([judged("a", "m", MODEL, rule="x")], {"control": "m"}, r"no answers to rule written-by-person; label with"),
    ],
)  # fmt: skip
def test_a_mistake_in_authors_is_one_line(run, rows, settings, says):
    with pytest.raises(UserError, match=says):
        run(rows, **settings)


RANKINGS = [
    {
        "prompt": "Sum up: A.", "category": "summary", "responses": ["a", "b"], "ranks": [1, 2], "model": ["old", "new"],
        "ratings": [5, 7], "flags": [["hallucination", "violent"], []],
    },
    {
        "prompt": "Sum up: B.", "category": "summary", "responses": ["c", "d"], "ranks": [2, 1], "model": ["new", "old"],
        "ratings": [4, 2], "flags": [["hallucination"], ["hallucination"]],
    },
    {  # all tied; only one is rated
        "prompt": "Hi", "category": "talk", "responses": ["e", "f"], "ranks": [1, 1], "model": ["old", "new"],
        "some_rated": [None, 1], "flags": [["hallucination"], ["unfit_for_assistant"]],
    },
]  # fmt: skip


def test_ratings_and_flags_by_hand(run):
    assert len(FLAGS) == 11
    old, new = run(RANKINGS, "rankings", closed_domain=["summary"])
    assert (old.model, new.model) == ("old", "new")
    found = [
        {measurement.name: (measurement.value, measurement.n) for measurement in each.measurements} for each in (old, new)
    ]
    assert found[0]["rating"] == (3.5, 2)
    assert found[1]["rating"] == (4.0, 3)
    assert [each["hallucination, closed domain"] for each in found] == [(1.0, 2), (0.5, 2)]
    assert [each["flag hallucination"] for each in found] == [(1.0, 3), (pytest.approx(1 / 3), 3)]
    assert [each["appropriate for an assistant"] for each in found] == [(1.0, 3), (pytest.approx(2 / 3), 3)]
    assert found[1]["flag unfit_for_assistant"] == (pytest.approx(1 / 3), 3)


def test_a_response_that_two_models_wrote_counts_for_both(run):
    old, new = run([{**RANKINGS[0], "also_by": [["new"], []]}], "rankings")
    assert [each.measurements[0].value for each in (old, new)] == [5, 6]


def test_a_comparison_that_the_app_exports_is_no_answer_about_flags(run, app):
    database, judgments = app
    row = {"prompt": "Hi", "responses": ["a", "b"], "model": ["old", "new"]}
    add_batch(database, [("t", row)], "compare")
    (ann,) = add_users(database, "ann")
    do(judgments, ann, "compare", {"choice": "B"})
    exported = rows_to_export(database, Selection("rankings"))
    assert exported[0]["ranks"] == [2, 1]
    old, _ = run([*RANKINGS, *exported], "rankings")
    assert [measurement.n for measurement in old.measurements if measurement.name == "flag violent"] == [3]
    with pytest.raises(UserError, match="no rankings with questions on each response"):
        run(exported, "rankings")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": None}, "rankings.jsonl:1: field 'model'"),
        ({"ratings": [8, 1]}, "field 'ratings': is not a list of whole numbers from 1 to 7"),
        ({"ratings": [1]}, "field 'ratings'"),
        ({"flags": ["violent"]}, "field 'flags'"),
    ],
)
def test_a_ranking_that_cannot_be_counted_is_one_line(run, change, complaint):
    with pytest.raises(UserError, match=complaint) as caught:
        run([{**RANKINGS[0], **change}], "rankings")
    assert "\n" not in str(caught.value)


def answer(judgments, user, verdicts):
    do(judgments, user, "rules", {"verdicts": {rule: {"verdict": each, "note": ""} for rule, each in verdicts.items()}})


def test_from_the_form_of_claims_to_the_measurements(app, run):
    """Three labelers answer the form; one stops at its gate."""
    database, judgments = app
    text = {"prompt": "Who wrote it?", "response": "Ann did (https://example.org/a, and https://example.org/b)."}
    import_rows(database, NewBatch("b", "rules", labelers_per_item=3, rule_set="grounding"), [("f:1", text)])
    answers = {"makes-claim": YES, "supported": YES, "well-known": NO, "cites": YES}
    for user, given in zip(add_users(database, "ann", "bob", "eve"), (answers, {"makes-claim": NO}, answers), strict=True):
        answer(judgments, user, given)
    exported = rows_to_export(database, Selection("rule_judgments"))
    assert len(exported) == 4 + 1 + 4
    aggregated = rows_to_export(database, Selection("rule_judgments", aggregated=True))
    assert {each["rule"]: each["verdict"] for each in aggregated} == answers
    for rows in (exported, aggregated):
        (result,) = run(rows)
        assert [each.value for each in result.measurements] == [1.0, 1.0, 1.0]


def test_the_decision_of_a_lead_counts_instead_of_the_labelers_answers(app, run):
    database, judgments = app
    row = {"prompt": "p", "response": "r"}
    add_batch(database, [("f:1", row)], "rules", labelers_per_item=3, rule_set="role")
    for user, verdict in zip(add_users(database, "ann", "bob", "eve"), (YES, YES, NO), strict=True):
        answer(judgments, user, {"helpful": YES, "in-role": verdict})
    (boss,) = add_users(database, "boss", role="lead")
    decision = {"verdicts": {rule: {"verdict": NO, "note": ""} for rule in ("helpful", "in-role")}}
    judgments.submit(boss, judgments.leases.adjudicate(boss, 1).id, "decision", decision, 1)
    (found,) = run(rows_to_export(database, Selection("rule_judgments")))
    assert values(found.measurements)["role consistency"] == 0
    counts = {"question": "in-role", "n": 1, "follows": 0, "violates": 1, "unsure": 0, "labelers agree": 0.333}
    assert found.tables["Verdicts by question"][1] == counts


def test_from_the_form_of_authorship_to_the_measurements(app, run):
    """Two labelers judge a text each of a person, a model and the control; none sees who wrote it."""
    database, judgments = app
    authors = ["person", "big", "tiny"]
    texts = {"prompt": "On ponds", "responses": [f"By {name}." for name in authors], "model": authors}
    import_rows(database, NewBatch("b", "rules", labelers_per_item=2, rule_set="authorship"), [("f:1", texts)])
    form = rule_sets.read(rule_sets.PACKAGE_RULE_SETS / "authorship.yaml")["rules"]
    content = {"prompt": "p", "response": "r", "rules": ["written-by-person"], "model": "big"}
    assert "big" not in json.dumps(TASKS["rules"].view(content, [], {}, form))
    ann, bob = add_users(database, "ann", "bob")
    for user, given in ((ann, (PERSON, PERSON, MODEL)), (bob, (PERSON, UNSURE, MODEL))):
        for verdict in given:
            answer(judgments, user, {"written-by-person": verdict})
    big, tiny = run(rows_to_export(database, Selection("rule_judgments")), control="tiny")
    assert (big.model, tiny.model) == ("big", "tiny")
    assert values(big.measurements) == {
        "judged rightly": 0.5,
        "called a model": 0.0,
        "people called people": 1.0,
        "don't know": 0.5,
        "judged rightly, minus control": -0.5,
    }
    assert values(tiny.measurements)["judged rightly"] == 1.0
    counts = {"author": "big", "texts": 1, "a person": 1, "a model": 0, "don't know": 1}
    assert big.tables["Answers by author"][1] == counts
