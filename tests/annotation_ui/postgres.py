"""A PostgreSQL cluster for the tests, created, started and stopped here on a free port of 127.0.0.1."""

import os
import pwd
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import event

from tests.ports import free_port


def binaries():
    """The newest server binaries of Debian's package, if it is installed."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return programs[-1].parent if programs else None


@contextmanager
def cluster():
    """The URL of a running server (without a database name); it refuses to run as root, so it runs as `postgres`."""
    bin_dir = binaries()
    assert bin_dir is not None
    folder = Path(tempfile.mkdtemp(prefix="align-pg-"))
    user = "postgres" if os.getuid() == 0 else pwd.getpwuid(os.getuid()).pw_name
    as_user = ["runuser", "-u", user, "--"] if os.getuid() == 0 else []
    if as_user:
        shutil.chown(folder, user)
    port, data = free_port(), folder / "data"

    def run(*command):
        subprocess.run([*as_user, *command], check=True, stdout=subprocess.DEVNULL, cwd=folder, timeout=120)

    run(str(bin_dir / "initdb"), "-D", str(data), "--auth=trust", "--username=align", "--no-instructions", "--no-sync")
    options = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c max_connections=200"
    options += " -c fsync=off -c full_page_writes=off"  # tests kill the app, never the machine under the database
    run(str(bin_dir / "pg_ctl"), "-D", str(data), "-w", "-l", str(folder / "log"), "-o", options, "start")
    try:
        yield f"postgresql://align@127.0.0.1:{port}"
    finally:
        run(str(bin_dir / "pg_ctl"), "-D", str(data), "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


def rows_read(database, action):
    """How many rows of tables and indexes the queries of `action` read; independent of the machine's load."""
    queries = []

    def record_query(_connection, _cursor, statement, parameters, *_):
        if statement.startswith("SELECT"):
            queries.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", record_query)
    try:
        action()
    finally:
        event.remove(database.engine, "before_cursor_execute", record_query)
    assert queries
    with database.engine.connect() as connection:
        plans = [
            connection.exec_driver_sql(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", parameters).scalar_one()[0]["Plan"]
            for statement, parameters in queries
        ]
    return sum(_rows(plan) for plan in plans)


def _rows(plan):
    own = (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
    return int(own) + sum(_rows(inner) for inner in plan.get("Plans", ()))
