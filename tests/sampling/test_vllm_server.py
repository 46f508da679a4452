"""PPO with a vLLM server: TRL's client over HTTP to a stand-in server, weights by name, seeds, bad servers."""

import math
import os
import re
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from align import cli
from align.core.errors import UserError
from align.core.seeds import RngStream, row_seeds
from align.ppo import PPOConfig, run_ppo
from align.sampling.generation import SamplingParams
from tests.launch.compared import compare, metrics
from tests.launch.launcher import ROOT, launch_in_turn
from tests.refusals import refusal
from tests.sampling.rewards import PROMPTS
from tests.vllm_stand_in import STAND_IN


def at(settings, url):
    """The settings of a run with the server at an address."""
    return settings | {"vllm": settings["vllm"] | {"url": url}}


def plain(folder):
    """The weights of a folder's model by name, tied ones once."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: weight.detach() for name, weight in model.named_parameters()}


def learned(folder, start, alpha_over_rank):
    """The weights after a run's last update, from its checkpoint: masters, or the start with B A scaled added to it."""
    path = max((folder / "checkpoints").glob("update-*/state.safetensors"))
    masters = {
        name.removeprefix("master/backbone.model."): value
        for name, value in load_file(path).items()
        if name.startswith("master/backbone.model.")
    }
    found = dict(start)
    for name, value in masters.items():
        if name in found:
            found[name] = value
        elif ".lora_A." in name:
            target = name.replace(".lora_A.policy", "")
            found[target] = start[target] + alpha_over_rank * masters[name.replace("lora_A", "lora_B")] @ value
    return found


@pytest.mark.parametrize("rank", [0, 4], ids=["full", "lora"])
def test_each_rollout_is_sampled_from_the_weights_of_its_update(serve, settings, rank):
    server = serve(settings["model"])
    folder = run_ppo(PPOConfig(**at(settings, server.url), lora_r=rank, lora_alpha=8.0)).parent
    start = plain(settings["model"])
    assert len(server.updates) == 3, "before the first rollout and after each update"
    for sent in server.updates:
        assert {name: value.shape for name, value in sent.items()} == {name: value.shape for name, value in start.items()}
    first, last = server.updates[0], server.updates[-1]
    assert all(torch.equal(first[name], value) for name, value in start.items()), "nothing was learned yet"
    expected = learned(folder, start, 8.0 / 4)
    moved = [name for name, value in expected.items() if not torch.equal(value, start[name])]
    assert len(moved) >= (len(start) if rank == 0 else 14)
    for name, value in expected.items():
        torch.testing.assert_close(last[name], value, rtol=0, atol=0 if rank == 0 else 1e-6)
    # float32 on both sides: what is left is the order of sums. A sync that was missed would show as 1e-2 and more.
    mismatches = [row["sampling/engine_kl"] for row in metrics(folder) if row["update"]]
    assert len(mismatches) == 2
    assert all(0 <= value < 1e-6 for value in mismatches)
    once = ["/server_info", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
    assert server.paths[-15:] == 3 * once
    met = ["/health", "/v1/models", "/server_info", "/tokenize", "/server_info", "/get_world_size"]
    assert server.paths[:-15] == [*met, "/init_weight_transfer_engine"]


def test_each_request_is_one_row_with_its_own_seed_and_our_ends(serve, settings, load_sharp):
    server = serve(settings["model"])
    run_ppo(PPOConfig(**at(settings, server.url) | {"rollout_batch_size": 6, "samples_per_prompt": 2}))
    tokenization = load_sharp("tiny-llama").tokenization
    prompts = [tokenization.prompt_ids(({"role": "user", "content": text},)) for text in PROMPTS]
    asked = [server.requests[a:b] for a, b in ((0, 3), (3, 9), (9, 12), (12, 18), (18, 21))]
    evaluation = row_seeds(3, 3, RngStream.VALIDATION_SAMPLES)
    for part in asked[::2]:
        assert sorted((body["prompt"][0], body["seed"]) for body in part) == sorted(zip(prompts, evaluation, strict=True))
    for update, part in enumerate(asked[1::2], start=1):
        assert sorted(body["seed"] for body in part) == sorted(row_seeds(6, 3, RngStream.ROLLOUT, update))
        assert sorted(body["prompt"][0] for body in part) == sorted(2 * prompts)
    for body in server.requests:
        assert body["stop_token_ids"] == sorted(tokenization.end_ids)
        assert (body["max_tokens"], body["temperature"], body["logprobs"]) == (6, 0.8, 0)


@pytest.mark.parametrize("given", [{"stop_token_ids": [7, 9]}, {"ignore_eos": True}], ids=["stops", "none"])
def test_the_stop_tokens_of_a_run_are_those_of_each_request(serve, settings, given):
    server = serve(settings["model"])
    run_ppo(PPOConfig(**at(settings, server.url) | {"total_updates": 1} | given))
    assert {tuple(body["stop_token_ids"]) for body in server.requests} == {tuple(given.get("stop_token_ids", ()))}


def test_a_server_that_dies_ends_the_run_which_resumes_with_another(serve, settings, tmp_path):
    whole = run_ppo(PPOConfig(**at(settings, serve(settings["model"]).url))).parent
    settings |= {"output_dir": str(tmp_path / "again")}
    dying = serve(settings["model"])
    dying.dies_after = 3 + 4 + 3 + 2  # in the middle of the second rollout
    begun = time.monotonic()
    with pytest.raises(
        UserError, match=rf"vLLM server {dying.url}: sampling failed \(.*; .*--resume_from_checkpoint auto"
    ) as caught:
        run_ppo(PPOConfig(**at(settings, dying.url)))
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 60
    resumed = run_ppo(PPOConfig(**at(settings, serve(settings["model"]).url), resume_from_checkpoint=True)).parent
    assert metrics(resumed) == metrics(whole)
    assert (resumed / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


def test_responses_end_where_an_end_token_stands_or_at_the_limit(serve, settings, make_engine_of):
    engine = make_engine_of(serve(settings["model"]).url)
    tokenization = engine.loaded.tokenization
    tokenization.end_ids = ends = frozenset(range(8, 60))  # about every fifth token
    prompts = [[9 + row, 40, 41] for row in range(12)]
    found = engine.sample(prompts, SamplingParams(4), (1, 2))
    assert 0 < sum(found.ended) < 12, "some of each"
    for ids, ended, seen in zip(found.ids, found.ended, found.log_probs, strict=True):
        assert ended == (ids[-1] in ends)
        assert not ends & set(ids[:-1])
        assert ended or len(ids) == 4
        assert len(seen) == len(ids)
    again = engine.sample(prompts, SamplingParams(4), (1, 2))
    assert (again.ids, again.ended) == (found.ids, found.ended)
    assert engine.sample(prompts, SamplingParams(4), (1, 3)).ids != found.ids


def answering(path, status, answer):
    """Let a server give this answer."""
    return lambda server: server.answers.update({path: (status, answer)})


def describing(part, **changes):
    """Let a server describe itself otherwise."""

    def change(server):
        info = server.model_info()
        info["vllm_config"] |= {part: (info["vllm_config"][part] | changes) if changes else None}
        server.answers["/server_info"] = (200, info)

    return change


@pytest.mark.parametrize(
    ("spoil", "timeout", "parts"),
    [
        (
            answering("/tokenize", 200, {"tokens": [1, 2, 3]}),
            30.0,
            ["it serves", "vocabulary"],
        ),
        (
            describing("model_config", max_model_len=15),
            30.0,
            ["15 tokens", "--max-model-len 16"],
        ),
        (answering("/server_info", 404, {"detail": "Not Found"}), 30.0, ["VLLM_SERVER_DEV_MODE=1"]),
        (describing("weight_transfer_config"), 30.0, ["--weight-transfer-config"]),
        (answering("/health", 503, {}), 1.0, ["not available after 1 s (it answers 503)", "vllm.url"]),
        (
            answering("/get_world_size", 500, {"error": "no workers"}),
            30.0,
            ["joining the server's weight transfer failed", "no workers", "docs/clusters.md"],
        ),
    ],
    ids=["vocabulary", "context", "no development mode", "no weight transfer", "still loading", "refuses to join"],
)
def test_a_server_that_will_not_do_is_refused_at_the_start(
    serve, settings, make_engine_of, monkeypatch, spoil, timeout, parts
):
    monkeypatch.setattr("align.sampling.vllm_engines.PAUSE", 0.01)
    server = serve(settings["model"])
    spoil(server)
    message = refusal(make_engine_of, server.url, timeout=timeout)
    assert server.url in message
    assert all(part in message for part in parts), message


@pytest.mark.parametrize("path", ["/v1/completions", "/server_info", "/tokenize"])
def test_what_a_proxy_answers_for_a_busy_server_is_asked_again(serve, settings, make_engine_of, monkeypatch, path):
    monkeypatch.setattr("align.sampling.vllm_engines.PAUSE", 0.01)
    expected = make_engine_of(serve(settings["model"]).url).sample([[9, 10]], SamplingParams(4), (1, RngStream.ROLLOUT))
    server = serve(settings["model"])
    server.passing[path] = [502, 503, 504]
    found = make_engine_of(server.url).sample([[9, 10]], SamplingParams(4), (1, RngStream.ROLLOUT))
    assert not server.passing[path]
    assert found == expected


def test_a_proxy_that_finds_no_server_ends_the_run_after_three_more_attempts(serve, settings, make_engine_of, monkeypatch):
    monkeypatch.setattr("align.sampling.vllm_engines.PAUSE", 0.01)
    server = serve(settings["model"])
    engine = make_engine_of(server.url)
    server.passing["/v1/completions"] = [502] * 5
    with pytest.raises(UserError, match=r"sampling failed \(Request failed: 502"):
        engine.sample([[9, 10]], SamplingParams(4), (1, RngStream.ROLLOUT))
    assert server.passing["/v1/completions"] == [502]


def test_a_transfer_of_weights_is_not_repeated(serve, settings, make_engine_of):
    """The server may have begun it: a second one would wait for weights that nobody sends."""
    server = serve(settings["model"])
    engine = make_engine_of(server.url)
    server.passing["/start_weight_update"] = [502]
    with pytest.raises(UserError, match=r"sending it the weights failed \(Request failed: 502"):
        engine.sample([[9, 10]], SamplingParams(4), (1, RngStream.ROLLOUT))


def asking_for(prompt):
    """Let a server answer different prompt than the one it was sent."""

    def change(server):
        honest = server.complete
        server.complete = lambda body: honest(body | {"prompt": [prompt]})

    return change


def returning(token):
    """Let a server end each response with this token."""

    def change(server):
        honest = server.complete

        def dishonest(body):
            answer = honest(body)
            answer["choices"][0]["token_ids"][-1] = token
            return answer

        server.complete = dishonest

    return change


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (answering("/v1/completions", 400, {"error": {"message": "max_tokens"}}), "sampling failed (Request failed: 400"),
        (answering("/v1/completions", 200, {"choices": []}), "sampling failed ("),
        (
            answering("/update_weights", 500, {"error": {"message": "no weight x"}}),
            "sending it the weights failed (Request failed: 500",
        ),
        (asking_for([9, 11]), "sampling failed (it responded to a different prompt)"),
        (returning(1_000_000), "sampling failed (it returned token 1000000, but the vocabulary is 0"),
    ],
    ids=["error", "empty", "weights", "different prompt", "impossible token"],
)
def test_an_error_or_an_impossible_answer_of_the_server_is_one_line(serve, settings, make_engine_of, spoil, part):
    server = serve(settings["model"])
    engine = make_engine_of(server.url)
    spoil(server)
    with pytest.raises(UserError, match=re.escape(part)) as caught:
        engine.sample([[9, 10]], SamplingParams(4), (1, RngStream.ROLLOUT))
    assert "\n" not in str(caught.value)


def test_a_server_that_was_started_again_between_two_rollouts_gets_no_weights(serve, settings, make_engine_of):
    """It has not joined the transfer: a broadcast would hang."""
    server = serve(settings["model"])
    engine = make_engine_of(server.url)
    server.instance = "another"
    with pytest.raises(UserError, match=r"sending it the weights failed \(it was restarted .* auto"):
        engine.sample([[9, 10]], SamplingParams(4), (1, RngStream.ROLLOUT))
    assert "/start_weight_update" not in server.paths


def test_a_server_that_never_answers_is_given_up_on(serve, settings, make_engine_of):
    server = serve(settings["model"])
    server.silent = "/v1/completions"
    engine = make_engine_of(server.url)
    for adapter in engine.client.session.adapters.values():
        adapter.limit = 0.5
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"sampling failed \(.*Read timed out"):
        engine.sample([[9, 10]], SamplingParams(4), (1, RngStream.ROLLOUT))
    assert time.monotonic() - begun < server.seconds_silent


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
    assert "sending it the weights took more than" in capfd.readouterr().err


def test_log_probs_of_another_distribution_stop_the_run(serve, settings, monkeypatch):
    server = serve(settings["model"])
    honest = server.complete

    def at_another_temperature(body):
        return honest(body | {"temperature": 3.0})

    monkeypatch.setattr(server, "complete", at_another_temperature)
    with pytest.raises(UserError, match=r"different distribution than the policy \(\S+ nats per token\)"):
        run_ppo(PPOConfig(**at(settings, server.url)))


@pytest.mark.parametrize(
    ("row", "part"),
    [
        (([9, 1_000_000, 9, 9], [-1.0] * 4), "it returned token 1000000, but the vocabulary is 0 to "),
        (([-1, 9, 9, 9], [-1.0] * 4), "it returned token -1, but"),
        (([9, 9, 9, 9], [-1.0, -1.0, -math.inf, -1.0]), "it returned a log-prob of -inf"),
        (([9, 9, 9, 9], [-1.0, -1.0, math.nan, -1.0]), "it returned a log-prob of nan"),
        (([9, 9, 9, 9], [-1.0] * 3), "it returned 4 tokens with 3 log-probs"),
        (([9] * 12, [-1.0] * 12), "it returned 12 tokens, but the limit is 4"),
        (([9, 9], [-1.0] * 2), "it returned 2 tokens without a stop token, fewer than the limit of 4"),
        (([9, 1, 9, 9], [-1.0] * 4), "it returned tokens after a stop token"),
    ],
)
def test_an_impossible_answer_is_refused(stand_in_vllm, load_sharp, row, part):
    from align.sampling.vllm_engines import require_answer

    loaded, stops = load_sharp("tiny-llama"), frozenset({1})
    require_answer(([9, 1], [-1.0, -0.5]), 4, loaded, stops)
    with pytest.raises(ValueError, match=re.escape(part)):
        require_answer(row, 4, loaded, stops)


@pytest.mark.parametrize("engine", ["vllm-server", "vllm-colocate"])
def test_an_encoder_decoder_is_refused(stand_in_vllm, make_ppo, load_sharp, engine):
    from align.sampling.engines import make_engine

    trainer = make_ppo(load_sharp("tiny-t5"), engine=engine)
    with pytest.raises(UserError, match=rf"engine {engine}: .* encoder-decoder \(t5\); use engine transformers"):
        make_engine(trainer.config, trainer.engine, trainer.loaded, 16)


def test_nobody_at_the_address(stand_in_vllm, make_engine_of):
    with pytest.raises(
        UserError, match=r"127.0.0.1:9: not available after 0.3 s \(ConnectionError\); start it as .* or correct vllm.url"
    ):
        make_engine_of("http://127.0.0.1:9", timeout=0.3)


@pytest.mark.parametrize(("key", "value"), [("url", "host:8000"), ("timeout", 0), ("memory_share", 1.0)])
def test_settings_out_of_range(key, value):
    with pytest.raises(UserError, match=f"vllm.{key}"):
        PPOConfig(reward_functions=["a:b"], vllm={key: value})


OF_TWO = """
    --dtype float32 --report_to none --reward_functions tests.sampling.rewards:letters
    --prompts data/prompts_validation.jsonl --overlong truncate --max_prompt_tokens 24
    --total_updates 2 --rollout_batch_size 5 --num_ppo_epochs 1 --max_new_tokens 5
    --learning_rate 1e-3 --missing_eos_score none --lora_r 4 --engine vllm-server --vllm.timeout 60
"""


@pytest.mark.slow
def test_two_processes_under_zero3_ask_and_send_what_one_does(serve, sharp_folders, tmp_path, monkeypatch):
    model, servers, words = sharp_folders["tiny-llama"], {}, {}
    for processes in (1, 2):
        servers[processes] = serve(model)
        own = ["--model", model, "--vllm.url", servers[processes].url, "--output_dir", str(tmp_path / str(processes))]
        words[processes] = ["ppo", *OF_TWO.split(), *own]
    monkeypatch.chdir(ROOT)
    cli.main(words[1])
    launch_in_turn([[__file__, *words[2]]], tmp_path, "zero3")
    one, two = servers[1], servers[2]
    assert compare(tmp_path / "1", tmp_path / "2").figure < 2e-3

    def asked(server):
        return sorted((body["prompt"], body["seed"]) for body in server.requests)

    assert len(two.requests) == 2 * 5, "the second process asks for nothing"
    assert asked(two) == asked(one)
    assert two.paths == one.paths
    assert [list(sent) for sent in two.updates] == [list(sent) for sent in one.updates]
    for sent, twin in zip(two.updates, one.updates, strict=True):
        assert all(torch.allclose(value, twin[name], atol=1e-4) for name, value in sent.items())


if __name__ == "__main__":  # `align WORDS` in the processes that a launcher started
    sys.path.insert(0, str(STAND_IN))
    cli.main()
