"""A server that cannot store anything says so, to whoever watches it and to the labelers, and recovers by itself."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import pytest

from annotation_ui import health
from annotation_ui.database import Database
from annotation_ui.health import KEEP_SECONDS, Health

from .client import Client
from .running import Server

pytestmark = pytest.mark.timeout(180)


@pytest.mark.full  # test_error_pages.py fills one
def test_a_full_disk_is_told_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    server = Server(f"sqlite:///{tmp_path / 'annotations.db'}", tmp_path)
    server.add_batch(3)
    with server.started():
        ann = Client(server, server.token("ann"))
        here = f"/api/assignments/{ann.next()['assignment']}"
        request = {"request_id": secrets.token_hex(8), "answer": {"ranks": [1, 2, 3, 4]}, "seconds": 1}
        with server.full_disk():
            time.sleep(KEEP_SECONDS)
            status, _, text = Client(server)("GET", "/healthz")
            assert (status, text.split(":")[0]) == (503, "the database cannot be written")
            status, _, text = ann("POST", f"{here}/submit", request)
            assert (status, text) == (503, '{"error":"nothing can be stored now; this page tries again"}')
        assert ann("POST", f"{here}/submit", request)[0] == 200
        time.sleep(KEEP_SECONDS)
        assert Client(server)("GET", "/healthz")[::2] == (200, "ok")
        assert "Traceback" not in (tmp_path / "log").read_text()


def test_little_space_counts_as_a_full_disk(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Health(database, tmp_path).problem() == ""
    monkeypatch.setattr(health, "MIN_FREE", 2**62)
    assert Health(database, tmp_path).problem().startswith("the disk is full: ")
