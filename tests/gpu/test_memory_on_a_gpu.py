"""The estimate before the start, against what a run has held on the GPU."""

import gc

import pytest
import torch

from align.ppo import PPOConfig
from align.ppo.trainer import make_trainer
from align.sft import SFTConfig
from align.sft.train import SFTTrainer
from tests.gpu.small_runs import COMMON, PPO

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
TOLERANCE = 0.15
LARGE = {"micro_batch_tokens": 8192, "max_prompt_tokens": 256}
"""Micro-batches so large that activations count, not weights alone."""


def trainer(stage, settings, folder):
    common = COMMON | LARGE | settings | {"model": "smollm2-135m", "dtype": "bfloat16", "output_dir": str(folder)}
    if stage == "sft":
        data = "data/demonstrations.jsonl"
        config = SFTConfig(**common | {"train_data": data, "batch_size": 64, "max_response_tokens": 256})
        return SFTTrainer(config.model, config.train_data, config)
    more = {"rollout_size": 64, "max_new_tokens": 128, "reward_functions": ["align.ppo.toy_rewards:share_of_e"]}
    return make_trainer(PPOConfig(**common | PPO | more))


@pytest.mark.parametrize("stage", ["sft", "ppo"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"lora_rank": 16}, {"gradient_checkpointing": True}, {"optimizer": "adafactor"}],
    ids=["full", "lora", "checkpointing", "adafactor"],
)
def test_the_estimate(stage, settings, tmp_path, record_property):
    gc.collect()
    torch.cuda.empty_cache()
    made = trainer(stage, settings, tmp_path)
    made.train()
    memory = made.run.memory
    record_property("estimate", memory.expected_bytes)
    record_property("peak", memory.peak())
    assert memory.peak() == pytest.approx(memory.expected_bytes, rel=TOLERANCE)
