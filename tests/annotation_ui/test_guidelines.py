"""Guidelines of a task: their versions, and who has read which, on both databases."""

from __future__ import annotations

import pytest

from align.core.errors import UserError
from annotation_ui import guidelines
from annotation_ui.database import Database

from .running import add_users


def test_a_new_version_of_guidelines_is_unread_until_it_is_opened(database: Database) -> None:
    ann, boss = add_users(database, "ann", "boss")

    def unread() -> int | None:
        with database.read() as session:
            newest = guidelines.unread(session, "rank", ann)
            return newest.id if newest else None

    assert unread() is None
    first = guidelines.save(database, "rank", "Be kind.", boss, edited=0)
    assert unread() == first
    for _ in range(2):
        guidelines.mark_read(database, first, ann)
    guidelines.mark_read(database, 999, ann)
    assert unread() is None
    guidelines.save(database, "rules", "Other task.", boss, edited=0)
    assert unread() is None
    second = guidelines.save(database, "rank", "Be kind and brief.", boss, edited=first)
    assert unread() == second
    with pytest.raises(UserError, match="nothing has changed"):
        guidelines.save(database, "rank", "Be kind and brief.", boss, edited=second)
    with database.read() as session:
        listed = [(each.number, each.text, each.author, each.readers) for each in guidelines.versions(session, "rank")]
    assert listed == [(2, "Be kind and brief.", "boss", 0), (1, "Be kind.", "boss", 1)]
