"""Building a PPO run: which model plays which role, and where each of them lives."""

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from align.distributed import place_frozen
from align.encoding import Limits, encode_prompts
from align.engines import make_engine
from align.models.backbone import Backbone
from align.models.heads import ScalarHead
from align.models.loading import Loaded, copy_adapter, load, load_config
from align.models.roles import ActorCritic, response_log_probs
from align.ppo.config import PPOConfig
from align.ppo.ptx import Pretraining
from align.ppo.rewards import Rewards, load_functions, mount_reward, shares_base
from align.ppo.trainer import PPOTrainer
from align.reward.checkpoint import is_reward_model, load_reward_model
from align.reward.scoring import RewardModelScorer
from align.run import Run
from align.tensor_ops import Padded
from align.training import make_optimisation


class Reference(nn.Module):
    """A frozen copy of the start, where all weights of the policy are trained."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, role: str, prompt: Padded, response: Padded, temperature: float) -> Tensor:
        """Log-probs [B, T]; `role` is `reference`, as `ActorCritic` would be asked."""
        hidden = self.backbone.hidden(prompt, response)
        return response_log_probs(self.backbone, hidden, response, response.mask(), temperature)[0]


def run_ppo(config: PPOConfig) -> Path:
    """Train a policy by PPO; gives the folder of the best one.

    Raises:
        UserError: for anything that the settings or the data have wrong.
    """
    run = Run(config, "ppo")
    functions = load_functions(config.reward_functions)
    if config.reward_model and not is_reward_model(config.reward_model):
        load_reward_model(config.reward_model)
    loaded = load(config, run.dtype)
    limits = Limits(config.max_prompt_tokens, config.max_new_tokens, config.overlong)
    prompts = encode_prompts(config.prompts, loaded, limits, config.skip_bad_rows)
    held_out = config.validation_prompts
    validation = encode_prompts(held_out, loaded, limits, config.skip_bad_rows) if held_out else []
    ptx = Pretraining(config, loaded) if config.ptx_data else None
    reward_head, mean = None, 0.0
    mounted = bool(config.reward_model) and shares_base(config.reward_model, loaded)
    if mounted:
        reward_head, mean = mount_reward(config.reward_model, loaded)
    reference = None if loaded.adapter else place_frozen(Reference(_copy(loaded.backbone)), run.accelerator)
    module = build_actor_critic(config, loaded, reward_head)
    optimisation = make_optimisation(run, module, config.updates * config.epochs * config.minibatches)
    model = None
    if mounted:

        def mounted_reward(prompt: Padded, response: Padded) -> Tensor:
            return optimisation.module("reward", prompt, response)

        fits, budget = loaded.backbone.fits, config.micro_batch_tokens
        model = RewardModelScorer(mounted_reward, mean, fits, run.accelerator, budget)
    elif config.reward_model:
        found = load_reward_model(config.reward_model, config.dtype)
        model = RewardModelScorer.of(found, loaded.tokenization, run.accelerator, config.micro_batch_tokens)
        if model.tokenization:
            run.say(f"{config.reward_model}: reads other token ids than the policy; texts are tokenized again for it")
    run.say(f"ppo: {len(prompts)} prompts, {len(validation)} held out; model {config.model}")
    rewards = Rewards(model, functions)
    longest = max(len(prompt.ids) for prompt in (*prompts, *validation)) + config.max_new_tokens
    engine = make_engine(config, optimisation, loaded, longest)
    trainer = PPOTrainer(run, config, loaded, optimisation, reference, rewards, prompts, validation, ptx, engine)
    folder = trainer.train()
    engine.close()
    run.close()
    return folder


def build_actor_critic(config: PPOConfig, loaded: Loaded, reward_head: ScalarHead | None = None) -> ActorCritic:
    """The module that PPO trains.

    A critic of its own starts from the reward model where that has the policy's architecture and all weights are trained
    (InstructGPT, section 3.5), else from the policy's start; its head starts at 0 unless it comes from the reward model.
    """
    backbone, hidden_size = loaded.backbone, loaded.backbone.hidden_size
    value_head = ScalarHead(hidden_size, start_at_zero=True)
    critic, critic_adapter = None, None
    if config.critic == "separate" and loaded.adapter:
        assert backbone.peft is not None
        copy_adapter(backbone.peft, loaded.adapter, "value")
        critic_adapter = "value"
        for name, weight in backbone.model.named_parameters():  # adding one adapter must not freeze the other
            if f".{loaded.adapter}." in name:
                weight.requires_grad_(True)
    elif config.critic == "separate":
        critic = _critic_from_reward(config, loaded, value_head) or _copy(backbone)
        critic.requires_grad_(True)
    if critic is not None:
        _freeze_vocabulary(critic)
    module = ActorCritic(backbone, loaded.adapter, value_head, loaded.start_adapter, critic, critic_adapter, reward_head)
    return module


def _critic_from_reward(config: PPOConfig, loaded: Loaded, value_head: ScalarHead) -> Backbone | None:
    if not config.reward_model:
        return None
    ours, theirs = loaded.backbone.model.config, load_config(config.reward_model)
    if ours.model_type != theirs.model_type or ours.hidden_size != theirs.hidden_size:
        return None
    found = load_reward_model(config.reward_model, config.dtype)
    with torch.no_grad():
        value_head.linear.weight.copy_(found.model.head.linear.weight)
        assert value_head.linear.bias is not None
        value_head.linear.bias.fill_(-found.mean)
    return found.model.backbone


def _copy(backbone: Backbone) -> Backbone:
    copied = Backbone.of(copy.deepcopy(backbone.model), check=False)
    copied.shares_prompts = backbone.shares_prompts
    return copied


def _freeze_vocabulary(critic: Backbone) -> None:
    """A critic predicts no token: a vocabulary matrix of its own gets no gradient."""
    out, into = critic.model.get_output_embeddings(), critic.model.get_input_embeddings()
    if out is not None and out.weight is not into.weight:
        out.requires_grad_(False)
