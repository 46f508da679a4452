"""Win rates from the verdicts of a real HTTP service, also one that misbehaves."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from align.errors import UserError
from align.eval.judging.chat_judge import ChatJudgeConfig
from align.eval.winrate.by_judge import endpoint_judge
from align.eval.winrate.settings import WinrateConfig
from align.eval.winrate.task import run_winrate
from align.runtime.endpoint import post_json

HI = ({"role": "user", "content": "Hi"},)


class Service(BaseHTTPRequestHandler):
    """An OpenAI-compatible service that first fails or answers as `server.script` says, and then names the longer answer."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers.get("Authorization"), body))
        step = self.server.script.pop(0) if self.server.script else None
        if step == "sleep":
            time.sleep(1.0)
        if isinstance(step, int):
            self.send_error(step)
            return
        question = body["messages"][0]["content"]
        answers = [question.split(f"<answer_{name}>\n")[1].split("\n</answer_")[0] for name in "AB"]
        lengths = [len(answer) for answer in answers]
        verdict = "TIE" if lengths[0] == lengths[1] else "AB"[lengths[1] > lengths[0]]
        content = step if isinstance(step, str) and step != "sleep" else f"I weighed A and B.\nVERDICT: {verdict}"
        data = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def service(*script):
    """A running service.

    Args:
        script: for each request in turn `sleep`, an HTTP status to fail with, or the text of an answer.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.script, server.seen, server.url = list(script), [], f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def judge_config(key_variable, timeout, retries):
    return ChatJudgeConfig(judge_model="m", key_variable=key_variable, timeout=timeout, retries=retries, parallel=1)


def test_an_endpoint_is_asked_both_ways_with_its_key(monkeypatch):
    monkeypatch.setenv("THE_KEY", "secret")
    with service(503) as server:
        judge = endpoint_judge(server.url + "/", judge_config("THE_KEY", 5, 2), pause=0.01)
        assert judge([HI, HI], ["long answer", "b"], ["short", "b"]) == [1.0, 0.5]
        assert len(server.seen) == 3  # one of them a second try
        path, key, body = server.seen[-1]
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", "Bearer secret", "m", 0)
    assert "user: Hi" in body["messages"][0]["content"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (["sleep", "sleep"], r"no answer in 0.2 s, tried 2 times"),
        ([500, 502], r"HTTP 502 .*, tried 2 times"),
        ([401], r"HTTP 401 "),
        (["I cannot say."], r"no verdict in the answer 'I cannot say.'"),
    ],
)
def test_an_endpoint_that_fails_is_one_line(script, message):
    with service(*script) as server:
        judge = endpoint_judge(server.url, judge_config("NO_SUCH_KEY", 0.2, 1), pause=0.01)
        with pytest.raises(UserError, match=message):
            judge([HI], ["a"], ["bb"])


def test_nobody_there():
    with service() as server:
        url = server.url
    with pytest.raises(UserError, match=r"cannot be reached .*tried 2 times"):
        post_json(url, {}, timeout=1, retries=1, pause=0.01)


def test_what_an_endpoint_judged_is_kept(settings):
    with service() as server:
        whole = WinrateConfig(**settings, endpoint=server.url, judge_model="m", parallel=1)
        expected = run_winrate(whole)
        asked = len(server.seen)
        path = Path(whole.output) / "winrate-judged.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:-1]))
        server.script, server.seen = ["no idea"], []
        with pytest.raises(UserError, match="no verdict"):
            run_winrate(whole)
        assert path.read_text() == "".join(lines[:-1])
        server.seen = []
        assert run_winrate(whole) == expected
        assert asked == 6
        assert len(server.seen) == 2
    rates = [figure.value for evaluation in expected for figure in evaluation.figures if figure.name == "win rate"]
    assert sum(rates) == pytest.approx(1)
