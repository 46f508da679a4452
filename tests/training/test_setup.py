import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Phi3Config

from align.core.errors import UserError
from align.dpo import DPOConfig, DPOTrainer
from align.ppo import PPOConfig, PPOTrainer
from align.reward import RewardConfig, RewardTrainer
from align.sft import SFTConfig, SFTTrainer
from align.training.model_source import ModelSource
from align.training.run import Run
from tests.settings import run_settings

SIZES = {"vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
SIZES |= {"pad_token_id": 0, "eos_token_id": 1}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 4, "long_factor": [8.0] * 4}


@pytest.mark.parametrize("longrope", [True, False])
def test_longrope_is_named(sharpen, sharp_folders, tmp_path, capsys, longrope):
    more = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16} if longrope else {}
    model = sharpen(AutoModelForCausalLM.from_config(Phi3Config(**SIZES, **more, max_position_embeddings=64)))
    long = torch.arange(5, 25)[None]
    with torch.no_grad():
        change = (model(long[:, :4]).logits[0] - model(long).logits[0, :4]).abs().max()
    assert (change > 1e-3) == longrope
    tokenizer = AutoTokenizer.from_pretrained(sharp_folders["tiny-llama"])
    config = SFTConfig(train_data="-", output_dir=str(tmp_path / "run"), report_to=["none"])
    source = ModelSource(model, tokenizer)
    source.load(Run(source.settings(config), "sft"))
    line = "model type 'phi3' has LongRoPE: a row of more than 16 tokens changes the log-probs"
    assert (line in " ".join(capsys.readouterr().err.split())) == longrope


RANKINGS = [{"prompt": "Hi", "responses": ["a", "b", "c"], "ranks": [1, 2, 3]}] * 2
DEMONSTRATIONS = [{"prompt": "Hi", "completion": "Ho"}] * 2


def no_reward(prompts, responses):
    return [0.0] * len(responses)


TRAINERS = {
    "dpo": lambda loaded, **more: DPOTrainer(loaded, RANKINGS, DPOConfig(**more)),
    "reward": lambda loaded, **more: RewardTrainer(loaded, RANKINGS, RewardConfig(**more)),
    "ppo": lambda loaded, **more: PPOTrainer(loaded, [no_reward], ["Hi"], PPOConfig(samples_per_prompt=2, **more)),
    "ppo, one response": lambda loaded, **more: PPOTrainer(loaded, [no_reward], ["Hi"], PPOConfig(**more)),
    "sft": lambda loaded, **more: SFTTrainer(loaded, DEMONSTRATIONS, SFTConfig(**more)),
}


@pytest.mark.parametrize("stage", TRAINERS)
def test_it_is_said_where_a_prompt_has_several_responses(stage, load_sharp, tmp_path, capsys):
    warned = []
    for shares in (True, False):
        loaded = load_sharp("tiny-llama")
        loaded.backbone.shares_prompts = shares
        TRAINERS[stage](loaded, dtype="float32", report_to=["none"], output_dir=str(tmp_path / str(shares)))
        warned.append("each prompt is recomputed" in capsys.readouterr().err)
    assert warned == [False, stage in ("dpo", "reward", "ppo")]


@pytest.mark.parametrize("stage", ["dpo", "reward", "ppo", "sft"])
def test_a_model_whose_weights_are_all_frozen_trains_a_head_or_is_refused(stage, load_sharp, tmp_path, capsys):
    loaded = load_sharp("tiny-llama")
    loaded.backbone.model.requires_grad_(False)
    settings = run_settings(tmp_path / "run")
    frozen = "all weights of the model are frozen, as merge_and_unload() leaves them"
    if stage == "reward":
        TRAINERS[stage](loaded, **settings)
        assert f"warning: {frozen}: only its head is trained" in " ".join(capsys.readouterr().err.split())
        return
    with pytest.raises(UserError) as raised:
        TRAINERS[stage](loaded, **settings)
    assert str(raised.value) == f"{frozen}: call requires_grad_(True) on it"
