"""`align annotate`: start the labeling app, or work on its database from the shell."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from sqlalchemy import select
from sqlalchemy.exc import DatabaseError

from align.core.errors import UserError
from annotation_ui.reports.export import Selection, export, records
from annotation_ui.reports.overview import progress
from annotation_ui.server.auth import Auth
from annotation_ui.server.health import database_error_line
from annotation_ui.server.services import Settings, make_services
from annotation_ui.store import rule_sets
from annotation_ui.store.batches import set_open
from annotation_ui.store.database import DATA_DIR, Database, sqlite_url
from annotation_ui.store.importing import NewBatch, import_file
from annotation_ui.store.schema import USER_ROLES, User
from annotation_ui.tasks import TASKS, Json, task_settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; without one, serve.

    Returns:
        The exit code: 2 for a user's mistake, which is printed as one line on stderr.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser().parse_args(arguments)
        command: Callable[[argparse.Namespace], None] = options.run
        command(options)
    except UserError as error:
        problem = str(error)
    except DatabaseError as error:
        problem = f"the database failed: {database_error_line(error)}"
    except OSError as error:
        problem = f"{error.filename or 'the file'}: {error.strerror or error}"
    else:
        return 0
    print(f"align annotate: {problem}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="align annotate", description=__doc__)
    parser.add_argument("--database", metavar="URL", help="sqlite:///file.db or postgresql://user@host/name")
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR, help="folder of the SQLite file")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=7860)
    parser.add_argument("--lease-minutes", type=float, default=30, help="how long an idle labeler holds an item")
    parser.add_argument("--session-hours", type=float, default=12, help="how long an idle labeler stays signed in")
    parser.add_argument("--https", action="store_true", help="behind a proxy that speaks TLS: cookies over https only")
    parser.set_defaults(run=_serve)
    commands = parser.add_subparsers(title="commands")

    _add_user_commands(commands)
    batch = commands.add_parser("import", help="make a batch from prompts or samples (JSON Lines)")
    batch.add_argument("file", type=Path)
    batch.add_argument("--task", choices=tuple(TASKS), required=True)
    batch.add_argument("--name", help="of the batch (default: the file's name)")
    batch.add_argument("--overlap", type=int, default=1, help="labelers for each item")
    batch.add_argument("--priority", type=int, default=0, help="higher is given out first")
    batch.add_argument("--labeler", action="append", default=[], help="only for this one (may be given again)")
    batch.add_argument("--attention-every", type=int, metavar="N", help="one attention item in N items (default: 10)")
    batch.add_argument("--rules", help="name of a rule set, or a rule file")
    for task, setting in task_settings():
        kind: dict[str, Any] = {"action": "store_true"} if setting.kind is bool else {"type": setting.kind}
        batch.add_argument(f"--{setting.name.replace('_', '-')}", help=f"{setting.help} (task {task.name})", **kind)
    batch.set_defaults(run=_import)

    commands.add_parser("batches", help="list batches with their progress").set_defaults(run=_list_batches)
    for verb, is_open in (("open", True), ("close", False)):
        change = commands.add_parser(f"{verb}-batch", help=f"{'' if is_open else 'do not '}give out the items of a batch")
        change.add_argument("name")
        change.set_defaults(run=_open_or_close, open=is_open)

    _add_export_command(commands)

    backup = commands.add_parser("backup", help="copy the SQLite database, also while the server runs")
    backup.add_argument("file", type=Path)
    backup.set_defaults(run=_backup)

    migrate = commands.add_parser("migrate", help="bring the database to this version's schema")
    migrate.add_argument("--down", metavar="REVISION", help="go back instead; base removes everything")
    migrate.set_defaults(run=_migrate)
    return parser


def _add_user_commands(commands: Any) -> None:
    user = commands.add_parser("create-user", help="add a user; prints the password")
    user.add_argument("name")
    user.add_argument("--role", choices=USER_ROLES, default="labeler")
    user.set_defaults(run=_create_user)

    password = commands.add_parser("reset-password", help="give a user a new password and print it")
    password.add_argument("name")
    password.set_defaults(run=_reset_password)

    deactivate = commands.add_parser("deactivate-user", help="sign a user out and let them in no more; judgments stay")
    deactivate.add_argument("name")
    deactivate.set_defaults(run=_deactivate_user)

    activate = commands.add_parser("activate-user", help="let a user sign in again who was deactivated or blocked")
    activate.add_argument("name")
    activate.add_argument("--role", choices=USER_ROLES, help="give the user this role, too")
    activate.set_defaults(run=_activate_user)

    commands.add_parser("users", help="list users").set_defaults(run=_list_users)


def _add_export_command(commands: Any) -> None:
    command = commands.add_parser("export", help="write judgments for training, with a manifest")
    command.add_argument("record", choices=tuple(records()))
    command.add_argument("file", type=Path, help="name.jsonl, name.parquet, or name.csv for a spreadsheet")
    command.add_argument("--aggregated", action="store_true", help="one row for each item instead of one for each labeler")
    command.add_argument("--since", type=_parse_time, metavar="TIME", help="only judgments from then on (ISO 8601)")
    command.add_argument("--batch", action="append", default=[], help="only this batch (may be given again)")
    command.add_argument("--include-gold", action="store_true", help="gold items too")
    command.add_argument(
        "--all-tied", action="store_true", help="rankings that tie all responses too (training leaves them out)"
    )
    command.add_argument(
        "--preferences",
        action="store_true",
        help="with aggregated rankings: how probable each order is, by labelers' reliability (for soft_targets)",
    )
    command.set_defaults(run=_export)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--data-dir {folder}: {error.strerror}") from None


def _check_address(host: str, port: int) -> None:
    """Refuse an address that cannot be listened on before anything is made or printed."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}:{port} ({getattr(error, 'strerror', None) or error})") from None


def _open(options: argparse.Namespace, must_exist: bool = False) -> Database:
    """The database of the command line, with the newest schema; prints a line if it is new.

    Raises:
        UserError: if it cannot be opened, or the command needs stored data and there is no database.
    """
    file = _sqlite_file(options)
    is_new = file is not None and not file.exists()
    if is_new and must_exist:
        raise UserError(f"there is no database {file}: set --data-dir or --database")
    if options.database is None:
        _make_folder(options.data_dir)
    database = Database(_database_url(options))
    database.upgrade()
    if is_new:
        print(f"new database: {file}", file=sys.stderr)
    return database


def _database_url(options: argparse.Namespace) -> str:
    return options.database or sqlite_url(options.data_dir)


def _sqlite_file(options: argparse.Namespace) -> Path | None:
    """The file of the database, if it is one."""
    kind, _, path = _database_url(options).partition(":///")
    return Path(path).absolute() if kind == "sqlite" and path else None


def _serve(options: argparse.Namespace) -> None:
    import uvicorn

    from annotation_ui.app import create_app

    _check_address(options.host, options.port)
    os.umask(0o077)  # uploads and exports, too, are for the owner alone
    _open(options).close()
    _make_folder(options.data_dir)
    settings = Settings(
        _database_url(options), options.data_dir, options.lease_minutes, options.session_hours, https=options.https
    )
    services = make_services(settings)
    password = services.auth.first_lead()
    if password is not None:
        print(f"First start: sign in as  lead  with the password  {password}  (shown only now)", flush=True)
    print(f"Labeling app: http://{options.host}:{options.port}", flush=True)
    uvicorn.run(
        create_app(services),
        host=options.host,
        port=options.port,
        log_level="warning",
        server_header=False,
        proxy_headers=options.https,  # without a proxy, a caller on this machine could name any address as its own
    )


def _create_user(options: argparse.Namespace) -> None:
    print(Auth(_open(options)).create_user(options.name, options.role))


def _activate_user(options: argparse.Namespace) -> None:
    auth = Auth(_open(options, must_exist=True))
    if options.role:
        auth.set_role(options.name, options.role)
    auth.set_active(options.name, True)
    print(f"{options.name} can sign in")


def _deactivate_user(options: argparse.Namespace) -> None:
    Auth(_open(options, must_exist=True)).set_active(options.name, False)
    print(f"{options.name} cannot sign in")


def _list_users(options: argparse.Namespace) -> None:
    with _open(options, must_exist=True).read() as session:
        users = session.scalars(select(User).order_by(User.name)).all()
    _print_table([{"name": user.name, "role": user.role, "active": user.active} for user in users])


def _list_batches(options: argparse.Namespace) -> None:
    with _open(options, must_exist=True).read() as session:
        rows = progress(session)
    _print_table([{key: row[key] for key in ("batch", "task", "open", "items", "done", "slots", "stuck")} for row in rows])


def _print_table(rows: list[Json]) -> None:
    """Print rows in columns that are separated by tabs."""
    for row in [list(rows[0]), *(row.values() for row in rows)] if rows else []:
        print(*({True: "yes", False: "no"}.get(cell, cell) if isinstance(cell, bool) else cell for cell in row), sep="\t")


def _open_or_close(options: argparse.Namespace) -> None:
    set_open(_open(options, must_exist=True), options.name, options.open)
    print(f"{options.name} is {'open' if options.open else 'closed'}")


def _backup(options: argparse.Namespace) -> None:
    file = _sqlite_file(options)
    if file is None:
        raise UserError("backup: PostgreSQL has pg_dump for this")
    if not file.exists():
        raise UserError(f"there is no database {file}: set --data-dir or --database")
    Database(_database_url(options)).backup(options.file)
    print(f"{file} copied to {options.file}")


def _reset_password(options: argparse.Namespace) -> None:
    print(Auth(_open(options, must_exist=True)).set_password(options.name))


def _import(options: argparse.Namespace) -> None:
    database = _open(options)
    chosen = {name: getattr(options, name) for name in ("attention_every", *(each.name for _, each in task_settings()))}
    with database.write() as session:
        rule_sets.store_shipped(session)
        rule_set = options.rules
        if rule_set and rule_set.endswith((".yaml", ".yml")):
            rule_set = rule_sets.store(session, rule_sets.read(Path(rule_set))).name
    batch = NewBatch(
        name=options.name or options.file.stem,
        task=options.task,
        overlap=options.overlap,
        priority=options.priority,
        rule_set=rule_set,
        settings={name: value for name, value in chosen.items() if value not in (None, False)},
        labelers=tuple(options.labeler),
    )
    count = import_file(database, batch, options.file)
    print(f"{count} items in batch {batch.name}")


def _export(options: argparse.Namespace) -> None:
    selection = Selection(
        record=options.record,
        aggregated=options.aggregated,
        since=options.since,
        batches=tuple(options.batch),
        include_gold=options.include_gold,
        all_tied=options.all_tied,
        preferences=options.preferences,
    )
    manifest = export(_open(options, must_exist=True), selection, options.file)
    print(f"{manifest['rows']} rows in {options.file}; what is in it: {options.file}.manifest.json")


def _parse_time(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a time such as 2026-01-31T12:00") from None


def _migrate(options: argparse.Namespace) -> None:
    database = _open(options, must_exist=options.down is not None)
    if options.down:
        database.downgrade(options.down)
    print(f"database at revision {database.revisions()[0]}")


if __name__ == "__main__":
    sys.exit(main())
