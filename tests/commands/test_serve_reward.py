"""A reward model behind HTTP: the scores of `RewardModelScorer`, for the requests of other frameworks' functions."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch
import uvicorn

from align.commands.serve_reward import ServeRewardConfig, make_api, run_serve_reward
from align.core.errors import UserError
from align.core.tensor_ops import Padded
from align.models.checkpoint import weights_of
from align.reward.checkpoint import load_reward_model, save_reward_model
from align.reward.scoring import RewardService
from examples import served_reward
from tests.ports import free_port

PROMPTS = [
    "Hi",
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go"}],
]
RESPONSES = ["Hello there.", "Where to?"]


@pytest.fixture(scope="module")
def folder(load_sharp, tmp_path_factory):
    loaded = load_sharp("tiny-llama")
    head = torch.randn(1, loaded.backbone.hidden_size, generator=torch.Generator().manual_seed(3))
    path = tmp_path_factory.mktemp("reward") / "model"
    save_reward_model(path, loaded, weights_of(loaded.backbone), head, {"mean": 0.5}, {"title": "R", "stage": "reward"})
    return str(path)


@pytest.fixture(scope="module")
def service(folder):
    return RewardService(load_reward_model(folder, "float32"), 512)


@pytest.fixture(scope="module")
def url(service, folder):
    """The application on a real port, in a thread of this process."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(make_api(service, folder), "127.0.0.1", port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


def post(url, payload):
    with urlopen(Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"}), timeout=60) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def expected(folder):
    """Rewards by the model itself, one row at a time."""
    found = load_reward_model(folder, "float32")
    tokenization, rewards = found.loaded.tokenization, []
    for prompt, response in zip(PROMPTS, RESPONSES, strict=True):
        turns = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)
        ids = tokenization.prompt_ids(turns), tokenization.response_ids(response)
        with torch.no_grad():
            rewards.append(float(found.model(Padded.from_lists([ids[0]]), Padded.from_lists([ids[1]]))[0]) - 0.5)
    return rewards


def test_plain_prompts_and_responses(url, expected):
    answer = post(f"{url}/score", {"prompts": PROMPTS, "responses": RESPONSES})
    assert answer["rewards"] == pytest.approx(expected, abs=1e-5)
    assert abs(expected[0] - expected[1]) > 0.01
    assert post(f"{url}/score", {"prompts": [], "responses": []}) == {"rewards": []}


def test_rendered_texts_as_openrlhf_sends_them(url, service, expected):
    """The text of a chat template, with the end of the turn or, from a response that was cut, without."""
    tokenizer = service.tokenization.tokenizer
    turns = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*turns, {"role": "assistant", "content": RESPONSES[0]}], tokenize=False)
    asked = {"query": [whole, prompt + RESPONSES[0]], "prompts": [prompt, prompt], "labels": [None, None]}
    answer = post(f"{url}/get_reward", asked)
    assert answer["rewards"] == pytest.approx([expected[0]] * 2, abs=1e-5)
    assert answer["scores"] == answer["rewards"]


def test_many_callers_at_once_get_their_own_answers(url, expected):
    def ask(number):
        rows = [number % 2] * (1 + number % 3)
        answer = post(
            f"{url}/score", {"prompts": [PROMPTS[row] for row in rows], "responses": [RESPONSES[row] for row in rows]}
        )
        assert answer["rewards"] == pytest.approx([expected[row] for row in rows], abs=1e-4)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(48)))


@pytest.mark.parametrize(
    ("path", "payload", "reason"),
    [
        ("score", {"prompts": ["a"], "responses": []}, "1 prompts and 0 responses"),
        ("score", {"prompts": [""], "responses": ["a"]}, "prompt"),
        ("score", {"prompts": ["a"], "responses": ["b " * 5000]}, "cannot read"),
        ("score", {"prompts": [[{"role": "robot", "content": "a"}]], "responses": ["b"]}, "use system, user or assistant"),
        ("get_reward", {"query": ["b"], "prompts": ["a"]}, "begin with its prompt"),
        ("get_reward", {"query": ["b"]}, "prompts"),
    ],
)
def test_a_mistake_is_status_422_and_the_next_caller_is_served(url, path, payload, reason, expected):
    with pytest.raises(HTTPError) as caught:
        post(f"{url}/{path}", payload)
    assert caught.value.code == 422
    assert reason in caught.value.read().decode()
    assert post(f"{url}/score", {"prompts": PROMPTS, "responses": RESPONSES})["rewards"] == pytest.approx(expected, abs=1e-5)


def test_health_names_the_model(url, folder):
    with urlopen(f"{url}/health", timeout=60) as answer:
        assert json.load(answer) == {"status": "ok", "reward_model": folder}


def test_the_command_refuses_what_it_cannot_serve(folder, tmp_path):
    with pytest.raises(UserError, match="neither a reward model"):
        run_serve_reward(ServeRewardConfig(reward_model=str(tmp_path)))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ServeRewardConfig(reward_model=folder, port=port, dtype="float32")
        # In a thread of its own: a browser of other tests may keep an event loop in this one.
        with ThreadPoolExecutor(1) as pool, pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}; give"):
            pool.submit(run_serve_reward, config).result()


def test_the_functions_for_trl_and_verl(url, expected, monkeypatch):
    monkeypatch.setenv("REWARD_URL", url)
    turns = [[{"role": "user", "content": "Hi"}], PROMPTS[1]]
    completions = [[{"role": "assistant", "content": text}] for text in RESPONSES]
    assert served_reward.trl_reward(PROMPTS, RESPONSES, trainer_state=None) == pytest.approx(expected, abs=1e-5)
    assert served_reward.trl_reward(turns, completions) == pytest.approx(expected, abs=1e-5)
    score = served_reward.compute_score("mine", RESPONSES[1], None, {"prompt": PROMPTS[1]})
    assert score == pytest.approx(expected[1], abs=1e-5)
    with pytest.raises(ValueError, match="a row of mine has no extra_info"):
        served_reward.compute_score("mine", "a", None)
