"""The settings of the server and the objects that its routes and pages share."""

from dataclasses import dataclass
from pathlib import Path

from annotation_ui.server.auth import Auth
from annotation_ui.server.checkpoints import Checkpoints
from annotation_ui.server.health import Health
from annotation_ui.server.probing import Probing
from annotation_ui.server.proxy import ProxySignIn
from annotation_ui.store.database import Database
from annotation_ui.store.judgments import Judgments
from annotation_ui.store.leases import Leases


@dataclass(frozen=True)
class Settings:
    """How `align annotate` was started."""

    database: str
    data_dir: Path
    lease_minutes: float = 30
    session_hours: float = 12
    https: bool = False  # the server is behind a TLS proxy: send cookies over https only
    proxy: ProxySignIn | None = None  # a proxy that signs users in

    @property
    def exports(self) -> Path:
        """The folder of the exports made on the lead's page."""
        return self.data_dir.resolve() / "exports"


@dataclass(frozen=True)
class Services:
    """One database and the objects that work on it."""

    settings: Settings
    database: Database
    auth: Auth
    leases: Leases
    judgments: Judgments
    checkpoints: Checkpoints
    probing: Probing
    health: Health


def make_services(settings: Settings) -> Services:
    """Open the database and create the services; no model is loaded yet."""
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
