import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.exc import DatabaseError

from align.core.errors import UserError
from annotation_ui.cli import main
from annotation_ui.store import audit
from annotation_ui.store.backup import back_up, restore
from annotation_ui.store.database import Database
from annotation_ui.store.judgments import Judgments
from annotation_ui.store.leases import Leases
from annotation_ui.store.schema import Batch, Item, Judgment
from tests.annotation_ui import postgres
from tests.annotation_ui.conftest import new_database
from tests.annotation_ui.running import ROOT, Client, Server, add_batch, add_users, do, stored


def judgments_in(path):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT count(*) FROM judgments").fetchone()[0]


@pytest.fixture
def database_kind():
    return "sqlite"


def test_a_backup_holds_what_is_still_in_the_log_and_is_one_private_file(database, judgments, tmp_path):
    (ann,) = add_users(database, "ann")
    add_batch(database, 2)
    do(judgments, ann, "rank", {"ranks": [1, 2, 3, 4]})
    target = tmp_path / "copies" / "today.db"
    back_up(tmp_path / "annotations.db", target)
    assert judgments_in(target) == 1
    assert [path.name for path in target.parent.iterdir()] == ["today.db"]
    assert target.stat().st_mode & 0o777 == 0o600
    do(judgments, ann, "rank", {"ranks": [1, 2, 3, 4]})  # the app works on
    with pytest.raises(UserError, match="already exists"):
        back_up(tmp_path / "annotations.db", target)
    assert judgments_in(target) == 1


KILLED = """
import os, sqlite3, sys, threading
from pathlib import Path
from annotation_ui.store import backup
point, source, target = sys.argv[1:]
def die(*_):
    os.kill(os.getpid(), 9)
if point == "copying":
    threading.Timer(float(os.environ["AFTER"]), die).start()
else:
    setattr(backup, point, die)
backup.back_up(Path(source), Path(target))
"""


@pytest.mark.parametrize(("point", "after"), [("copying", 0.0), ("copying", 0.02), ("_check", 0), ("sync", 0)])
def test_a_kill_during_a_backup_leaves_no_half_file(database, tmp_path, point, after):
    add_batch(database, [("f:1", {"prompt": "x" * 900_000, "responses": ["a", "b"]})] * 40)  # 36 MB take a while
    target = tmp_path / "copy.db"
    command = [sys.executable, "-c", KILLED, point, str(tmp_path / "annotations.db"), str(target)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "AFTER": str(after)}
    ended = subprocess.run(command, env=environment, check=False, timeout=120).returncode
    assert ended == -signal.SIGKILL
    assert not target.exists()
    back_up(tmp_path / "annotations.db", target)  # the leftovers are in nobody's way
    with closing(sqlite3.connect(target)) as connection:
        assert connection.execute("SELECT count(*) FROM items").fetchone()[0] == 40


def test_a_backup_of_a_running_server_is_restored_after_it_has_stopped(tmp_path, capsys):
    server = Server(f"sqlite:///{tmp_path / 'annotations.db'}", tmp_path)
    here, copy = ("--data-dir", str(tmp_path)), str(tmp_path / "copy.db")
    with server.started():
        ann = Client(server, server.token("ann"))
        server.add_batch(3, name="kept")
        ann.submit()
        assert main([*here, "backup", copy]) == 0
        ann.submit()
        capsys.readouterr()
        assert main([*here, "restore", copy]) == 2
        line = capsys.readouterr().err
        assert line.startswith(f"align annotate: {tmp_path / 'annotations.db'}: is in use; stop the app first")
        ann.submit()  # nothing has happened to the running one
    restored = time.time()
    assert main([*here, "restore", copy]) == 0
    printed = capsys.readouterr().out
    (kept,) = tmp_path.glob("annotations.db.before-restore-*")
    assert printed == f"{copy} restored to {tmp_path / 'annotations.db'}; the old database is {kept}\n"
    assert (judgments_in(tmp_path / "annotations.db"), judgments_in(kept)) == (1, 3)  # no judgment is lost
    with server.started():
        assert Client(server, ann.token)("GET", "/api/tasks")[0] == 401  # sessions of the backup have ended
        with server.database.read() as session:
            assert session.scalar(select(func.count(Judgment.id))) == 1
            assert audit.records(session)[0]["action"] == "restore"
            assert session.scalars(select(Batch.name)).all() == ["kept"]
        Client(server, server.token("ann")).submit()
        assert stored(server.database, select(Judgment.created_at).order_by(Judgment.id))[-1] >= restored
    assert not list(tmp_path.glob(".*partial*"))


def test_a_backup_of_another_version_is_refused_and_left_as_it_is(database, tmp_path):
    back_up(tmp_path / "annotations.db", tmp_path / "old.db")
    with closing(sqlite3.connect(tmp_path / "old.db")) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '0099_of_a_later_version'")
    target = tmp_path / "new" / "annotations.db"
    with pytest.raises(UserError, match=r"another version of the app .*0099_of_a_later_version"):
        restore(tmp_path / "old.db", target)
    assert not target.exists()
    untouched = Database(f"sqlite:///{tmp_path / 'old.db'}")
    assert untouched.revisions()[0] == "0099_of_a_later_version"
    untouched.close()


def test_the_log_of_a_lost_database_is_not_taken_for_that_of_the_backup(database, judgments, tmp_path):
    file, copy = tmp_path / "annotations.db", tmp_path / "copy.db"
    (ann,) = add_users(database, "ann")
    add_batch(database, 5)
    back_up(file, copy)
    for _ in range(5):
        do(judgments, ann, "rank", {"ranks": [1, 2, 3, 4]})
    log = file.with_name("annotations.db-wal").read_bytes()
    assert log
    database.close()
    file.unlink()
    file.with_name("annotations.db-wal").write_bytes(log)  # as after a deletion of the file alone
    restore(copy, file)
    assert judgments_in(file) == 0
    (kept,) = tmp_path.glob("annotations.db-wal.before-restore-*")
    assert kept.read_bytes() == log


def test_a_plain_copy_with_a_log_is_refused_until_it_is_one_file(database, judgments, tmp_path):
    (ann,) = add_users(database, "ann")
    add_batch(database, 2)
    do(judgments, ann, "rank", {"ranks": [1, 2, 3, 4]})
    plain, fresh = tmp_path / "plain.db", tmp_path / "fresh" / "annotations.db"
    for ending in ("", "-wal"):  # as `cp annotations.db*` copies them while the app runs
        plain.with_name(plain.name + ending).write_bytes((tmp_path / f"annotations.db{ending}").read_bytes())
    with pytest.raises(UserError, match=f"{plain}: plain.db-wal"):
        restore(plain, fresh)
    assert not fresh.exists()
    assert main(["--database", f"sqlite:///{plain}", "backup", str(tmp_path / "whole.db")]) == 0
    assert restore(tmp_path / "whole.db", fresh) is None
    assert judgments_in(fresh) == 1


def test_what_is_no_backup_changes_nothing(database, tmp_path):
    add_batch(database, 2)
    database.close()
    file = tmp_path / "annotations.db"
    (tmp_path / "text.db").write_text("no database" * 1000)
    with closing(sqlite3.connect(tmp_path / "other.db")) as connection:
        connection.execute("CREATE TABLE t (a)")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    damaged = bytearray(file.read_bytes())
    damaged[4096 * 3 : 4096 * 40] = os.urandom(4096 * 37)
    (tmp_path / "damaged.db").write_bytes(damaged)
    for name, line in (
        ("none.db", "no such file"),
        ("text.db", "not a backup of this app"),
        ("other.db", "not a backup of this app"),
        ("damaged.db", "not a backup of this app"),
        ("annotations.db", "is the database itself"),
    ):
        with pytest.raises(UserError, match=line):
            restore(tmp_path / name, file)
    assert not list(tmp_path.glob("*before-restore*"))
    assert stored(database, select(func.count(Item.id))) == [2]


def test_the_documented_commands_copy_and_restore_postgresql(postgres_url, request):
    page = (ROOT / "docs" / "annotation.md").read_text(encoding="utf-8")
    dump, restored = (re.search(rf"^{program} .*$", page, re.M)[0] for program in ("pg_dump", "pg_restore"))
    url = new_database(request, "postgresql", None)
    database = Database(url)
    database.upgrade()
    judgments, (ann,) = Judgments(Leases(database)), add_users(database, "ann")
    add_batch(database, 2)
    do(judgments, ann, "rank", {"ranks": [1, 2, 3, 4]})

    def run(command):
        program, *words = shlex.split(command.replace("postgresql://user@host/name", url))
        database.close()
        subprocess.run([postgres.binaries() / program, *words], check=True, cwd=request.getfixturevalue("tmp_path"))

    run(dump)
    do(judgments, ann, "rank", {"ranks": [1, 2, 3, 4]})
    run(restored)
    assert stored(database, select(func.count(Judgment.id))) == [1]
    with pytest.raises(DatabaseError, match="append-only"), database.write() as session:
        session.execute(update(Judgment).values(seconds=1.0))
    do(judgments, ann, "rank", {"ranks": [1, 2, 3, 4]})  # ids go on behind those that were restored
    database.close()
