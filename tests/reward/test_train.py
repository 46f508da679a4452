"""The loss of the reward model in batches: padding, order and micro-batches never change it, nor a further term."""

import pytest
import torch

from align.models.heads import RewardModel, ScalarHead
from align.reward import RewardConfig
from align.reward.rankings import group_sizes
from align.reward.train import batch_loss
from align.training.start import build_engine
from tests.models.losses import ADAPTER, assert_invariant, loss_of_rows, rankings


@pytest.mark.parametrize("lora_r", [0, ADAPTER])
@pytest.mark.parametrize("terms", [{}, {"centering_weight": 0.1}], ids=str)
def test_the_reward_loss(tiny_name, load_sharp, make_run, hand_rollout, lora_r, terms):
    loaded = load_sharp(tiny_name, adapter="reward", lora_r=lora_r)
    run = make_run(RewardConfig, "reward")
    torch.manual_seed(2)
    model = RewardModel(loaded.backbone, ScalarHead(loaded.backbone.hidden_size, bias=False), loaded.adapter)
    engine, examples = build_engine(run, model, 1), rankings(hand_rollout)
    given = {"soft_targets": False, "centering_weight": 0.0} | terms
    assert_invariant(engine, group_sizes(loaded.backbone, examples), loss_of_rows(batch_loss, engine, examples, **given))
