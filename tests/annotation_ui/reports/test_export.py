import csv
import hashlib
import json
import random
import re
import secrets
import time
from datetime import datetime

import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sqlalchemy import select

from align.batches.encoding import records_of
from align.cli import main as align_command
from align.core.errors import UserError
from align.data.formats import convert_row
from align.data.readers import read_records
from align.data.records import FLAGS, AttributeJudgment, Demonstration, Ranking, RuleJudgment
from annotation_ui.lead_tabs.overview import day_chart
from annotation_ui.reports import overview
from annotation_ui.reports.events import new_judgments
from annotation_ui.reports.export import Selection, export, records, rows_to_export
from annotation_ui.reports.labeler_report import labeler_rows
from annotation_ui.reports.row_files import plain_cell
from annotation_ui.store import guidelines, rule_sets
from annotation_ui.store.batches import delete_batch
from annotation_ui.store.schema import Batch, Item, Judgment
from annotation_ui.tasks import TASKS, BadInputError
from annotation_ui.tasks.judge_rules import verdict_attributes
from annotation_ui.tasks.rankings import ranking_attributes
from tests.annotation_ui.running import add_batch, add_users, do, rank_rows, read, stored


def test_rankings_raw_pairs_and_aggregated(database, judgments):
    add_batch(database, rank_rows(1, 3), labelers_per_item=2)
    ann, bob = add_users(database, "ann", "bob")
    rank = {"ranks": [2, 1, 2], "ratings": [3, 7, 3], "flags": [["violent"], [], []]}
    do(judgments, ann, "rank", rank)
    do(judgments, bob, "rank", {"ranks": [3, 1, 2]})
    base = {"prompt": "Prompt 0", "responses": ["Response 0.0", "Response 0.1", "Response 0.2"], "id": "item-0",
            "model": ["model-0", "model-1", "model-2"]}  # fmt: skip
    first, second = rows_to_export(database, Selection("rankings"))
    names = first.pop("labeler"), second.pop("labeler")
    assert first == {**base, **rank}
    assert second == {**base, "ranks": [3, 1, 2]}
    assert len(set(names)) == 2
    assert not set(names) & {"ann", "bob"}
    pairs = [(row["chosen"][-1], row["rejected"][-1]) for row in rows_to_export(database, Selection("pairs"))]
    assert pairs == [("1", "0"), ("1", "2"), ("1", "0"), ("2", "0"), ("1", "2")]
    (together,) = rows_to_export(database, Selection("rankings", aggregated=True))
    assert together == {**base, "ranks": [3, 1, 2], "ratings": [3, 7, 3]}


def test_every_exported_row_is_a_record_that_training_reads(database, judgments):
    """Also the awkward ones: ratings of some, a tie of all, a response that was sampled twice."""
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    reasons = {"finish_reason": ["stop", "length", "stop"]}
    row = {"prompt": turns, "responses": ["a", "b", "a"], "model": ["x", "y", "z"], "id": 1, **reasons}
    add_batch(database, [("t", row), ("t", row)])
    add_batch(database, [("t", {"prompt": "p"})], "demonstrate")
    talk = {"prompt": "p", "response": "r"}
    add_batch(database, [("t", talk)], "rules", rule_set=own_rules(database))
    add_batch(database, [("t", talk)], "edit")
    add_batch(database, [("t", talk)], "spans")
    (ann,) = add_users(database, "ann")
    do(judgments, ann, "rank", {"ranks": [2, 1], "ratings": [None, 7], "flags": [[], ["violent"]]})
    do(judgments, ann, "rank", {"ranks": [1, 1], "ratings": [4, 4], "flags": [[], []]})
    do(judgments, ann, "demonstrate", {"completion": "c"})
    do(judgments, ann, "rules", {"verdicts": {"a": {"verdict": "unsure", "note": "n"}}})
    do(judgments, ann, "edit", {"completion": "corrected", "outcome": "corrected"})
    do(judgments, ann, "spans", {"spans": [{"start": 0, "end": 1, "type": "incorrect"}]})
    ranking, tie = rows_to_export(database, Selection("rankings"))
    assert (tie["ranks"], tie["ratings"]) == ([1, 1], [4, 4])
    assert (ranking["responses"], ranking["model"], ranking["some_rated"]) == (["a", "b"], ["x", "y"], [None, 7])
    assert ranking["also_by"] == [["z"], []]
    assert ranking["finish_reason"] == ["stop", "length"]
    assert {convert_row(row, Ranking)[1][0].responses for row in rows_to_export(database, Selection("pairs"))} == {
        ("b", "a"),
        ("corrected", "r"),
    }
    kinds = {"rankings": Ranking, "pairs": None, "rule_judgments": RuleJudgment, "demonstrations": Demonstration}
    kinds |= {"skips": None, "attributes": AttributeJudgment, "spans": None}
    assert set(kinds) == set(records())
    for record, kind in kinds.items():
        for found in rows_to_export(database, Selection(record)):
            back = kind.from_row(found).to_row() if kind else found
            same = set(found) - {"some_rated", "also_by", "labeler"}
            assert {field: back[field] for field in same} == {field: found[field] for field in same}


def test_an_empty_answer_is_judged_and_learned_from_like_any_other(database, judgments):
    """Policies write them. Two that show nothing are one answer: nobody can prefer one to the other."""
    row = {"prompt": "p", "responses": ["a", "", " \n", "b"], "model": list("wxyz")}
    add_batch(database, [("t", row)])
    add_batch(database, [("t", {"prompt": "p", "response": ""})], "rules", rule_set=own_rules(database))
    (ann,) = add_users(database, "ann")
    do(judgments, ann, "rank", {"ranks": [1, 3, 2], "ratings": [7, 1, 6], "flags": [[], ["fails_instruction"], []]})
    do(judgments, ann, "rules", {"verdicts": {"a": {"verdict": "follows", "note": ""}}})
    (ranking,) = rows_to_export(database, Selection("rankings"))
    assert (ranking["responses"], ranking["ranks"], ranking["model"]) == (["a", "", "b"], [1, 3, 2], ["w", "x", "z"])
    assert Ranking.from_row(ranking).responses == ("a", "", "b")
    (judgment,) = rows_to_export(database, Selection("rule_judgments"))
    assert RuleJudgment.from_row(judgment).response == ""
    pairs = rows_to_export(database, Selection("pairs"))
    assert [(row["chosen"], row["rejected"]) for row in pairs] == [("a", ""), ("a", "b"), ("b", "")]
    read_back = [convert_row(pair, Ranking)[1][0] for pair in pairs]
    assert [record.responses for record in read_back] == [("a", ""), ("a", "b"), ("b", "")]
    attributes = [AttributeJudgment.from_row(row) for row in rows_to_export(database, Selection("attributes"))]
    of_empty = [record.attributes for record in attributes if record.response == ""]
    assert [(each.get("rating"), each.get("fails_instruction"), each.get("a")) for each in of_empty] == [
        (1, 1, None),
        (None, None, 1),
    ]


def own_rules(database):
    with database.write() as session:
        rule_sets.store(session, {"name": "own", "title": "", "source": "", "rules": [{"id": "a", "text": "A"}]})
    return "own"


def test_gold_time_and_batches_select(database, judgments):
    rows = rank_rows(2, 2)
    rows[1][1]["gold"] = {"ranks": [1, 2]}
    settings = {"attention_every": 1}
    first, second = add_batch(database, rows, priority=1, settings=settings), add_batch(database, rank_rows(1, 2))
    (ann,) = add_users(database, "ann")
    do(judgments, ann, "rank", {"ranks": [1, 2]})
    do(judgments, ann, "rank", {"ranks": [2, 1]})
    later = time.time()
    do(judgments, ann, "rank", {"ranks": [2, 1]})
    assert len(rows_to_export(database, Selection("rankings"))) == 2
    assert len(rows_to_export(database, Selection("rankings", include_gold=True))) == 3
    assert [row["ranks"] for row in rows_to_export(database, Selection("rankings", since=later))] == [[2, 1]]
    assert len(rows_to_export(database, Selection("rankings", batches=(second,)))) == 1
    assert len(rows_to_export(database, Selection("rankings", batches=(first,), include_gold=True))) == 2
    (row,) = read(database, labeler_rows, "rank")
    assert (row["judgments"], row["attention"], row["attention items"]) == (3, 1.0, 1)
    progress = {each["batch"]: (each["done"], each["slots"]) for each in read(database, overview.progress)}
    assert progress == {first: (1, 1), second: (1, 1)}
    assert read(database, overview.per_day, "rank")[0]["judgments"] == 3


def test_an_item_with_a_later_judgment_is_combined_from_all_of_its_judgments(database, judgments):
    add_batch(database, rank_rows(2, 2), labelers_per_item=3)
    ann, bob, cem = add_users(database, "ann", "bob", "cem")
    for labeler in (ann, bob):
        for _ in range(2):
            do(judgments, labeler, "rank", {"ranks": [1, 2]})
    later = time.time()
    do(judgments, cem, "rank", {"ranks": [2, 1]})
    for aggregated, rows in ((False, [("item-0", [2, 1])]), (True, [("item-0", [1, 2])])):
        found = rows_to_export(database, Selection("rankings", aggregated, since=later))
        assert [(row["id"], row["ranks"]) for row in found] == rows


def test_the_busiest_labelers_have_a_color_each_and_the_rest_one_together(database, judgments):
    add_batch(database, rank_rows(3, 2), labelers_per_item=4)
    for labeler, count in zip(add_users(database, "ann", "bob", "cem", "dee"), (1, 3, 2, 1), strict=True):
        for _ in range(count):
            do(judgments, labeler, "rank", {"ranks": [1, 2]})
    rows = read(database, overview.per_day, "rank", most=2)
    each = read(database, overview.per_day, "rank", most=3)  # nobody is "1 others"
    assert {row["labeler"] for row in each} == {"ann", "bob", "cem", "dee"}
    assert {row["labeler"]: row["judgments"] for row in rows} == {"bob": 3, "cem": 2, "2 others": 2}


def test_the_bars_of_a_day_are_as_long_as_its_judgments_and_the_latest_day_is_on_top():
    days = [("2026-11-01", "ann", 3), ("2026-11-02", "2 others", 1), ("2026-11-02", "<b>", 5)]
    html = day_chart([{"day": day, "labeler": name, "judgments": count} for day, name, count in days], "none")
    assert re.findall(r"<td class=.time.>(.*?)</td>", html) == ["2026-11-02", "2026-11-01"]
    assert re.findall(r"<td class=.number.>(.*?)</td>", html) == ["6", "3"]
    assert re.findall(r"width: ([0-9.]+)%", html) == ["100.0", "50.0"]
    bars = re.findall(r'class="color-(\d)" style="flex: (\d)"', html)
    assert bars == [("0", "5"), ("2", "1"), ("1", "3")]
    assert "&lt;b&gt;: 5, 2 others: 1" in html  # read aloud
    assert "<b>" not in html
    assert day_chart([], "none") == '<p class="empty">none</p>'


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_files_manifest_and_hash(database, judgments, tmp_path, kind):
    hostile = '=HYPERLINK("http://x","y")'
    add_batch(database, [("t", {"prompt": hostile, "responses": ["+1", "\u2028ok\0"]})])
    ann, boss = add_users(database, "ann", "boss")
    guidelines.save(database, "rank", "Be fair.", boss, edited=0)
    do(judgments, ann, "rank", {"ranks": [1, 2]})
    path = tmp_path / f"out.{kind}"
    manifest = export(database, Selection("rankings"), path)
    content = path.read_bytes()
    digest = hashlib.sha256(b"Be fair.").hexdigest()
    assert manifest["guidelines"] == [{"task": "rank", "version": 1, "text": "Be fair.", "sha256": digest}]
    assert manifest == json.loads((tmp_path / f"out.{kind}.manifest.json").read_text())
    assert manifest["file"]["sha256"] == hashlib.sha256(content).hexdigest()
    assert (manifest["rows"], manifest["judgments"], manifest["items"], len(manifest["labelers"])) == (1, 1, 1, 1)
    if kind == "jsonl":
        assert json.loads(content)["prompt"] == hostile  # training reads exactly what was there
    elif kind == "csv":
        assert content.startswith(b"\xef\xbb\xbf")  # without it, Excel reads another encoding
        with path.open(newline="", encoding="utf-8-sig") as file:
            (row,) = csv.DictReader(file)
        assert row["prompt"] == f"'{hostile}"
        assert list(row) == sorted(row)
    else:
        assert pyarrow.parquet.read_table(path).to_pylist() == rows_to_export(database, Selection("rankings"))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.sampled_from(["1", "2", "a", "item-1", "1@2", "1#2", None]), min_size=1, max_size=4), max_size=3)
)
def test_ids_are_unique_across_imports_and_the_first_import_keeps_its_own(database, judgments, imports):
    (ann,) = add_users(database, secrets.token_hex(8))
    for batch in stored(database, select(Batch.name).where(Batch.deleted_at.is_(None))):
        delete_batch(database, batch)
    before = {item.external_id for item in stored(database, select(Item))}
    for ids in imports:
        rows = [("t", {"prompt": str(n), "responses": ["a", "b"], "id": row_id}) for n, row_id in enumerate(ids)]
        add_batch(database, rows)
        for _ in rows:
            do(judgments, ann, "rank", {"ranks": [1, 2]})
    exported = [row["id"] for row in rows_to_export(database, Selection("rankings"))]
    assert len(set(exported)) == len(exported) == sum(map(len, imports))
    if imports and not before:
        expected = {row_id for row_id in imports[0] if row_id}
        assert expected <= set(exported[: len(imports[0])])
    followed = [event["id"] for event in new_judgments(database, 0, limit=10_000) if event["kind"] == "submit"]
    assert followed[len(followed) - len(exported) :] == exported


def test_the_version_of_the_guidelines_that_was_shown_is_exported(database, judgments):
    add_batch(database, 3)
    ann, boss = add_users(database, "ann", "boss")
    other = guidelines.save(database, "rules", "Of another task.", boss, edited=0)
    first = guidelines.save(database, "rank", "Be kind.", boss, edited=0)
    second = guidelines.save(database, "rank", "Be kind and brief.", boss, edited=first)  # while ann has the first one open
    for number, version in enumerate((first, second, None)):
        opened = judgments.leases.next(ann, "rank")
        with pytest.raises(BadInputError, match="guidelines"):
            judgments.submit(ann, opened.id, f"bad-{number}", {"ranks": [1, 2, 3, 4]}, 1, other)
        judgments.submit(ann, opened.id, f"request-{number}", {"ranks": [1, 2, 3, 4]}, 1, version)
    rows = rows_to_export(database, Selection("rankings", times=True))
    assert [row.get("guidelines") for row in rows] == [1, 2, None]
    assert not any("guidelines" in row for row in rows_to_export(database, Selection("rankings")))


def test_rows_have_the_time_and_the_seconds_of_their_judgment(database, judgments, tmp_path):
    add_batch(database, 2)
    (ann,) = add_users(database, "ann")
    do(judgments, ann, "rank", {"ranks": [1, 2, 3, 4]})
    judgments.skip(ann, judgments.leases.next(ann, "rank").id, "skip-request", "", 2.0)
    made = stored(database, select(Judgment).order_by(Judgment.id))
    for record, judgment in zip(("rankings", "skips"), made, strict=True):
        (row,) = rows_to_export(database, Selection(record, times=True))
        assert datetime.fromisoformat(row.pop("judged_at")).timestamp() == int(judgment.created_at)
        assert row.pop("seconds") == round(judgment.seconds, 1)
        assert [row] == rows_to_export(database, Selection(record))
    export(database, Selection("rankings", times=True), tmp_path / "timed.jsonl")
    assert list(read_records(tmp_path / "timed.jsonl", Ranking))  # training reads them
    with pytest.raises(UserError, match="times are those of single judgments"):
        rows_to_export(database, Selection("rankings", aggregated=True, times=True))


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "  =1", "\n=1", "＝1+1", " ＠SUM(A1)"])
def test_no_cell_is_a_formula(cell):
    assert plain_cell(cell).startswith("'")
    assert plain_cell("plain - text") == "plain - text"


def test_agreement_of_rankings_is_measured_from_the_database(database, judgments):
    rows = rank_rows(3, 3)
    rows[2][1]["gold"] = {"ranks": [1, 2, 3]}  # everybody gets it first, and its answer is clear: it does not count
    add_batch(database, rows, labelers_per_item=2, settings={"attention_every": 1})
    ann, bob = add_users(database, "ann", "bob")
    for user, of_second in ((ann, [1, 2, 3]), (bob, [3, 2, 1])):
        for ranks in ([1, 2, 3], [1, 2, 3], of_second):
            do(judgments, user, "rank", {"ranks": ranks})
    measured = read(database, overview.coefficients, "rank")
    found = {row["measure"]: (row["value"], row["shared items"]) for row in measured}
    # Units (1, 1), (2, 2), (3, 3), (1, 3), (2, 2), (3, 1); n_c = 4. With ranks 1, 2, 3 of marginals 4 each, the ordinal
    # distances are 4^2 (1-2, 2-3) and 8^2 (1-3): observed 4 x 64 / 12, expected 2 x 16 (16 + 16 + 64) / (12 x 11).
    assert found == {
        "Krippendorff's alpha of ranks (ordinal)": (round(1 - (4 * 64 / 12) / (3072 / 132), 3), 2),
        "Krippendorff's alpha of ratings (ordinal)": (None, 2),
        "Pairwise agreement (ties count)": (0.5, 2),
    }


def test_win_rates_and_disagreement(database, judgments):
    row = {"prompt": "p", "responses": ["a", "b"], "model": ["new", "old"]}
    known = {**row, "gold": {"choice": "B"}, "training": True}  # it tells nothing of the models
    add_batch(database, [("t", known), *(("t", {**row, "id": str(i)}) for i in range(2))], "compare", labelers_per_item=2)
    ann, bob = add_users(database, "ann", "bob")
    for user, choices in ((ann, ("B", "A", "A")), (bob, ("B", "A", "B"))):
        for choice in choices:
            do(judgments, user, "compare", {"choice": choice})
    new, old = read(database, overview.win_rates)
    assert (new["win rate"], old["win rate"]) == (0.75, 0.25)
    (differs,) = read(database, overview.disagreements, "compare")
    assert (differs["id"], differs["agreement"]) == ("1", 0)


def test_the_category_of_a_prompt_comes_back_with_each_row(database, judgments):
    """`align sample` writes it, and training reads it."""
    add_batch(database, [("t", {"prompt": "p", "responses": ["a", "b"], "category": "chat"})])
    add_batch(database, [("t", {"prompt": "p", "category": "code"})], "demonstrate")
    (ann,) = add_users(database, "ann")
    do(judgments, ann, "rank", {"ranks": [1, 2]})
    do(judgments, ann, "demonstrate", {"completion": "c"})
    for record, category in (("rankings", "chat"), ("pairs", "chat"), ("demonstrations", "code")):
        for aggregated in (False, True):
            (row,) = rows_to_export(database, Selection(record, aggregated=aggregated))
            assert row["category"] == category, (record, aggregated)
    (row,) = rows_to_export(database, Selection("rankings"))
    assert Ranking.from_row(row).category == "chat"


@pytest.mark.parametrize("database_kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)], indirect=True)
def test_preferences_weigh_labelers_and_are_read_by_training(database, judgments, tmp_path):
    """Twenty items on which two agree and the third guesses; then one on which the third disagrees with one of the two."""
    add_batch(database, rank_rows(21, 2), labelers_per_item=3)
    ann, bob, cy = add_users(database, "ann", "bob", "cy")
    for number in range(21):
        for labeler in (ann, bob, cy):
            turned = labeler is cy and number % 2 == 0
            do(judgments, labeler, "rank", {"ranks": [2, 1] if turned else [1, 2]})
    rows = rows_to_export(database, Selection("rankings", aggregated=True, preferences=True))
    plain = rows_to_export(database, Selection("rankings", aggregated=True))
    assert [{name: value for name, value in row.items() if name != "preferences"} for row in rows] == plain
    for row in rows:
        (own, better), (worse, other) = row["preferences"]
        assert (own, other) == (0.0, 0.0)
        assert better > 0.9 > worse
    path = tmp_path / "rankings.jsonl"
    manifest = export(database, Selection("rankings", aggregated=True, preferences=True), path)
    assert manifest["preferences"] == "one-coin Dawid and Skene"
    assert [record.preferences[0][1] for record in read_records(path, Ranking)] == [row["preferences"][0][1] for row in rows]


@pytest.mark.parametrize("selection", [Selection("rankings", preferences=True), Selection("pairs", True, preferences=True)])
def test_preferences_are_of_aggregated_rankings_alone(database, selection):
    with pytest.raises(UserError, match="export rankings, aggregated"):
        rows_to_export(database, selection)


TEXT = {"prompt": "Hi", "response": "Yo"}


def rows_of(verdicts):
    return [{**TEXT, "rule": rule, "verdict": verdict} for rule, verdict in verdicts.items()]


def test_verdicts_of_a_response_are_one_row():
    rows = rows_of({"sensible": "follows", "specific": "violates", "new": "unsure"})
    assert list(verdict_attributes(rows)) == [{**TEXT, "attributes": {"sensible": 1, "specific": 0}}]
    assert list(verdict_attributes(rows[2:])) == []


def test_an_attribute_is_1_for_the_answer_that_its_form_calls_yes():
    harm = {"answers": [["follows", "No"], ["violates", "Yes"], ["unsure", "?"]]}
    quality = {"answers": [["violates", "no"], ["follows", "YES"], ["unsure", "?"]]}
    german = {"answers": [["violates", "Ja"], ["follows", "Nein"], ["unsure", "?"]], "positive": "violates"}
    rules = [{"id": name, **form} for name, form in {"harm": harm, "good": quality, "schlecht": german, "rule": {}}.items()]
    for verdict, values in {"violates": (1, 0, 1, 0), "follows": (0, 1, 0, 1)}.items():
        (row,) = verdict_attributes(rows_of(dict.fromkeys(("harm", "good", "schlecht", "rule"), verdict)), rules)
        assert tuple(row["attributes"].values()) == values


@settings(deadline=None)
@given(st.lists(st.sampled_from(["violates", "follows", "unsure", None]), min_size=1, max_size=5))
def test_any_is_yes_with_one_yes_and_no_only_if_all_were_answered_no(verdicts):
    yes = [["violates", "Yes"], ["follows", "No"], ["unsure", "Unsure"]]
    rules = [{"id": "gate", "gate": True}, *({"id": str(n), "answers": yes, "any": "unsafe"} for n in range(len(verdicts)))]
    judged = {str(number): verdict for number, verdict in enumerate(verdicts) if verdict}
    (row,) = verdict_attributes(rows_of({"gate": "follows", **judged}), rules)
    wanted = 1 if "violates" in verdicts else 0 if set(verdicts) == {"follows"} else None
    assert row["attributes"].get("unsafe") == wanted
    assert row["attributes"]["gate"] == 1


NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)  # each example fills a database
RANKS = st.lists(st.integers(1, 3), min_size=3, max_size=3).map(lambda ranks: [sorted({*ranks}).index(r) + 1 for r in ranks])
VERDICT = st.sampled_from(["violates", "follows", "unsure"])


def decide(judgments, lead, task, item, answer):
    assignment = judgments.leases.adjudicate(lead, item)
    shown = TASKS[task].shown(answer, assignment.shown_order)
    judgments.submit(lead, assignment.id, f"{lead}-{assignment.id}-{secrets.token_hex(4)}", shown, 1)


def learned(database, batch, record, kind, **more):
    """The records that training reads from an export, by id."""
    found = {}
    for each in records_of(rows_to_export(database, Selection(record, batches=(batch,), **more)), kind, False):
        found.setdefault(each.id, []).append(each)
    return found


@settings(max_examples=12, deadline=None, phases=NO_SHRINKING, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.lists(RANKS, min_size=2, max_size=2), st.lists(RANKS, max_size=2)), min_size=1, max_size=3))
def test_training_on_raw_rankings_counts_the_last_decision_of_a_lead_alone(database, judgments, items):
    """Also if the decision ties responses of which labelers prefer one, or leaves out a rating that a labeler gave."""
    names = [secrets.token_hex(8) for _ in range(4)]
    labelers, leads = add_users(database, *names[:2]), add_users(database, *names[2:], role="lead")
    batch = add_batch(database, rank_rows(len(items), 3), labelers_per_item=2, labelers=tuple(names[:2]))
    for number, labeler in enumerate(labelers):
        for votes, _ in items:
            rated = {"ratings": [4, None, 7], "flags": [["violent"], [], []]}
            do(judgments, labeler, "rank", {"ranks": votes[number], **rated})
    ids = dict(zip(rows_in(database, batch), items, strict=True))
    since = time.time()
    for item, (_, decisions) in ids.items():
        for lead, ranks in zip(leads, decisions, strict=False):
            decide(judgments, lead, "rank", item, {"ranks": ranks})
    counted = [decisions[-1:] or votes for votes, decisions in items]
    rankings = learned(database, batch, "rankings", Ranking)
    assert [[list(each.ranks) for each in found] for found in rankings.values()] == counted
    pairs = learned(database, batch, "pairs", Ranking)
    wanted = [
        sorted((i, j) for ranks in answers for i in range(3) for j in range(3) if ranks[i] < ranks[j]) for answers in counted
    ]
    found = [sorted(tuple(int(text[-1]) for text in each.responses) for each in found) for found in pairs.values()]
    assert found == [each for each in wanted if each]
    attributes = learned(database, batch, "attributes", AttributeJudgment)
    for (_, decisions), judged in zip(items, attributes.values(), strict=True):
        assert any("rating" in each.attributes for each in judged) is not bool(decisions)
    later = rows_to_export(database, Selection("rankings", batches=(batch,), since=since))
    assert len(later) == sum(len(votes) + len(decisions) for votes, decisions in items if decisions)


@settings(max_examples=12, deadline=None, phases=NO_SHRINKING, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(VERDICT, min_size=2, max_size=2), st.lists(VERDICT, max_size=2))
def test_training_on_raw_verdicts_counts_the_last_decision_of_a_lead_alone(database, judgments, votes, decisions):
    names = [secrets.token_hex(8) for _ in range(4)]
    labelers, leads = add_users(database, *names[:2]), add_users(database, *names[2:], role="lead")
    settings = {"rule_set": own_rules(database), "labelers_per_item": 2, "labelers": tuple(names[:2])}
    batch = add_batch(database, [("t", {"prompt": "p", "response": "r"})], "rules", **settings)
    (item,) = rows_in(database, batch)

    def answer(verdict):
        return {"verdicts": {"a": {"verdict": verdict, "note": ""}}}

    for labeler, verdict in zip(labelers, votes, strict=True):
        do(judgments, labeler, "rules", answer(verdict))
    for lead, verdict in zip(leads, decisions, strict=False):
        decide(judgments, lead, "rules", item, answer(verdict))
    counted = decisions[-1:] or votes
    (found,) = learned(database, batch, "rule_judgments", RuleJudgment).values()
    assert [each.verdict for each in found] == counted
    value = {"violates": 0, "follows": 1}
    judged = learned(database, batch, "attributes", AttributeJudgment).get(found[0].id, [])
    assert [each.attributes for each in judged] == [{"a": value[verdict]} for verdict in counted if verdict in value]


def rows_in(database, batch):
    """The numbers of a batch's items."""
    return stored(database, select(Item.id).join(Batch, Batch.id == Item.batch_id).where(Batch.name == batch))


def test_a_ranking_gives_ratings_and_flags_of_each_response():
    flag = next(iter(FLAGS))
    row = {"prompt": "Hi", "responses": ["a", "b"], "ranks": [1, 2], "some_rated": [None, 3], "flags": [[flag], []]}
    first, second = ranking_attributes([row])
    assert first["attributes"] == {name: int(name == flag) for name in FLAGS}
    assert second["attributes"] == {"rating": 3, **dict.fromkeys(FLAGS, 0)}


@pytest.mark.parametrize("database_kind", ["sqlite"], indirect=True)
def test_30_rankings_train_a_reward_model(database, judgments, tmp_path):
    rows, rng = rank_rows(30), random.Random(30)
    rows[0][1]["responses"][1] = ""  # as policies write it
    add_batch(database, rows)
    (ann,) = add_users(database, "ann")
    for _ in rows:
        do(judgments, ann, "rank", {"ranks": rng.sample([1, 2, 3, 4], 4)})
    path, output = tmp_path / "rankings.jsonl", tmp_path / "reward"
    assert export(database, Selection("rankings"), path)["rows"] == 30
    words = ["--model", "tiny-gpt2", "--train_data", str(path), "--output_dir", str(output), "--batch_size", "15"]
    align_command(["reward", *words, "--report_to", "none", "--dtype", "float32"])
    assert list(output.rglob("*.safetensors"))
