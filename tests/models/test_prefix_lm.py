import shutil
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from transformers import BertConfig

from align.batches.encoding import Limits, encode_demonstrations
from align.core.errors import UserError
from align.core.settings import ModelConfig
from align.core.tensor_ops import Padded
from align.models.backbone import wrap
from align.models.backbone.kinds import make_prefix_lm
from align.models.loading import load, load_on_meta
from align.ppo import PPOConfig, run_ppo
from align.reward import RewardConfig, run_reward
from align.reward.checkpoint import load_reward_model
from align.sampling.engines import make_engine
from align.sampling.settings import EngineConfig
from align.sft import SFTConfig, run_sft
from align.sft.train import require_prompt_in_row
from align.training.checkpoint.consolidation import consolidate
from tests.files import metrics_of
from tests.models.architectures import make_model
from tests.settings import run_settings

PROMPT, RESPONSE = [5, 6, 7, 8, 9, 10], [20, 21, 22, 23, 24, 25, 26]


@pytest.fixture(params=["tiny-gpt2", "tiny-llama"])
def loaded(request, load_sharp):
    return load_sharp(request.param, prefix_lm=True)


def row_states(backbone, prompt, response):
    """[L+T, H]: the model's own last states of a row."""
    found = []
    hook = backbone.model.base_model.register_forward_hook(lambda *call: found.append(call[-1].last_hidden_state[0]))
    with torch.no_grad():
        backbone.hidden(Padded.from_lists([prompt]), Padded.from_lists([response]))
    hook.remove()
    return found[0]


def test_a_prompt_sees_itself_whole_and_a_response_what_stands_before_it(loaded):
    def changed(prompt, response):
        """Which states of the row differ from those of the first prompt with its first response."""
        first, second = (row_states(loaded.backbone, *row) for row in ((PROMPT, RESPONSE), (prompt, response)))
        return ((first - second).abs().amax(-1) > 1e-3).tolist()

    assert changed([*PROMPT[:-1], 50], RESPONSE) == [True] * 13  # the last prompt token
    assert changed(PROMPT, [*RESPONSE[:3], 50, *RESPONSE[4:]]) == [False] * 9 + [True] * 4  # the fourth response token


COMMON = run_settings(max_prompt_tokens=64)


@pytest.mark.parametrize("rank", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_three_stages_that_are_told_once_and_go_on_where_they_stopped(rank, stage_data, tmp_path):
    """Only SFT has the setting. PPO itself refuses a first minibatch whose ratio is not 1."""
    common = COMMON | {"lora_r": rank}
    demonstrations, pairs, prompts = stage_data
    settings = common | {"model": "tiny-llama", "train_data": demonstrations, "batch_size": 4, "prefix_lm": True}
    settings |= {"save_steps": 1}
    sft = run_sft(SFTConfig(**settings, output_dir=str(tmp_path / "sft")))
    found = load(ModelConfig(model=str(sft), lora_r=rank), torch.float32)
    assert not found.backbone.causal
    consolidate(tmp_path / "sft", tmp_path / "whole")
    assert not load(ModelConfig(model=str(tmp_path / "whole"), lora_r=rank), torch.float32).backbone.causal
    settings = common | {"model": str(sft), "output_dir": str(tmp_path / "reward")}
    reward = run_reward(RewardConfig(**settings, train_data=pairs, batch_size=4))
    assert not load_reward_model(str(reward), "float32").loaded.backbone.causal
    settings = common | {"model": str(sft), "reward_model": str(reward), "prompts": prompts, "save_steps": 1}
    settings |= {
        "rollout_batch_size": 4,
        "num_mini_batches": 1,
        "num_ppo_epochs": 1,
        "max_new_tokens": 6,
        "total_updates": 2,
        "learning_rate": 1e-3,
    }
    whole = run_ppo(PPOConfig(**settings, output_dir=str(tmp_path / "ppo")))
    assert not load(ModelConfig(model=str(whole), lora_r=rank), torch.float32).backbone.causal
    rows = metrics_of(tmp_path / "ppo")
    assert rows[0]["kl/k1"] == pytest.approx(0.0, abs=1e-5)
    assert rows[0]["policy/clipfrac"] == 0.0
    # Broken off after the first update, a run ends with the same weights.
    again = tmp_path / "again"
    shutil.copytree(tmp_path / "ppo", again)
    for made in (again / "checkpoints" / "update-000002", again / "model"):
        shutil.rmtree(made, ignore_errors=made.name != "model")
    assert (again / "checkpoints" / "update-000001").exists()
    run_ppo(PPOConfig(**settings, output_dir=str(again), resume_from_checkpoint=True))
    (stored,) = whole.glob("*.safetensors") if rank == 0 else [whole / "adapter_model.safetensors"]
    first, second = load_file(stored), load_file(again / "model" / stored.name)
    assert all(torch.equal(weight, second[name]) for name, weight in first.items())


def test_a_conversation_is_an_example_of_each_turn(load_sharp, tmp_path):
    """A later turn's prompt holds the earlier answers, which it sees whole: they cannot be learned in the same row."""
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "Why?"), ("assistant", "So.")]
    data = [{"messages": [{"role": role, "content": text} for role, text in turns]}]
    limits = Limits(64, 64, "error")
    assert len(encode_demonstrations(data, load_sharp("tiny-llama"), limits, False)) == 1
    assert len(encode_demonstrations(data, load_sharp("tiny-llama", prefix_lm=True), limits, False)) == 2


def test_what_reads_a_prompt_whole_as_it_is_needs_no_setting(sharp_folders):
    config = ModelConfig(model=sharp_folders["tiny-t5"])
    for loads in (load, load_on_meta):
        with pytest.raises(UserError, match=r"^prefix_lm: model '.*tiny-t5' has an encoder.*; leave it off$"):
            loads(config, torch.float32, prefix_lm=True)
    with pytest.raises(UserError, match="has an encoder"):
        make_prefix_lm(BertConfig(), "it")


def test_what_needs_a_prompt_read_from_left_to_right_is_refused(load_sharp):
    loaded = load_sharp("tiny-llama", prefix_lm=True)
    with pytest.raises(UserError, match=r"^prompt_loss_weight: "):
        require_prompt_in_row(loaded, 0.5)
    with (
        pytest.raises(UserError, match=r"^engine vllm-server:"),
        patch("importlib.util.find_spec"),
    ):
        make_engine(EngineConfig(engine="vllm-server"), None, loaded, 9)


def test_a_mask_without_effect_is_refused(sharpen):
    """Of a model that reads from left to right whatever mask it is given."""
    model = sharpen(make_model("Llama 1, 2"))
    model.model.register_forward_pre_hook(lambda _, args, given: (args, given | {"attention_mask": None}), with_kwargs=True)
    model.config.prefix_lm = True
    with pytest.raises(UserError, match=r"^prefix_lm: model type 'llama'"):
        wrap(model)
