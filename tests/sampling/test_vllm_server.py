"""PPO with a vLLM server: TRL's client over HTTP to a stand-in server, weights by name, seeds, bad servers."""

import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from align.core.errors import UserError
from align.core.seeds import Stream
from align.ppo import PPOConfig, run_ppo
from align.sampling.generation import Sampling, row_seeds
from tests.launch.test_launch import metrics
from tests.sampling.prompts import PROMPTS


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
    folder = run_ppo(PPOConfig(**settings, vllm_url=server.url, lora_rank=rank, lora_alpha=8.0)).parent
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
    mismatches = [row["sampling/mismatch"] for row in metrics(folder) if row["update"]]
    assert len(mismatches) == 2
    assert all(0 <= value < 1e-6 for value in mismatches)
    once = ["/server_info", "/start_weight_update", "/update_weights", "/finish_weight_update", "/reset_prefix_cache"]
    assert server.paths[-15:] == 3 * once
    met = ["/health", "/v1/models", "/server_info", "/tokenize", "/server_info", "/get_world_size"]
    assert server.paths[:-15] == [*met, "/init_weight_transfer_engine"]


def test_each_request_is_one_row_with_its_own_seed_and_our_ends(serve, settings, load_sharp):
    server = serve(settings["model"])
    run_ppo(PPOConfig(**settings | {"rollout_size": 6, "samples_per_prompt": 2}, vllm_url=server.url))
    tokenization = load_sharp("tiny-llama").tokenization
    prompts = [tokenization.prompt_ids(({"role": "user", "content": text},)) for text in PROMPTS]
    asked = [server.requests[a:b] for a, b in ((0, 3), (3, 9), (9, 12), (12, 18), (18, 21))]
    evaluation = row_seeds(3, 3, Stream.VALIDATION_SAMPLES)
    for part in asked[::2]:
        assert sorted((body["prompt"][0], body["seed"]) for body in part) == sorted(zip(prompts, evaluation, strict=True))
    for update, part in enumerate(asked[1::2], start=1):
        assert sorted(body["seed"] for body in part) == sorted(row_seeds(6, 3, Stream.ROLLOUT, update))
        assert sorted(body["prompt"][0] for body in part) == sorted(2 * prompts)
    for body in server.requests:
        assert body["stop_token_ids"] == sorted(tokenization.end_ids)
        assert (body["max_tokens"], body["temperature"], body["logprobs"]) == (6, 0.8, 0)


def test_a_server_that_dies_costs_nothing_but_the_update_it_died_in(serve, settings, tmp_path):
    whole = run_ppo(PPOConfig(**settings, vllm_url=serve(settings["model"]).url)).parent
    settings |= {"output_dir": str(tmp_path / "again"), "vllm_timeout": 8.0}  # all of it is waited for the dead server
    dying = serve(settings["model"])
    dying.dies_after = 3 + 4 + 3 + 2  # in the middle of the second rollout
    begun = time.monotonic()
    with pytest.raises(UserError, match=rf"vLLM server {dying.url}: sampling failed \(.*; .*--resume true") as caught:
        run_ppo(PPOConfig(**settings, vllm_url=dying.url))
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begun < 60
    resumed = run_ppo(PPOConfig(**settings, vllm_url=serve(settings["model"]).url, resume=True)).parent
    assert metrics(resumed) == metrics(whole)
    assert (resumed / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()


# ------------------------------------------------------------------------------------------------------ lengths and ends


def test_responses_end_where_an_end_token_stands_or_at_the_limit(serve, settings, make_engine_of):
    engine = make_engine_of(serve(settings["model"]).url)
    tokenization = engine.loaded.tokenization
    tokenization.end_ids = ends = frozenset(range(8, 60))  # about every fifth token
    prompts = [[9 + row, 40, 41] for row in range(12)]
    found = engine.sample(prompts, Sampling(4), (1, 2))
    assert 0 < sum(found.ended) < 12, "some of each"
    for ids, ended, seen in zip(found.ids, found.ended, found.log_probs, strict=True):
        assert ended == (ids[-1] in ends)
        assert not ends & set(ids[:-1])
        assert ended or len(ids) == 4
        assert len(seen) == len(ids)
    again = engine.sample(prompts, Sampling(4), (1, 2))
    assert (again.ids, again.ended) == (found.ids, found.ended)
    assert engine.sample(prompts, Sampling(4), (1, 3)).ids != found.ids
    engine.close()
