"""Files of a wrong type or size, on the lead's page and without it: one clear message, and nothing is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from sqlalchemy import func, select

from align.core.errors import UserError
from annotation_ui import importing, rule_sets
from annotation_ui.database import Database
from annotation_ui.guard import MAX_UPLOAD_BODY
from annotation_ui.importing import NewBatch, import_file
from annotation_ui.schema import Batch

from .conftest import SCREENSHOTS
from .running import Server


def sparse(path: Path, size: int) -> Path:
    """A file of the given size that takes no space on the disk."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def batches(database: Database) -> int:
    with database.read() as session:
        return session.scalar(select(func.count(Batch.id))) or 0


@pytest.mark.timeout(120)
def test_the_page_refuses_a_wrong_type_and_an_oversized_file(server: Server, browser: Browser, tmp_path: Path) -> None:
    before = batches(server.database)
    page = server.page(browser, "uploader", "lead")
    page.goto("/lead/")
    page.get_by_role("tab", name="Import").click()
    picker = page.locator('[role="tabpanel"]:visible input[type="file"]').first
    message = page.locator(".toast-body")
    (tmp_path / "samples.exe").write_bytes(b"MZ")
    picker.set_input_files(tmp_path / "samples.exe")
    send = page.get_by_role("button", name="Import", exact=True)
    page.get_by_label("Name of the batch").fill("never made")
    page.wait_for_timeout(500)
    send.click()
    expect(message.last).to_contain_text("samples.exe: must be a file of type .jsonl")
    picker.set_input_files(sparse(tmp_path / "large.jsonl", importing.MAX_BYTES + 1))
    send.click()
    expect(message.last).to_contain_text("large.jsonl: larger than 256 MiB")
    page.screenshot(path=SCREENSHOTS / "upload-refused.png")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "p", "responses": ["a", "b"]}\n{"prompt": "p"}\n')
    picker.set_input_files(tmp_path / "broken.jsonl")
    send.click()
    expect(message.last).to_contain_text("broken.jsonl:2: responses: must be a list of texts")
    assert batches(server.database) == before
    page.context.close()


def test_files_are_refused_without_the_page_too(database: Database, tmp_path: Path) -> None:
    """What the page would refuse can be sent without it; the guard's limits are above those of the files."""
    (tmp_path / "rows.csv").write_text("prompt\np")
    large = sparse(tmp_path / "large.jsonl", importing.MAX_BYTES + 1)
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    for path, line in (
        (tmp_path / "rows.csv", "rows.csv: not a .jsonl file (one JSON object per line)"),
        (large, "large.jsonl: larger than 256 MiB; split it into several batches"),
        (tmp_path / "binary.jsonl", "binary.jsonl: not UTF-8 text"),
    ):
        with pytest.raises(UserError) as error:
            import_file(database, NewBatch("b", "rank"), path, path.name)
        assert str(error.value) == line
    (tmp_path / "rules.py").write_text("import os")
    for path, line in (
        (tmp_path / "rules.py", "rules.py: not a .yaml file"),
        (sparse(tmp_path / "rules.yaml", rule_sets.MAX_BYTES + 1), "rules.yaml: larger than 1 MiB"),
    ):
        with pytest.raises(UserError) as error:
            rule_sets.read(path, path.name)
        assert str(error.value) == line
    assert batches(database) == 0
    assert importing.MAX_BYTES < MAX_UPLOAD_BODY
