import json
import subprocess
import sys
import time

import pytest
from playwright.sync_api import expect
from sqlalchemy import select

from align.core.errors import UserError
from annotation_ui.reports import overview
from annotation_ui.server.guard import MAX_UPLOAD_BODY
from annotation_ui.store import importing, rule_sets
from annotation_ui.store.batches import BatchSettings, change_batch
from annotation_ui.store.importing import NewBatch, import_file, import_rows
from annotation_ui.store.schema import Batch, Item
from annotation_ui.tasks import TASKS
from tests.annotation_ui.running import ROOT, add_batch, add_users, do, rank_rows, read, stored
from tests.refusals import refusal


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "must be an object"),
        ('{"responses": ["a", "b"]}', "prompt"),
        ('{"prompt": "p", "responses": ["a"]}', "needs 2 to 9 distinct texts, has 1"),
        ('{"prompt": "p", "responses": ["a", 1]}', "responses[1]"),
        ('{"prompt": [{"role": "robot", "content": "x"}], "responses": ["a", "b"]}', "role"),
        ('{"prompt": "p", "responses": ["a", "\\ud800"]}', "responses[1]"),
        ('{"prompt": "p", "responses": ["a", "b"], "model": ["m"]}', "model"),
        ('{"prompt": "p", "responses": ["a", "b"], "gold": {"ranks": [1, 5]}}', "ranks"),
    ],
)
def test_a_bad_row_is_refused_with_its_line_and_nothing_is_kept(database, tmp_path, line, says):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "responses": ["a", "b"]}\n\n' + line + "\n")
    line = refusal(import_file, database, NewBatch("b", "rank"), path)
    assert line.startswith(f"{path}:3: ")
    assert says in line
    assert read(database, overview.progress) == []


def test_a_file_may_begin_with_a_byte_order_mark(database, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "ü", "responses": ["a", "b"]}\n', encoding="utf-8-sig")
    assert import_file(database, NewBatch("b", "rank"), path) == 1


def test_a_raised_overlap_reaches_those_who_passed_the_item(database, leases, judgments):
    name = add_batch(database, 2)
    ann, bob = add_users(database, "ann", "bob")
    for user in (ann, bob):
        do(judgments, user, "rank", {"ranks": [1, 2, 3, 4]})
    assert leases.next(ann, "rank") is None
    assert change_batch(database, name, BatchSettings(name, 2), version=1) == 2
    do(judgments, ann, "rank", {"ranks": [1, 2, 3, 4]})
    do(judgments, bob, "rank", {"ranks": [1, 2, 3, 4]})
    assert leases.next(ann, "rank") is leases.next(bob, "rank") is None


GOLD = {"prompt": "p", "response": "r", "rules": ["no-threats"]}


@pytest.mark.parametrize(
    ("task", "row", "says"),
    [
        ("compare", {"prompt": "p", "responses": ["a", "b", "c"]}, "needs 2 distinct texts, has 3"),
        ("rules", {**GOLD, "gold": {"verdicts": {"no-threats": "good"}}}, "the verdict on no-threats must be one of"),
        ("rules", {**GOLD, "gold": {"verdicts": {"no-threats": {}}}}, "the verdict on no-threats must be one of"),
        (
            "rules",
            {**GOLD, "gold": {"verdicts": {"nonsense": "follows"}}},
            "gold: rule 'nonsense'",
        ),
        ("rules", {**GOLD, "gold": {"verdicts": {}}}, "gold: needs `verdicts`"),
        ("rules", {**GOLD, "gold": {"verdict": "follows"}}, "gold: needs `verdicts`"),
        ("rules", {**GOLD, "rules": [{}]}, "rules: "),
        ("rules", {**GOLD, "rules": ["no-threats", "no-threats"]}, "rules: "),
        ("probe", {"rule": {}}, "rule: "),
        ("probe", {"rule": "no-threats", "gold": {"verdict": "follows"}}, "gold: "),
        ("rank", {"prompt": "p", "responses": ["a", "b"], "gold": {"ranks": [1, 2], "flags": [{}]}}, "flags: "),
        ("rank", {"prompt": "p", "responses": ["a", "b"], "gold": {"ranks": [1, 2], "flags": [[{}], []]}}, "unknown flag"),
        ("rank", {"prompt": "p", "responses": ["a", "b" * 200_001]}, "responses[1]: longer than 200000 characters"),
        ("rank", {"prompt": "p", "responses": ["a", "b"], "category": 3}, "category: must be text"),
    ],
)
def test_what_a_task_cannot_use_is_refused_in_one_line(tmp_path, task, row, says):
    rules = [{"id": "no-threats", "text": "Does not threaten anybody."}, {"id": "no-insults", "text": "No insults."}]
    line = refusal(list, importing._items(TASKS[task], Batch(labelers_per_item=1, settings={}), rules, [("f:1", row)]))
    assert line.startswith("f:1: ")
    assert says in line


def test_gold_of_single_rules_stays_with_the_item_that_asks_about_the_rule(database):
    row = {**GOLD, "rules": ["no-threats", "no-insults"], "gold": {"verdicts": {"no-insults": "follows"}}}
    with database.write() as session:
        rule_sets.store_shipped(session)
    add_batch(database, [("t", row)], "rules", rule_set="sparrow-dialogue", settings={"one_rule_each": True})
    assert {item.content["rules"][0]: item.gold for item in stored(database, select(Item))} == {
        "no-threats": None,
        "no-insults": {"verdicts": {"no-insults": "follows"}},
    }


def test_nobody_gets_an_item_before_all_are_there_and_a_broken_import_leaves_nothing(database, leases, monkeypatch):
    monkeypatch.setattr(importing, "_CHUNK", 2)
    (ann,) = add_users(database, "ann")
    given_out = []

    def rows(bad):
        for number, row in enumerate(rank_rows(7)):
            given_out.append(leases.next(ann, "rank"))
            yield ("t:8", {"prompt": "p"}) if bad and number == 6 else row

    with pytest.raises(UserError, match="t:8"):
        import_rows(database, NewBatch("b", "rank"), rows(bad=True))
    assert stored(database, select(Item.id)) == read(database, overview.progress) == []
    with database.write() as session:  # what a killed import leaves
        session.add(Batch(name="b", task="rank", labelers_per_item=1, open=False, complete=False))
    with pytest.raises(UserError, match="import of"):
        change_batch(database, "b", BatchSettings("b"), version=1)
    assert import_rows(database, NewBatch("b", "rank"), rows(bad=False)) == 7
    assert set(given_out) == {None}
    assert leases.next(ann, "rank") is not None
    with pytest.raises(UserError, match="'b'"):
        import_rows(database, NewBatch("b", "rank"), [])


def test_a_large_import_from_the_command_line_does_not_stall_a_labeler(ann, tmp_path):
    ann.server.add_batch(3)
    path, text = tmp_path / "large.jsonl", "A response of some length, as models write them. " * 8
    with path.open("w") as file:
        for number in range(20_000):
            row = {"prompt": f"Prompt {number}", "responses": [f"{text}{k}" for k in range(4)]}
            file.write(json.dumps(row) + "\n")
    here = f"/api/assignments/{ann.next()['assignment']}/draft"
    words = ["--database", ann.server.database_url, "import", str(path), "--task", "rank"]
    started = subprocess.Popen(
        [sys.executable, "-m", "annotation_ui.cli", *words], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}
    )
    waits = []
    begun = time.perf_counter()
    while started.poll() is None:
        start = time.perf_counter()
        assert ann("PUT", here, {"draft": {"state": {}}, "sequence": len(waits) + 1})[0] == 200
        waits.append(time.perf_counter() - start)
        time.sleep(0.05)
    assert started.returncode == 0
    assert len(waits) > 10
    # In one transaction, 150,000 items made a labeler wait for 18 s: nearly all the time that they took.
    assert max(waits) < max(2, 0.2 * (time.perf_counter() - begun))


def sparse(path, size):
    """A file of the given size that takes no space on the disk."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def test_the_page_refuses_a_wrong_type_and_an_oversized_file(server, browser, tmp_path):
    before = stored(server.database, select(Batch.id))
    page = server.lead_page(browser, "uploader")
    page.get_by_role("tab", name="Import").click()
    picker = page.locator('[role="tabpanel"]:visible input[type="file"]').first
    message = page.locator(".toast-body")
    (tmp_path / "samples.exe").write_bytes(b"MZ")
    picker.set_input_files(tmp_path / "samples.exe")
    send = page.get_by_role("button", name="Import", exact=True)
    page.get_by_label("Batch name").fill("never made")
    page.wait_for_timeout(500)
    send.click()
    expect(message.last).to_contain_text("samples.exe: must be a file of type .jsonl")
    picker.set_input_files(sparse(tmp_path / "large.jsonl", importing.MAX_BYTES + 1))
    send.click()
    expect(message.last).to_contain_text("large.jsonl: larger than 256 MiB")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "p", "responses": ["a", "b"]}\n{"prompt": "p"}\n')
    picker.set_input_files(tmp_path / "broken.jsonl")
    send.click()
    expect(message.last).to_contain_text("broken.jsonl:2: responses: must be a list of texts")
    assert stored(server.database, select(Batch.id)) == before


def test_files_are_refused_without_the_page_too(database, tmp_path):
    """What the page would refuse can be sent without it; the guard's limits are above those of the files."""
    (tmp_path / "rows.csv").write_text("prompt\np")
    large = sparse(tmp_path / "large.jsonl", importing.MAX_BYTES + 1)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for path, line in (
        (tmp_path / "rows.csv", "rows.csv: not a .jsonl file (one JSON object per line)"),
        (large, "large.jsonl: larger than 256 MiB; split it into several batches"),
        (tmp_path / "binary.jsonl", "binary.jsonl: not UTF-8 text"),
    ):
        assert refusal(import_file, database, NewBatch("b", "rank"), path, path.name) == line
    (tmp_path / "rules.py").write_text("import os")
    for path, line in (
        (tmp_path / "rules.py", "rules.py: not a .yaml file"),
        (sparse(tmp_path / "rules.yaml", rule_sets.MAX_BYTES + 1), "rules.yaml: larger than 1 MiB"),
    ):
        assert refusal(rule_sets.read, path, path.name) == line
    assert stored(database, select(Batch.id)) == []
    assert importing.MAX_BYTES < MAX_UPLOAD_BODY
