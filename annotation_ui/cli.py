"""`align annotate`: start the labelling app, or work on its database from the shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from align.errors import UserError
from annotation_ui import rule_sets
from annotation_ui.auth import Auth
from annotation_ui.database import Database
from annotation_ui.export import RECORDS, Selection, export
from annotation_ui.importing import NewBatch, import_file
from annotation_ui.schema import ROLES, TASKS
from annotation_ui.services import Settings, make_services


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; without one, serve."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.data_dir.mkdir(parents=True, exist_ok=True)
        options.database = options.database or f"sqlite:///{options.data_dir / 'annotations.db'}"
        command: Callable[[argparse.Namespace], None] = options.run
        command(options)
    except UserError as error:
        print(f"align annotate: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="align annotate", description=__doc__)
    parser.add_argument("--database", metavar="URL", help="sqlite:///file.db or postgresql://user@host/name")
    parser.add_argument("--data-dir", type=Path, default=Path("runs/annotate"), help="where the SQLite file lies")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=7860)
    parser.add_argument("--lease-minutes", type=float, default=30, help="how long an idle labeler holds an item")
    parser.add_argument("--session-hours", type=float, default=12, help="how long an idle labeler stays signed in")
    parser.add_argument("--https", action="store_true", help="behind a proxy that speaks TLS: cookies over https only")
    parser.set_defaults(run=_serve)
    commands = parser.add_subparsers(title="commands")

    user = commands.add_parser("create-user", help="add a user; prints the password")
    user.add_argument("name")
    user.add_argument("--role", choices=ROLES, default="labeler")
    user.set_defaults(run=_create_user)

    password = commands.add_parser("reset-password", help="give a user a new password and print it")
    password.add_argument("name")
    password.set_defaults(run=_reset_password)

    batch = commands.add_parser("import", help="make a batch from prompts or samples (JSON Lines)")
    batch.add_argument("file", type=Path)
    batch.add_argument("--task", choices=TASKS, required=True)
    batch.add_argument("--name", help="of the batch (default: the file's name)")
    batch.add_argument("--overlap", type=int, default=1, help="labelers for each item")
    batch.add_argument("--priority", type=int, default=0, help="higher is given out first")
    batch.add_argument("--rules", help="name of a rule set, or a rule file")
    batch.add_argument("--one-rule-each", action="store_true", help="one item for each rule of each response")
    batch.add_argument("--checkpoint", help="model to talk to (task probe)")
    batch.add_argument("--min-words", type=int, help="length hint (task demonstrate)")
    batch.add_argument("--max-words", type=int, help="length hint (task demonstrate)")
    batch.set_defaults(run=_import)

    out = commands.add_parser("export", help="write judgments for training, with a manifest")
    out.add_argument("record", choices=tuple(RECORDS))
    out.add_argument("file", type=Path, help="name.jsonl, name.parquet, or name.csv for a spreadsheet")
    out.add_argument("--aggregated", action="store_true", help="one row an item instead of one a labeler")
    out.add_argument("--since", type=_moment, metavar="TIME", help="only judgments from then on (ISO 8601)")
    out.add_argument("--batch", action="append", default=[], help="only this batch (may be given again)")
    out.add_argument("--include-gold", action="store_true", help="gold items too")
    out.add_argument("--all-tied", action="store_true", help="rankings that tie all responses too (training refuses them)")
    out.set_defaults(run=_export)

    migrate = commands.add_parser("migrate", help="bring the database to this version's schema")
    migrate.add_argument("--down", metavar="REVISION", help="go back instead; base removes everything")
    migrate.set_defaults(run=_migrate)
    return parser


def _open(options: argparse.Namespace) -> Database:
    database = Database(options.database)
    database.upgrade()
    return database


def _serve(options: argparse.Namespace) -> None:
    import uvicorn

    from annotation_ui.app import create_app

    _open(options).close()
    settings = Settings(
        options.database, options.data_dir, options.lease_minutes, options.session_hours, https=options.https
    )
    services = make_services(settings)
    password = services.auth.first_lead()
    if password is not None:
        print(f"First start: sign in as  lead  with the password  {password}  (shown only now)", flush=True)
    print(f"Labelling app: http://{options.host}:{options.port}", flush=True)
    uvicorn.run(create_app(services), host=options.host, port=options.port, log_level="warning", server_header=False)


def _create_user(options: argparse.Namespace) -> None:
    print(Auth(_open(options)).create_user(options.name, options.role))


def _reset_password(options: argparse.Namespace) -> None:
    print(Auth(_open(options)).set_password(options.name))


def _import(options: argparse.Namespace) -> None:
    database = _open(options)
    chosen = {
        "one_rule_each": options.one_rule_each or None,
        "checkpoint": options.checkpoint,
        "min_words": options.min_words,
        "max_words": options.max_words,
    }
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
        settings={name: value for name, value in chosen.items() if value is not None},
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
    )
    manifest = export(_open(options), selection, options.file)
    print(f"{manifest['rows']} rows in {options.file}; what is in it: {options.file}.manifest.json")


def _moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _migrate(options: argparse.Namespace) -> None:
    database = Database(options.database)
    if options.down:
        database.downgrade(options.down)
    else:
        database.upgrade()
    print(f"database at revision {database.revisions()[0]}")


if __name__ == "__main__":
    sys.exit(main())
