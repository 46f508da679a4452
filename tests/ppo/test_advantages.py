import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from align.ppo.advantages import add_kl_penalty, advantages_and_returns, gae, grpo, reinforce_plus_plus, rloo

QUICK = settings(deadline=None, max_examples=40)

NAN = float("nan")


def doubles(rows):
    return torch.tensor(rows, dtype=torch.float64)


def check(found, expected):
    torch.testing.assert_close(found, doubles(expected), rtol=0, atol=1e-12)


def test_gae_by_hand():
    advantages, returns = advantages_and_returns(
        doubles([[1.0, 0.0, 2.0]]), doubles([[0.5, 1.0, -1.0]]), torch.tensor([3]), gamma=0.9, lam=0.5
    )
    # delta_3 = 2 + .9 x 0 - (-1) = 3               A_3 = 3
    # delta_2 = 0 + .9 x (-1) - 1 = -1.9            A_2 = -1.9 + .45 x 3 = -.55
    # delta_1 = 1 + .9 x 1 - .5 = 1.4               A_1 = 1.4 + .45 x (-.55) = 1.1525
    check(advantages, [[1.1525, -0.55, 3.0]])
    check(returns, [[1.6525, 0.45, 2.0]])  # A + V: 1.1525 + .5, -.55 + 1, 3 - 1
    advantages, returns = advantages_and_returns(
        doubles([[1.0, 4.0, 100.0], [5.0, NAN, NAN]]),
        doubles([[2.0, 3.0, NAN], [1.0, 7.0, NAN]]),
        torch.tensor([2, 1]),
        gamma=1.0,
        lam=0.95,
    )
    # Row 1, two tokens: A_2 = 4 - 3 = 1; delta_1 = 1 + 3 - 2 = 2, A_1 = 2 + .95 x 1 = 2.95. Row 2: A_1 = 5 - 1 = 4.
    check(advantages, [[2.95, 1.0, 0.0], [4.0, 0.0, 0.0]])
    check(returns, [[4.95, 4.0, 0.0], [5.0, 0.0, 0.0]])
    found, _ = gae(doubles([[1.0, 3.0]]), doubles([[0.0, 0.0]]), torch.tensor([2]), 1.0, 0.95)
    # Advantages 1 + .95 x 3 = 3.85 and 3: mean 3.425, deviations +-.425.
    assert found.tolist() == [pytest.approx([1.0, -1.0], abs=1e-6)]


@QUICK
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    st.sampled_from([0.0, 0.3, 0.95, 1.0]),
)
def test_gae_against_its_definition_and_against_shorter_rows(lengths, seed, gamma, lam):
    rng = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(len(lengths), max(lengths) + 2, generator=rng, dtype=torch.float64) for _ in range(2))
    advantages, returns = advantages_and_returns(rewards, values, torch.tensor(lengths), gamma, lam)
    for row, length in enumerate(lengths):
        reward, value = rewards[row].tolist(), [*values[row, :length].tolist(), 0.0]
        delta = [reward[t] + gamma * value[t + 1] - value[t] for t in range(length)]
        for t in range(length):  # Schulman et al. 2016, equation 16: sum over l of (gamma lambda)^l delta_(t+l)
            expected = sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, length))
            assert advantages[row, t].item() == pytest.approx(expected, abs=1e-12)
            assert returns[row, t].item() == pytest.approx(expected + value[t], abs=1e-12)
        alone = advantages_and_returns(
            rewards[row : row + 1, :length], values[row : row + 1, :length], torch.tensor([length]), gamma, lam
        )
        assert torch.equal(alone[0], advantages[row : row + 1, :length])
        assert torch.equal(alone[1], returns[row : row + 1, :length])
        assert advantages[row, length:].abs().sum().item() == returns[row, length:].abs().sum().item() == 0.0


# Two prompts with three responses each, of 2, 1 and 2 tokens; totals 1, 2, 6 and 5, 5, 5.
REWARDS = [[0.0, 1.0], [2.0, 0.0], [4.0, 2.0], [1.0, 4.0], [5.0, 0.0], [0.0, 5.0]]
LENGTHS = torch.tensor([2, 1, 2, 2, 1, 2])


def test_rloo_by_hand():
    advantages = rloo(doubles(REWARDS), LENGTHS, samples=3)
    # 1 - (2 + 6) / 2 = -3; 2 - (1 + 6) / 2 = -1.5; 6 - (1 + 2) / 2 = 4.5; nothing is better than the others of prompt 2.
    check(advantages, [[-3.0, -3.0], [-1.5, 0.0], [4.5, 4.5], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]])


def test_grpo_by_hand():
    advantages = grpo(doubles(REWARDS[:3]), LENGTHS[:3], samples=3, epsilon=0.0)
    deviation = (14 / 3) ** 0.5  # of -2, -1, 3
    check(advantages, [[-2 / deviation] * 2, [-1 / deviation, 0.0], [3 / deviation] * 2])
    assert grpo(doubles(REWARDS), LENGTHS, samples=3)[3:].abs().max() == 0.0


def test_reinforce_plus_plus_by_hand():
    advantages = reinforce_plus_plus(doubles(REWARDS[:3]), LENGTHS[:3], gamma=0.5)
    # Sums of what follows: 0 + .5 x 1 and 1; 2; 4 + .5 x 2 = 5 and 2. Of .5, 1, 2, 5, 2 the mean is 2.1, the squares of
    # the deviations 2.56 + 1.21 + .01 + 8.41 + .01 = 12.2, the variance 2.44.
    scale = (2.44 + 1e-8) ** -0.5
    check(advantages, [[-1.6 * scale, -1.1 * scale], [-0.1 * scale, 0.0], [2.9 * scale, -0.1 * scale]])


def test_no_estimator_reads_past_the_end():
    rewards, values, lengths = doubles([[1.0, 0.0], [3.0, 4.0]]), doubles([[1.0, NAN], [2.0, 2.0]]), torch.tensor([1, 2])
    estimates = (rloo(rewards, lengths, 2), grpo(rewards, lengths, 2), reinforce_plus_plus(rewards, lengths, 1.0))
    for advantages in (*estimates, gae(rewards, values, lengths, 1.0, 0.95)[0]):
        assert torch.isfinite(advantages).all()
        assert advantages[0, 1] == 0.0


def test_shaped_rewards_by_hand():
    log_probs = doubles([[-1.0, -2.0, -0.5], [-3.0, 99.0, NAN]])
    reference = doubles([[-1.5, -1.0, -0.5], [-1.0, NAN, -7.0]])
    found = add_kl_penalty(doubles([10.0, -4.0]), log_probs - reference, torch.tensor([3, 1]), kl_coef=0.1)
    # Row 1: -.1 (-1 + 1.5) = -.05;  -.1 (-2 + 1) = .1;  -.1 (0) + 10 = 10.
    # Row 2 has one token: -.1 (-3 + 1) - 4 = -3.8; nothing behind it, whatever stands there.
    torch.testing.assert_close(found, doubles([[-0.05, 0.1, 10.0], [-3.8, 0.0, 0.0]]), rtol=0, atol=1e-12)
