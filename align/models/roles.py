"""The roles of PPO on one backbone: policy, reference, critic and reward models.

With LoRA, they share one frozen base: policy, separate critic and reward models are adapters, and the reference is the
base without adapters or with the frozen initial adapter.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from align.core.tensor_ops import Padded
from align.models.backbone import Backbone
from align.models.heads import LanguageModel, RewardModel, ScalarHead, response_log_probs

REWARD_ADAPTER, VALUE_ADAPTER = "reward", "value"
"""Names of adapters on the policy's base, for a reward model and a separate critic."""


class ActorCriticOutput(NamedTuple):
    """Predictions of policy and critic for responses, all [B, T], 0 past a response's end.

    Entropy costs a softmax, so it is computed only with gradients disabled, or if the loss has an entropy term.
    """

    log_probs: Tensor
    values: Tensor
    entropy: Tensor
    value_states: Tensor | None = None
    """[B, T, H] hidden states that the value head maps to values, or None with gradients enabled."""


class Role(Enum):
    """The outputs of an `ActorCritic`."""

    POLICY = "policy"
    REFERENCE = "reference"
    LANGUAGE_MODEL = "language model"
    REWARD = "reward"
    VALUE = "value"


class ActorCritic(nn.Module):
    """One module with all weights that PPO trains, under one engine, and the roles that share its backbone.

    Call it through `Roles`. `forward` is one entry point because a DeepSpeed engine's hooks are on it.

    Args:
        adapter: the policy's adapter. If None, all weights are trained.
        reference_adapter: adapter of a reference that shares the backbone. If None, the base without adapters.
        critic: the critic's backbone, or None if it shares the policy's.
        critic_adapter: the critic's adapter. If None, the policy's trunk.
        reward_heads: heads of reward models that are adapters on the backbone, by adapter name.
        with_entropy: compute the entropy of the policy with its gradient.
        frozen_critic: frozen critic backbone outside this module.
        trains_critic: whether gradients train the critic. If not, values are computed only with gradients disabled.
    """

    def __init__(
        self,
        backbone: Backbone,
        adapter: str | None,
        value_head: ScalarHead,
        reference_adapter: str | None = None,
        critic: Backbone | None = None,
        critic_adapter: str | None = None,
        reward_heads: Mapping[str, ScalarHead] | None = None,
        with_entropy: bool = False,
        frozen_critic: Backbone | None = None,
        trains_critic: bool = True,
    ) -> None:
        super().__init__()
        self._frozen_critic = [frozen_critic] if frozen_critic else []  # in a list: its weights are not this module's
        self.backbone, self.adapter_name, self.reference_adapter = backbone, adapter, reference_adapter
        self.value_head, self.critic, self.critic_adapter = value_head, critic, critic_adapter
        self.reward_heads, self.with_entropy = nn.ModuleDict(reward_heads or {}), with_entropy
        self.trains_critic = trains_critic

    def forward(
        self,
        role: Role,
        prompt: Padded,
        response: Padded,
        temperature: float = 1.0,
        prompt_of_response: Tensor | None = None,
        reward: str = "",
    ) -> ActorCriticOutput | Tensor:
        """Compute the output of `role`, see the methods of `Roles`. `reward` is the adapter name of a reward model."""
        if role is Role.REWARD:
            head = cast(ScalarHead, self.reward_heads[reward])
            return cast(Tensor, RewardModel(self.backbone, head, reward)(prompt, response, prompt_of_response))
        if role is Role.POLICY:
            return self._policy(prompt, response, temperature, prompt_of_response)
        if role is Role.VALUE:
            # These values train only the critic; a shared trunk belongs to the policy.
            with nullcontext() if self.has_trunk_for_values else torch.no_grad():
                states = self._value_states(prompt, response, prompt_of_response)
            return self._values(states, response.mask())
        adapter = self.reference_adapter if role is Role.REFERENCE else self.adapter_name
        model = LanguageModel(self.backbone, adapter)
        return cast(Tensor, model(prompt, response, None, temperature, prompt_of_response))

    def _policy(
        self, prompt: Padded, response: Padded, temperature: float, prompt_of_response: Tensor | None
    ) -> ActorCriticOutput:
        mask = response.mask()
        with self.backbone.adapter(self.adapter_name):
            hidden = self.backbone.hidden(prompt, response, prompt_of_response)
            with_entropy = self.with_entropy or not torch.is_grad_enabled()
            log_probs, entropy = response_log_probs(self.backbone, hidden, response, mask, temperature, with_entropy)
        if torch.is_grad_enabled() and not self.trains_critic:
            return ActorCriticOutput(log_probs, torch.zeros_like(log_probs), entropy)
        states = self._value_states(prompt, response, prompt_of_response) if self.has_trunk_for_values else hidden[:, :-1]
        values = self._values(states, mask)
        return ActorCriticOutput(log_probs, values, entropy, None if torch.is_grad_enabled() else states)

    @property
    def has_trunk_for_values(self) -> bool:
        """Whether the critic does not share the policy's trunk."""
        return self.critic is not None or self.critic_adapter is not None or bool(self._frozen_critic)

    def _value_states(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None) -> Tensor:
        """Return the hidden states [B, T, H] before each response token, from the critic or the shared trunk."""
        if critic := self.critic or next(iter(self._frozen_critic), None):
            return critic.hidden(prompt, response, prompt_of_response)[:, :-1]
        with self.backbone.adapter(self.critic_adapter or self.adapter_name):
            return self.backbone.hidden(prompt, response, prompt_of_response)[:, :-1]

    def _values(self, states: Tensor, mask: Tensor) -> Tensor:
        return cast(Tensor, self.value_head(states)).masked_fill(~mask, 0.0)


@dataclass(eq=False)
class Roles:
    """The roles of a PPO run.

    Attributes:
        actor_critic: an `ActorCritic`, or the engine around it.
        reference_model: separate frozen language model. If None, the policy's backbone is also the reference.
    """

    actor_critic: Any
    reference_model: Any = None

    def policy(
        self, prompt: Padded, response: Padded, temperature: float, prompt_of_response: Tensor | None = None
    ) -> ActorCriticOutput:
        """Return log-probs, values and entropy of B responses to P prompts.

        Args:
            temperature: divides the logits.
            prompt_of_response: [B] prompt index of each response. If None, response i answers prompt i.
        """
        return cast(ActorCriticOutput, self.actor_critic(Role.POLICY, prompt, response, temperature, prompt_of_response))

    @property
    def value_head(self) -> ScalarHead:
        """The head of the critic."""
        return self._module.value_head

    @property
    def trains_critic(self) -> bool:
        """Whether gradients train the critic."""
        return self._module.trains_critic

    @property
    def _module(self) -> ActorCritic:
        return cast(ActorCritic, getattr(self.actor_critic, "module", self.actor_critic))  # an engine may be around it

    def values(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        """Return values [B, T] whose gradients reach only the critic's weights, not a shared trunk."""
        return cast(Tensor, self.actor_critic(Role.VALUE, prompt, response, 1.0, prompt_of_response))

    def reference(
        self, prompt: Padded, response: Padded, temperature: float, prompt_of_response: Tensor | None = None
    ) -> Tensor:
        """Return log-probs [B, T] of the reference; arguments as for `policy`."""
        if self.reference_model is not None:
            return cast(Tensor, self.reference_model(prompt, response, None, temperature, prompt_of_response))
        return cast(Tensor, self.actor_critic(Role.REFERENCE, prompt, response, temperature, prompt_of_response))

    def language_model(self, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        """Return log-probs [B, T] of the policy at temperature 1, for a language-model loss."""
        return cast(Tensor, self.actor_critic(Role.LANGUAGE_MODEL, prompt, response, 1.0, prompt_of_response))

    def reward(self, adapter: str, prompt: Padded, response: Padded, prompt_of_response: Tensor | None = None) -> Tensor:
        """Return rewards [B] of a reward model that is an adapter on the policy's base."""
        return cast(Tensor, self.actor_critic(Role.REWARD, prompt, response, 1.0, prompt_of_response, adapter))
