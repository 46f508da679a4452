import math
import shutil
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from align.batches.encoding import Limits, encode_prompts
from align.commands.sample import scorer_of
from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.statistics import correlation, kendall_tau, mean_interval, pair_calibration_error
from align.core.tensor_ops import Padded
from align.data.records import Prompt, Ranking
from align.eval.answers import sampled_responses
from align.eval.policy_comparison import (
    best_responses,
    compare_policies,
    expected_best,
    judged_win_rates,
    kl_bound,
    sizes_on_curve,
)
from align.eval.results import read_evaluations
from align.eval.reward import RewardEvalConfig, checkpoints_of, interval_over_rankings, run_reward_eval
from align.models.heads import response_log_probs
from align.models.loading import load, load_tokenization
from align.ppo import PPOConfig, run_ppo
from align.reward.checkpoint import load_reward_model
from align.sampling.generation import SamplingParams
from tests.eval.files import stored_rows
from tests.files import write_rows
from tests.settings import run_settings

RANKINGS = [
    {"prompt": "Hi", "responses": ["a", "bb", "ccc"], "ranks": [1, 2, 3], "category": "x"},
    {"prompt": "Count", "responses": ["1 2", "no"], "ranks": [2, 1], "category": "y"},
    {"prompt": "Who?", "responses": ["me", "you there", "them"], "ranks": [1, 2, 2], "category": "x"},
]


@pytest.fixture
def settings(tmp_path, reward_folders):
    given = {"reward_model": reward_folders["tiny-llama"], "gold_model": reward_folders["tiny-gpt2"]}
    given["preferences"] = write_rows(tmp_path / "rankings.jsonl", RANKINGS)
    given["prompts"] = write_rows(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in RANKINGS])
    return given | {"output": str(tmp_path / "out"), "dtype": "float32", "max_new_tokens": 5}


def measurements(evaluation):
    return {measurement.name: measurement for measurement in evaluation.measurements}


def test_accuracy_and_order_are_those_of_single_rows(settings):
    proxy, gold = run_reward_eval(RewardEvalConfig(**settings))
    assert (proxy.model, gold.model) == ("tiny-llama", "tiny-gpt2")
    found = load_reward_model(settings["reward_model"], "float32")
    right, taus = [], []
    for row in RANKINGS:
        record, tokenization = Ranking.from_row(row), found.loaded.tokenization
        prompt, rewards = tokenization.prompt_ids(record.prompt), []
        for text in record.responses:
            both = Padded.from_lists([prompt]), Padded.from_lists([tokenization.response_ids(text)])
            rewards.append(float(found.model(*both)) - found.mean)
        taus.append(kendall_tau(record.ranks, rewards))
        pairs = [(i, j) for i, a in enumerate(record.ranks) for j, b in enumerate(record.ranks) if a < b]
        right += [rewards[i] > rewards[j] for i, j in pairs]
    assert measurements(proxy)["accuracy"].value == pytest.approx(np.mean(right))
    assert measurements(proxy)["accuracy"].n == 6
    assert measurements(proxy)["Kendall's tau"].value == pytest.approx(np.mean(taus))
    table = proxy.tables["by category"]
    assert [(row["category"], row["pairs"]) for row in table] == [("x", 5), ("y", 1)]
    assert sum(row["pairs"] for row in proxy.tables["calibration"]) == 6
    assert proxy.measurements[0].scorer != gold.measurements[0].scorer


def test_rewards_of_other_preferences_are_not_reused(settings, tmp_path):
    config = RewardEvalConfig(**settings | {"gold_model": ""})
    run_reward_eval(config)
    path = tmp_path / "out" / "reward-tiny-llama.jsonl"
    before, lines = stored_rows(path), len(path.read_text().splitlines())
    write_rows(tmp_path / "rankings.jsonl", [RANKINGS[0] | {"responses": ["a", "bb", "other"]}, *RANKINGS[1:]])
    run_reward_eval(config)
    after = stored_rows(path)
    assert (after["2"], after["3"]) == (before["2"], before["3"])
    assert after["1"] != before["1"]
    assert len(path.read_text().splitlines()) == lines + 1


def test_the_curve_of_best_of_n(settings, sharp_folders):
    config = RewardEvalConfig(**settings | {"preferences": ""}, models=[sharp_folders["tiny-llama"]], samples=8)
    (found,) = run_reward_eval(config)
    curve = found.tables["curve"]
    assert [row["n"] for row in curve] == [1, 2, 4, 8]
    rewards = [row["reward"] for row in curve]
    assert rewards == sorted(rewards)
    (path,) = Path(settings["output"]).glob("best-of-n-tiny-llama-by-tiny-llama-*.jsonl")
    rows = stored_rows(path)
    kept = [row["rewards"] for row in rows.values()]
    assert [len(row) for row in kept] == [8, 8, 8]
    assert measurements(found)["reward, best of 1"].value == pytest.approx(np.mean(kept))
    assert measurements(found)["reward, best of 8"].value == pytest.approx(np.max(kept, axis=1).mean())
    assert "1.20 nats" in measurements(found)["gold, best of 8"].note  # log 8 - 7/8
    assert read_evaluations(Path(settings["output"]) / "best-of-n.json") == [found]


def test_reward_against_kl_over_the_policies_of_a_run(settings, sharp_folders, tmp_path):
    given = {"model": sharp_folders["tiny-llama"], "reward_model": settings["reward_model"], "prompts": settings["prompts"]}
    given |= {"total_updates": 2, "rollout_batch_size": 4, "max_new_tokens": 5, "save_steps": 1, "save_total_limit": 0}
    given |= run_settings(tmp_path / "ppo", learning_rate=1e-3)
    given["missing_eos_score"] = None  # few responses end: equal scores would not move the policy
    run_ppo(PPOConfig(**given, validation_prompts=settings["prompts"]))
    config = RewardEvalConfig(**settings | {"preferences": ""}, frontier=str(tmp_path / "ppo"))
    found = run_reward_eval(config)
    assert [each.model for each in found] == ["tiny-llama", "update-000001", "update-000002"]
    kl = [measurements(each)["KL"].value for each in found]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert min(kl[1:]) > 1e-5
    assert all({"reward", "gold"} <= measurements(each).keys() for each in found)
    assert found[0].tables["reward against KL"][0]["policy"] == "tiny-llama"
    assert not list(Path(settings["output"]).glob("update-*")), "the policies are removed"


def test_mistakes(settings, tmp_path):
    with pytest.raises(UserError, match="reward_model is ''"):
        RewardEvalConfig()
    with pytest.raises(UserError, match=r"gold_model is .*"):
        RewardEvalConfig(reward_model="a", gold_model="a")
    with pytest.raises(UserError, match="no checkpoints; train with save_steps"):
        checkpoints_of(str(tmp_path))
    shutil.copytree(settings["reward_model"], tmp_path / "checkpoints" / "update-000001")
    with pytest.raises(UserError, match=r"config\.yaml: not the config of a PPO run"):
        checkpoints_of(str(tmp_path))


def test_intervals_draw_whole_rankings_again():
    # Two rankings, each with a length correlation of its own: +1 and -1. Of the four equally likely draws of two, one is
    # all of the first and one all of the second, so the middle 95 % reaches both.
    up, down = np.array([[1.0, 0.0], [9, 5]]), np.array([[0.0, 1.0], [9, 5]])
    found = interval_over_rankings(lambda joined: correlation(*joined), [up, down])
    assert found == pytest.approx((-1.0, 1.0))
    # Both say 0.731, sigmoid(1): one of each is right half of the time, two of the second never.
    said = 1 / (1 + math.exp(-1))
    differences = [np.array([1.0]), np.array([-1.0])]
    assert interval_over_rankings(pair_calibration_error, differences) == pytest.approx((said - 0.5, said))
    assert interval_over_rankings(pair_calibration_error, differences[:1]) == (None, None)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
def test_the_closed_form_is_the_mean_over_all_subsets(n):
    generator = np.random.default_rng(3)
    rewards, gold = generator.normal(size=7), generator.normal(size=7)
    chosen = [max(subset, key=lambda i: rewards[i]) for subset in combinations(range(7), n)]
    assert expected_best(rewards, rewards, n) == pytest.approx(np.mean([rewards[i] for i in chosen]))
    assert expected_best(rewards, gold, n) == pytest.approx(np.mean([gold[i] for i in chosen]))


def test_best_of_n_by_hand():
    """1 is never the best of two; the two 5s are it equally often, whatever their order. Of 1, 2, 4: 2, 4 and 4."""
    for gold in ([0.0, 2.0, 4.0], [0.0, 4.0, 2.0]):
        assert expected_best(np.array([1.0, 5.0, 5.0]), np.array(gold), 2) == pytest.approx(3.0)
    rewards = np.array([4.0, 1.0, 2.0])
    assert expected_best(rewards, rewards, 2) == pytest.approx(10 / 3)
    assert [kl_bound(n) for n in (1, 2, 64)] == pytest.approx([0, 0.6931 - 0.5, 4.1589 - 63 / 64], abs=1e-4)
    assert sizes_on_curve(64) == [1, 2, 4, 8, 16, 32, 64]
    assert sizes_on_curve(6) == [1, 2, 4, 6]


PROMPTS = [Prompt(prompt=({"role": "user", "content": text},)) for text in ("red", "a longer question", "why")]
SAMPLING = SamplingParams(6)


@pytest.fixture(scope="module")
def reward(reward_folders):
    return load_reward_model(reward_folders["tiny-llama"], "float32")


def test_a_policy_against_itself_gains_nothing(sharp_folders, reward):
    name = sharp_folders["tiny-llama"]
    found = compare_policies(name, name, reward, PROMPTS, SAMPLING, seed=3, samples=4, dtype="float32")
    assert found.before == found.after
    assert (found.gain, found.gain_low, found.gain_high) == (0.0, 0.0, 0.0)
    assert found.kl == pytest.approx(0.0, abs=1e-6)
    assert len(found.after.texts) == 12
    answers = [{tuple(answer.ids) for answer in found.after.answers[i : i + 4]} for i in (0, 4, 8)]
    assert all(len(each) == 4 for each in answers)  # each sample has noise of its own


def test_prompts_of_token_ids_are_read_and_scored_as_they_are(sharp_folders, reward):
    policy, ids, answer = sharp_folders["tiny-llama"], [9, 10, 11], [20, 21, 1]
    found = compare_policies(policy, policy, reward, [Prompt(ids=ids)], SAMPLING, seed=3, samples=2, dtype="float32")
    end = load_tokenization(policy).end_id  # a response that was cut is scored at an end token, too
    answers = [[*each.ids, *([] if each.ended else [end])] for each in found.after.answers]
    read = Padded.from_lists([ids] * 2), Padded.from_lists(answers)
    with torch.no_grad():
        assert found.after.rewards == pytest.approx((reward.model(*read) - reward.mean).tolist(), abs=1e-5)
        expected = float(reward.model(Padded.from_lists([ids]), Padded.from_lists([answer])) - reward.mean)
    loaded = load(ModelConfig(model=policy, chat_template="plain"), torch.float32)  # the reward model has another template
    prompts = encode_prompts([{"input_ids": ids}], loaded, Limits(10, 10), False)
    responses = sampled_responses(prompts, [answer], loaded.tokenization)
    assert scorer_of(loaded, reward, 1000)(responses) == pytest.approx([expected], abs=1e-5)


def test_compared_policies_read_the_chat_template_that_is_given(sharp_folders, reward):
    name, read = sharp_folders["tiny-llama"], load_tokenization(sharp_folders["tiny-llama"], "raw")
    found = compare_policies(name, name, reward, PROMPTS, SAMPLING, 3, 1, "float32", chat_template="raw")
    expected = [read.prompt_ids(prompt.prompt) for prompt in PROMPTS]
    assert [answer.prompt_ids for answer in found.before.answers] == expected
    assert found.before == found.after


def test_gain_and_kl_are_means_over_prompts_and_their_answers(sharp_folders, reward):
    before, after = sharp_folders["tiny-gpt2"], sharp_folders["tiny-llama"]  # their byte tokenizer is one
    found = compare_policies(before, after, reward, PROMPTS, SAMPLING, seed=3, samples=2, dtype="float32")
    rewards = np.array([found.before.rewards, found.after.rewards]).reshape(2, 3, 2).mean(-1)
    assert found.gain == pytest.approx((rewards[1] - rewards[0]).mean())
    assert (found.gain_low, found.gain_high) == pytest.approx(mean_interval(rewards[1] - rewards[0]))
    policies = [load(ModelConfig(model=name), torch.float32) for name in (after, before)]
    total = 0.0
    for row, answer in enumerate(found.after.answers):
        prompt = Padded.from_lists([policies[0].tokenization.prompt_ids(PROMPTS[row // 2].prompt)])
        response = Padded.from_lists([answer.ids])
        with torch.no_grad():
            said = [
                response_log_probs(p.backbone, p.backbone.hidden(prompt, response), response, response.mask())[0].double()
                for p in policies
            ]
        ratio = said[1] - said[0]  # k3 of Schulman's note: r - 1 - log r of reference over policy
        total += float((ratio.exp() - 1 - ratio).sum())
    assert found.kl == pytest.approx(total / 6, rel=1e-4)


def test_the_best_of_n_is_the_highest_of_those_that_were_drawn(sharp_folders, reward):
    name = sharp_folders["tiny-llama"]
    one, many = (best_responses(name, reward, PROMPTS, n, SAMPLING, seed=3, dtype="float32") for n in (1, 8))
    assert [len(found.rewards) for found in (one, many)] == [3, 3]
    assert many.rewards[0] >= one.rewards[0]  # the first answer to the first prompt has the same noise in both
    repeated = compare_policies(name, name, reward, PROMPTS, SAMPLING, seed=3, samples=8, dtype="float32")
    assert many.answers != repeated.before.answers[::8]  # noise of its own
    assert sum(many.rewards) > sum(one.rewards)


def test_a_judge_counts_wins_and_halves_ties(sharp_folders, reward):
    before, after = sharp_folders["tiny-gpt2"], sharp_folders["tiny-llama"]
    found = compare_policies(before, after, reward, PROMPTS, SAMPLING, seed=3, samples=2, dtype="float32")
    wins = (np.sign(np.subtract(found.after.rewards, found.before.rewards)) + 1) / 2
    rates = judged_win_rates(found, reward, after)  # as the judge, the reward model itself
    assert rates == pytest.approx(wins.reshape(3, 2).mean(1))
    same = compare_policies(after, after, reward, PROMPTS, SAMPLING, seed=3, samples=2, dtype="float32")
    assert judged_win_rates(same, reward, after).tolist() == [0.5, 0.5, 0.5]
