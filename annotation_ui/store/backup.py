"""Backup and restoration of a SQLite database. For PostgreSQL, use pg_dump and pg_restore."""

import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from sqlalchemy import delete

from align.core.errors import UserError
from align.core.files import PARTIAL, sync
from annotation_ui.store import audit
from annotation_ui.store.database import Database, keep_private
from annotation_ui.store.schema import SignIn

_LOGS = ("-wal", "-shm", "-journal")


def back_up(source: Path, target: Path) -> None:
    """Copy a snapshot of a SQLite database while other processes use it.

    The copy is written under a hidden name and gets its own once it is checked and on disk, so a killed process leaves no
    file of that name.
    """
    if target.exists():
        raise UserError(f"{target}: already exists")
    with _new_database(target) as partial:
        try:
            with closing(sqlite3.connect(source)) as database, closing(sqlite3.connect(partial)) as copy:
                database.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")  # one file, without a log beside it
            _check(partial)
        except sqlite3.Error as error:
            raise UserError(f"{target}: {error}") from None
        sync(partial)
        if target.exists():
            raise UserError(f"{target}: already exists")
        os.replace(partial, target)
        sync(target.parent)


def restore(backup: Path, file: Path) -> Path | None:
    """Replace a database that is not in use by a backup.

    The backup is checked and brought to the newest schema in a copy first. All sessions in it end. The old database is kept
    under another name, which is returned.

    Raises:
        UserError: if the backup is not one, if a log beside it holds changes that it lacks, or if a process has the database
            open. Nothing has changed then.
    """
    if not backup.is_file():
        raise UserError(f"{backup}: no such file")
    if file.exists() and backup.samefile(file):
        raise UserError(f"{backup}: is the database itself")
    for beside in (backup.with_name(backup.name + ending) for ending in ("-wal", "-journal")):
        if beside.exists() and beside.stat().st_size > 0:
            copying = f"align annotate --database sqlite:///{backup} backup FILE"
            raise UserError(f"{backup}: {beside.name} has changes that are not in the file; merge them first: `{copying}`")
    with _new_database(file) as partial:
        shutil.copyfile(backup, partial)
        try:
            _check(partial)
        except sqlite3.Error as error:
            raise UserError(f"{backup}: not a backup of this app ({error})") from None
        _prepare(partial)
        sync(partial)
        ending = f".before-restore-{time.strftime('%Y%m%d-%H%M%S')}"
        kept = file.with_name(file.name + ending)
        if not file.exists():
            for log in _LOGS:  # SQLite would take the log of a lost database for that of the new one
                with suppress(FileNotFoundError):
                    file.with_name(file.name + log).rename(file.with_name(file.name + log + ending))
            os.replace(partial, file)
            return None
        with _alone(file):
            os.link(file, kept)
            os.replace(partial, file)
            for log in _LOGS:  # it belongs to the old file, which holds all that was in it
                file.with_name(file.name + log).unlink(missing_ok=True)
            sync(file.parent)
        return kept


def _prepare(file: Path) -> None:
    """Upgrade the copy of a backup, end its sessions, and record the restoration."""
    database = Database(f"sqlite:///{file}")
    try:
        database.upgrade()
        with database.write() as session:
            session.execute(delete(SignIn))
            audit.record(session, "restore", {})
    finally:
        database.close()
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")


@contextmanager
def _new_database(target: Path) -> Iterator[Path]:
    """Yield a hidden name next to `target` for a new database. Remove it and its logs at the end."""
    partial = target.with_name(f".{target.name}-{uuid.uuid4().hex}{PARTIAL}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        keep_private(partial)
        yield partial
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error})") from error
    finally:
        for name in (partial.name, *(partial.name + log for log in _LOGS)):
            with suppress(OSError):
                partial.with_name(name).unlink(missing_ok=True)


def _check(file: Path) -> None:
    """Check that a file is an intact database of this app.

    Raises:
        sqlite3.Error: if it is damaged, not a database, or one of another program.
    """
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("SELECT id FROM judgments LIMIT 1")
        problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(f"damaged: {problem}")


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Lock a database exclusively, and move its log into it.

    A connection holds a shared lock on a database in WAL mode as long as it is open, so leaving that mode fails while
    another one is.
    """
    with closing(sqlite3.connect(file, timeout=1, isolation_level=None)) as connection:
        try:
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            connection.execute("PRAGMA journal_mode=DELETE")
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            raise UserError(f"{file}: is in use; stop the app first ({error})") from None
        yield
