"""Two policies side by side: the same noise for both, several answers to a prompt, the interval over prompts."""

import numpy as np
import pytest
import torch

from align.core.settings import ModelConfig
from align.core.statistics import mean_interval
from align.core.tensor_ops import Padded
from align.data.records import Prompt
from align.eval.reward.policy_comparison import best_responses, compare_policies, judged_win_rates
from align.models.loading import load
from align.models.roles import response_log_probs
from align.reward.checkpoint import load_reward_model
from align.sampling.generation import Sampling

PROMPTS = [Prompt(prompt=({"role": "user", "content": text},)) for text in ("red", "a longer question", "why")]
SAMPLING = Sampling(6)


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
    answers = [{tuple(ids) for ids in found.after.ids[i : i + 4]} for i in (0, 4, 8)]
    assert all(len(each) == 4 for each in answers)  # each sample has noise of its own


def test_gain_and_kl_are_means_over_prompts_and_their_answers(sharp_folders, reward):
    before, after = sharp_folders["tiny-gpt2"], sharp_folders["tiny-llama"]  # their byte tokenizer is one
    found = compare_policies(before, after, reward, PROMPTS, SAMPLING, seed=3, samples=2, dtype="float32")
    rewards = np.array([found.before.rewards, found.after.rewards]).reshape(2, 3, 2).mean(-1)
    assert found.gain == pytest.approx((rewards[1] - rewards[0]).mean())
    assert (found.gain_low, found.gain_high) == pytest.approx(mean_interval(rewards[1] - rewards[0]))
    policies = [load(ModelConfig(model=name), torch.float32) for name in (after, before)]
    total = 0.0
    for row, ids in enumerate(found.after.ids):
        prompt = Padded.from_lists([policies[0].tokenization.prompt_ids(PROMPTS[row // 2].prompt)])
        response = Padded.from_lists([ids])
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
    assert many.ids != repeated.before.ids[::8]  # noise of its own
    assert sum(many.rewards) > sum(one.rewards)


def test_a_judge_counts_wins_and_halves_ties(sharp_folders, reward):
    before, after = sharp_folders["tiny-gpt2"], sharp_folders["tiny-llama"]
    found = compare_policies(before, after, reward, PROMPTS, SAMPLING, seed=3, samples=2, dtype="float32")
    wins = (np.sign(np.subtract(found.after.rewards, found.before.rewards)) + 1) / 2
    rates = judged_win_rates(found, reward, after)  # as the judge, the reward model itself
    assert rates == pytest.approx(wins.reshape(3, 2).mean(1))
    same = compare_policies(after, after, reward, PROMPTS, SAMPLING, seed=3, samples=2, dtype="float32")
    assert judged_win_rates(same, reward, after).tolist() == [0.5, 0.5, 0.5]
