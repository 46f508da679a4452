"""Building a PPO run: which model plays which role, and where each of them lives."""

import copy
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from align.distributed import place_frozen
from align.encoding import EncodedPrompt, Limits, encode_prompts
from align.engines import make_engine
from align.generation import Sampling
from align.memory import cache_bytes
from align.models.backbone import Backbone, wrap
from align.models.heads import ScalarHead
from align.models.loading import Loaded, copy_adapter, load, load_config
from align.models.roles import ActorCritic, response_log_probs
from align.ppo.config import PPOConfig
from align.ppo.experience import minibatches
from align.ppo.ptx import Pretraining
from align.ppo.rewards import MountedReward, Rewards, load_functions, mount_reward, shares_base
from align.ppo.rollout import Rollout, prompts_of_update
from align.ppo.trainer import PPOTrainer
from align.rehearsal import Reading, Rows, pass_bytes
from align.reward.checkpoint import is_reward_model, load_reward_model
from align.reward.scoring import RewardModelScorer
from align.run import Run
from align.shared_prompts import families, family_tokens
from align.supervised import LOOKED_AHEAD, largest_batch
from align.tensor_ops import Padded
from align.training import make_optimisation


class Reference(nn.Module):
    """A frozen copy of the start, where all weights of the policy are trained."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(
        self, role: str, prompt: Padded, response: Padded, temperature: float, owner: Tensor | None = None
    ) -> Tensor:
        """Log-probs [B, T]; `role` is `reference`, as `ActorCritic` would be asked."""
        hidden = self.backbone.hidden(prompt, response, owner)
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
    run.memory.foresee(config, copies=1)
    loaded = load(config, run.dtype)
    limits = Limits(config.max_prompt_tokens, config.max_new_tokens, config.overlong)
    prompts = encode_prompts(config.prompts, loaded, limits, config.skip_bad_rows)
    held_out = config.validation_prompts
    validation = encode_prompts(held_out, loaded, limits, config.skip_bad_rows) if held_out else []
    ptx = Pretraining(config, loaded) if config.ptx_data else None
    shares = bool(config.reward_model) and shares_base(config.reward_model, loaded)
    mounted = mount_reward(config.reward_model, loaded) if shares else None
    copied = None if loaded.adapter else Reference(_copy(loaded.backbone))
    module = build_actor_critic(config, loaded, mounted)
    found = load_reward_model(config.reward_model, config.dtype) if config.reward_model and not mounted else None
    check_memory(run, config, loaded, module, [copied, found.model if found else None], prompts)
    reference = place_frozen(copied, run.accelerator) if copied else None
    optimisation = make_optimisation(run, module, config.updates * config.epochs * config.minibatches)
    model = None
    if mounted:

        def mounted_reward(prompt: Padded, response: Padded, owner: Tensor | None) -> Tensor:
            return optimisation.module("reward", prompt, response, owner=owner)

        backbone, budget = loaded.backbone, config.micro_batch_tokens
        shape = backbone.shape("reward")
        model = RewardModelScorer(mounted_reward, mounted.mean, backbone, run.accelerator, budget, shape=shape)
    elif found:
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


def check_memory(
    run: Run,
    config: PPOConfig,
    loaded: Loaded,
    module: ActorCritic,
    frozen: Sequence[nn.Module | None],
    prompts: list[EncodedPrompt],
) -> None:
    """Tell how much memory the run will need, if every response is as long as it may be.

    Raises:
        UserError: if that is more than there is.
    """
    readings = [Reading(loaded.backbone, loaded.adapter, predicts=True)]
    if config.critic == "separate":
        readings.append(Reading(module.critic or loaded.backbone, module.critic_adapter, predicts=False))
    read: list[tuple[int, list[int]]] = []  # of each family its prompt's tokens and its responses'
    costs: list[int] = []
    batches: list[list[int]] = []
    for update in range(1, min(config.updates, LOOKED_AHEAD) + 1):
        chosen = prompts_of_update(config, prompts, update)
        rollout = Rollout(chosen, [[0] * config.max_new_tokens] * len(chosen), [], [])
        asked = [prompt.ids for prompt in chosen]
        for rows in minibatches(config, rollout, update, 0):
            together = families(loaded.backbone, asked, rollout.responses, rows, config.micro_batch_tokens)
            batches.append([len(read) + number for number in range(len(together))])
            read += [(len(asked[family[0]]), [config.max_new_tokens] * len(family)) for family in together]
            costs += family_tokens(loaded.backbone, asked, rollout.responses, together)
    largest, several = largest_batch(run, ((batch, [costs[family] for family in batch]) for batch in batches))
    size = Rows.of([read[family] for family in largest])
    alive = math.ceil(config.rollout_size / run.accelerator.num_processes)
    held = min(alive * (max(prompt for prompt, _ in read) + config.max_new_tokens), Sampling.batch_tokens)
    phases = {
        "learning": lambda: pass_bytes(readings, size, learn=True),
        "scoring": lambda: pass_bytes(readings, size, learn=False),
        "sampling": lambda: cache_bytes(loaded.backbone, held, alive),
    }
    several |= bool(config.ptx_data)
    run.say(run.memory.check(config, module, [model for model in frozen if model], phases, several))


def build_actor_critic(config: PPOConfig, loaded: Loaded, mounted: MountedReward | None = None) -> ActorCritic:
    """The module that PPO trains.

    A critic of its own starts from the reward model (InstructGPT, section 3.5) where that is an adapter on the policy's
    base, or where all weights are trained and it has the policy's architecture; else from the policy's start, with a head
    that starts at 0.
    """
    backbone, hidden_size = loaded.backbone, loaded.backbone.hidden_size
    value_head = ScalarHead(hidden_size, start_at_zero=True)
    critic, critic_adapter = None, None
    if config.critic == "separate" and loaded.adapter:
        assert backbone.peft is not None
        copy_adapter(backbone.peft, "reward" if mounted else loaded.adapter, "value")
        critic_adapter = "value"
        if mounted:
            _start_from(mounted.head, mounted.mean, value_head)
        for name, weight in backbone.model.named_parameters():  # adding one adapter must not freeze the other
            if f".{loaded.adapter}." in name:
                weight.requires_grad_(True)
    elif config.critic == "separate":
        critic = _critic_from_reward(config, loaded, value_head) or _copy(backbone)
        critic.requires_grad_(True)
    if critic is not None:
        _freeze_vocabulary(critic)
    reward_head = mounted.head if mounted else None
    return ActorCritic(backbone, loaded.adapter, value_head, loaded.start_adapter, critic, critic_adapter, reward_head)


def _critic_from_reward(config: PPOConfig, loaded: Loaded, value_head: ScalarHead) -> Backbone | None:
    if not config.reward_model:
        return None
    ours, theirs = loaded.backbone.model.config, load_config(config.reward_model)
    if ours.model_type != theirs.model_type or ours.hidden_size != theirs.hidden_size:
        return None
    found = load_reward_model(config.reward_model, config.dtype)
    _start_from(found.model.head, found.mean, value_head)
    return found.model.backbone


@torch.no_grad()
def _start_from(reward_head: ScalarHead, mean: float, value_head: ScalarHead) -> None:
    """Let values start as rewards less their mean over demonstrations."""
    value_head.linear.weight.copy_(reward_head.linear.weight)
    assert value_head.linear.bias is not None
    value_head.linear.bias.fill_(-mean)


def _copy(backbone: Backbone) -> Backbone:
    copied = wrap(copy.deepcopy(backbone.model), check=False)
    copied.shares_prompts = backbone.shares_prompts
    return copied


def _freeze_vocabulary(critic: Backbone) -> None:
    """A critic predicts no token: a vocabulary matrix of its own gets no gradient."""
    out, into = critic.model.get_output_embeddings(), critic.model.get_input_embeddings()
    if out is not None and out.weight is not into.weight:
        out.requires_grad_(False)
