"""A run whose model reads a prompt again for each response says so: sharing was once lost without a word."""

import pytest

from align.dpo import DPOConfig, DPOTrainer
from align.ppo import PPOConfig, PPOTrainer
from align.reward import RewardConfig, RewardTrainer
from align.sft import SFTConfig, SFTTrainer

RANKINGS = [{"prompt": "Hi", "responses": ["a", "b", "c"], "ranks": [1, 2, 3]}] * 2
DEMONSTRATIONS = [{"prompt": "Hi", "completion": "Ho"}] * 2
TRAINERS = {
    "dpo": lambda loaded, **more: DPOTrainer(loaded, RANKINGS, DPOConfig(**more)),
    "reward": lambda loaded, **more: RewardTrainer(loaded, RANKINGS, RewardConfig(**more)),
    "ppo": lambda loaded, **more: PPOTrainer(
        loaded, [lambda prompts, responses: [0.0] * len(responses)], ["Hi"], PPOConfig(samples_per_prompt=2, **more)
    ),
    "ppo, one response": lambda loaded, **more: PPOTrainer(
        loaded, [lambda prompts, responses: [0.0] * len(responses)], ["Hi"], PPOConfig(samples_per_prompt=1, **more)
    ),
    "sft": lambda loaded, **more: SFTTrainer(loaded, DEMONSTRATIONS, SFTConfig(**more)),
}


@pytest.mark.parametrize("stage", TRAINERS)
@pytest.mark.slow
def test_it_is_said_where_a_prompt_has_several_responses(stage, load_sharp, tmp_path, capsys):
    warned = []
    for shares in (True, False):
        loaded = load_sharp("tiny-llama")
        loaded.backbone.shares_prompts = shares
        TRAINERS[stage](loaded, dtype="float32", log_to=["none"], output_dir=str(tmp_path / str(shares)))
        warned.append("cannot read several responses in one row" in capsys.readouterr().err)
    assert warned == [False, stage in ("dpo", "reward", "ppo")]
