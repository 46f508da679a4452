"""Which prompts an update samples from and which rows its minibatches hold: reproducible, complete, shuffled."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.ppo.config import PPOConfig
from align.ppo.experience import RoleOutputs, build_experience, minibatches
from align.ppo.metrics import repetition
from align.ppo.rollout import Rollout, prompts_of_update
from align.ppo.scores import ScoreShaping
from align.tokenization.encoded import EncodedPrompt

QUICK = settings(deadline=None, max_examples=40)


def config(**changes):
    return PPOConfig(reward_functions=["align.ppo.toy_rewards:brevity"], **changes)


def prompts(count):
    return [EncodedPrompt(({"role": "user", "content": str(i)},), [i]) for i in range(count)]


def numbers(found):
    return [prompt.ids[0] for prompt in found]


def rollout(lengths, ended=None):
    rows = len(lengths)
    return Rollout(prompts(rows), [[7] * n for n in lengths], ended or [True] * rows, ["x" * n for n in lengths])


@QUICK
@given(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(0, 5))
def test_each_pass_over_the_prompts_is_complete(count, per_update, repeats, seed):
    settled = config(rollout_size=per_update * repeats, samples_per_prompt=repeats, seed=seed)
    seen = []
    for update in range(1, 3 * count + 1):
        found = numbers(prompts_of_update(settled, prompts(count), update))
        assert len(found) == per_update * repeats
        groups = [found[i : i + repeats] for i in range(0, len(found), repeats)]
        assert all(len(set(group)) == 1 for group in groups), "samples of one prompt stand side by side"
        seen += [group[0] for group in groups]
    for start in range(0, len(seen) - count + 1, count):
        assert sorted(seen[start : start + count]) == list(range(count))


def test_each_pass_is_shuffled_anew_and_by_the_seed():
    one, other = config(rollout_size=50, seed=1), config(rollout_size=50, seed=2)
    first, second = (numbers(prompts_of_update(one, prompts(50), update)) for update in (1, 2))
    assert first != second
    assert first != list(range(50))
    assert first != numbers(prompts_of_update(other, prompts(50), 1))
    assert first == numbers(prompts_of_update(one, prompts(50), 1)), "an update depends on nothing that came before it"


@QUICK
@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 3), st.integers(0, 3))
def test_minibatches_are_a_partition_of_nearly_equal_parts(rows, parts, update, epoch):
    parts = min(parts, rows)
    found = minibatches(config(rollout_size=rows, minibatches=parts), rollout([1] * rows), update, epoch)
    assert len(found) == parts
    assert sorted(row for part in found for row in part) == list(range(rows))
    assert max(map(len, found)) - min(map(len, found)) <= 1


@QUICK
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 6))
def test_samples_of_a_prompt_stay_in_one_minibatch(prompts, each, parts):
    settled = config(rollout_size=prompts * each, samples_per_prompt=each, minibatches=min(parts, prompts))
    found = minibatches(settled, rollout([1] * (prompts * each)), 1, 0)
    assert sorted(row for part in found for row in part) == list(range(prompts * each))
    for part in found:
        groups = [part[i : i + each] for i in range(0, len(part), each)]
        assert groups == [list(range(first, first + each)) for first in part[::each]]


def test_minibatches_are_reshuffled_each_epoch_and_update():
    settled, rows = config(minibatches=2), rollout([1] * 64)
    found = [minibatches(settled, rows, update, epoch) for update in (1, 2) for epoch in (0, 1)]
    assert all(found[i] != found[j] for i in range(4) for j in range(i))
    assert minibatches(settled, rows, 1, 0) == found[0]


@pytest.mark.parametrize(
    ("ids", "share"),
    [
        ([], 0.0),
        ([1, 2], 0.0),
        ([1, 2, 3, 4], 0.0),
        ([1, 1, 1, 1], 0.5),  # two trigrams, one of them new
        ([1, 2, 3, 1, 2, 3], 0.25),  # 123 231 312 123: one of four occurred before
    ],
)
def test_repetition_by_hand(ids, share):
    assert repetition(ids) == share


def test_a_shaped_rollout_by_hand():
    settled = config(kl_beta=0.1, gamma=1.0, lam=1.0, missing_eos="replace", missing_eos_score=-1.0)
    roles = RoleOutputs(
        log_probs=torch.tensor([[-1.0, -1.0], [-2.0, 0.0]]),
        reference=torch.tensor([[-2.0, -1.0], [-1.0, 0.0]]),
        values=torch.tensor([[0.5, 1.0], [0.0, 0.0]]),
        entropy=torch.zeros(2, 2),
    )
    cut = rollout([2, 1], [True, False])
    scores = ScoreShaping(settled).apply_eos_rule(torch.tensor([3.0, 9.0]), cut)
    experience = build_experience(settled, cut, scores, roles, beta=0.1)
    assert experience.scores.tolist() == [3.0, -1.0]  # the second did not end
    # Rewards: row 1 -.1 x 1 = -.1, then 3; row 2 -.1 x (-1) - 1 = -.9. With lambda 1 returns are what is still to come.
    torch.testing.assert_close(experience.returns, torch.tensor([[2.9, 3.0], [-0.9, 0.0]]), rtol=0, atol=1e-6)
    # Advantages 2.4, 2, -.9: mean 3.5 / 3 = 1.16667, squares 1.52111 + .69444 + 4.27111 = 6.48667, variance 2.16222,
    # deviation 1.47045.
    expected = torch.tensor([[1.23333 / 1.47045, 0.83333 / 1.47045], [-2.06667 / 1.47045, 0.0]])
    torch.testing.assert_close(experience.advantages, expected, rtol=0, atol=2e-5)
    assert experience.mask.tolist() == [[True, True], [True, False]]


def test_whitened_rewards_keep_their_mean_and_reach_the_returns():
    settled = config(gamma=1.0, lam=1.0, whiten_rewards=True)
    nothing = torch.zeros(2, 1)
    roles = RoleOutputs(nothing, nothing, nothing, nothing)
    experience = build_experience(settled, rollout([1, 1]), torch.tensor([2.0, 6.0]), roles, beta=0.0)
    # Rewards 2 and 6: mean 4, deviation 2, so 4 - 1 and 4 + 1.
    assert experience.returns[:, 0].tolist() == pytest.approx([3.0, 5.0], abs=1e-6)
    assert experience.advantages[:, 0].tolist() == pytest.approx([-1.0, 1.0], abs=1e-6)
