"""A vLLM server that will not do, answers wrongly or not at all: each is one line that names it."""

import math
import os
import re
import time

import pytest

from align.core.errors import UserError
from align.core.seeds import Stream
from align.ppo import PPOConfig, run_ppo
from align.sampling.generation import Sampling


def bad(server, path, status, answer):
    server.answers[path] = (status, answer)


def another_vocabulary(server):
    bad(server, "/tokenize", 200, {"tokens": [1, 2, 3]})


def small_context(server):
    info = server.model_info()
    info["vllm_config"]["model_config"]["max_model_len"] = 15
    bad(server, "/server_info", 200, info)


def no_development_mode(server):
    bad(server, "/server_info", 404, {"detail": "Not Found"})


def no_weight_transfer(server):
    info = server.model_info()
    info["vllm_config"]["weight_transfer_config"] = None
    bad(server, "/server_info", 200, info)


def still_loading(server):
    bad(server, "/health", 503, {})


def refuses_to_join(server):
    bad(server, "/get_world_size", 500, {"error": "no workers"})


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (another_vocabulary, ["it serves", "another vocabulary; start it with the model that is trained, "]),
        (small_context, ["its context is 15 tokens, but prompts and responses need 16; start it with --max-model-len 16"]),
        (no_development_mode, ["VLLM_SERVER_DEV_MODE=1"]),
        (no_weight_transfer, ["--weight-transfer-config"]),
        (still_loading, ["not up after 1 s (it answers 503)", "vllm_url"]),
        (refuses_to_join, ["joining the server's weight transfer failed", "no workers", "docs/clusters.md"]),
    ],
)
def test_a_server_that_will_not_do_is_refused_at_the_start(serve, settings, make_engine_of, spoil, parts):
    server = serve(settings["model"])
    spoil(server)
    with pytest.raises(UserError) as caught:
        make_engine_of(server.url, timeout=1.0 if spoil is still_loading else 30.0)
    message = str(caught.value)
    assert "\n" not in message
    assert server.url in message
    assert all(part in message for part in parts), message


def test_nobody_at_the_address(stand_in_vllm, make_engine_of):
    with pytest.raises(
        UserError, match=r"127.0.0.1:9: not up after 0.3 s \(ConnectionError\); start it as .* or correct vllm_url"
    ):
        make_engine_of("http://127.0.0.1:9", timeout=0.3)


@pytest.mark.parametrize(
    ("path", "status", "answer", "part"),
    [
        ("/v1/completions", 400, {"error": {"message": "max_tokens"}}, "sampling failed (Request failed: 400"),
        ("/v1/completions", 200, {"choices": []}, "sampling failed ("),
        (
            "/update_weights",
            500,
            {"error": {"message": "no weight x"}},
            "sending it the weights failed (Request failed: 500",
        ),
    ],
)
def test_an_error_of_the_server_is_one_line_that_quotes_it(serve, settings, make_engine_of, path, status, answer, part):
    server = serve(settings["model"])
    engine = make_engine_of(server.url)
    bad(server, path, status, answer)
    with pytest.raises(UserError, match=re.escape(part)) as caught:
        engine.sample([[9, 10]], Sampling(4), (1, Stream.ROLLOUT))
    assert "\n" not in str(caught.value)
    engine.close()


def test_a_server_that_was_started_again_or_breaks_off_is_one_line(serve, settings, make_engine_of):
    server = serve(settings["model"])
    engine = make_engine_of(server.url)
    server.cut_off = True
    with pytest.raises(UserError, match=r"sampling failed \(.*--resume true"):
        engine.sample([[9, 10]], Sampling(4), (1, Stream.ROLLOUT))
    server.instance = "another"
    engine.weights_changed()
    with pytest.raises(UserError, match=r"sending it the weights failed \(it was started again since the last rollout\)"):
        engine.sample([[9, 10]], Sampling(4), (1, Stream.ROLLOUT))
    engine.close()


# ------------------------------------------------------------------------------------------------------------ wrong answers


def another_prompt(choice):
    choice["prompt_token_ids"] = [9, 11]


def token_beyond_the_vocabulary(choice):
    choice["token_ids"][1] = 1_000_000


def negative_token(choice):
    choice["token_ids"][0] = -1


def endless_log_prob(choice):
    give_log_prob(choice, -math.inf)


def log_prob_that_is_no_number(choice):
    give_log_prob(choice, math.nan)


def give_log_prob(choice, value):
    token = choice["logprobs"]["tokens"][2]
    choice["logprobs"]["token_logprobs"][2] = value
    choice["logprobs"]["top_logprobs"][2] = {token: value}


def more_than_was_asked_for(choice):
    repeat(choice, 3)


def less_without_an_end(choice):
    choice["token_ids"] = choice["token_ids"][:2]
    choice["logprobs"] = {name: values[:2] for name, values in choice["logprobs"].items()}


def text_after_the_end(choice):
    choice["token_ids"][1] = 1


def repeat(choice, times):
    choice["token_ids"] *= times
    choice["logprobs"] = {name: values * times for name, values in choice["logprobs"].items()}


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (another_prompt, "it answered another prompt than the one it was sent"),
        (token_beyond_the_vocabulary, "it returned token 1000000, but the model has tokens 0 to "),
        (negative_token, "it returned token -1, but the model has tokens 0 to "),
        (endless_log_prob, "it returned a log-prob of -inf"),
        (log_prob_that_is_no_number, "sampling failed ("),
        (more_than_was_asked_for, "it returned 12 tokens, but at most 4 were asked for"),
        (less_without_an_end, "it returned 2 tokens without an end, of 4 that were asked for"),
        (text_after_the_end, "it returned tokens after the token that ends a response"),
    ],
)
def test_an_answer_to_something_else_is_one_line(serve, settings, make_engine_of, monkeypatch, spoil, part):
    server = serve(settings["model"])
    engine = make_engine_of(server.url)
    engine.loaded.tokenization.end_ids = frozenset({1})
    honest = server.complete

    def dishonest(body):
        answer = honest(body | {"stop_token_ids": []})  # four tokens in any case
        spoil(answer["choices"][0])
        return answer

    monkeypatch.setattr(server, "complete", dishonest)
    with pytest.raises(UserError, match=re.escape(part)) as caught:
        engine.sample([[9, 10]], Sampling(4), (1, Stream.ROLLOUT))
    assert "\n" not in str(caught.value)
    assert f"vLLM server {server.url}: sampling failed (" in str(caught.value)
    engine.close()


def test_a_server_that_never_answers_is_given_up_on(serve, settings, make_engine_of):
    server = serve(settings["model"])
    server.silent = "/v1/completions"
    engine = make_engine_of(server.url)
    for adapter in engine.client.session.adapters.values():
        adapter.limit = 0.5
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"sampling failed \(.*Read timed out"):
        engine.sample([[9, 10]], Sampling(4), (1, Stream.ROLLOUT))
    assert time.monotonic() - begun < server.seconds_silent
    engine.close()


def test_a_broadcast_that_hangs_ends_the_process_with_a_line(serve, settings, make_engine_of, capfd):
    """NCCL cannot be interrupted from Python: a child process stands in for the run."""
    engine = make_engine_of(serve(settings["model"]).url)
    engine.timeout = -9.5  # the limit is 10 s beyond what an answer may take
    child = os.fork()
    if child == 0:
        with engine._exit_after_timeout("sending it the weights"):
            time.sleep(30)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert "sending it the weights took over" in capfd.readouterr().err
    engine.close()


def test_log_probs_of_another_distribution_stop_the_run(serve, settings, monkeypatch):
    server = serve(settings["model"])
    honest = server.complete

    def at_another_temperature(body):
        return honest(body | {"temperature": 3.0})

    monkeypatch.setattr(server, "complete", at_another_temperature)
    with pytest.raises(UserError, match=r"different distribution than the policy \(\S+ nats per token\)"):
        run_ppo(PPOConfig(**settings, vllm_url=server.url))


def test_an_encoder_decoder_is_refused(stand_in_vllm, make_ppo, load_sharp):
    from align.sampling.engines import make_engine

    trainer = make_ppo(load_sharp("tiny-t5"), engine="vllm-server", vllm_url="http://127.0.0.1:9", vllm_timeout=0.1)
    with pytest.raises(UserError, match=r"engine vllm-server: .* encoder-decoder \(t5\); use engine transformers"):
        make_engine(trainer.config, trainer.optimization, trainer.loaded, 16)


@pytest.mark.parametrize(("key", "value"), [("vllm_url", "host:8000"), ("vllm_timeout", 0), ("vllm_memory_share", 1.0)])
def test_settings_out_of_range(key, value):
    with pytest.raises(UserError, match=key):
        PPOConfig(reward_functions=["a:b"], **{key: value})
