"""Health check for /healthz: whether the server can store what labelers send, by storing something."""

import shutil
import threading
import time
from pathlib import Path

from sqlalchemy.exc import DatabaseError

from align.core.errors import UserError
from annotation_ui.store.database import Database
from annotation_ui.store.schema import Heartbeat

MIN_FREE = 32 * 2**20  # bytes; SQLite needs room to move its log into the database
KEEP_SECONDS = 2.0  # anyone may ask, but not make the server write all the time


class Health:
    """Writes to `database` and looks at the free space of `folder`."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._database, self._folder = database, folder
        self._lock = threading.Lock()
        self._checked_at, self._problem = float("-inf"), ""

    def problem(self) -> str:
        """Why nothing can be stored now; empty if it can."""
        with self._lock:
            if time.monotonic() - self._checked_at >= KEEP_SECONDS:
                self._problem = self._find_problem()
                self._checked_at = time.monotonic()
            return self._problem

    def _find_problem(self) -> str:
        free = shutil.disk_usage(self._folder).free
        if free < MIN_FREE:
            return f"the disk is full: {free // 2**20} MiB are left"
        try:
            with self._database.write() as session:
                session.merge(Heartbeat(id=1, at=time.time()))
        except (DatabaseError, UserError) as error:
            return f"the database cannot be written: {database_error_line(error)}"
        return ""


def database_error_line(error: DatabaseError | UserError) -> str:
    """The database's own error message, in one line."""
    return str(getattr(error, "orig", None) or error).strip().splitlines()[0]
