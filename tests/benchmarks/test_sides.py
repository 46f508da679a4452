"""Each side of each kind of work at a tiny size. TRL 1.12.0's PPO needs an environment of its own and is not among them."""

import pytest

from benchmarks import ours
from benchmarks.data import llama_1b, make_model, make_reward_model, make_texts
from benchmarks.measuring import examples, measure
from benchmarks.workloads import ALL, SCALES, scaled

TINY = SCALES["tiny"]
NAMES = ("ppo", "ppo_lora", "reward_k4", "reward_long", "sft", "sampling_32", "time_to_reward")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What `benchmarks.data` makes, for some of the work."""
    made = tmp_path_factory.mktemp("bench")
    make_model(made / "model", TINY.model)
    make_model(made / "race", "tiny-llama", endless=False)
    for seed, name in enumerate(NAMES):
        make_texts(made, scaled(ALL[name], TINY), made / ("race" if name == "time_to_reward" else "model"), seed)
    make_reward_model(made, {})
    make_reward_model(made, {"lora_r": 2})
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


def test_sft_counts_the_same_tokens_on_both_sides(folder, tmp_path):
    work = scaled(ALL["sft"], TINY)
    lengths = {len(row["prompt"]) + len(row["responses"][0]) for row in examples(folder, work)}
    for side in ("ours", "peer"):
        found = measure(side, work, "float32", folder, 1, tmp_path)
        assert len(found.seconds) == len(found.tokens) == work.measured
        assert all(work.rows * min(lengths) <= tokens <= work.rows * max(lengths) for tokens in found.tokens)


def test_sampling_counts_new_tokens(folder, tmp_path):
    work = scaled(ALL["sampling_32"], TINY)
    for side in ("ours", "peer"):
        found = measure(side, work, "float32", folder, 1, tmp_path)
        assert len(found.seconds) == work.measured
        # The untrained model says its end token now and then: a row may be shorter, never longer.
        assert all(work.rows <= tokens <= work.rows * work.response[1] for tokens in found.tokens)


def test_our_side_of_the_race_runs(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "RACE_UPDATES", 2)
    found = measure("ours", scaled(ALL["time_to_reward"], TINY), "1e-3", folder, 1, tmp_path)
    assert found.seconds == []
    assert 0.0 < found.figures["best_reward"] < 0.5


def test_the_model_for_a_gpu_has_room_for_its_work():
    large = [scaled(work, SCALES["gpu"]) for work in ALL.values() if work.stage != "race"]
    assert max(work.prompt[1] + work.response[1] for work in large) <= llama_1b(49152).max_position_embeddings
