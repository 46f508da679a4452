import socket

import pytest
from sqlalchemy import select

from align.cli import main as align_command
from annotation_ui.cli import _parser, main
from annotation_ui.server.auth import Auth
from annotation_ui.store.database import Database, sqlite_url
from annotation_ui.store.schema import Batch
from tests.annotation_ui.running import stored
from tests.files import write_rows


@pytest.fixture
def run(tmp_path, capsys):
    """`run(*words)`: (exit code, stdout and stderr) of the command in a folder; a traceback fails the test."""

    def run_command(*words, folder=tmp_path):
        code = main(["--data_dir", str(folder), *words])  # an underscore is read as a hyphen
        streams = capsys.readouterr()
        return code, streams.out + streams.err

    return run_command


def test_the_command_line(run, tmp_path):
    (tmp_path / "s.jsonl").write_text('{"prompt": "p", "responses": ["a", "b"]}\n')
    (tmp_path / "own.yaml").write_text("name: own\nrules: [{id: a, text: b}]")
    assert run("migrate")[0] == 0
    assert len(run("create-user", "ann")[1].strip()) >= 10
    samples = ("import", str(tmp_path / "s.jsonl"), "--task", "rank", "--labeler")
    assert run(*samples, "nobody") == (2, "align annotate: no user 'nobody'\n")
    assert run(*samples, "ann") == (0, "1 item in batch s\n")
    rules = ("--task", "rules", "--name", "r", "--rules", str(tmp_path / "own.yaml"))
    assert run("import", str(tmp_path / "s.jsonl"), *rules) == (0, "2 items in batch r\n")
    code, printed = run("export", "rankings", str(tmp_path / "out.jsonl"), "--since", "2026-01-01")
    assert (code, printed.split()[0]) == (0, "0")
    assert run("export", "rankings", str(tmp_path / "out.exe"))[0] == 2
    assert run("import", str(tmp_path / "none.jsonl"), "--task", "rank", "--name", "n") == (
        2,
        f"align annotate: {tmp_path / 'none.jsonl'}: No such file or directory\n",
    )
    assert run("--database", "mysql://x/y", "migrate")[0] == 2


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--port", "99999"], "cannot listen on 127.0.0.1:99999 (bind(): port must be 0-65535.)"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--database", "sqlite:///FOLDER/bad.db"], "database sqlite:///FOLDER/bad.db: file is not a database"),
        (["--database", "sqlite:///FOLDER/no/a.db"], "database sqlite:///FOLDER/no/a.db: unable to open database file"),
        (["--database", "sqlite:///FOLDER", "migrate"], "database sqlite:///FOLDER: unable to open database file"),
        (["--database", f"sqlite:////{'x' * 300}", "migrate"], f"/{'x' * 300}: File name too long"),
        (["--database", "postgresql://host:port/name", "migrate"],
         "'postgresql://host:port/name'"),
        (["--data-dir", "FOLDER/bad.db", "migrate"], "--data-dir FOLDER/bad.db: File exists"),
        (["reset-password", "ann"], "no database FOLDER/annotations.db"),
        (["export", "pairs", "x.jsonl"],
         "no database FOLDER/annotations.db"),
        (["export", "pairs", "x.jsonl", "--since", "never"],
         "argument --since: invalid time 'never'"),
        (["--proxy-user-header", "X-User"], "--proxy-user-header and --proxy-address"),
        (["--proxy-address", "10.0.0.1"], "--proxy-user-header and --proxy-address"),
        (["--proxy-user-header", "X User", "--proxy-address", "10.0.0.1"],
         "--proxy-user-header 'X User'"),
        *((["--proxy-user-header", "X-User", "--proxy-address", address],
           f"--proxy-address '{address}'")
          for address in ("proxy.example.org", "10.0.0.0/8")),
        (["backup", "x.db"], "no database FOLDER/annotations.db"),
        *((["--database", "postgresql://user@host/name", command, "x.db"],
           program)
          for command, program in (("backup", "pg_dump"), ("restore", "pg_restore"))),
        (["hours", "pay.txt"], "pay.txt: the name must end in .csv"),
        (["hours", "--since", "March"], "argument --since: invalid day 'March'"),
        *((["hours", "--gap-minutes", gap], f"--gap-minutes {gap}: must be 0 or more") for gap in ("-1", "nan")),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(run, words, line, tmp_path):
    (tmp_path / "bad.db").write_bytes(b"no database, but longer than the header of one" * 10)
    words = [word.replace("FOLDER", str(tmp_path)) for word in words]
    code, printed = run(*words)
    assert (code, printed.count("\n")) == (2, 1)
    assert printed.startswith("align annotate: ")
    assert line.replace("FOLDER", str(tmp_path)) in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.db"]


def test_users_are_let_in_again_and_exports_say_what_is_wrong(run, tmp_path):
    new = tmp_path / "new"
    code, printed = run("create-user", "ann", folder=new)
    password, line = printed.splitlines()
    assert (code, line) == (0, f"new database: {new / 'annotations.db'}")
    assert len(password) >= 10
    assert len(run("create-user", "bob", folder=new)[1].splitlines()) == 1
    database = Database(f"sqlite:///{tmp_path / 'new' / 'annotations.db'}")
    auth = Auth(database)
    auth.set_active("ann", False)
    assert auth.sign_in("ann", password, "here") is None
    assert run("activate-user", "ann", "--role", "lead", folder=new) == (0, "ann can sign in\n")
    signed_in = auth.signed_in(auth.sign_in("ann", password, "here"))
    assert signed_in.user.role == "lead"
    assert run("activate-user", "carl", folder=new)[0] == 2
    database.close()
    for words, line in (
        (("rankings", str(tmp_path / "x.jsonl"), "--batch", "nosuch"), "no batch 'nosuch'"),
        (("rankings", str(tmp_path)), f"{tmp_path}: the name must end in .jsonl, .parquet, .csv"),
        (("rankings", "/proc/x.jsonl"), "/proc/x.jsonl: cannot be written (No such file or directory)"),
    ):
        assert run("export", *words, folder=new) == (2, f"align annotate: {line}\n")


def test_a_port_that_is_taken_is_refused_before_anything_is_made(tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit, match="2"):
        align_command(["annotate", "--data-dir", str(tmp_path), "--port", str(taken.getsockname()[1])])
    printed = capsys.readouterr()
    assert printed.err.startswith("align annotate: cannot listen on 127.0.0.1:")
    assert (len(printed.err.splitlines()), printed.out, list(tmp_path.iterdir())) == (1, "", [])


def test_users_and_batches_on_the_shell(run, tmp_path):
    rows = [{"prompt": "p", "responses": ["a", "b"]}, {"prompt": "q", "responses": ["a", "b"], "gold": {"ranks": [1, 2]}}]
    write_rows(tmp_path / "s.jsonl", rows)
    assert run("create-user", "ann")[0] == run("create-user", "boss", "--role", "lead")[0] == 0
    assert run("create-user", "Ann")[0] == 2  # nobody could tell the two apart
    for every, code in (("0", 2), ("-3", 2), ("3", 0)):
        assert run("import", str(tmp_path / "s.jsonl"), "--task", "rank", "--attention-every", every)[0] == code
    assert run("deactivate-user", "ann") == (0, "ann cannot sign in\n")
    assert run("deactivate-user", "boss")[0] == 2  # the only lead
    assert run("users") == (0, "name\trole\tactive\nann\tlabeler\tno\nboss\tlead\tyes\n")
    assert run("activate-user", "ann")[0] == 0
    head = "batch\ttask\topen\titems\tdone\tslots\tstuck\n"
    assert run("batches") == (0, f"{head}s\trank\tyes\t1\t0\t1\t0\n")
    assert run("close-batch", "s") == (0, "s is closed\n")
    assert run("close-batch", "none")[0] == 2
    assert run("batches") == (0, f"{head}s\trank\tno\t1\t0\t1\t0\n")
    assert run("open-batch", "s") == (0, "s is open\n")
    database = Database(sqlite_url(tmp_path))
    assert stored(database, select(Batch.settings)) == [{"attention_every": 3}]
    database.close()
    code, printed = run("forget", "ann")
    assert (code, " labeler-" in printed.splitlines()[0]) == (0, True)
    assert "0 judgments" in printed
    assert run("forget", "ann") == (2, "align annotate: no user 'ann'\n")


def test_tokens_on_the_shell(run, tmp_path):
    assert f"no database {tmp_path / 'annotations.db'}" in run("token", "list")[1]
    code, printed = run("token", "create", "ci", "--scope", "export", "--scope", "read")
    token = printed.splitlines()[0]
    assert (code, token.startswith("align_"), len(token)) == (0, True, 49)
    assert run("token", "create", "ci", "--scope", "read")[0] == 2
    assert run("token", "create", "x")[1] == "align annotate: the following arguments are required: --scope\n"
    head, row = run("token", "list")[1].splitlines()
    assert head.split("\t") == ["token", "scopes", "made by", "valid", "added", "last used"]
    assert row.split("\t")[:4] == ["ci", "read, export", "shell", "yes"]
    assert run("token", "revoke", "ci")[0] == 0
    assert run("token", "list")[1].splitlines()[1].split("\t")[3] == "no"
    trail = [line.split("\t")[1:] for line in run("audit")[1].splitlines()[1:]]
    assert trail == [["revoke token", "shell", "token ci"], ["create token", "shell", "scopes read,export, token ci"]]
    assert token not in run("audit", "--limit", "1")[1]


def test_options_of_the_server_stand_before_or_behind_the_command():
    parse = _parser().parse_args
    assert parse(["--port", "1"]).port == parse(["--port", "1", "serve"]).port == parse(["serve", "--port", "1"]).port == 1
    assert parse(["--port", "1", "serve", "--port", "2"]).port == 2
    assert parse(["serve"]).port == parse([]).port == 7860
