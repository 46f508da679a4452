"""No request makes Gradio open a file of the server: not to read it, and not to drop the locks of the database in use."""

import json
import re
import secrets
import subprocess
import sys

import pytest
from sqlalchemy import select

from annotation_ui.server.services import Settings, make_services
from annotation_ui.store.schema import Judgment
from annotation_ui.tasks import task_settings
from tests.annotation_ui.running import ROOT, Client, Server, stored


def file_data(path):
    """A value that Gradio takes for an uploaded file, whichever field it comes in."""
    return {"path": str(path), "orig_name": "x.jsonl", "size": 1, "meta": {"_type": "gradio.FileData"}}


def call_event(boss, number, data):
    """Everything that the server answers to one event of the lead's page."""
    session = secrets.token_hex(8)
    status, _, text = boss(
        "POST", "/lead/gradio_api/queue/join", {"data": data, "fn_index": number, "session_hash": session, "trigger_id": 1}
    )
    if status != 200:
        return text
    return text + boss("GET", f"/lead/gradio_api/queue/data?session_hash={session}")[2]


def attack_with(boss, path, step=1):
    """What the server answers to a request for the file through every event, or some, and every path of Gradio."""
    answers = []
    for event in json.loads(boss("GET", "/lead/config")[2])["dependencies"][::step]:
        if event["backend_fn"] and event["inputs"]:
            answers.append(call_event(boss, event["id"], [file_data(path) for _ in event["inputs"]]))
            answers.append(call_event(boss, event["id"], [[{"inner": file_data(path)}] for _ in event["inputs"]]))
    for name in ("save", "import_batch", "run_action", "predict"):
        body = {"data": [file_data(path)] * 10}
        answers += [boss("POST", f"/lead/gradio_api/{way}/{name}", body)[2] for way in ("call", "call/v2", "run", "api")]
    return "".join(answers)


def gradio_paths(folder, value):
    """(method, path) of every route of Gradio, with a value in each of its parameters."""
    from annotation_ui.app import create_app  # imports Gradio

    services = make_services(Settings(f"sqlite:///{folder / 'routes.db'}", folder))
    services.database.upgrade()
    found = []
    for mount in create_app(services).routes:
        for route in endpoints(getattr(mount, "routes", [])):
            path = route.path_format
            for parameter in route.param_convertors:
                path = re.sub(rf"\{{{parameter}(:\w+)?\}}", lambda _: value, path)
            found += [(method, f"{mount.path}{path}") for method in route.methods]
    services.database.close()
    return found


def endpoints(routes):
    """The routes with a method, also of included routers."""
    for route in routes:
        if hasattr(route, "original_router"):
            yield from endpoints(route.original_router.routes)
        elif getattr(route, "methods", None):
            yield route


@pytest.mark.parametrize(
    "every", [pytest.param(False, marks=pytest.mark.part), pytest.param(True, marks=pytest.mark.slow)], ids=["files", "all"]
)
def test_no_path_or_event_of_gradio_gives_a_file_away(every, boss, ann, tmp_path):
    """In any run through the paths that name files and some events, in the full run through all."""
    secret = boss.server.folder / "secret.jsonl"
    secret.write_text("never-to-be-seen")
    paths = gradio_paths(tmp_path, str(secret))
    assert len(paths) > 100  # both pages
    assert any("file=" in path for _, path in paths)
    for method, path in paths:
        if not every and not re.search("file|path|proxy|upload|stream", path):
            continue
        for form in {path, path.replace("//", "/")}:
            if "/heartbeat/" in form or form.endswith("/queue/data"):
                continue  # streams without an end; no file can be named there
            for client in (boss, ann):
                body = {"data": [file_data(secret)], "fn_index": 0, "session_hash": "x", "component_id": 1, "fn_name": "ls"}
                status, _, text = client(method, form, body if method == "POST" else None)
                assert status < 500, (method, form, text[:300])
                assert "never-to-be-seen" not in text, (method, form)
    assert "never-to-be-seen" not in attack_with(boss, secret, 1 if every else 6)
    attack_with(boss, f"{boss.server.url}/healthz", 1 if every else 9)  # an address is not fetched, either
    assert [path for path in (boss.server.folder / "tmp").rglob("*") if path.is_file()] == []


def test_no_answer_may_be_read_by_a_page_of_another_server(boss):
    for path in ("/lead/config", "/config", "/lead/", "/api/tasks", "/lead/gradio_api/startup-events"):
        for origin in ("http://localhost:3000", "http://127.0.0.1:9", "null", "https://evil.example"):
            headers = boss("GET", path, None, {"Origin": origin, "Host": f"localhost:{boss.server.port}"})[1]
            assert not [name for name in headers if name.startswith("access-control")], (path, origin)


def test_uploads_and_exports_leave_no_copy_and_are_the_owners_alone(boss):
    uploads = boss.server.folder / "uploads"
    status, _, text = boss("POST", "/lead/uploads?name=rows.jsonl", '{"prompt": "p", "responses": ["a", "b"]}\n')
    assert status == 200, text
    key = json.loads(text)["upload"]
    (stored,) = (uploads / key).iterdir()
    assert (stored.name, stored.stat().st_mode & 0o777) == ("rows.jsonl", 0o600)
    events = json.loads(boss("GET", "/lead/config")[2])["dependencies"]
    (event,) = [event["id"] for event in events if event["api_name"] == "import_batch"]
    of_tasks = [{bool: False, int: None, str: ""}[setting.kind] for _, setting in task_settings()]
    fields = [key, f"sent-{key}", "rank", None, 1, 0, 10, [], *of_tasks]
    assert "Imported 1 item." in call_event(boss, event, fields)
    assert list(uploads.iterdir()) == []
    assert "no longer exists" in call_event(boss, event, fields)
    for name in ("..", "a/b", "", "x" * 300, "a%00b", "a%0Ab"):
        assert boss("POST", f"/lead/uploads?name={name}", "x")[0] == 422, name
    assert list(uploads.iterdir()) == []

    (event,) = [event["id"] for event in events if event["api_name"] == "write_export"]
    answer = call_event(boss, event, ["rankings", "jsonl", [], False, False, False, True, None])
    exports = list((boss.server.folder / "exports").iterdir())
    assert exports
    for path in exports:
        assert path.stat().st_mode & 0o777 == 0o600
        assert f"exports/{path.name}" in answer or len(exports) > 2
        assert boss("GET", f"/lead/exports/{path.name}")[2] == path.read_text()
    for name in ("..%2fannotations.db", "annotations.db", f"..%2fuploads%2f{key}", "x.jsonl"):
        assert boss("GET", f"/lead/exports/{name}")[0] in (400, 404), name
    folder = boss.server.folder
    for path in (folder / "annotations.db", f"{folder}/exports/../annotations.db", "/etc/passwd", ROOT / "pyproject.toml"):
        assert boss("GET", f"/lead/gradio_api/file={path}")[0] in (400, 403, 404), path
    assert [path for path in (boss.server.folder / "tmp").rglob("*") if path.is_file()] == []
    for suffix in ("", "-wal", "-shm"):
        assert (boss.server.folder / f"annotations.db{suffix}").stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_acknowledged_judgments_survive_attacks_and_a_second_process_and_a_kill(tmp_path):
    """Opening the database in the server's process drops SQLite's locks; the next process would then delete its log."""
    database = tmp_path / "annotations.db"
    database.touch(mode=0o644)
    server = Server(f"sqlite:///{database}", tmp_path)
    server.add_batch(30)
    acknowledged = []
    with server.started():
        ann, boss = Client(server, server.token("ann")), Client(server, server.token("boss", "lead"))

        def submit(count):
            acknowledged.extend(ann.submit()["request_id"] for _ in range(count))

        def second_process(*words):
            command = [sys.executable, "-m", "annotation_ui.cli", "--database", server.database_url, *words]
            subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.DEVNULL)

        server.database.close()  # this process must not be the one that holds the locks
        submit(10)
        attack_with(boss, database)
        second_process("export", "rankings", "one.jsonl")
        submit(10)
        attack_with(boss, f"{database}-shm")
        second_process("create-user", "carl")
        submit(10)
        server.kill()
        server.start()
        assert stored(server.database, select(Judgment.request_id).order_by(Judgment.id)) == acknowledged
    assert database.stat().st_mode & 0o777 == 0o600
