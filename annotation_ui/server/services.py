"""Settings of the server, and objects shared by its routes and pages."""

import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.exc import DatabaseError

from align.core.errors import UserError
from annotation_ui.server.auth import Auth
from annotation_ui.server.checkpoints import Checkpoints
from annotation_ui.server.probing import Probing
from annotation_ui.server.proxy import ProxySignIn
from annotation_ui.store.database import Database, database_error_line
from annotation_ui.store.judgments import Judgments
from annotation_ui.store.leases import Leases
from annotation_ui.store.schema import Heartbeat

MIN_FREE = 32 * 2**20  # bytes; SQLite needs space to checkpoint its log
KEEP_SECONDS = 2.0  # caches the result, because the check writes and needs no sign-in


@dataclass(frozen=True)
class Settings:
    """Options of `align annotate`."""

    database: str
    data_dir: Path
    lease_minutes: float = 30
    session_hours: float = 12
    https: bool = False  # behind a TLS proxy; send cookies only over https
    proxy: ProxySignIn | None = None  # a proxy that signs users in
    root_path: str = ""  # path below which a proxy serves the app, such as /labels

    @property
    def exports(self) -> Path:
        """Folder of exports."""
        return self.data_dir.resolve() / "exports"

    @property
    def uploads(self) -> Path:
        """Folder of uploads."""
        return self.data_dir.resolve() / "uploads"


class Health:
    """Health check for /healthz: performs a test write."""

    def __init__(self, database: Database, folder: Path) -> None:
        self._database, self._folder = database, folder
        self._lock = threading.Lock()
        self._checked_at, self._problem = float("-inf"), ""

    def problem(self) -> str:
        """Return the reason why the server cannot store anything, or an empty string."""
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


@dataclass(frozen=True)
class Services:
    """Database, and the objects that use it."""

    settings: Settings
    database: Database
    auth: Auth
    leases: Leases
    judgments: Judgments
    checkpoints: Checkpoints
    probing: Probing
    health: Health


def make_services(settings: Settings) -> Services:
    """Open the database and create the services. No model is loaded."""
    database = Database(settings.database)
    leases = Leases(database, settings.lease_minutes * 60)
    judgments = Judgments(leases)
    checkpoints = Checkpoints()
    return Services(
        settings=settings,
        database=database,
        auth=Auth(database, settings.session_hours),
        leases=leases,
        judgments=judgments,
        checkpoints=checkpoints,
        probing=Probing(judgments, checkpoints.reply),
        health=Health(database, database.folder or settings.data_dir),
    )
