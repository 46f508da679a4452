"""Helpers shared by the commands of `align annotate`: parser, database, tables, times."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NoReturn

from align.core.errors import UserError
from annotation_ui.store.database import Database, sqlite_url
from annotation_ui.tasks import Json


class Parser(argparse.ArgumentParser):
    """Parser with one-line errors, without usage. It accepts `--data_dir` for `--data-dir`."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([re.sub("^--[^=]*", _dashed, word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _dashed(option: re.Match[str]) -> str:
    return option[0].replace("_", "-")


def add_command(commands: Any, name: str, run: Callable[..., None], text: str, *arguments: str) -> argparse.ArgumentParser:
    """Add a command with string arguments. `run(options)` executes it."""
    command: argparse.ArgumentParser = commands.add_parser(name, help=text)
    for argument in arguments:
        command.add_argument(argument)
    command.set_defaults(run=run)
    return command


def make_folder(folder: Path) -> None:
    """Create a folder, or raise a UserError that names `--data-dir`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--data-dir {folder}: {error.strerror}") from None


def open_database(options: argparse.Namespace, must_exist: bool = False) -> Database:
    """Open the database named on the command line and upgrade its schema. Print a line if it is new.

    Raises:
        UserError: If the database cannot be opened, or `must_exist` is set and there is no database.
    """
    file = sqlite_file(options)
    is_new = file is not None and not file.exists()
    if is_new and must_exist:
        raise UserError(f"no database {file}; set --data-dir or --database")
    if options.database is None:
        make_folder(options.data_dir)
    database = Database(database_url(options))
    database.upgrade()
    if is_new:
        print(f"new database: {file}", file=sys.stderr)
    return database


def database_url(options: argparse.Namespace) -> str:
    """Return the URL of the database named on the command line."""
    return options.database or sqlite_url(options.data_dir)


def sqlite_file(options: argparse.Namespace) -> Path | None:
    """Return the file of a SQLite database, or None for PostgreSQL."""
    kind, _, path = database_url(options).partition(":///")
    return Path(path).absolute() if kind == "sqlite" and path else None


def print_table(rows: list[Json]) -> None:
    """Print rows as tab-separated columns, with times in UTC."""
    if rows:
        print(*rows[0], sep="\t")
    for row in rows:
        print(*(_cell(*each) for each in row.items()), sep="\t")


def _cell(column: str, value: Any) -> Any:
    if column in ("at", "added", "last used"):
        return "" if value is None else datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%d %H:%M:%S")
    return ("no", "yes")[value] if isinstance(value, bool) else value


def parse_time(text: str) -> float:
    """Parse a time such as 2026-01-31T12:00 into seconds since 1970."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid time {text!r}: use a format such as 2026-01-31T12:00") from None


def parse_day(text: str) -> date:
    """Parse a day such as 2026-11-01."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid day {text!r}: use a format such as 2026-11-01") from None
