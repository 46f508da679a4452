"""docs/annotation.md and docs/howto/labeling.md are held against the app: commands run, tables and numbers agree."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from sqlalchemy import select

from annotation_ui.cli import _parser, main
from annotation_ui.rendering import markdown
from annotation_ui.reports import counts
from annotation_ui.reports.export import records
from annotation_ui.server import auth
from annotation_ui.server.services import MIN_FREE, Settings, make_services
from annotation_ui.store import importing, rule_sets
from annotation_ui.store.database import DATA_DIR, Database, sqlite_url
from annotation_ui.store.judgments import Judgments
from annotation_ui.store.leases import ATTENTION_EVERY, Leases
from annotation_ui.store.schema import User
from annotation_ui.tasks import TASKS, fields
from tests.annotation_ui.running import ROOT, do, stored
from tests.files import read_rows, write_rows

PAGE = (ROOT / "docs" / "annotation.md").read_text(encoding="utf-8")
FLAT = re.sub(r"\s+", " ", PAGE)


def commands(block, page=PAGE):
    """The `align annotate` commands of the page's n-th block that has any; servers are left out."""
    blocks = [body for _, body in re.findall(r"^```([a-z]*)\n(.*?)^```$", page, re.M | re.S) if "align annotate" in body]
    words = [shlex.split(line, comments=True) for line in blocks[block].splitlines() if line.startswith("align annotate")]
    return [each[2:] for each in words if _parser().parse_args(each[2:]).run.__name__ != "_serve"]


def rows_of_table(first):
    """The rows of the table whose first column is headed `first`."""
    found = re.search(rf"^\| {re.escape(first)} \|.*\n\| ---.*\n((?:\|.*\n)*)", PAGE, re.M)
    assert found
    return [[cell.strip(" `") for cell in line.strip("| ").split(" | ")] for line in found[1].splitlines()]


def test_the_first_commands_lead_from_samples_to_a_file_for_training(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    samples = [{"prompt": f"P{n}", "responses": ["a", "b", "c"], "model": ["m"] * 3, "id": f"s{n}"} for n in range(2)]
    write_rows(Path("samples.jsonl"), samples)
    guide = (ROOT / "docs" / "howto" / "labeling.md").read_text(encoding="utf-8")
    before, [export] = commands(0, guide), commands(1, guide)
    assert [main(words) for words in before] == [0, 0, 0]
    assert "new database: " in capsys.readouterr().err
    database = Database(sqlite_url(DATA_DIR))
    users = stored(database, select(User.id))
    for user in users:
        for _ in samples:
            do(Judgments(Leases(database)), user, "rank", {"ranks": [1, 2, 3]})
    database.close()
    assert main(export) == 0
    rows = read_rows(Path("rankings.jsonl"))
    assert [(row["id"], row["ranks"]) for row in rows] == [(f"s{n}", [1, 2, 3]) for n in (0, 1)]
    assert Path("rankings.jsonl.manifest.json").is_file()
    assert [main(words) for words in commands(2)] == [0, 0, 0]  # a new password, shut out, and in again as a lead
    assert {path.name.split("-")[0] for path in DATA_DIR.iterdir()} == {"annotations.db"}  # and its log


def test_the_commands_of_a_team_work_on_its_database_alone(database_url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [[database_url if "://" in word else word for word in words] for words in commands(1)]
    assert len(given) == 1
    assert all(main(words) == 0 for words in given)
    assert main(["--database", database_url, "create-user", "ann"]) == 0
    assert not (tmp_path / "runs").exists()


def test_the_tables_name_every_task_tab_and_record(database, tmp_path):
    import gradio as gr  # takes seconds, which tests of other files need not wait for

    from annotation_ui.app import lead_page

    assert [row[:2] for row in rows_of_table("`--task`")] == [[task.name, task.title] for task in TASKS.values()]
    for (record, tasks), (named, made_from, _) in zip(records().items(), rows_of_table("record"), strict=True):
        assert named == record
        listed = set(made_from.split(", "))
        assert listed == ({"all tasks"} if set(tasks) == set(TASKS) else set(tasks))
    page = lead_page(make_services(Settings(str(database.engine.url), tmp_path)))
    tabs = [block.label for block in page.blocks.values() if isinstance(block, gr.Tab)]
    assert [row[0] for row in rows_of_table("tab")] == tabs


def test_the_numbers_are_those_of_the_code():
    settings = Settings("", Path())
    dialogue = rule_sets.read(rule_sets.PACKAGE_RULE_SETS / "sparrow-dialogue.yaml")["rules"]
    harms = rule_sets.read(rule_sets.PACKAGE_RULE_SETS / "lamda-harms-form.yaml")["rules"]
    assert (len([each for each in harms if each.get("gate")]), len(harms)) == (1, 12)
    assert (ATTENTION_EVERY, auth.FAILURES, auth.WINDOW_SECONDS, auth.RENEW_SECONDS) == (10, 5, 900, 300)
    assert (settings.session_hours, counts.MAX_LEFT) == (12, 1000)
    for statement in (
        f"at most {importing.MAX_ROW:,} characters long with at most {fields.MAX_TEXT:,} in one response",
        f"`.jsonl` up to {importing.MAX_BYTES // 2**20} MiB, rule sets as `.yaml` up to {rule_sets.MAX_BYTES // 2**20} MiB",
        f"contains {len(dialogue)} dialogue rules",
        f"and {auth.NAME_FAILURES} block it from everywhere",
        f"Passwords have {auth.MIN_PASSWORD} characters or more",
        f"`--lease-minutes`, {settings.lease_minutes:g}",
        f"more than {markdown.MAX_MARKDOWN:,} characters",
        f"more than {markdown.MAX_SECONDS} s of computing",
        f"more than {markdown.MAX_HTML:,} characters of HTML",
        f"less than {MIN_FREE // 2**20} MiB are free",
    ):
        assert statement in FLAT, statement


def test_the_rule_files_that_are_shown_are_whole():
    plain, form = (rule_sets.parse(text, "f") for text in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S))
    assert [rule["id"] for rule in plain["rules"]] == ["no-threats"]
    gate, harm = form["rules"]
    assert gate["gate"]
    assert dict(gate["answers"])["violates"] == "No"
    assert dict(harm["answers"])["violates"] == "Yes"


@pytest.mark.slow
def test_the_script_writes_the_pictures_of_the_page(own_server, browser, tmp_path):
    script = runpy.run_path(str(ROOT / "docs" / "write_screenshots.py"))
    script["add_samples"](own_server)
    script["write_documentation"](own_server, browser, tmp_path)
    written = {file.name for file in tmp_path.iterdir()}
    assert written == {file.name for file in (ROOT / "docs" / "images").glob("annotate-*.png")}
    assert written == set(re.findall(r"images/(annotate-[a-z]+\.png)", PAGE))
