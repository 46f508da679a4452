"""Scalar heads: how they start, and where a reward is read."""

import pytest
import torch

from align.core.tensor_ops import Padded
from align.models.heads import RewardModel, ScalarHead

PROMPT, RESPONSE = Padded.from_lists([[9, 10, 11], [12]]), Padded.from_lists([[20, 21], [22, 23, 24, 25]])


def test_a_head_is_a_dot_product_in_float32():
    head = ScalarHead(2).bfloat16()
    with torch.no_grad():
        head.linear.weight.copy_(torch.tensor([[0.5, -2.0]]))
        head.linear.bias.fill_(0.25)
    found = head(torch.tensor([[[1.0, 2.0], [1000.0, 1.0]]], dtype=torch.bfloat16))
    # 0.5 - 4 + 0.25 = -3.25; 500 - 2 + 0.25 = 498.25, which bfloat16 would round to 498.
    assert found.dtype == torch.float32
    assert found.tolist() == [[-3.25, 498.25]]


def test_a_reward_head_starts_with_the_standard_deviation_of_its_source():
    torch.manual_seed(0)
    head = ScalarHead(9_999)
    # 1 / sqrt(9999 + 1) = 0.01; of 9999 draws the estimate is good to 0.01 / sqrt(2 * 9999) = 0.00007: 4 of those.
    assert float(head.linear.weight.detach().std()) == pytest.approx(0.01, abs=0.0003)
    assert head.linear.bias.tolist() == [0.0]


def test_a_value_head_on_a_shared_trunk_starts_at_zero():
    head = ScalarHead(5, start_at_zero=True)
    assert head(torch.randn(3, 2, 5)).abs().max() == 0.0


@torch.no_grad()
def test_a_reward_is_read_after_the_last_real_token(backbone):
    torch.manual_seed(1)
    head = ScalarHead(backbone.hidden_size)
    rewards = RewardModel(backbone, head, None)(PROMPT, RESPONSE)
    hidden = backbone.hidden(PROMPT, RESPONSE)
    assert rewards.tolist() == pytest.approx([float(head(hidden[0, 2])), float(head(hidden[1, 4]))], abs=1e-6)
