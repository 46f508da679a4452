import pytest

from annotation_ui.reports import overview
from annotation_ui.reports.export import Selection, rows_to_export
from annotation_ui.store import guidelines, rule_sets
from annotation_ui.store.importing import NewBatch, import_rows
from annotation_ui.tasks import TASKS, BadInputError
from tests.annotation_ui.running import add_users, do, read
from tests.refusals import refusal


def test_shipped_rule_sets_are_whole():
    sets = {path.stem: rule_sets.read(path) for path in rule_sets.PACKAGE_RULE_SETS.glob("*.yaml")}
    assert len(sets) == 8
    assert all(each["source"] and each["name"] == name for name, each in sets.items())


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("", 1, "empty"),
        ("- a", 1, "must be a mapping"),
        ("name: x\nrules:\n  - id: a\n    text: b\n  - id: a\n    text: c", 5, "twice"),
        ("name: x\nrules:\n  - id: a\n    txt: b", 4, "unknown field 'txt'"),
        ("name: x\nrules:\n  - id: a", 3, "text is missing"),
        ("name: x\nrules: {}", 2, "must be a list"),
        ("name: Big Name\nrules: [{id: a, text: b}]", 1, "small letters"),
        ("name: x\nrules:\n  - id: a\n    text: [b]", 4, "text: must be text"),
        ("name: x\nrules:\n  - id: 'a", 3, "not YAML"),
        ("name: x\nanswers: {violates: 'No', follows: 'Yes'}\nrules: [{id: a, text: b}]", 2, "unsure is missing"),
        ("name: x\nrules:\n  - {id: a, text: b}\n  - {id: c, text: d, gate: true}", 4, "gate: must stand before"),
        ("name: x\nrules:\n  - {id: a, text: b, gate: yes}", 3, "gate: must be true or false"),
        ("name: x\nrules:\n  - {id: a, text: b, fill: name}", 3, "fill: must be url"),
        ("name: x\nrules:\n  - {id: a, text: b, positive: unsure}", 3, "positive: must be one of violates, follows"),
        ("name: x\npreselect: no\nrules: [{id: a, text: b}]", 2, "preselect: must be one of"),
        ("name: x\nrules:\n  - {id: a, text: b, examples: c}", 3, "examples: must be a list of texts"),
        ("name: x\nrules:\n  - {id: a, text: b, reasons: [c, c]}", 3, "reasons: the same text twice"),
        ("name: x\nany: a\nrules:\n  - {id: a, text: b}", 4, "any: 'a' is the id of a rule"),
        ("name: x\nany: Not Safe\nrules:\n  - {id: a, text: b}", 2, "any: 'Not Safe': small letters"),
        ("name: !!python/object:os.system x\nrules:\n  - bad", 3, "must be a mapping"),
    ],
)
def test_a_bad_rule_file_is_refused_with_its_line(text, line, says):
    error = refusal(rule_sets.parse, text, "own.yaml")
    assert error.startswith(f"own.yaml:{line}: ")
    assert says in error


def test_the_version_of_the_rules_goes_with_the_judgment(database, judgments):
    with database.write() as session:
        for text in ("new", "old", "new"):  # the last one counts, also one that was stored before
            rule_sets.store(session, {"name": "own", "title": "", "source": "", "rules": [{"id": "a", "text": text}]})
    import_rows(database, NewBatch("b", "rules", rule_set="own"), [("t", {"prompt": "p", "response": "r"})])
    (ann,) = add_users(database, "ann")
    do(judgments, ann, "rules", {"verdicts": {"a": {"verdict": "follows", "note": ""}}})
    assert [row["value"] for row in read(database, overview.coefficients, "rules")] == [None, None]  # of one labeler
    ((_, _, task, rules),) = judgments.history(ann)
    assert (task, [rule["text"] for rule in rules]) == ("rules", ["new"])
    assert [row["rule"] for row in rows_to_export(database, Selection("rule_judgments"))] == ["a"]


def verdicts(**given):
    return {"verdicts": {rule.replace("_", "-"): {"verdict": verdict, "note": ""} for rule, verdict in given.items()}}


def test_a_form_names_its_buttons_in_its_own_order():
    rules = rule_sets.read(rule_sets.PACKAGE_RULE_SETS / "lamda-harms-form.yaml")["rules"]
    (content,) = TASKS["rules"].contents({"prompt": "p", "response": "r"}, {}, rules)
    shown = TASKS["rules"].view(content, [], {}, rules)["rules"]
    assert [rule["id"] for rule in shown if rule.get("gate")] == ["can-be-judged"]
    assert len(shown[0]["reasons"]) == 3
    assert dict(shown[0]["answers"])["follows"] == "None of these"
    assert "preselect" not in shown[0]
    for harm in shown[1:]:
        assert harm["answers"] == [["follows", "No"], ["violates", "Yes"], ["unsure", "Unsure"]]
        assert harm["preselect"] == "follows"
        assert harm["step"] != shown[0]["step"]
        assert harm.get("help") or harm.get("examples")
    plain = rule_sets.read(rule_sets.PACKAGE_RULE_SETS / "lamda-harms.yaml")["rules"]
    assert set(TASKS["rules"].view({**content, "rules": [plain[0]["id"]]}, [], {}, plain)["rules"][0]) == {"id", "text"}


def test_what_a_labeler_said_is_told_in_the_words_of_the_form():
    form, task = rule_sets.read(rule_sets.PACKAGE_RULE_SETS / "authorship.yaml")["rules"], TASKS["rules"]
    assert task.summary(verdicts(written_by_person="violates"), form) == "A model"
    assert task.known({"verdicts": {"written-by-person": "follows"}}, form) == "written-by-person: A person"
    several = verdicts(a="follows", b="violates", c="follows")
    assert task.summary(several) == "1 violates, 2 follows"
    named = [{"id": rule, "text": rule, "answers": [["follows", "Yes"], ["violates", "No"]]} for rule in "abc"]
    assert task.summary(several, named) == "2 Yes, 1 No"


def test_behind_a_gate_that_is_violated_nothing_is_asked():
    rules = rule_sets.read(rule_sets.PACKAGE_RULE_SETS / "grounding.yaml")["rules"]
    task = TASKS["rules"]
    (content,) = task.contents({"prompt": "p", "response": "r"}, {}, rules)
    stopped = task.check(verdicts(makes_claim="violates", supported="follows"), content, rules)
    assert list(stopped["verdicts"]) == ["makes-claim"]  # what was answered before the gate closed is not kept
    for open_gate in ("follows", "unsure"):
        with pytest.raises(BadInputError, match="supported, well-known, cites"):
            task.check(verdicts(makes_claim=open_gate), content, rules)
    with pytest.raises(BadInputError, match="makes-claim"):
        task.check(verdicts(supported="follows"), content, rules)
    assert task.rows(content, stopped) == [{"prompt": "p", "response": "r", "rule": "makes-claim", "verdict": "violates"}]


def test_only_the_reasons_of_a_gate_are_accepted_for_its_violation():
    rules = rule_sets.read(rule_sets.PACKAGE_RULE_SETS / "lamda-harms-form.yaml")["rules"]
    task, content = TASKS["rules"], {"prompt": "p", "response": "r", "rules": [rule["id"] for rule in rules]}
    for note, accepted in {rules[0]["reasons"][1]: True, "": False, "another": False}.items():
        answer = {"verdicts": {"can-be-judged": {"verdict": "violates", "note": note}}}
        if accepted:
            assert task.check(answer, content, rules) == answer
        else:
            with pytest.raises(BadInputError, match="can-be-judged"):
                task.check(answer, content, rules)


@pytest.mark.parametrize("field", ["gate: true", "any: unsafe"])
def test_questions_that_belong_together_are_not_asked_alone(field):
    rules = rule_sets.parse(f"name: x\nrules:\n  - {{id: a, text: b, {field}}}\n  - {{id: c, text: d}}", "f")["rules"]
    row = {"prompt": "p", "response": "r"}
    assert len(TASKS["rules"].contents(row, {}, rules)) == 1
    with pytest.raises(BadInputError, match=field.split(":")[0]):
        TASKS["rules"].contents(row, {"one_rule_each": True}, rules)


TURNS = [{"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "assistant")]


@pytest.mark.parametrize("field", ["prompt", "messages"])
@pytest.mark.parametrize("task", ["rules", "edit", "spans"])
def test_a_conversation_that_ends_with_the_assistant_is_judged_by_its_last_turn(task, field):
    rules = [{"id": "a", "text": "b"}]
    for turns in (TURNS[:2], TURNS, TURNS[1:], [{"role": "system", "content": "s"}, *TURNS]):
        (content,) = TASKS[task].contents({field: turns, "model": "m"}, {}, rules)
        assert (content["prompt"], content["response"], content["model"]) == (turns[:-1], turns[-1]["content"], "m")
    for turns in (TURNS[:1], TURNS[1:2], [], [TURNS[1], TURNS[1]], [{"role": "assistant"}]):
        with pytest.raises(BadInputError, match=rf"{field}|response|prompt"):
            TASKS[task].contents({field: turns}, {}, rules)
    with pytest.raises(BadInputError, match="prompt"):  # two answers: which one is to be judged?
        TASKS[task].contents({"prompt": TURNS, "response": "r"}, {}, rules)


def test_the_note_starts_with_the_addresses_in_the_response():
    rules = rule_sets.read(rule_sets.PACKAGE_RULE_SETS / "grounding.yaml")["rules"]
    response = "See https://a.example/x?y=1, (https://b.example/z) and again https://a.example/x?y=1."
    view = TASKS["rules"].view({"prompt": "p", "response": response, "rules": ["supported", "cites"]}, [], {}, rules)
    assert [rule.get("note") for rule in view["rules"]] == [None, "https://a.example/x?y=1 https://b.example/z"]


def test_labelers_who_stop_at_different_gates_differ_and_the_majority_counts_who_was_asked():
    going, stopping = verdicts(makes_claim="follows", supported="violates"), verdicts(makes_claim="violates")
    assert TASKS["rules"].similarity(going, stopping) == TASKS["rules"].similarity(stopping, going) == 0
    combined = TASKS["rules"].combine([stopping, going, going])
    assert {rule: each["verdict"] for rule, each in combined["verdicts"].items()} == {
        "makes-claim": "follows",
        "supported": "violates",
    }


def test_a_draft_of_guidelines_is_there_for_each_task():
    for task in TASKS:
        assert guidelines.draft(task).startswith("# ")
    assert "a style that you recognize." in guidelines.draft("compare")  # lines of a file are no line breaks
    assert "\n1. An answer that could hurt someone loses.\n2. An answer" in guidelines.draft("compare")
    assert "\n| 4 | half useful" in guidelines.draft("rank")
