import pytest

from align.core.errors import UserError
from align.core.statistics import majority
from align.extras.rules.evaluation import QUESTION, RuleCase, RulesConfig, agreement_measurement, count_violations, run_rules
from align.runtime.endpoint import question_version
from annotation_ui.tasks import TASKS
from tests.files import write_rows

V, U, F = "violates", "unsure", "follows"


@pytest.mark.parametrize(
    ("votes", "result"),
    [([V], V), ([V, V, F], V), ([V, F], U), ([U, U, V], U), ([V, V, F, F], U), ([V, U, F], U), ([F, F, V, U], F)],
)
def test_majority(votes, result):
    assert majority(votes, tie=U) == result


def test_agreement_counts_what_both_decided():
    """One both violate, one the first alone, one the second alone, one neither; the unsure ones do not count."""
    first, second = {1: V, 2: V, 3: F, 4: U, 5: F, 6: V}, {1: V, 2: F, 3: V, 4: V, 5: F, 6: U, 7: V}
    accuracy = agreement_measurement(first, second, "scorer")
    assert (accuracy.value, accuracy.n) == (0.5, 4)
    assert agreement_measurement({}, {}, "scorer").value is None


def test_the_figures_of_rules_state_their_direction():
    cases = [RuleCase("r", "", ({"role": "user", "content": str(n)},), "x") for n in range(10)]
    people = {case: "violates" if n < 5 else "follows" for n, case in enumerate(cases)}
    (rate, *_), _ = count_violations(people, cases, "scorer")
    accuracy = agreement_measurement(people, people, "scorer")
    assert (rate.better, accuracy.better) == ("lower", "higher")
    # All ten agree: 0.6915 to 1 by Clopper and Pearson.
    assert (accuracy.low, accuracy.high) == pytest.approx((0.025**0.1, 1.0))


RULES = "name: r\nrules:\n  - id: no-insults\n    text: Insults nobody.\n  - id: on-topic\n    text: Stays on topic.\n"
# Response by response, the votes on no-insults and on on-topic.
VOTES = {"one": ([V, V], [F, F]), "two": ([F], [F]), "three": ([F, U], [V]), "four": ([F], [U])}


def by_length(question):
    """A judge that takes long responses for violations, and knows nothing of rules."""
    response = question.partition("<reply>\n")[2].partition("\n</reply>")[0]
    return "BREAKS" if len(response) > 3 else "KEEPS"


@pytest.fixture
def judging(serve):
    """`judging(judge)`: the settings of a chat model that answers each question with a verdict."""

    def start(judge):
        def answer(path, headers, body):
            verdict = judge(body["messages"][0]["content"])
            return 200, {"choices": [{"message": {"content": f"Well.\nVERDICT: {verdict}"}}]}

        return {"endpoint": serve(answer), "endpoint_model": "m"}

    return start


@pytest.fixture
def settings(tmp_path, judging):
    rows = [
        {"prompt": "p", "response": response, "rule": rule, "verdict": vote, "labeler": f"l{number}"}
        for response, both in VOTES.items()
        for rule, votes in zip(("no-insults", "on-topic"), both, strict=True)
        for number, vote in enumerate(votes)
    ]
    write_rows(tmp_path / "judged.jsonl", rows)
    (tmp_path / "rules.yaml").write_text(RULES)

    def make(**more):
        chosen = {"judgments": [str(tmp_path / "judged.jsonl")], "rules": [str(tmp_path / "rules.yaml")],
                  "output": str(tmp_path / "out"), **judging(by_length)}  # fmt: skip
        return RulesConfig(**(chosen | more))

    return make


def values(evaluation):
    return {measurement.name: (measurement.value, measurement.n) for measurement in evaluation.measurements}


def test_rows_of_the_labeling_app(settings, tmp_path):
    """What the app writes for a judged conversation, note and all, in JSON Lines."""
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    answer = {"verdicts": {"no-insults": {"verdict": V, "note": "rude"}, "on-topic": {"verdict": F, "note": ""}}}
    rows = TASKS["rules"].rows({"prompt": talk, "response": "r"}, answer)
    path = tmp_path / "export.jsonl"
    write_rows(path, ({**row, "labeler": "blue fox", "id": "item-1"} for row in rows))
    (found,) = run_rules(settings(judgments=[str(path)]))
    assert values(found)["agreement: accuracy"] == (0.5, 2)


def test_the_decision_of_a_lead_is_the_verdict_of_people(settings, tmp_path):
    asked = {"prompt": "Hi", "response": "r", "rule": "no-insults"}
    rows = [{**asked, "verdict": verdict} for verdict in (V, V, V)] + [{**asked, "verdict": F, "decision": True}]
    write_rows(tmp_path / "export.jsonl", rows)
    (found,) = run_rules(settings(judgments=[str(tmp_path / "export.jsonl")]))
    assert [row["people"] for row in found.tables["Human judgments and the scorer"] if sum(list(row.values())[1:])] == [F]


def test_people_against_a_scorer(settings):
    """The scorer finds both rules violated by three and by four, and by no other response."""
    (found,) = run_rules(settings())
    measurements = values(found)
    assert measurements["overall violation rate"] == (0.5, 4)
    # one: V-F, F-F; two: F-F, F-F; three: unsure, V-V; four: F-V, unsure -> 1 both, 1 people alone, 1 scorer alone, 3 none
    assert measurements["agreement: accuracy"] == (pytest.approx(4 / 6), 6)
    assert found.tables["Human judgments and the scorer"] == [
        {"people": V, "scorer violates": 1, "scorer unsure": 0, "scorer follows": 1},
        {"people": U, "scorer violates": 2, "scorer unsure": 0, "scorer follows": 0},
        {"people": F, "scorer violates": 1, "scorer unsure": 0, "scorer follows": 3},
    ]


def test_responses_of_models_by_a_scorer(settings, tmp_path):
    rows = [
        {"prompt": "p", "responses": ["ab", "abcd"], "model": ["a", "b"]},
        {"prompt": "q", "responses": ["abcdef"], "model": ["a"]},
    ]
    write_rows(tmp_path / "answers.jsonl", rows)
    config = settings(judgments=[], responses=[str(tmp_path / "answers.jsonl")])
    first, second = run_rules(config)
    assert (first.model, second.model) == ("a", "b")
    assert values(first)["overall violation rate"] == (0.5, 2)
    assert values(second)["on-topic violation rate"] == (1.0, 1)


def test_what_was_judged_is_not_judged_again(settings, judging):
    asked = []
    config = settings(**judging(lambda question: asked.append(question) or by_length(question)))
    assert run_rules(config) == run_rules(config)
    assert len(asked) == 2 * len(VOTES)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"judgments": []}, "responses is"),
        ({"endpoint": ""}, "endpoint is ''"),
        ({"endpoint_model": ""}, "endpoint_model is ''"),
        ({"models": ["m"]}, "models is"),
    ],
)
def test_settings_that_do_not_fit(settings, more, complaint):
    with pytest.raises(UserError, match=complaint):
        settings(**more)


def test_a_rule_that_is_in_no_file_and_a_file_that_is_none_of_rules(settings, tmp_path):
    other = "name: r\nrules:\n  - {id: other, text: Other.}\n"
    unknown = r"judged\.jsonl: rule 'no-insults' is not in .*rules\.yaml; add its file"
    for text, says in ((other, unknown), ("- 1\n", r"rules\.yaml: not a rule file")):
        (tmp_path / "rules.yaml").write_text(text)
        with pytest.raises(UserError, match=says):
            run_rules(settings())


def test_a_chat_model_reads_rule_conversation_and_reply(settings, judging):
    asked = judging(lambda question: "BREAKS" if "three" in question and "topic." in question else "KEEPS")
    (found,) = run_rules(settings(**asked))
    assert values(found)["on-topic violation rate"] == (0.25, 4)
    assert values(found)["no-insults violation rate"] == (0.0, 4)
    assert found.measurements[-1].scorer == f"m at {asked['endpoint']} ({question_version(QUESTION)})"
