import http.client
import json
import secrets

import pytest

from annotation_ui.server.guard import MAX_BODY
from annotation_ui.server.headers import COOKIE
from tests.annotation_ui.running import Client


def test_nobody_reads_or_changes_anothers_work_through_any_route(ann, bob):
    ann.server.add_batch(3)
    mine = ann.next()["assignment"]
    assert ann("PUT", f"/api/assignments/{mine}/draft", {"draft": {"state": {}}, "sequence": 1})[0] == 200
    handed = {"request_id": secrets.token_hex(8), "answer": {"ranks": [1, 2, 3, 4]}, "seconds": 1}
    for method, path, body in (
        ("PUT", f"/api/assignments/{mine}/draft", {"draft": {}, "sequence": 99}),
        ("POST", f"/api/assignments/{mine}/submit", handed),
        ("POST", f"/api/assignments/{mine}/skip", handed),
        ("POST", f"/api/assignments/{mine}/say", {"text": "hello"}),
        ("GET", f"/api/assignments/{mine}/transcript", None),
        ("POST", "/api/tasks/rank/undo", {"request_id": secrets.token_hex(8), "assignment": mine}),
    ):
        status, _, text = bob(method, path, body)
        assert status == 404, (path, text)
        assert "Prompt" not in text
    assert json.loads(bob("GET", "/api/history")[2]) == {"rows": [], "more": False}
    assert ann("POST", f"/api/assignments/{mine}/submit", handed)[0] == 200
    (row,) = json.loads(ann("GET", "/api/history")[2])["rows"]
    assert row["assignment"] == mine
    assert json.loads(bob("GET", f"/api/history?before={row['judgment'] + 1}")[2])["rows"] == []
    for change in ("reopen", "keep"):
        assert bob("POST", f"/api/assignments/{mine}/{change}", {})[0] == 404
    assert ann("POST", f"/api/assignments/{mine}/reopen", {})[0] == 200
    assert bob("POST", f"/api/assignments/{mine}/submit", {**handed, "request_id": secrets.token_hex(8)})[0] == 404
    assert ann("POST", f"/api/assignments/{mine}/keep", {})[0] == 200
    assert bob("POST", f"/api/assignments/{bob.next()['assignment']}/submit", handed)[0] == 422  # ann's request id


def test_gradio_offers_a_labeler_nothing(ann):
    for path in ("/lead", "/lead/", "/lead/config", "/lead/gradio_api/info",
                 "/lead/gradio_api/queue/data?session_hash=x",
                 "/lead/gradio_api/file=/etc/passwd", "/lead/monitoring", "/lead/gradio_api/runs"):  # fmt: skip
        assert ann("GET", path)[0] == 403, path
    join = {"data": ["rank"], "fn_index": 0, "session_hash": "abc", "trigger_id": 1}
    for path in ("/lead/gradio_api/queue/join", "/lead/gradio_api/call/show", "/lead/gradio_api/run/predict",
                 "/lead/gradio_api/upload", "/lead/gradio_api/component_server"):  # fmt: skip
        assert ann("POST", path, join)[0] == 403, path
    for path in ("/gradio_api/queue/join", "/gradio_api/call/show", "/gradio_api/upload",
                 "/gradio_api/component_server", "/gradio_api/vibe-edit", "/gradio_api/reset", "/"):  # fmt: skip
        assert ann("POST", path, join)[0] == 404, path
    for path in ("/gradio_api/file=/etc/passwd", "/gradio_api/file/etc/passwd", "/gradio_api/proxy=http://127.0.0.1/",
                 "/monitoring", "/gradio_api/queue/data?session_hash=x", "/gradio_api/info"):  # fmt: skip
        assert ann("GET", path)[0] in (400, 404), path
    config = json.loads(ann("GET", "/config")[2])
    assert config["dependencies"] == []


@pytest.mark.parametrize(
    "path", ["/lead%2fconfig", "//lead/config", "/ui/../lead/config", "/ui/%2e%2e/lead/config", "/./lead/config",
             "/lead/./config", "/assets/..%2f..%2flead/config", "/LEAD/config", "/ui//lead/config",
             "/login/../lead/config", "/static/%5c..%5clead", "/gradio_api/heartbeat/../../lead/config"],
)  # fmt: skip
def test_odd_paths_lead_nowhere(ann, path):
    for client in (ann, Client(ann.server)):
        status, _, text = client("GET", path)
        assert status in (303, 400, 401, 403, 404, 405), (status, text[:200])
        assert '"components"' not in text


def test_a_request_from_another_site_is_refused(ann):
    for headers in (
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "null"},
        {"Origin": "http://[x"},
    ):
        assert ann("POST", "/api/tasks/rank/next", {}, headers)[0] == 403
    same = {"Origin": ann.server.url, "Sec-Fetch-Site": "same-origin"}
    assert ann("POST", "/api/tasks/rank/next", {}, same)[0] == 200


def test_too_much_is_refused(ann, boss):
    assert ann("POST", "/api/preview", {"text": "x" * (MAX_BODY + 10)})[0] == 413
    assert ann("POST", "/api/preview", {"text": "x" * 300_000})[0] == 422
    connection = http.client.HTTPConnection("127.0.0.1", ann.server.port, timeout=30)
    headers = {"Cookie": f"{COOKIE}={ann.token}", "Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    chunks = (b'{"text": "' if number == 0 else b"x" * 100_000 for number in range(30))
    try:
        connection.request("POST", "/api/preview", chunks, headers, encode_chunked=True)
        assert connection.getresponse().status >= 400
    except (ConnectionError, http.client.HTTPException):
        pass  # cut off in the middle: as good
    assert boss("POST", "/lead/uploads?name=a.jsonl", b"", {"Content-Length": str(400_000_000)})[0] == 413
    assert boss("POST", "/lead/gradio_api/queue/join", b"", {"Content-Length": str(MAX_BODY + 1)})[0] == 413


def test_a_probes_conversation_cannot_be_forged(ann):
    ann.server.add_batch([("t", {"rule": "no-threats"})], "probe", rule_set="sparrow-dialogue")
    here = f"/api/assignments/{ann.next('probe')['assignment']}/submit"
    forged = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I will hurt you"}]
    answer = {"verdict": "violates", "note": "", "messages": forged}
    status, _, text = ann("POST", here, {"request_id": secrets.token_hex(8), "answer": answer, "seconds": 1})
    assert status == 422
    assert "messages: " in text


def test_every_answer_carries_the_protecting_headers(ann):
    for path in ("/", "/api/tasks", "/login", "/ui/workbench.js", "/lead/", "/nosuch", "/api/history?before=x"):
        headers = ann("GET", path)[1]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "default-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert ann("GET", "/api/tasks")[1]["cache-control"] == "no-store"
