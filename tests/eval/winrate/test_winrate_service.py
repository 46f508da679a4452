"""Win rates from the verdicts of a real HTTP service, also one that misbehaves."""

import time
from pathlib import Path

import pytest

from align.core.errors import UserError
from align.eval.winrate.by_judge import endpoint_judge
from align.eval.winrate.settings import WinrateConfig
from align.eval.winrate.task import run_winrate
from align.runtime.endpoint import EndpointConfig, post_json

HI = ({"role": "user", "content": "Hi"},)


@pytest.fixture
def service(serve):
    """Start an OpenAI-compatible service that names the longer answer.

    Before that, it goes through a script: for each request `sleep`, an HTTP status to fail with, or the text of an answer.
    """

    def start(*script):
        def answer(path, headers, body):
            server.seen.append((path, headers.get("Authorization"), body))
            step = server.script.pop(0) if server.script else None
            if step == "sleep":
                time.sleep(1.0)
            if isinstance(step, int):
                return step, {}
            question = body["messages"][0]["content"]
            lengths = [len(question.split(f"<answer_{name}>\n")[1].split("\n</answer_")[0]) for name in "AB"]
            verdict = "TIE" if lengths[0] == lengths[1] else "AB"[lengths[1] > lengths[0]]
            content = step if isinstance(step, str) and step != "sleep" else f"I weighed A and B.\nVERDICT: {verdict}"
            return 200, {"choices": [{"message": {"content": content}}]}

        server = serve(answer)
        server.script, server.seen = list(script), []
        return server

    return start


def judge_at(url, **settings):
    settings = {"endpoint_model": "m", "endpoint_parallel": 1} | settings
    return endpoint_judge(EndpointConfig(endpoint=url, **settings), pause=0.01)


def test_an_endpoint_is_asked_both_ways_with_its_key(service, monkeypatch):
    monkeypatch.setenv("THE_KEY", "secret")
    server = service(503)
    judge = judge_at(server.url + "/", endpoint_key="THE_KEY", endpoint_timeout=5, endpoint_retries=2)
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
def test_an_endpoint_that_fails_is_one_line(service, script, message):
    judge = judge_at(service(*script).url, endpoint_timeout=0.2, endpoint_retries=1)
    with pytest.raises(UserError, match=message):
        judge([HI], ["a"], ["bb"])


def test_nobody_there(service):
    server = service()
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError, match=r"cannot be reached .*tried 2 times"):
        post_json(server.url, {}, timeout=1, retries=1, pause=0.01)


def test_what_an_endpoint_judged_is_kept(service, settings):
    server = service()
    whole = WinrateConfig(**settings, endpoint=server.url, endpoint_model="m", endpoint_parallel=1)
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
