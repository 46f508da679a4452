"""Back up and restore a SQLite database. For PostgreSQL, use pg_dump and pg_restore."""

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

    The copy is written to a hidden file and renamed once it is checked and synced to disk. A killed process therefore never
    leaves an incomplete file at `target`.
    """
    if target.exists():
        raise UserError(f"{target}: already exists")
    with _new_database(target) as partial:
        try:
            with closing(sqlite3.connect(source)) as database, closing(sqlite3.connect(partial)) as copy:
                database.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")  # one file, without a separate log
            _check(partial)
        except sqlite3.Error as error:
            raise UserError(f"{target}: {error}") from None
        sync(partial)
        if target.exists():
            raise UserError(f"{target}: already exists")
        os.replace(partial, target)
        sync(target.parent)


def restore(backup: Path, file: Path) -> Path | None:
    """Replace a database with a backup. The database must not be in use.

    A copy of the backup is first checked and upgraded to the newest schema, and its sessions are deleted.

    Args:
        backup: file written by `back_up`.
        file: database to replace.

    Returns:
        New path of the replaced database, or None if there was no database.

    Raises:
        UserError: If the backup is invalid, a log next to it has changes that the file lacks, or a process has the database
            open. The database is then unchanged.
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
            for log in _LOGS:  # SQLite would apply the log of a lost database to the new one
                with suppress(FileNotFoundError):
                    file.with_name(file.name + log).rename(file.with_name(file.name + log + ending))
            os.replace(partial, file)
            return None
        with _alone(file):
            os.link(file, kept)
            os.replace(partial, file)
            for log in _LOGS:  # belongs to the old file and is already merged into it
                file.with_name(file.name + log).unlink(missing_ok=True)
            sync(file.parent)
        return kept


def _prepare(file: Path) -> None:
    """Upgrade the copy of a backup, delete its sessions, and record the restoration."""
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
    """Yield the path of a new hidden file next to `target`. Remove the file and its logs at the end, if they still exist."""
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
        sqlite3.Error: If it is damaged, not a database, or a database of another program.
    """
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("SELECT id FROM judgments LIMIT 1")
        problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise sqlite3.DatabaseError(f"damaged: {problem}")


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """Lock a database exclusively, and merge its log into it.

    Every open connection holds a shared lock on a database in WAL mode, so leaving that mode fails while another connection
    is open.
    """
    with closing(sqlite3.connect(file, timeout=1, isolation_level=None)) as connection:
        try:
            connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            connection.execute("PRAGMA journal_mode=DELETE")
            connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            raise UserError(f"{file}: is in use; stop the app first ({error})") from None
        yield
