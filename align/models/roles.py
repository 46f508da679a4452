"""The roles of PPO on one backbone: policy, reference, critic and reward models.

With LoRA, one frozen base serves them all: policy, separate critic and reward models are adapters, and the reference is
the base without adapters or with the frozen adapter that training started from.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from align.core.tensor_ops import Padded
from align.models.backbone import Backbone
from align.models.heads import LanguageModel, RewardModel, ScalarHead, response_log_probs

REWARD_ADAPTER, VALUE_ADAPTER, REFERENCE_ADAPTER = "reward", "value", "reference"
"""Names of adapters on the policy's base: of a reward model, of a separate critic, of a reference that follows it."""


class ActorCriticOutput(NamedTuple):
    """Predictions of policy and critic for responses, all [B, T], 0 past a response's end.

    Entropy costs a softmax: it is computed where gradients are off, or if it is learned.
    """

    log_probs: Tensor
    values: Tensor
    entropy: Tensor


class Role(Enum):
    """The outputs of an `ActorCritic`."""

    POLICY = "policy"
    REFERENCE = "reference"
    INITIAL = "initial policy"
    LANGUAGE_MODEL = "language model"
    REWARD = "reward"


class ActorCritic(nn.Module):
    """All weights that PPO trains in one module, under one engine, with the roles that share its backbone.

    Call it through `Roles`. `forward` is one entry point because a DeepSpeed engine's hooks are on it.

    Args:
        adapter: the policy's adapter; None: all weights are trained.
        initial_adapter: of the initial policy, if it shares the backbone; None: the bare base.
        critic: the critic's backbone, or None if it shares the policy's.
        critic_adapter: the critic's adapter; None: the policy's trunk.
        reward_heads: of reward models that are adapters on the backbone, by the adapter's name.
        with_entropy: compute the entropy of the policy with its gradient.
        reference_adapter: of the reference, if it is no longer the initial policy.
    """

    def __init__(
        self,
        backbone: Backbone,
        adapter: str | None,
        value_head: ScalarHead,
        initial_adapter: str | None = None,
        critic: Backbone | None = None,
        critic_adapter: str | None = None,
        reward_heads: Mapping[str, ScalarHead] | None = None,
        with_entropy: bool = False,
        reference_adapter: str | None = None,
    ) -> None:
        super().__init__()
        self.reference_adapter = reference_adapter or initial_adapter
        self.backbone, self.adapter_name, self.initial_adapter = backbone, adapter, initial_adapter
        self.value_head, self.critic, self.critic_adapter = value_head, critic, critic_adapter
        self.reward_heads, self.with_entropy = nn.ModuleDict(reward_heads or {}), with_entropy

    def forward(
        self,
        role: Role,
        prompt: Padded,
        response: Padded,
        temperature: float = 1.0,
        prompt_of_response: Tensor | None = None,
        reward: str = "",
    ) -> ActorCriticOutput | Tensor:
        """Compute the output of `role`, see the methods of `Roles`; `reward` names the adapter of a reward model."""
        if role is Role.REWARD:
            head = cast(ScalarHead, self.reward_heads[reward])
            return cast(Tensor, RewardModel(self.backbone, head, reward)(prompt, response, prompt_of_response))
        if role is Role.POLICY:
            return self._policy(prompt, response, temperature, prompt_of_response)
        adapters = {Role.REFERENCE: self.reference_adapter, Role.INITIAL: self.initial_adapter}
        model = LanguageModel(self.backbone, adapters.get(role, self.adapter_name))
        return cast(Tensor, model(prompt, response, None, temperature, prompt_of_response))

    def _policy(
        self, prompt: Padded, response: Padded, temperature: float, prompt_of_response: Tensor | None
    ) -> ActorCriticOutput:
        mask = response.mask()
        with self.backbone.adapter(self.adapter_name):
            hidden = self.backbone.hidden(prompt, response, prompt_of_response)
            with_entropy = self.with_entropy or not torch.is_grad_enabled()
            log_probs, entropy = response_log_probs(self.backbone, hidden, response, mask, temperature, with_entropy)
        if self.critic is not None:
            hidden = self.critic.hidden(prompt, response, prompt_of_response)
        elif self.critic_adapter is not None:
            with self.backbone.adapter(self.critic_adapter):
                hidden = self.backbone.hidden(prompt, response, prompt_of_response)
        values = self.value_head(hidden[:, :-1]).masked_fill(~mask, 0.0)
        return ActorCriticOutput(log_probs, values, entropy)


@dataclass(eq=False)
class Roles:
    """The roles of a PPO run.

    Attributes:
        actor_critic: an `ActorCritic`, or the engine around it.
        reference_model: a separate frozen language model; None: the policy's backbone is also the reference.
        initial_model: a frozen copy of the initial policy, if the reference follows the policy.
        reference_is_updated: whether the reference follows the policy.
    """

    actor_critic: Any
    reference_model: Any = None
    initial_model: Any = None
    reference_is_updated: bool = False

    def policy(
        self, prompt: Padded, response: Padded, temperature: float, prompt_of_response: Tensor | None = None
    ) -> ActorCriticOutput:
        """Return log-probs, values and entropy of B responses to P prompts.

        Args:
            temperature: divides the logits.
            prompt_of_response: [B] the prompt of each response; None: response i answers prompt i.
        """
        return cast(ActorCriticOutput, self.actor_critic(Role.POLICY, prompt, response, temperature, prompt_of_response))

    def reference(
        self, prompt: Padded, response: Padded, temperature: float, prompt_of_response: Tensor | None = None
    ) -> Tensor:
        """Return log-probs [B, T] of the reference; arguments as for `policy`."""
        if self.reference_model is not None:
            return cast(Tensor, self.reference_model(prompt, response, None, temperature, prompt_of_response))
        return cast(Tensor, self.actor_critic(Role.REFERENCE, prompt, response, temperature, prompt_of_response))

    def initial(
        self, prompt: Padded, response: Padded, temperature: float, prompt_of_response: Tensor | None = None
    ) -> Tensor:
        """Return log-probs [B, T] of the initial policy, where it is not the reference; arguments as for `policy`."""
        if self.initial_model is not None:
            return cast(Tensor, self.initial_model(prompt, response, None, temperature, prompt_of_response))
        return cast(Tensor, self.actor_critic(Role.INITIAL, prompt, response, temperature, prompt_of_response))

    def language_model(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        """Return log-probs [B, T] of the policy at temperature 1, for a language-model loss."""
        return cast(Tensor, self.actor_critic(Role.LANGUAGE_MODEL, prompt, response, 1.0, prompt_of_response))

    def reward(self, adapter: str, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        """Return rewards [B] of a reward model that is an adapter on the policy's base."""
        return cast(Tensor, self.actor_critic(Role.REWARD, prompt, response, 1.0, prompt_of_response, adapter))
