"""Policy, reference, value and reward as roles of one backbone, or of several where adapters cannot do.

With LoRA, one frozen base serves them all: the policy, a critic of its own and the reward model are adapters, the
reference is the base with adapters off (or with the frozen adapter that the training started from).
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from align.models.backbone import Backbone
from align.models.heads import ScalarHead
from align.tensor_ops import Padded, entropy_of, log_probs_of


def response_log_probs(
    backbone: Backbone, hidden: Tensor, response: Padded, mask: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs [B, T] of response tokens, and the logits [n, V] that they were read from.

    The vocabulary product is taken only where `mask` holds (n places); elsewhere log-probs are 0.

    Args:
        hidden: [B, T+1, H] from `Backbone.hidden`.
        mask: [B, T] bool.
    """
    logits = backbone.logits(hidden[:, :-1][mask])
    chosen = log_probs_of(logits, response.ids[mask], temperature)
    return torch.zeros(mask.shape, device=hidden.device).masked_scatter(mask, chosen), logits


class Policy(nn.Module):
    """A language model that is trained; what supervised fine-tuning optimises."""

    def __init__(self, backbone: Backbone, adapter: str | None) -> None:
        super().__init__()
        self.backbone, self.adapter_name = backbone, adapter

    def forward(self, prompt: Padded, response: Padded, mask: Tensor) -> Tensor:
        """Log-probs [B, T] of the response tokens where `mask` holds."""
        with self.backbone.adapter(self.adapter_name):
            hidden = self.backbone.hidden(prompt, response)
        return response_log_probs(self.backbone, hidden, response, mask)[0]


class RewardModel(nn.Module):
    """A backbone with a scalar head that is read after a response's last token.

    Args:
        adapter: the adapter to compute with; None: the bare backbone.
    """

    def __init__(self, backbone: Backbone, head: ScalarHead, adapter: str | None) -> None:
        super().__init__()
        self.backbone, self.head, self.adapter_name = backbone, head, adapter

    def forward(self, prompt: Padded, response: Padded, owner: Tensor | None = None) -> Tensor:
        """Rewards [R] of R responses to N prompts; `owner` [R] names each response's prompt."""
        with self.backbone.adapter(self.adapter_name):
            hidden = self.backbone.hidden(prompt, response, owner)
        rows = torch.arange(len(response.lengths), device=hidden.device)
        return self.head(hidden[rows, response.lengths])


class Prediction(NamedTuple):
    """What policy and critic say of responses; all [B, T], 0 where the mask does not hold.

    Entropy is taken without gradient, and only where gradients are off: a figure to report, at the price of a softmax.
    """

    log_probs: Tensor
    values: Tensor
    entropy: Tensor


class ActorCritic(nn.Module):
    """Everything that PPO trains in one module, under one engine, with the roles that share its backbone.

    Args:
        backbone: the policy's.
        adapter: the policy's adapter; None: all weights are trained.
        start_adapter: what the reference computes with, where it shares the backbone; None: the bare base.
        value_head: reads values from the critic's hidden states.
        critic: a backbone of the critic's own, or None where it shares the policy's.
        critic_adapter: the adapter that the critic computes with; None: the policy's trunk.
        reward: a reward model on the same backbone, or None.
    """

    def __init__(
        self,
        backbone: Backbone,
        adapter: str | None,
        value_head: ScalarHead,
        start_adapter: str | None = None,
        critic: Backbone | None = None,
        critic_adapter: str | None = None,
        reward_head: ScalarHead | None = None,
    ) -> None:
        super().__init__()
        self.backbone, self.adapter_name, self.start_adapter = backbone, adapter, start_adapter
        self.value_head, self.critic, self.critic_adapter = value_head, critic, critic_adapter
        self.reward_head = reward_head

    def forward(
        self, role: str, prompt: Padded, response: Padded, temperature: float = 1.0, owner: Tensor | None = None
    ) -> Prediction | Tensor:
        """`policy`: a `Prediction`; `reference` and `language`: log-probs [B, T] of the frozen start and of the policy;
        `reward`: rewards [B].

        One entry point for all roles, because the hooks of a DeepSpeed engine sit on the module's own `forward`.
        """
        mask = response.mask()
        if role == "reward":
            assert self.reward_head is not None
            return RewardModel(self.backbone, self.reward_head, "reward")(prompt, response, owner)
        with self.backbone.adapter(self.start_adapter if role == "reference" else self.adapter_name):
            hidden = self.backbone.hidden(prompt, response, owner)
        log_probs, logits = response_log_probs(self.backbone, hidden, response, mask, temperature)
        if role != "policy":
            return log_probs
        entropy = torch.zeros_like(log_probs)
        if not torch.is_grad_enabled():
            entropy[mask] = entropy_of(logits, temperature)
        return Prediction(log_probs, self._values(hidden, prompt, response, owner, mask), entropy)

    def _values(self, hidden: Tensor, prompt: Padded, response: Padded, owner: Tensor | None, mask: Tensor) -> Tensor:
        if self.critic is not None:
            hidden = self.critic.hidden(prompt, response, owner)
        elif self.critic_adapter is not None:
            with self.backbone.adapter(self.critic_adapter):
                hidden = self.backbone.hidden(prompt, response, owner)
        return self.value_head(hidden[:, :-1]).masked_fill(~mask, 0.0)
