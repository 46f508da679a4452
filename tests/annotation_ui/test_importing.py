"""What comes in: rows refused by their line, an overlap that is raised later."""

from __future__ import annotations

from pathlib import Path

import pytest

from align.errors import UserError
from annotation_ui import overview
from annotation_ui.database import Database
from annotation_ui.importing import NewBatch, change_batch, import_file
from annotation_ui.judgments import Judgments
from annotation_ui.leases import Leases

from .running import add_batch, add_users, do


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
