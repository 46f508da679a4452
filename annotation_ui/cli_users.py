"""Commands of `align annotate` for users, tokens, hours and the audit trail."""

import argparse
from pathlib import Path
from typing import Any

from sqlalchemy import select

from align.core.errors import UserError, counted
from annotation_ui.cli_common import add_command, open_database, parse_day, print_table
from annotation_ui.reports.hours import COLUMNS, GAP_S, hours
from annotation_ui.reports.row_files import to_csv, write_file
from annotation_ui.server.auth import Auth
from annotation_ui.store import audit
from annotation_ui.store.forget import forget
from annotation_ui.store.schema import USER_ROLES, User
from annotation_ui.store.tokens import SCOPES, Tokens


def add_user_commands(commands: Any) -> None:
    """Add the commands that manage users, tokens and hours."""
    user = add_command(commands, "create-user", _create_user, "add a user and print the password", "name")
    user.add_argument("--role", choices=USER_ROLES, default="labeler")
    add_command(commands, "reset-password", _reset_password, "set a new password and print it", "name")
    out = "sign a user out and block sign-in; judgments are kept"
    add_command(commands, "deactivate-user", _deactivate_user, out, "name")
    back = "let a deactivated or blocked user sign in again"
    activate = add_command(commands, "activate-user", _activate_user, back, "name")
    activate.add_argument("--role", choices=USER_ROLES, help="also change the role")
    worked = add_command(commands, "hours", _hours, "active hours and items per labeler and day (UTC)")
    worked.add_argument("file", type=Path, nargs="?", help="a .csv file (default: print a table)")
    worked.add_argument("--since", type=parse_day, metavar="DAY", help="first day, such as 2026-11-01")
    worked.add_argument("--until", type=parse_day, metavar="DAY", help="last day")
    worked.add_argument("--gap-minutes", type=float, default=GAP_S / 60, help="longest pause that counts as working time")
    erase = "replace a name by its pseudonym and blank the user's remarks; judgments are kept"
    add_command(commands, "forget", _forget, erase, "name")
    add_command(commands, "users", _list_users, "list users")
    _add_token_commands(commands)
    trail = add_command(commands, "audit", _list_audit_records, "list actions on tokens, data and users, newest first")
    trail.add_argument("--limit", type=int, default=100, help="maximum number of records")


def _add_token_commands(commands: Any) -> None:
    token = commands.add_parser("token", help="manage API tokens")
    actions = token.add_subparsers(title="actions", required=True)
    create = add_command(actions, "create", _create_token, "add a token and print it", "name")
    scopes = ", ".join(f"{scope} ({allows})" for scope, allows in SCOPES.items())
    create.add_argument("--scope", action="append", choices=tuple(SCOPES), required=True, help=f"{scopes}; may be repeated")
    add_command(actions, "revoke", _revoke_token, "revoke a token", "name")
    add_command(actions, "list", _list_tokens, "list tokens")


def _create_user(options: argparse.Namespace) -> None:
    print(Auth(open_database(options)).create_user(options.name, options.role))


def _activate_user(options: argparse.Namespace) -> None:
    auth = Auth(open_database(options, must_exist=True))
    if options.role:
        auth.set_role(options.name, options.role)
    auth.set_active(options.name, True)
    print(f"{options.name} can sign in")


def _deactivate_user(options: argparse.Namespace) -> None:
    Auth(open_database(options, must_exist=True)).set_active(options.name, False)
    print(f"{options.name} cannot sign in")


def _hours(options: argparse.Namespace) -> None:
    if options.file is not None and options.file.suffix.lower() != ".csv":
        raise UserError(f"{options.file}: the name must end in .csv")
    if not options.gap_minutes >= 0:
        raise UserError(f"--gap-minutes {options.gap_minutes:g}: must be 0 or more")
    with open_database(options, must_exist=True).read() as session:
        rows = hours(session, options.since, options.until, options.gap_minutes * 60)
    if options.file is None:
        print_table(rows)
    else:
        write_file(options.file, to_csv(rows, COLUMNS))
        print(f"{counted(len(rows), 'row')} in {options.file}")


def _forget(options: argparse.Namespace) -> None:
    pseudonym, blanked = forget(open_database(options, must_exist=True), options.name)
    print(f"{options.name} is now {pseudonym}; blanked the remarks of {blanked} judgments")
    print("judgments, demonstrations, corrections and conversations are kept under the pseudonym")


def _list_users(options: argparse.Namespace) -> None:
    with open_database(options, must_exist=True).read() as session:
        users = session.scalars(select(User).order_by(User.name)).all()
    print_table([{"name": user.name, "role": user.role, "active": user.active} for user in users])


def _reset_password(options: argparse.Namespace) -> None:
    print(Auth(open_database(options, must_exist=True)).set_password(options.name))


def _create_token(options: argparse.Namespace) -> None:
    print(Tokens(open_database(options)).create(options.name, options.scope))


def _revoke_token(options: argparse.Namespace) -> None:
    Tokens(open_database(options, must_exist=True)).revoke(options.name)
    print(f"revoked token {options.name}")


def _list_tokens(options: argparse.Namespace) -> None:
    print_table(Tokens(open_database(options, must_exist=True)).rows())


def _list_audit_records(options: argparse.Namespace) -> None:
    with open_database(options, must_exist=True).read() as session:
        print_table(audit.records(session, max(1, options.limit)))
