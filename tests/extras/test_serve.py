"""A served reward model answers OpenRLHF, vLLM and PPO; a server that is wrong or dies costs one line and no data."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
import uvicorn

from align.core.errors import UserError
from align.extras.serve import RewardService, make_app
from align.ppo import PPOConfig, run_ppo
from align.reward import remote
from align.reward.remote import RemoteRewardModel
from align.reward.text_scoring import TextAnswer, TextRewardModel
from align.runtime.endpoint import post_json
from tests.files import ROOT, metrics_of, read_rows
from tests.http_stand_in import answering

CONVERSATION = [{"role": "user", "content": "Name a moon."}, {"role": "assistant", "content": "Phobos."}]
ANSWER = TextAnswer(({"role": "user", "content": "Name a moon."},), "Phobos.")


@contextlib.contextmanager
def serving(app):
    """The address of an application, in a thread."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def model(reward_model):
    return TextRewardModel(reward_model, "float32")


def post(url, payload, **headers):
    return post_json(url, payload, retries=0, headers=headers)


def test_the_server_speaks_the_formats_of_openrlhf_and_vllm(model):
    expected = model([ANSWER])[0]
    chat = model.tokenization.chat
    prompt = chat.render(tuple(CONVERSATION[:1]), generation_prompt=True)
    with serving(make_app(RewardService(model, "rm"), None, 10_000)) as url:
        given = post(f"{url}/get_reward", {"query": [prompt + "Phobos."], "prompts": [prompt], "labels": [""]})
        assert given["rewards"] == given["scores"] == [pytest.approx(expected, abs=1e-5)]
        assert given["extra_logs"] == {}
        for request in ({"messages": CONVERSATION}, {"input": prompt + "Phobos."}, {"input": [prompt + "Phobos."]}):
            assert post(f"{url}/classify", request)["data"][0]["probs"] == [pytest.approx(expected, abs=1e-5)]
            assert post(f"{url}/pooling", request)["data"][0]["data"] == [pytest.approx(expected, abs=1e-5)]
        assert post(f"{url}/score", {"messages": [CONVERSATION] * 3})["rewards"] == pytest.approx([expected] * 3, abs=1e-5)
        with urllib.request.urlopen(f"{url}/health") as answer:
            assert json.load(answer)["status"] == "ok"
        for path in ("", "/score", "/get_reward", "/classify", "/pooling"):
            client = RemoteRewardModel(
                url + path,
                lambda asked, text: (
                    chat.render(asked, generation_prompt=True),
                    chat.render((*asked, {"role": "assistant", "content": text}), generation_prompt=False).rstrip("\n"),
                ),
            )
            assert client([ANSWER.prompt] * 2, ["Phobos."] * 2) == pytest.approx([expected] * 2, abs=1e-5), path


def test_bad_requests_are_refused_and_the_server_lives_on(model):
    with serving(make_app(RewardService(model, "rm", max_rows=2), None, 4_000)) as url:
        for request, status, said in (
            ({"messages": [CONVERSATION] * 3}, 413, "max_rows"),
            ({"query": ["x" * 5_000]}, 413, "max_megabytes"),
            ({"query": [1]}, 400, "query is"),
            ({"query": ["a"], "prompts": ["a", "b"]}, 400, "prompts has 2"),
            ({"messages": [CONVERSATION[:1]]}, 400, "assistant turn"),
            ({"messages": "hello"}, 400, "messages"),
            ({"messages": [CONVERSATION], "ended": [True, False]}, 400, "ended"),
            ({"query": ["x" * 2_000]}, 400, "tokens, and"),
            ({}, 400, "none of the fields"),
            ([], 400, "JSON object"),
        ):
            with pytest.raises(UserError, match=rf"HTTP {status}.*{said}"):
                post(f"{url}/score", request)
        assert len(post(f"{url}/score", {"messages": [CONVERSATION]})["rewards"]) == 1


def test_a_token_is_required_of_each_request(model, monkeypatch):
    with serving(make_app(RewardService(model, "rm"), "secret", 4_000)) as url:
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
            with pytest.raises(UserError, match="HTTP 401"):
                post(f"{url}/score", {"messages": [CONVERSATION]}, **headers)
        monkeypatch.delenv(remote.TOKEN, raising=False)
        with pytest.raises(UserError, match=rf"HTTP 401.*set {remote.TOKEN}"):
            RemoteRewardModel(url).check()
        monkeypatch.setenv(remote.TOKEN, "secret")
        RemoteRewardModel(url).check()


def test_an_address_that_cannot_be_one_is_refused():
    for url, said in (
        ("http://", "write http://HOST:PORT"),
        ("http://host:port/score", "not an address"),
        ("http://host/v1/chat", "none of /score, /get_reward, /classify, /pooling"),
    ):
        with pytest.raises(UserError, match=said):
            RemoteRewardModel(url)


def config_of(folder, url, **settings):
    given = {"model": "tiny-llama", "prompts": str(ROOT / "data" / "prompts_validation.jsonl"), "reward_model": [url]}
    given |= {"output_dir": str(folder), "report_to": ["none"], "dtype": "float32", "overlong": "truncate"}
    small = {"total_updates": 3, "rollout_batch_size": 4, "max_new_tokens": 6, "max_prompt_tokens": 48, "save_steps": 1}
    return PPOConfig(**given | small | {"missing_eos_score": None} | settings)


def test_ppo_trains_against_a_served_model(model, tmp_path):
    given = []

    class Recorded(RewardService):
        def score(self, request):
            given.append(super().score(request))
            return given[-1]

    with serving(make_app(Recorded(model, "rm"), None, 100_000)) as url:
        run_ppo(config_of(tmp_path / "run", url))
    rows = [row for row in metrics_of(tmp_path / "run") if "reward/mean" in row]
    assert len(given) == 1 + len(rows) == 4, "a check, and one request in each update"
    for row, scores in zip(rows, given[1:], strict=True):
        assert row["reward/mean"] == row["reward/remote"] == pytest.approx(sum(scores) / 4, abs=1e-5)


def test_a_server_that_is_not_there_stops_a_run_before_a_model_is_loaded(tmp_path, monkeypatch):
    def not_called(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("align.training.model_source.load", not_called)
    with pytest.raises(UserError, match=r"reward_model http://127\.0\.0\.1:9/score: cannot be reached"):
        run_ppo(config_of(tmp_path / "run", "http://127.0.0.1:9"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("failure", ["dies", "nan", "too few"])
def test_a_server_that_fails_in_a_run_loses_nothing(failure, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "RETRIES", 1)
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    calls = []

    def answer(request):
        calls.append(1)
        rows = len(json.loads(request.body)["messages"])
        if len(calls) <= 2:  # the check, and the first update
            return 200, json.dumps({"rewards": [0.5] * rows}).encode()
        if failure == "dies":
            return None
        scores = [float("nan")] * rows if failure == "nan" else [0.5]
        return 200, json.dumps({"rewards": scores}).encode()

    said = {"dies": "cannot be reached", "nan": "gave nan", "too few": "1 scores for 4 responses"}[failure]
    with answering(answer) as url, pytest.raises(UserError, match=rf"reward_model .*{said}.*unscored\.jsonl") as stopped:
        run_ppo(config_of(tmp_path / "run", url))
    assert "\n" not in str(stopped.value)
    assert len(read_rows(tmp_path / "run" / "unscored.jsonl")) == 4

    def always(request):
        return 200, json.dumps({"rewards": [0.5] * len(json.loads(request.body)["messages"])}).encode()

    with answering(always) as url:
        run_ppo(config_of(tmp_path / "run", url, resume_from_checkpoint="auto"))
    assert (tmp_path / "run" / "model").exists()


def test_a_server_that_returns_comes_back_into_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    calls = []

    def answer(request):
        calls.append(1)
        rows = len(json.loads(request.body)["messages"])
        return (503, b"") if len(calls) == 2 else (200, json.dumps({"rewards": [0.5] * rows}).encode())

    with answering(answer) as url:
        run_ppo(config_of(tmp_path / "run", url, total_updates=1))
    assert len(calls) == 3


def test_the_command_serves_until_it_is_stopped(reward_model):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = [sys.executable, "-m", "align.cli", "serve", reward_model, "--port", port, "--dtype", "float32"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        deadline, found = time.monotonic() + 180, None
        while found is None and time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(UserError):
                found = post(f"http://127.0.0.1:{port}/score", {"messages": [CONVERSATION]})
            time.sleep(0.2)
        assert found
        assert len(found["rewards"]) == 1
        second = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, timeout=240)
        assert second.returncode == 2
        assert "set another port" in second.stderr
        assert "Traceback" not in second.stderr
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60)[1]
    assert "Traceback" not in said
