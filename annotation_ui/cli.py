"""`align annotate`: start the labeling app, or manage its database from the shell."""

import argparse
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from sqlalchemy.exc import DatabaseError

from align.core.errors import UserError, counted
from annotation_ui.cli_common import (
    Parser,
    add_command,
    database_url,
    make_folder,
    open_database,
    parse_time,
    print_table,
    sqlite_file,
)
from annotation_ui.cli_users import add_user_commands
from annotation_ui.reports.export import Selection, export, records
from annotation_ui.reports.overview import progress
from annotation_ui.reports.task_facts import read_facts
from annotation_ui.server.proxy import Peer, proxy_sign_in
from annotation_ui.server.root_path import checked_root_path
from annotation_ui.server.services import Settings, make_services
from annotation_ui.store import rule_sets
from annotation_ui.store.backup import back_up, restore
from annotation_ui.store.batches import set_open
from annotation_ui.store.database import DATA_DIR, database_error_line
from annotation_ui.store.importing import NewBatch, import_file
from annotation_ui.tasks import TASKS, task_settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command (default: serve). Print a user error as one line on stderr and return exit code 2."""
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


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="align annotate", description=__doc__)
    parser.add_argument("--database", metavar="URL", help="sqlite:///file.db or postgresql://user@host/name")
    parser.add_argument("--data-dir", type=Path, default=DATA_DIR, help="folder of the SQLite database")
    _add_server_options(parser)
    parser.set_defaults(run=_serve)
    commands = parser.add_subparsers(title="commands")

    serve = commands.add_parser("serve", help="start the app (default); accepts the server options")
    _add_server_options(serve, only_if_given=True)
    add_user_commands(commands)
    _add_batch_commands(commands)
    _add_export_command(commands)
    _add_database_commands(commands)
    return parser


def _add_server_options(parser: argparse.ArgumentParser, only_if_given: bool = False) -> None:
    """Add the server options. With `only_if_given`, an absent option keeps the value given before the command."""

    def add(option: str, default: Any, text: str | None = None, **more: Any) -> None:
        parser.add_argument(option, default=argparse.SUPPRESS if only_if_given else default, help=text, **more)

    add("--host", "127.0.0.1")
    add("--port", 7860, type=int)
    add("--lease-minutes", 30, "minutes until an idle labeler's item is reassigned", type=float)
    add("--session-hours", 12, "hours until an idle session ends", type=float)
    add("--https", False, "send cookies over https only, behind a TLS proxy", action="store_true")
    add("--root-path", "", "path below which a proxy serves the app, such as /labels", metavar="PATH")
    add("--proxy-user-header", "", "header in which a proxy names the signed-in user", metavar="NAME")
    add("--proxy-address", "", "IP address of that proxy; the header is ignored from other addresses", metavar="IP")


def _add_batch_commands(commands: Any) -> None:
    batch = add_command(commands, "import", _import, "import prompts or samples (JSON Lines) as a batch")
    batch.add_argument("file", type=Path)
    batch.add_argument("--task", choices=tuple(TASKS), required=True)
    batch.add_argument("--name", help="batch name (default: the file's name)")
    batch.add_argument("--labelers-per-item", type=int, default=1, help="labelers per item")
    batch.add_argument("--priority", type=int, default=0, help="batches with a higher priority come first")
    batch.add_argument(
        "--labeler", action="append", default=[], help="assign the batch to this labeler only; may be repeated"
    )
    batch.add_argument("--attention-every", type=int, metavar="N", help="one of N items is an attention item (default: 10)")
    batch.add_argument("--rules", help="rule set: a name or a file")
    for task, setting in task_settings():
        kind: dict[str, Any] = {"action": "store_true"} if setting.kind is bool else {"type": setting.kind}
        batch.add_argument(f"--{setting.name.replace('_', '-')}", help=f"{setting.help} (task {task.name})", **kind)
    add_command(commands, "batches", _list_batches, "list batches and their progress")
    add_command(commands, "open-batch", _open_or_close, "open a batch: assign its items", "name").set_defaults(open=True)
    closed = "close a batch: stop assigning its items"
    add_command(commands, "close-batch", _open_or_close, closed, "name").set_defaults(open=False)


def _add_database_commands(commands: Any) -> None:
    backup = add_command(commands, "backup", _backup, "copy the SQLite database, even while the server runs")
    backup.add_argument("file", type=Path)
    restored = "replace the SQLite database by a backup; stop the app first"
    add_command(commands, "restore", _restore, restored).add_argument("file", type=Path)
    add_command(commands, "migrate", _migrate, "upgrade the database schema")


def _add_export_command(commands: Any) -> None:
    command = add_command(commands, "export", _export, "export judgments and a manifest")
    command.add_argument("record", choices=tuple(records()))
    command.add_argument("file", type=Path, help="output file: .jsonl, .parquet, or .csv for spreadsheets")
    command.add_argument("--aggregated", action="store_true", help="one row per item instead of one per labeler")
    command.add_argument("--since", type=parse_time, metavar="TIME", help="only judgments since this time (ISO 8601)")
    only = "only this batch; may be repeated"
    command.add_argument("--batch", dest="batches", metavar="BATCH", action="append", default=[], help=only)
    command.add_argument("--include-gold", action="store_true", help="include items with known answers")
    command.add_argument("--times", action="store_true", help="add the time and the active seconds of each judgment")
    command.add_argument(
        "--preferences",
        action="store_true",
        help="add preference probabilities to aggregated rankings, for soft_targets",
    )


def _check_address(host: str, port: int) -> None:
    """Raise UserError if the server cannot listen on the address. Called before anything is created or printed."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on {host}:{port} ({getattr(error, 'strerror', None) or error})") from None


def _serve(options: argparse.Namespace) -> None:
    import uvicorn

    from annotation_ui.app import create_app

    _check_address(options.host, options.port)
    proxy = proxy_sign_in(options.proxy_user_header, options.proxy_address)
    os.umask(0o077)  # makes new files, including uploads and exports, private
    open_database(options).close()
    make_folder(options.data_dir)
    settings = Settings(
        database_url(options),
        options.data_dir,
        options.lease_minutes,
        options.session_hours,
        options.https,
        proxy,
        checked_root_path(options.root_path),
    )
    services = make_services(settings)
    password = services.auth.first_lead()
    if password is not None:
        print(f"First start: sign in as  lead  with the password  {password}  (shown only now)", flush=True)
    print(f"Labeling app: http://{options.host}:{options.port}{settings.root_path}", flush=True)
    threading.Thread(target=read_facts, args=(services.database,), daemon=True).start()  # so that the lead's page opens fast
    uvicorn.run(
        Peer(create_app(services), options.https),
        host=options.host,
        port=options.port,
        log_level="warning",
        server_header=False,
        proxy_headers=False,  # handled by `Peer`
    )


def _list_batches(options: argparse.Namespace) -> None:
    with open_database(options, must_exist=True).read() as session:
        rows = progress(session)
    print_table([{key: row[key] for key in ("batch", "task", "open", "items", "done", "slots", "stuck")} for row in rows])


def _open_or_close(options: argparse.Namespace) -> None:
    set_open(open_database(options, must_exist=True), options.name, options.open)
    print(f"{options.name} is {'open' if options.open else 'closed'}")


def _backup(options: argparse.Namespace) -> None:
    file = _file_to_copy(options, "pg_dump")
    if not file.exists():
        raise UserError(f"no database {file}; set --data-dir or --database")
    back_up(file, options.file)
    print(f"{file} copied to {options.file}")


def _restore(options: argparse.Namespace) -> None:
    file = _file_to_copy(options, "pg_restore")
    if options.database is None:
        make_folder(options.data_dir)
    kept = restore(options.file, file)
    print(f"{options.file} restored to {file}" + (f"; the old database is {kept}" if kept else ""))


def _file_to_copy(options: argparse.Namespace, program: str) -> Path:
    """Return the file of the SQLite database. For PostgreSQL, raise UserError that recommends `program`."""
    file = sqlite_file(options)
    if file is None:
        raise UserError(f"only SQLite databases are supported; use {program} for PostgreSQL")
    return file


def _import(options: argparse.Namespace) -> None:
    database = open_database(options)
    chosen = {name: getattr(options, name) for name in ("attention_every", *(each.name for _, each in task_settings()))}
    with database.write() as session:
        rule_sets.store_shipped(session)
        rule_set = options.rules
        if rule_set and rule_set.endswith((".yaml", ".yml")):
            rule_set = rule_sets.store(session, rule_sets.read(Path(rule_set))).name
    batch = NewBatch(
        name=options.name or options.file.stem,
        task=options.task,
        labelers_per_item=options.labelers_per_item,
        priority=options.priority,
        rule_set=rule_set,
        settings={name: value for name, value in chosen.items() if value is not None and value is not False},
        labelers=tuple(options.labeler),
    )
    count = import_file(database, batch, options.file)
    print(f"{counted(count, 'item')} in batch {batch.name}")


def _export(options: argparse.Namespace) -> None:
    selection = Selection(**{field.name: getattr(options, field.name) for field in fields(Selection)})
    manifest = export(open_database(options, must_exist=True), selection, options.file)
    print(f"{manifest['rows']} rows in {options.file}; manifest: {options.file}.manifest.json")


def _migrate(options: argparse.Namespace) -> None:
    print(f"database at revision {open_database(options).revisions()[0]}")


if __name__ == "__main__":
    sys.exit(main())
