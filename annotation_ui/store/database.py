"""Database connections and transactions on SQLite or PostgreSQL.

A transaction of `write()` is on disk once it has ended without an error. SQLite allows one writer at a time. Within this
process, a lock queues writers fairly, whereas SQLite would poll. BEGIN IMMEDIATE excludes other processes.
"""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DatabaseError
from sqlalchemy.orm import Session

from align.core.errors import UserError
from annotation_ui.store.schema import Base, create_tables

POOL_SIZE = 40  # one connection per worker thread of the web server
DATA_DIR = Path("runs/annotate")
"""Default folder of the SQLite database."""


def sqlite_url(folder: Path) -> str:
    """Return the URL of the SQLite database in a folder."""
    return f"sqlite:///{folder / 'annotations.db'}"


class Database:
    """Engine, transactions and migrations for a database URL."""

    def __init__(self, url: str) -> None:
        self.engine = _engine(url)
        self.is_sqlite = self.engine.dialect.name == "sqlite"
        self.folder = Path(self.engine.url.database or "").resolve().parent if self.is_sqlite else None
        self._writing = self.engine.execution_options(begin="BEGIN IMMEDIATE")
        self._lock = threading.Lock() if self.is_sqlite else nullcontext()

    @contextmanager
    def write(self) -> Iterator[Session]:
        """Open a session that commits at the end of the block and rolls back on an error."""
        with self._lock, Session(self._writing, expire_on_commit=False) as session, session.begin():
            yield session

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Open a read-only session on a snapshot of the database."""
        with Session(self.engine, expire_on_commit=False) as session:
            yield session

    def empty_log(self, seconds: float) -> bool:
        """Merge SQLite's log into the database and truncate it. The log contains earlier versions of changed text.

        Args:
            seconds: maximum time to wait for other connections. No other connection can write in the meantime.

        Returns:
            Whether the log is empty. False if a connection is still reading. Always True for PostgreSQL.
        """
        if not self.is_sqlite:
            return True
        with closing(sqlite3.connect(str(self.engine.url.database), timeout=seconds)) as connection:
            busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return not busy

    def upgrade(self) -> None:
        """Create the tables of a new database, or upgrade an older one to the newest schema."""
        config = _alembic_config()
        where = f"database {self.engine.url.render_as_string()}"
        try:
            with self._lock, self._writing.begin() as connection:
                config.attributes["connection"] = connection
                is_new = MigrationContext.configure(connection).get_current_revision() is None
                if is_new:
                    create_tables(connection)
                (command.stamp if is_new else command.upgrade)(config, "head")
        except DatabaseError as error:
            raise UserError(f"{where}: {database_error_line(error)}") from error
        except CommandError as error:
            raise UserError(f"{where}: was created by another version of the app ({error})") from error

    def revisions(self) -> tuple[str | None, str | None]:
        """Return (the database's revision, the newest revision)."""
        with self.engine.connect() as connection:
            current = MigrationContext.configure(connection).get_current_revision()
        return current, ScriptDirectory.from_config(_alembic_config()).get_current_head()

    def lock_table(self, session: Session, table: type[Base]) -> None:
        """Lock a table against other writers until the transaction ends. Not needed for SQLite, which has one writer."""
        if not self.is_sqlite:
            session.execute(text(f"LOCK TABLE {table.__tablename__} IN SHARE ROW EXCLUSIVE MODE"))

    def close(self) -> None:
        self.engine.dispose()


def database_error_line(error: DatabaseError | UserError) -> str:
    """Return the database's error message as one line."""
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0]


def _alembic_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parents[1] / "migrations"))
    return config


def _engine(url: str) -> Engine:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):  # ValueError if the port is not a number
        raise UserError(f"not a database URL: {url!r} (sqlite:///file.db or postgresql://user@host/name)") from None
    if parsed.drivername in ("postgresql", "postgres"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername == "sqlite":
        keep_private(Path(parsed.database or ""))
        engine = create_engine(parsed, pool_size=POOL_SIZE, max_overflow=POOL_SIZE, connect_args={"timeout": 30})
        event.listen(engine, "connect", _sqlite_settings)
        event.listen(engine, "begin", _sqlite_begin)
        return engine
    if parsed.drivername != "postgresql+psycopg":
        raise UserError(f"{parsed.drivername} is not supported: use sqlite:///file.db or postgresql://user@host/name")
    return create_engine(parsed, pool_size=POOL_SIZE, max_overflow=POOL_SIZE, pool_pre_ping=True)


def keep_private(file: Path) -> None:
    """Make the database readable only by its owner. SQLite gives its log the same mode.

    An existing file is not opened, because closing it would drop the locks that SQLite holds in this process.
    """
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        for path in (file, file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")):
            if path.is_file() and path.stat().st_mode & 0o077 and path.stat().st_uid == os.geteuid():
                path.chmod(0o600)
    except OSError:
        pass  # SQLite reports why it cannot be opened


def _sqlite_settings(connection: Any, _: Any) -> None:
    """Set the pragmas of a new SQLite connection.

    WAL lets readers work during a write. synchronous=FULL writes every commit to disk before it is acknowledged.
    secure_delete=ON overwrites deleted text with zeros, such as drafts and the remarks of a forgotten user.
    """
    connection.isolation_level = None  # SQLAlchemy sends BEGIN instead of the driver
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON", "busy_timeout=30000"):
        connection.execute(f"PRAGMA {pragma}")


def _sqlite_begin(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN"))
