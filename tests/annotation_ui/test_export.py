"""What goes in, what comes out: imports refused by line, exports row for row, manifests, safe spreadsheets."""

from __future__ import annotations

import csv
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect

from align.data.records import Demonstration, Ranking, RuleJudgment
from align.errors import UserError
from annotation_ui import overview, rule_sets
from annotation_ui.cli import main
from annotation_ui.database import Database
from annotation_ui.export import RECORDS, Selection, export, plain_cell, rows_of
from annotation_ui.importing import NewBatch, change_batch, import_file, import_rows, read_rows
from annotation_ui.judgments import Judgments
from annotation_ui.leases import Leases
from annotation_ui.schema import Base
from annotation_ui.tasks import TASKS

from .running import add_batch, add_users, rank_rows


def do(judgments: Judgments, user: int, task: str, answer: dict[str, Any]) -> None:
    """Answer the labeler's next item in the item's own order."""
    assignment = judgments.leases.next(user, task)
    assert assignment is not None
    shown = TASKS[task].shown(answer, assignment.shown_order)
    judgments.submit(user, assignment.id, f"{user}-{assignment.id}-{task}", shown, 3.0)


def test_migrations_go_up_and_down_and_match_the_models(database: Database) -> None:
    with database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    assert database.revisions()[0] == database.revisions()[1]
    database.downgrade("base")
    with database.engine.connect() as connection:
        assert set(inspect(connection).get_table_names()) <= {"alembic_version"}
    database.upgrade()
    add_batch(database, 1)


def test_rankings_raw_pairs_and_aggregated(database: Database, judgments: Judgments) -> None:
    add_batch(database, rank_rows(1, 3), overlap=2)
    ann, bob = add_users(database, "ann", "bob")
    rank = {"ranks": [2, 1, 2], "ratings": [3, 7, 3], "flags": [["violent"], [], []]}
    do(judgments, ann, "rank", rank)
    do(judgments, bob, "rank", {"ranks": [3, 1, 2], "ratings": [None] * 3, "flags": [[], [], []]})
    base = {"prompt": "Prompt 0", "responses": ["Response 0.0", "Response 0.1", "Response 0.2"], "id": "item-0",
            "model": ["model-0", "model-1", "model-2"]}  # fmt: skip
    first, second = rows_of(database, Selection("rankings"))
    names = first.pop("labeler"), second.pop("labeler")
    assert first == {**base, **rank}
    assert second == {**base, "ranks": [3, 1, 2]}
    assert len(set(names)) == 2
    assert not set(names) & {"ann", "bob"}
    pairs = [(row["chosen"][-1], row["rejected"][-1]) for row in rows_of(database, Selection("pairs"))]
    assert pairs == [("1", "0"), ("1", "2"), ("1", "0"), ("2", "0"), ("1", "2")]
    (together,) = rows_of(database, Selection("rankings", aggregated=True))
    assert together == {**base, "ranks": [3, 1, 2], "ratings": [3, 7, 3]}


def test_every_exported_row_is_a_record_that_training_reads(database: Database, judgments: Judgments) -> None:
    """Also the awkward ones: ratings of some, a tie of all, a response that was sampled twice."""
    turns = [{"role": role, "content": role} for role in ("user", "assistant", "user")]
    row = {"prompt": turns, "responses": ["a", "b", "a"], "model": ["x", "y", "z"], "id": 1}
    add_batch(database, [("t", row), ("t", row)])
    add_batch(database, [("t", {"prompt": "p"})], "demonstrate")
    talk = {"prompt": "p", "response": "r"}
    add_batch(database, [("t", talk)], "rules", rule_set=own_rules(database))
    (ann,) = add_users(database, "ann")
    do(judgments, ann, "rank", {"ranks": [2, 1], "ratings": [None, 7], "flags": [[], ["violent"]]})
    do(judgments, ann, "rank", {"ranks": [1, 1], "ratings": [4, 4], "flags": [[], []]})
    do(judgments, ann, "demonstrate", {"completion": "c"})
    do(judgments, ann, "rules", {"verdicts": {"a": {"verdict": "unsure", "note": "n"}}})
    (ranking,) = rows_of(database, Selection("rankings"))
    assert (ranking["responses"], ranking["model"], ranking["some_rated"]) == (["a", "b"], ["x", "y"], [None, 7])
    assert len(rows_of(database, Selection("rankings", all_tied=True))) == 2
    kinds = {"rankings": Ranking, "pairs": None, "rule_judgments": RuleJudgment, "demonstrations": Demonstration}
    assert set(kinds) == set(RECORDS)
    for record, kind in kinds.items():
        for found in rows_of(database, Selection(record)):
            back = kind.from_row(found).to_row() if kind else found
            same = set(found) - {"some_rated", "labeler"}
            assert {field: back[field] for field in same} == {field: found[field] for field in same}


def own_rules(database: Database) -> str:
    with database.write() as session:
        rule_sets.store(session, {"name": "own", "title": "", "source": "", "rules": [{"id": "a", "text": "A"}]})
    return "own"


def test_gold_time_and_batches_select(database: Database, judgments: Judgments) -> None:
    rows = rank_rows(2, 2)
    rows[1][1]["gold"] = {"ranks": [1, 2]}
    first, second = add_batch(database, rows, priority=1), add_batch(database, rank_rows(1, 2))
    (ann,) = add_users(database, "ann")
    blank = {"ratings": [None, None], "flags": [[], []]}
    do(judgments, ann, "rank", {"ranks": [1, 2], **blank})
    do(judgments, ann, "rank", {"ranks": [2, 1], **blank})
    later = time.time()
    do(judgments, ann, "rank", {"ranks": [2, 1], **blank})
    assert len(rows_of(database, Selection("rankings"))) == 2
    assert len(rows_of(database, Selection("rankings", include_gold=True))) == 3
    assert [row["ranks"] for row in rows_of(database, Selection("rankings", since=later))] == [[2, 1]]
    assert len(rows_of(database, Selection("rankings", batches=(second,)))) == 1
    assert len(rows_of(database, Selection("rankings", batches=(first,), include_gold=True))) == 2
    with database.read() as session:
        (row,) = overview.labelers(session, "rank")
        assert (row["judgments"], row["on gold"], row["gold items"]) == (3, 0.0, 1)
        progress = {each["batch"]: (each["done"], each["of"]) for each in overview.progress(session)}
        assert progress == {first: (1, 1), second: (1, 1)}
        assert overview.per_day(session, "rank")[0]["judgments"] == 3


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
def test_files_manifest_and_hash(database: Database, judgments: Judgments, tmp_path: Path, kind: str) -> None:
    hostile = '=HYPERLINK("http://x","y")'
    add_batch(database, [("t", {"prompt": hostile, "responses": ["+1", "\u2028ok\0"]})])
    (ann,) = add_users(database, "ann")
    do(judgments, ann, "rank", {"ranks": [1, 2], "ratings": [None, None], "flags": [[], []]})
    path = tmp_path / f"out.{kind}"
    manifest = export(database, Selection("rankings"), path)
    content = path.read_bytes()
    assert manifest == json.loads((tmp_path / f"out.{kind}.manifest.json").read_text())
    assert manifest["file"]["sha256"] == hashlib.sha256(content).hexdigest()
    assert (manifest["rows"], manifest["judgments"], manifest["items"], len(manifest["labelers"])) == (1, 1, 1, 1)
    if kind == "jsonl":
        assert json.loads(content)["prompt"] == hostile  # training reads exactly what was there
    elif kind == "csv":
        with path.open(newline="") as file:
            (row,) = csv.DictReader(file)
        assert row["prompt"] == f"'{hostile}"


def test_parquet_holds_the_same_rows(database: Database, judgments: Judgments, tmp_path: Path) -> None:
    add_batch(database, 2)
    (ann,) = add_users(database, "ann")
    for ranks in ([1, 2, 3, 4], [4, 3, 2, 1]):
        do(judgments, ann, "rank", {"ranks": ranks, "ratings": [None] * 4, "flags": [[]] * 4})
    export(database, Selection("rankings"), tmp_path / "out.parquet")
    assert pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist() == rows_of(database, Selection("rankings"))


@pytest.mark.parametrize("cell", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "  =1", "\n=1"])
def test_no_cell_is_a_formula(cell: str) -> None:
    assert plain_cell(cell).startswith("'")
    assert plain_cell("plain - text") == "plain - text"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "must be an object"),
        ('{"responses": ["a", "b"]}', "prompt"),
        ('{"prompt": "p", "responses": ["a"]}', "needs 2 to 9 different ones, has 1"),
        ('{"prompt": "p", "responses": ["a", 1]}', "responses[1]"),
        ('{"prompt": [{"role": "robot", "content": "x"}], "responses": ["a", "b"]}', "role"),
        ('{"prompt": "p", "responses": ["a", "\\ud800"]}', "responses[1]"),
        ('{"prompt": "p", "responses": ["a", "b"], "model": ["m"]}', "model"),
        ('{"prompt": "p", "responses": ["a", "b"], "gold": {"ranks": [1, 5]}}', "ranks"),
    ],
)
def test_a_bad_row_is_refused_with_its_line_and_nothing_is_kept(
    database: Database, tmp_path: Path, line: str, says: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "responses": ["a", "b"]}\n\n' + line + "\n")
    with pytest.raises(UserError) as error:
        import_file(database, NewBatch("b", "rank"), path)
    assert str(error.value).startswith(f"{path}:3: ")
    assert says in str(error.value)
    with database.read() as session:
        assert overview.progress(session) == []


def test_shipped_rule_sets_are_whole() -> None:
    sets = {path.stem: rule_sets.read(path) for path in rule_sets.SHIPPED.glob("*.yaml")}
    assert {name: len(each["rules"]) for name, each in sets.items()} == {
        "sparrow-dialogue": 23,
        "lamda-harms": 14,
        "lamda-quality": 6,
    }
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
        ("name: !!python/object:os.system x\nrules:\n  - bad", 3, "must be a mapping"),
    ],
)
def test_a_bad_rule_file_is_refused_with_its_line(text: str, line: int, says: str) -> None:
    with pytest.raises(UserError) as error:
        rule_sets.parse(text, "own.yaml")
    assert str(error.value).startswith(f"own.yaml:{line}: "), error.value
    assert says in str(error.value)


def test_the_version_of_the_rules_goes_with_the_judgment(database: Database, judgments: Judgments) -> None:
    with database.write() as session:
        for text in ("old", "new"):
            rule_sets.store(session, {"name": "own", "title": "", "source": "", "rules": [{"id": "a", "text": text}]})
            if text == "old":
                session.flush()
        newest = rule_sets.newest(session, "own")
        assert newest is not None
        digest = newest.digest
    import_rows(database, NewBatch("b", "rules", rule_set="own"), [("t", {"prompt": "p", "response": "r"})])
    (ann,) = add_users(database, "ann")
    do(judgments, ann, "rules", {"verdicts": {"a": {"verdict": "follows", "note": ""}}})
    with database.read() as session:
        (kappa, alpha) = overview.coefficients(session, "rules")
        assert kappa["value"] is alpha["value"] is None
    assert judgments.history(ann)[0].task == "rules"
    assert [row["rule"] for row in rows_of(database, Selection("rule_judgments"))] == ["a"]
    assert digest


def test_win_rates_and_disagreement(database: Database, judgments: Judgments) -> None:
    row = {"prompt": "p", "responses": ["a", "b"], "model": ["new", "old"]}
    add_batch(database, [("t", {**row, "id": str(i)}) for i in range(2)], "compare", overlap=2)
    ann, bob = add_users(database, "ann", "bob")
    for user, choices in ((ann, ("A", "A")), (bob, ("A", "B"))):
        for choice in choices:
            do(judgments, user, "compare", {"choice": choice})
    with database.read() as session:
        new, old = overview.win_rates(session)
        assert (new["win rate"], old["win rate"]) == (0.75, 0.25)
        (differs,) = overview.disagreements(session, "compare")
        assert (differs["id"], differs["agreement"]) == ("1", 0)


def test_a_raised_overlap_reaches_those_who_passed_the_item(
    database: Database, leases: Leases, judgments: Judgments
) -> None:
    name = add_batch(database, 2)
    ann, bob = add_users(database, "ann", "bob")
    blank = {"ratings": [None] * 4, "flags": [[]] * 4}
    for user in (ann, bob):
        do(judgments, user, "rank", {"ranks": [1, 2, 3, 4], **blank})
    assert leases.next(ann, "rank") is None
    change_batch(database, name, 2, 0, True)
    do(judgments, ann, "rank", {"ranks": [1, 2, 3, 4], **blank})
    do(judgments, bob, "rank", {"ranks": [1, 2, 3, 4], **blank})
    assert leases.next(ann, "rank") is leases.next(bob, "rank") is None


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        code = main(["--data-dir", str(tmp_path), *arguments])
        streams = capsys.readouterr()
        return code, streams.out + streams.err

    (tmp_path / "s.jsonl").write_text('{"prompt": "p", "responses": ["a", "b"]}\n')
    (tmp_path / "own.yaml").write_text("name: own\nrules: [{id: a, text: b}]")
    assert run("migrate")[0] == 0
    assert len(run("create-user", "ann")[1].strip()) >= 10
    assert run("import", str(tmp_path / "s.jsonl"), "--task", "rank") == (0, "1 items in batch s\n")
    rules = (
        "import",
        str(tmp_path / "s.jsonl"),
        "--task",
        "rules",
        "--name",
        "r",
        "--rules",
        str(tmp_path / "own.yaml"),
    )
    assert run(*rules) == (0, "2 items in batch r\n")
    code, said = run("export", "rankings", str(tmp_path / "out.jsonl"), "--since", "2026-01-01")
    assert (code, said.split()[0]) == (0, "0")
    assert run("export", "rankings", str(tmp_path / "out.exe"))[0] == 2
    assert run("import", str(tmp_path / "none.jsonl"), "--task", "rank", "--name", "n") == (
        2,
        f"align annotate: {tmp_path / 'none.jsonl'}: No such file or directory\n",
    )
    assert run("--database", "mysql://x/y", "migrate")[0] == 2
    assert set(RECORDS) == {"rankings", "pairs", "rule_judgments", "demonstrations"}
    assert list(read_rows([" \n"], "f")) == []
