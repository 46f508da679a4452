import shutil
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from align.core.settings import ModelConfig
from align.models.heads import RewardModel
from align.models.loading import load
from align.models.lora import LoraSettings
from align.models.roles import Role, Roles
from align.ppo.actor_critic import build_actor_critic
from align.ppo.scoring_models import can_share_base, load_reward_adapter, load_source
from align.reward.checkpoint import load_reward_model
from align.reward.scoring import RewardModelScorer
from align.tokenization.encoded import SampledResponse
from tests.models.adapters import PROMPT, RESPONSE, adapter_weights, response_logits, save_reward, states, trainable


@pytest.fixture
def reward_folder(tiny_name, load_sharp, tmp_path):
    """A saved reward model that is an adapter on the base that the policy uses too."""
    loaded = load_sharp(tiny_name, adapter="reward", lora_r=3)
    with torch.no_grad():
        for weight in adapter_weights(loaded.backbone, "reward").values():
            weight.mul_(1.2)  # not the policy's weights
    save_reward(tmp_path / "reward", loaded, mean=0.25, seed=8)
    return str(tmp_path / "reward")


@torch.no_grad()
def test_a_reward_adapter_on_the_policys_base_says_what_the_reward_model_says(lora, reward_folder):
    found = load_reward_model(reward_folder, "float32")
    policy, bare = states(lora.backbone, "policy"), states(lora.backbone, None)
    assert can_share_base(reward_folder, lora)
    head, mean, _ = load_reward_adapter(reward_folder, lora)
    on_policy = RewardModel(lora.backbone, head, "reward")
    torch.testing.assert_close(on_policy(PROMPT, RESPONSE), found.model(PROMPT, RESPONSE), atol=1e-5, rtol=0)
    assert mean == found.mean == 0.25
    assert found.model(PROMPT, RESPONSE).std() > 1e-2
    assert torch.equal(states(lora.backbone, "policy"), policy)
    assert torch.equal(states(lora.backbone, None), bare)


@torch.no_grad()
@pytest.mark.parametrize(("name", "whole"), [("tiny-gpt2", "lm_head"), ("tiny-llama", "embed_tokens")])
def test_whole_modules_of_a_reward_adapter_leave_the_policy_as_it_is(name, whole, load_sharp, sharp_folders, tmp_path):
    """PEFT would write a module into the base if the saved config did not list it; GPT-2's is tied to the embedding."""
    settings = ModelConfig(model=sharp_folders[name], lora_r=2, lora=LoraSettings(modules_to_save=[whole]))
    start = load(settings, torch.float32, "reward")
    for weight in adapter_weights(start.backbone, "reward").values():
        weight.mul_(1.2)
    expected = save_reward(tmp_path / "reward", start)(PROMPT, RESPONSE)
    policy = load_sharp(name, lora_r=2)
    before = [response_logits(policy.backbone, adapter) for adapter in ("policy", None)]
    head, _, _ = load_reward_adapter(str(tmp_path / "reward"), policy)
    assert all(map(torch.equal, before, (response_logits(policy.backbone, adapter) for adapter in ("policy", None))))
    for model in (
        RewardModel(policy.backbone, head, "reward"),
        load_reward_model(str(tmp_path / "reward"), "float32").model,
    ):
        torch.testing.assert_close(model(PROMPT, RESPONSE), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("critic", ["shared", "separate"])
def test_a_mounted_reward_is_frozen_and_the_policy_stays_trainable(lora, reward_folder, make_ppo, critic):
    trainer = make_ppo(lora, load_reward_adapter(reward_folder, lora), critic=critic)
    names = {name for name in trainer.engine.trainable if "adapter" not in name}
    assert not any(".reward." in name or name.startswith("reward_head") for name in names)
    assert set(adapter_weights(lora.backbone, "policy")) <= trainable(lora.backbone)
    with torch.no_grad():
        rewards = trainer.roles.reward("reward", PROMPT, RESPONSE)
        found = load_reward_model(reward_folder, "float32").model(PROMPT, RESPONSE)
    torch.testing.assert_close(rewards, found, atol=1e-5, rtol=0)


@torch.no_grad()
def test_two_reward_adapters_share_the_policys_base(lora, reward_folder, tmp_path):
    """Members of an ensemble: two adapters, two heads, one base; the second one's head is the negative of the first's."""
    other = Path(shutil.copytree(reward_folder, tmp_path / "other"))
    head = load_file(other / "reward_head.safetensors")["weight"]
    save_file({"weight": -head}, other / "reward_head.safetensors")
    found = load_reward_model(reward_folder, "float32")
    folders = {"reward_1": reward_folder, "reward_2": str(other)}
    sources = [load_source(folder, lora, "float32", name) for name, folder in folders.items()]
    module = build_actor_critic(lora, adapters=[source.adapter_on_policy for source in sources])
    expected, roles = found.model(PROMPT, RESPONSE), Roles(module)
    torch.testing.assert_close(roles.reward("reward_1", PROMPT, RESPONSE), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(roles.reward("reward_2", PROMPT, RESPONSE), -expected, atol=1e-5, rtol=0)
    assert not any("reward" in name for name, weight in module.named_parameters() if weight.requires_grad)


@torch.no_grad()
def test_a_critic_adapter_starts_as_the_mounted_reward(lora, reward_folder, make_ppo):
    on_policy = load_reward_adapter(reward_folder, lora)
    module = make_ppo(lora, on_policy, critic="separate").engine.module
    values = module(Role.POLICY, PROMPT, RESPONSE).values
    rewards = on_policy.head(states(lora.backbone, "reward"))  # [:, t]: the reward of what was said before token t
    assert values.std() > 1e-2
    torch.testing.assert_close(values, (rewards[:, :-1] - on_policy.mean) * RESPONSE.mask(), atol=1e-5, rtol=0)


def test_a_reward_model_with_a_chat_template_of_its_own_is_not_mounted(reward_folder, load_sharp, tiny_name):
    """Its adapter would read the policy's token ids, which are those of another template: wrong scores, without a word."""
    alike, other = load_sharp(tiny_name, lora_r=4), load_sharp(tiny_name, lora_r=4, chat_template="raw")
    assert can_share_base(reward_folder, alike)
    assert not can_share_base(reward_folder, other)
    scorers = [
        RewardModelScorer.from_loaded(
            load_reward_model(reward_folder, "float32"), policy.tokenization, Accelerator(cpu=True), 99
        )
        for policy in (alike, other)
    ]
    conversation = ({"role": "user", "content": "Hi"},)
    rewards = [
        scorer([SampledResponse(conversation, policy.tokenization.prompt_ids(conversation), [20, 21, 1], "ab")])[0]
        for scorer, policy in zip(scorers, (alike, other), strict=True)
    ]
    ids = alike.tokenization.response_ids("ab")
    again = scorers[0]([SampledResponse(conversation, alike.tokenization.prompt_ids(conversation), ids, "ab")])[0]
    assert rewards[1] == pytest.approx(again, abs=1e-5)  # read through the reward model's own template


def test_a_reward_model_on_another_base_is_not_mounted(reward_folder, load_sharp, sharp_folders, tmp_path, tiny_name):
    other = "tiny-llama" if tiny_name != "tiny-llama" else "tiny-gpt2"
    assert not can_share_base(reward_folder, load_sharp(other, lora_r=4))
    assert not can_share_base(reward_folder, load_sharp(tiny_name))  # the policy's weights are trained: nothing to share
    assert not can_share_base(sharp_folders[tiny_name], load_sharp(tiny_name, lora_r=4))  # not a reward model
