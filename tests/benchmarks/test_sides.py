"""Each side of each kind of work at a tiny size. TRL 1.12.0's PPO needs an environment of its own and is not among them."""

from dataclasses import replace

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, OPTConfig

from align.ppo.records import Experience
from benchmarks import ours
from benchmarks.data import QWEN3, SHAPES, make
from benchmarks.measuring import examples, measure
from benchmarks.workloads import ALL, SCALES, WORKS, scaled

TINY = SCALES["tiny"]
NAMES = ("ppo", "ppo_lora", "reward_k4", "reward_long", "sft", "sampling_32", "time_to_reward")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What `benchmarks.data` makes, for some of the work."""
    made = tmp_path_factory.mktemp("bench") / "tiny"
    make(made, "tiny", NAMES)
    return made


@pytest.mark.parametrize("name", ["ppo", "ppo_lora"])
def test_our_ppo(folder, name, tmp_path):
    work = scaled(ALL[name], TINY)
    found = measure("ours", work, "auto", folder, 1, tmp_path)
    assert len(found.seconds) == work.measured
    assert all(seconds > 0 for seconds in found.seconds)
    assert sum(found.figures[part] for part in ("sample", "score", "record", "learn")) == pytest.approx(1.0, abs=1e-5)
    assert found.figures["response_tokens"] <= work.response[1]


@pytest.mark.parametrize("name", ["reward_k4", "reward_long"])
def test_a_ranking_is_read_by_us_once_and_by_the_peer_pair_by_pair(folder, name, tmp_path):
    work = scaled(ALL[name], TINY)
    mine = measure("ours", work, "auto", folder, 1, tmp_path)
    assert mine.tokens == [work.rows * (work.prompt[0] + work.responses * work.response[0])] * work.measured
    theirs = measure("peer", work, "float32", folder, 1, tmp_path)
    read = work.pairs_read or work.pairs
    assert theirs.tokens == [work.rows * read * 2 * (work.prompt[0] + work.response[0])] * work.measured
    assert all(seconds > 0 for seconds in mine.seconds + theirs.seconds)


def test_sft_and_sampling_count_the_same_tokens_on_both_sides(folder, tmp_path):
    work = scaled(ALL["sft"], TINY)
    lengths = {len(row["prompt"]) + len(row["responses"][0]) for row in examples(folder, work)}
    for side in ("ours", "peer"):
        found = measure(side, work, "float32", folder, 1, tmp_path)
        assert len(found.seconds) == len(found.tokens) == work.measured
        assert all(work.rows * min(lengths) <= tokens <= work.rows * max(lengths) for tokens in found.tokens)
    work = scaled(ALL["sampling_32"], TINY)
    for side in ("ours", "peer"):
        found = measure(side, work, "float32", folder, 1, tmp_path / "sampling")
        assert len(found.seconds) == work.measured
        # The untrained model says its end token now and then: a row may be shorter, never longer.
        assert all(work.rows <= tokens <= work.rows * work.response[1] for tokens in found.tokens)


def test_our_side_of_the_race_runs(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "RACE_UPDATES", 2)
    found = measure("ours", scaled(ALL["time_to_reward"], TINY), "1e-3", folder, 1, tmp_path)
    assert found.seconds == []
    assert 0.0 < found.figures["best_reward"] < 0.5


def test_the_models_for_a_gpu_have_room_for_their_work():
    for work in WORKS:
        if work.stage != "race":
            large, gpu = scaled(work, SCALES["gpu"]), SCALES["gpu"].model
            config = SHAPES[work.gpu_models[0] if work.gpu_models else gpu](49152)
            assert large.prompt[1] + large.response[1] <= config.max_position_embeddings, work.name


@pytest.mark.parametrize(
    ("name", "parameters"), [("opt-1.3b", 1.31e9), ("opt-350m", 0.33e9), ("qwen3-0.6b", 0.6e9), ("qwen3-4b", 4.02e9)]
)
def test_the_shapes_are_those_of_published_models(name, parameters):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPES[name](50272))
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(parameters, rel=0.01)


@pytest.mark.slow
def test_work_on_a_gpu_alone_reads_its_own_models(tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "opt-1.3b", lambda vocabulary: _opt(vocabulary, word_embed_proj_dim=32))
    monkeypatch.setitem(SHAPES, "opt-350m", lambda vocabulary: _opt(vocabulary, word_embed_proj_dim=16))
    sizes = {"rows": 4, "prompt": (4, 4), "response": (4, 4)}
    monkeypatch.setitem(ALL, "ppo_opt", work := replace(ALL["ppo_opt"], **sizes))
    make(tmp_path / "data", "gpu", ["ppo_opt"])
    (folder := tmp_path / "ours").mkdir()
    found = measure("ours", work, "auto", tmp_path / "data", 1, folder)
    assert found.figures["response_tokens"] == 4
    assert found.seconds[0] > 0
    budget = yaml.safe_load((folder / "run" / "config.yaml").read_text())["micro_batch_tokens"]
    assert budget == work.settings["micro_batch_tokens"]


@pytest.mark.parametrize(("name", "model"), [("rl_16k", "qwen3-0.6b"), ("rl_lora_4b", "qwen3-4b")])
def test_learning_from_given_responses(name, model, tmp_path, monkeypatch):
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 16}
    monkeypatch.setitem(SHAPES, model, QWEN3(**small))
    settings = ALL[name].settings | {"micro_batch_tokens": 16}
    monkeypatch.setitem(ALL, name, work := replace(ALL[name], prompt=(4, 4), response=(12, 12), settings=settings))
    make(tmp_path / "data", "gpu", [name])
    packed, batch = [], Experience.batch
    monkeypatch.setattr(Experience, "batch", lambda *words: packed.append(words[1].rows) or batch(*words))
    found = measure("ours", work, "auto", tmp_path / "data", 1, tmp_path)
    assert found.tokens == [2 * 16] * work.measured
    assert sum(found.seconds) < found.figures["update"] * work.measured
    assert found.figures["mfu_learn"] > 0
    assert all(len(rows) == 1 for rows in packed), "a row of the longest length is a micro-batch"
    assert len(packed) >= 2 * (work.warmup + work.measured)


def _opt(vocabulary, **sizes):
    return OPTConfig(vocab_size=vocabulary, hidden_size=32, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2, **sizes)
